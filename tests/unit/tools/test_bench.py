"""tools/dev/bench.py: tables are printed; lengths of random models; sides take turns."""

import sys

import pytest

from tools.dev.bench_tables.report import Result, TableLine
from tools.dev.bench_tables.sides import BenchFailed, Side, alternate
from tools.dev.bench_tables.tasks import end_probability


def test_markdown():
    row = TableLine("a row", {"ours": 0.51234, "steps": 5, "equal": "4 of 5"}, 1.8765)
    lines = Result("numerics", "Numerics", "bitwise / fast", [row], "the command").markdown().splitlines()
    assert lines[2] == "|  | ours | steps | equal | bitwise / fast |"
    assert lines[4] == "| a row | 0.512 | 5 | 4 of 5 | **1.88** |"


def test_end_probability():
    p = end_probability(81, 128)
    assert sum((1 - p) ** k for k in range(128)) == pytest.approx(81)


SIDE = """
import json, sys
from tools.dev.bench_tables.sides import STEP, wait_for_turn
records, order, name, last = sys.argv[1:]
for step in range(1, int(last) + 1):
    wait_for_turn(step)
    with open(order, "a") as file:
        file.write(name)
    with open(records, "a") as file:
        file.write(json.dumps({STEP: step}) + chr(10))
sys.exit(3)
"""


def sides(tmp_path, names, *, last=9):
    order = tmp_path / "order"
    start = {
        name: lambda name=name: Side(
            name,
            [sys.executable, "-c", SIDE, str(tmp_path / f"{name}.jsonl"), str(order), name, str(last)],
            directory=tmp_path / name,
            records=tmp_path / f"{name}.jsonl",
        )
        for name in names
    }
    return start, order


def test_sides_take_turns(tmp_path):
    start, order = sides(tmp_path, "abc")
    turns = alternate(start, 3)
    assert order.read_text() == "abc" + "abc" + "cba" + "abc"
    assert list(turns) == ["a", "b", "c"] and [len(taken) for taken in turns.values()] == [3, 3, 3]
    assert turns["a"][0][-1]["training/global_step"] == 2


def test_a_side_that_ends_early(tmp_path):
    start, _ = sides(tmp_path, "a", last=1)
    with pytest.raises(BenchFailed, match="a ended with 3"):
        alternate(start, 1)
