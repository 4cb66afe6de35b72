"""tools/bench.py: results are stored, compared and printed; lengths of random models; sides take turns."""

import sys
from argparse import Namespace

import pytest

from tools.bench_tables.grpo import compare, measure, time_to
from tools.bench_tables.report import Result, Row, read_results, regressions, store_results
from tools.bench_tables.sides import BenchFailed, Side, alternate
from tools.bench_tables.tasks import end_probability


def result(figure, *, better="higher", name="a row"):
    row = Row(name, {"ours, s": 0.51234, "rounds": 5, "of ours": "update 0.3"}, figure)
    return Result("grpo", "A GRPO step", "TRL / Lockstep", better, [row], "python tools/bench.py grpo")


def record(step, seconds, **timings):
    timings = {f"timing_s/{name}": value for name, value in timings.items()}
    return {"training/global_step": step, "timing_s/step": seconds, "response_length/mean": 4.0, **timings}


def test_row_of_two_sides():
    ours = [[record(step, 5.0, gen=1.0, turn=wait)] for step, wait in enumerate([3.0, 2.0, 4.0])]
    theirs = [[record(step, 6.0, gen=4.0)] for step in range(3)]
    row = compare("a row", "TRL, 1 x 2", {"Lockstep": ours, "TRL, 1 x 2": theirs})
    assert row.figure == 3.0  # medians; the wait for a turn does not count
    assert row.columns["Lockstep, s"] == "2.00 (1.00 to 3.00)" and row.rounds["Lockstep"] == [2.0, 3.0, 1.0]
    assert row.columns["of TRL"] == "generation 4.00, rest 2.00" and row.columns["TRL runs on"] == "1 x 2"


def test_markdown():
    lines = result(1.8765).markdown().splitlines()
    assert lines[2] == "|  | ours, s | rounds | of ours | TRL / Lockstep |"
    assert lines[4] == "| a row | 0.512 | 5 | update 0.3 | **1.88** |"


def test_regressions(tmp_path):
    path = tmp_path / "results.json"
    store_results(path, [result(2.0)])
    stored = read_results(path)["grpo"]
    assert regressions(result(1.71), stored, 0.15) == []
    (sentence,) = regressions(result(1.69), stored, 0.15)
    assert "grpo, a row: TRL / Lockstep is 1.69 and was 2; with a tolerance of 15%" in sentence
    lower = result(2.0, better="lower")
    assert regressions(result(1.0, better="lower"), lower, 0.15) == []
    assert "at most 2.3" in regressions(result(2.31, better="lower"), lower, 0.15)[0]
    (sentence,) = regressions(result(2.0, name="another"), stored, 0.15)
    assert "no stored figures for its rows (another)" in sentence
    assert regressions(result(2.0), None, 0.15)
    assert regressions(result(None), stored, 0.15) == ["grpo, a row: no TRL / Lockstep was found; it was 2."]


def test_storing_keeps_other_rows(tmp_path):
    path = tmp_path / "results.json"
    store_results(path, [result(2.0), result(1.0, name="another")][:1])
    store_results(path, [result(3.0, name="another")])
    store_results(path, [result(4.0)])
    assert {row.name: row.figure for row in read_results(path)["grpo"].rows} == {"a row": 4.0, "another": 3.0}
    path.write_text('{"grpo": 1}')
    with pytest.raises(ValueError, match="is not a file of results"):
        read_results(path)


def test_unknown_row(tmp_path):
    with pytest.raises(BenchFailed, match="--rows=7B matches no row; rows: 0.7M, 16 x 8"):
        measure(Namespace(rows=["7B"]), tmp_path, tmp_path)


def test_time_to_accuracy():
    seconds, accuracies = [10.0, 20.0, 30.0], [0.6, 0.8, 1.0]
    assert time_to(0.9, seconds, accuracies) == pytest.approx(25.0)
    assert time_to(0.5, seconds, accuracies) == 10.0
    assert time_to(1.1, seconds, accuracies) == float("inf")


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
        file.write(json.dumps({STEP: step, "cost": -ord(name)}) + chr(10))
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
    turns = alternate(start, 3, rivals="bc", seconds=lambda turn: turn[-1]["cost"])
    assert order.read_text() == "abc" + "ac" + "ca" + "ac"  # b lost the warm-up
    assert list(turns) == ["a", "c"] and [len(taken) for taken in turns.values()] == [3, 3]
    assert turns["a"][0][-1]["training/global_step"] == 2


def test_a_side_that_ends_early(tmp_path):
    start, _ = sides(tmp_path, "a", last=1)
    with pytest.raises(BenchFailed, match="a ended with 3"):
        alternate(start, 1)
