"""The page of pairs of features: accepted, and how they are tested, or refused, and why."""

import ast
import itertools
from pathlib import Path

from rl.config.exclusions import NOT_BUILT, exclusions
from rl.config.schema import load_config
from tests.matrix import ALTERNATIVES, DATA, FEATURES, MORE_RANKS, keys_of, refusal

TESTS = Path(__file__).resolve().parents[2] / "tests"
ROOT = f"{TESTS.parent}/"
TITLE = """# Which features can be combined

Pairs of features, each as the keys that enable it. A pair is accepted, or a config with both is refused with
the reason given here. "Not built" is a refusal of a pair that would make sense.

A test in the table covers that pair alone. Every accepted pair and triple may be drawn by
`python -m tests.matrix`, which runs the program with both for three steps, with all checks on.

"""


def covered() -> dict[frozenset[str], str]:
    """Return pair -> test, by the marks `pytest.mark.covers(feature, feature, ...)` of the tests.

    Raises ValueError for a mark with an unknown feature.
    """
    found: dict[frozenset[str], str] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            for mark in node.decorator_list:
                if not isinstance(mark, ast.Call) or ast.unparse(mark.func) != "pytest.mark.covers":
                    continue
                names = [ast.literal_eval(argument) for argument in mark.args]
                if unknown := set(names) - set(FEATURES):
                    raise ValueError(f"{path.name}: {node.name} covers {unknown}, which are not in FEATURES")
                for pair in itertools.combinations(names, 2):
                    found.setdefault(frozenset(pair), f"{path.relative_to(TESTS)}::{node.name}")
    return found


def kind_of(names: tuple[str, str]) -> str:
    """Return "accepted", "meaningless", "not built", ALTERNATIVES or MORE_RANKS."""
    said = refusal(names)
    if said is None or said in (ALTERNATIVES, MORE_RANKS):
        return said or "accepted"
    config = load_config(None, [*DATA, *(keys_of(names) or [])])
    refused = [pair for pair in exclusions() if pair.applies(config)]
    return "not built" if any((pair.first, pair.second) in NOT_BUILT for pair in refused) else "meaningless"


def matrix_page() -> str:
    """Return the page."""
    pairs = list(itertools.combinations(FEATURES, 2))
    kinds = {pair: kind_of(pair) for pair in pairs}
    counts = {kind: list(kinds.values()).count(kind) for kind in dict.fromkeys(kinds.values())}
    tests = covered()
    lines = [f"{len(pairs)} pairs of {len(FEATURES)} features: "]
    lines[0] += ", ".join(f"{number} {kind}" for kind, number in counts.items()) + ".\n"
    lines += ["## Features\n", *(f"- {name}: `{keys.replace(ROOT, '')}`" for name, keys in FEATURES.items())]
    lines += ["\n## Refused pairs\n", "| pair | kind | reason |", "| --- | --- | --- |"]
    for pair, kind in kinds.items():
        if kind in ("meaningless", "not built"):
            lines.append(f"| {' + '.join(pair)} | {kind} | {(refusal(pair) or '').replace('|', ' ')} |")
    lines += ["\n## Pairs with a test of their own\n", "| pair | test |", "| --- | --- |"]
    lines += [
        f"| {' + '.join(pair)} | `{tests[frozenset(pair)]}` |" for pair in pairs if frozenset(pair) in tests
    ]
    return TITLE + "\n".join(lines) + "\n"
