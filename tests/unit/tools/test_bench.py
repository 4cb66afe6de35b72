"""tools/bench.py: results are stored, compared and printed; lengths of random models; sides take turns."""

import sys

import pytest

from tools.bench_tables.report import Result, Row, read_results, regressions, store_results
from tools.bench_tables.sides import BenchFailed, Side, alternate
from tools.bench_tables.tasks import end_probability


def result(figure, *, better="higher", name="a row"):
    row = Row(name, {"ours": 0.51234, "steps": 5, "equal": "4 of 5"}, figure)
    return Result("sweep", "A sweep", "one job / alone", better, [row], "python tools/bench.py sweep")


def test_markdown():
    lines = result(1.8765).markdown().splitlines()
    assert lines[2] == "|  | ours | steps | equal | one job / alone |"
    assert lines[4] == "| a row | 0.512 | 5 | 4 of 5 | **1.88** |"


def test_regressions(tmp_path):
    path = tmp_path / "results.json"
    store_results(path, [result(2.0)])
    stored = read_results(path)["sweep"]
    assert regressions(result(1.71), stored, 0.15) == []
    (sentence,) = regressions(result(1.69), stored, 0.15)
    assert "sweep, a row: one job / alone is 1.69 and was 2; with a tolerance of 15%" in sentence
    lower = result(2.0, better="lower")
    assert regressions(result(1.0, better="lower"), lower, 0.15) == []
    assert "at most 2.3" in regressions(result(2.31, better="lower"), lower, 0.15)[0]
    (sentence,) = regressions(result(2.0, name="another"), stored, 0.15)
    assert "no stored figures for its rows (another)" in sentence
    assert regressions(result(2.0), None, 0.15)
    (sentence,) = regressions(result(None), stored, 0.15)
    assert sentence == "sweep, a row: no one job / alone was found; it was 2."


def test_storing_keeps_other_rows(tmp_path):
    path = tmp_path / "results.json"
    store_results(path, [result(2.0), result(1.0, name="another")][:1])
    store_results(path, [result(3.0, name="another")])
    store_results(path, [result(4.0)])
    rows = read_results(path)["sweep"].rows
    assert {row.name: row.figure for row in rows} == {"a row": 4.0, "another": 3.0}
    path.write_text('{"sweep": 1}')
    with pytest.raises(ValueError, match="is not a file of results"):
        read_results(path)


def test_end_probability():
    p = end_probability(81, 128)
    assert sum((1 - p) ** k for k in range(128)) == pytest.approx(81)


SIDE = """
import json, sys
from tools.bench_tables.sides import STEP, wait_for_turn
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
