"""Count, per 1,000 words, the marks of prose that a reader reads twice, in comments, docstrings and docs.

    python tools/docs/prose.py              each room of rl/ and other folder, and each page, worst first
    python tools/docs/prose.py --files 30   the 30 worst files
    python tools/docs/prose.py rl/models    these files or folders only

A pronoun in place of its noun and a second relative clause in a sentence make a reader look back; an example
spares it. For example, write "the engine's weights" where a sentence has a pronoun for it. The columns are
the figures of FIGURES; `marks` is the number of hits above the bounds.
"""

import argparse
import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("rl", "launch", "lockstep", "tools", "tests", "train_rl.py", "docs", "README.md")
FIGURES: dict[str, tuple[str, float]] = {
    "those": (r"\bthose\b", 0.6),
    "of which": (r"\b(?:(?:of|in) which|whose)\b", 1.2),
    "that of": (r"\b(?:that|ones) of\b", 0.4),
    "example": (r"\b(?:examples?|note|TODO)\b|\be\.g\.", 1.5),
}
"""Name -> pattern and bound per 1,000 words, an upper bound except for "example" (lower bound)."""
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def files(paths: tuple[str, ...] | list[str] = FOLDERS) -> Iterator[Path]:
    """Yield the Python files and pages below the paths, which are relative to the repository."""
    for path in (ROOT / each for each in paths):
        found = [path] if path.is_file() else sorted([*path.rglob("*.py"), *path.rglob("*.md")])
        yield from (each for each in found if "/generated/" not in str(each))


def prose(path: Path) -> str:
    """Return the comments and docstrings of a Python file, or a page without its blocks of code."""
    text = path.read_text()
    if path.suffix != ".py":
        return FENCE.sub("", text)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    parts = [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    for node in ast.walk(ast.parse(text)):
        # A string alone in a statement is a docstring of a function, a class, a constant or a field.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            parts.append(node.value.value if isinstance(node.value.value, str) else "")
    return "\n".join(parts)


def count(text: str) -> Counter[str]:
    """Return the number of words and of hits of each figure."""
    hits = {name: len(re.findall(pattern, text, re.IGNORECASE)) for name, (pattern, _) in FIGURES.items()}
    return Counter(words=len(WORD.findall(text)), **hits)


def rates(counted: Counter[str]) -> dict[str, float]:
    """Return each figure per 1,000 words."""
    return {name: 1000 * counted[name] / max(counted["words"], 1) for name in FIGURES}


def marks(counted: Counter[str]) -> float:
    """Return the number of hits above the bounds of all figures but "example"."""
    bounds = {name: bound for name, (_, bound) in FIGURES.items() if name != "example"}
    return sum(max(0.0, counted[name] - bound * counted["words"] / 1000) for name, bound in bounds.items())


def room(path: Path) -> str:
    """Return the folder of a Python file, at most two deep, or the page."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:2]) if path.suffix == ".md" or len(parts) > 2 else "/".join(parts[:1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", default=list(FOLDERS), help="files or folders of the repository")
    parser.add_argument("--files", type=int, default=0, help="print so many files instead of rooms")
    arguments = parser.parse_args()
    tables: dict[str, Counter[str]] = defaultdict(Counter)
    for path in files(arguments.paths):
        tables[str(path.relative_to(ROOT)) if arguments.files else room(path)] += count(prose(path))
    total: Counter[str] = sum(tables.values(), Counter())
    order = sorted(tables.items(), key=lambda item: -marks(item[1]))[: arguments.files or None]
    print(f"{'per 1,000 words':34} {'words':>7} {'marks':>6}", *(f"{name:>9}" for name in FIGURES))
    for name, counted in [*order, ("total", total)]:
        figures = (f"{rate:9.2f}" for rate in rates(counted).values())
        print(f"{name:34} {counted['words']:7} {marks(counted):6.0f}", *figures)


if __name__ == "__main__":
    main()
