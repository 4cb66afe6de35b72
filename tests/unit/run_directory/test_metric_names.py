"""docs/metrics.md has every metric that the source logs, and no other; tests/records.py checks runs."""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache

import pytest

from rl.run_directory.named_metrics import alternatives, is_documented
from rl.run_directory.view import CURVES, LAST
from tests.spawn import ROOT

READERS = ("config", "run_directory")
"""Rooms that log no metrics of their own."""
STATISTICS = {
    "rl/objectives/losses": "actor",
    "rl/objectives/value_loss.py": "critic",
    "rl/objectives/preference.py": "preference",
}
"""Sources of statistics without a section in their names, and the section."""
OTHER_KEYS = ("failures/", "check/moved")
"""Keys that are no metrics: a count, which becomes agents/failures/*, and a value that is only checked."""

Parts = tuple[str | None, ...]
"""A string of the source: literal parts, and None for each replacement field."""


@cache
def trees() -> dict[str, ast.Module]:
    paths = [path for path in (ROOT / "rl").rglob("*.py") if path.parent.name not in READERS]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}


def parts_of(node: ast.AST) -> Parts | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return (node.value,)
    if isinstance(node, ast.JoinedStr):
        return tuple(part.value if isinstance(part, ast.Constant) else None for part in node.values)
    return None


def written(tree: ast.Module) -> Iterator[Parts]:
    """Yield the keys with a '/' that are assigned, or are in a dict, and the names given to `spread`."""
    for node in ast.walk(tree):
        keys: list[ast.AST | None] = []
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            keys = [node.slice]
        elif isinstance(node, ast.Dict):
            keys = list(node.keys)
        elif isinstance(node, ast.DictComp):
            keys = [node.key]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "spread":
            yield from ((*name, "/mean") for name in [parts_of(node.args[0])] if name)
        for parts in map(parts_of, filter(None, keys)):
            text = "".join(part or "" for part in parts or ())
            if "/" in text and " " not in text and not text.startswith(OTHER_KEYS):
                yield parts


def statistics(tree: ast.Module) -> Iterator[str]:
    """Yield the names in calls of `summed`, and in dicts that are assigned to `stats`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "summed":
            yield from (keyword.arg for keyword in node.keywords if keyword.arg)
        is_stats = isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "stats"
        if is_stats and isinstance(node.value, ast.Dict):
            yield from (key.value for key in node.value.keys if isinstance(key, ast.Constant))


def timings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found = [keyword.value for keyword in node.keywords if keyword.arg == "timing"]
            found += node.args[:1] if getattr(node.func, "attr", "") == "timed" else []
            yield from (each.value for each in found if isinstance(each, ast.Constant))


@cache
def source() -> tuple[set[str], list[Parts]]:
    """Return the words of the source (strings, keyword arguments, slots) and its strings with fields."""
    words, fields = set(), set()
    for node in (node for tree in trees().values() for node in ast.walk(tree)):
        parts = parts_of(node)
        if parts and any(parts) and None in parts:
            fields.add(parts)
        elif parts and None not in parts:
            words.add("".join(parts))
        elif isinstance(node, ast.keyword) and node.arg:
            words.add(node.arg)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "spread" and node.args:
            name = parts_of(node.args[0])
            words |= {"".join(name)} if name and None not in name else set()
    return words, sorted(fields, key=str)


@cache
def is_written(text: str) -> bool:
    """Whether the source can build the text from its strings; <x> stands for a value."""
    words, fields = source()
    return text in words or bool(re.fullmatch("<[^>]*>", text)) or any(fits(p, text) for p in fields)


@cache
def fits(parts: Parts, text: str) -> bool:
    if not parts:
        return not text
    head, *rest = parts
    if head is not None:
        return text.startswith(head) and fits(tuple(rest), text[len(head) :])
    ends = [len(text)] if not rest else range(1, len(text) + 1)
    return any(fits(tuple(rest), text[end:]) and is_written(text[:end]) for end in ends)


def test_names_of_runs_are_found():
    """Names that are in few tests' runs: placeholders, for example <name>, also within alternatives."""
    names = ("val-core/a/b/acc/mean@4", "val-core/a/loss", "val/loss", "val-aux/agents/failures/step")
    assert all(map(is_documented, names))
    wrong = ("val-core/a/acc/mean@x", "actor/loss", "xactor/lr", "actor/lr/x", "perf/mfu/<name>")
    assert not any(map(is_documented, wrong))


def test_metrics_of_the_source_are_documented():
    names = alternatives()
    missing = set()
    for file, tree in trees().items():
        for parts in written(tree):
            pattern = "".join(".+" if part is None else re.escape(part) for part in parts)
            is_whole = None not in parts and is_documented("".join(filter(None, parts)))
            if not is_whole and not any(re.search(f"(^|/){pattern}$", name) for name in names):
                missing.add((file, parts))
        for place, section in STATISTICS.items():
            if file.startswith(place):
                missing |= {(file, n) for n in statistics(tree) if not is_documented(f"{section}/{n}")}
        missing |= {(file, name) for name in timings(tree) if not is_documented(f"timing_s/{name}")}
    assert not missing, missing


def test_documented_metrics_are_in_the_source():
    unknown = [name for name in alternatives() if not is_written(name)]
    assert unknown == []


@pytest.mark.parametrize("shown", [CURVES.values(), LAST.values()])
def test_the_view_shows_documented_metrics(shown):
    assert all(map(is_documented, shown))


def test_the_dashboard_shows_documented_metrics():
    logged = [re.sub("<[kn]>", "1", name) for name in alternatives()]
    dashboard = json.loads((ROOT / "tools/grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    names = [name for query in queries for name in re.findall(r'name=~?"([^"$]*)"', query)]
    unknown = [name for name in names if not any(re.fullmatch(name, each) for each in logged)]
    assert len(names) > 15 and unknown == []
