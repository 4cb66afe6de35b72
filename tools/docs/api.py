"""The page of the classes and functions that users' files and programs call, from their docstrings."""

import ast
from collections.abc import Iterator
from pathlib import Path

from rl.config.declarations import texts_under

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    "lockstep/library.py": ("train", "read_run", "RunResult", "RunError"),
    "rl/phases/phases.py": ("Phases",),
    "rl/data/batch.py": ("Batch",),
    "rl/rewards/__init__.py": (),
    "rl/*/agents/environment.py": (),
    "rl/*/agents/shipped/gsm8k.py": ("Gsm8k",),
}
"""File -> the classes and functions of it that the page has, after the file's own docstring. The folder of an
option, which can be taken out, is a pattern."""


def api_page() -> str:
    """Return the page in Markdown."""
    parts = [
        "# Classes and functions",
        "What your programs, algorithms, rewards and environments call. [Extending](extending.md) and "
        "[Agents](agents.md) have examples.",
    ]
    for path, chosen in ((path, SOURCES[name]) for name in SOURCES for path in ROOT.glob(name)):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        parts += [f"## {name}", _text(tree)]
        found = {node.name: node for node in _public(tree.body)}
        for node in (found[each] for each in chosen):
            parts += _described(node, "###")
    return "\n\n".join(parts) + "\n"


def _public(body: list[ast.stmt]) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield node


def _described(node: ast.ClassDef | ast.FunctionDef, heading: str) -> Iterator[str]:
    """Yield the heading and the docstring, and for a class its documented attributes and public methods."""
    yield f"{heading} {node.name}"
    if isinstance(node, ast.FunctionDef):
        result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        yield f"```python\n{node.name}({ast.unparse(node.args)}){result}\n```"
    yield _text(node)
    if isinstance(node, ast.ClassDef):
        yield "\n".join(f"- `{name}`: {_plain(text)}" for name, text in texts_under(node).items())
        for method in _public(node.body):
            yield from _described(method, f"{heading}#")


def _text(node: ast.ClassDef | ast.FunctionDef | ast.Module) -> str:
    return _plain(ast.get_docstring(node) or "")


def _plain(text: str) -> str:
    return text.replace("<", "&lt;")
