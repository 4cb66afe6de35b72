import json

import pytest

from launch.watch import RunFiles
from lockstep.__main__ import call
from lockstep.commands import COMMANDS
from rl.config.limits import PhaseLimits
from rl.faults.heartbeat import HeartbeatWriter
from rl.faults.phase_tracker import PhaseTracker
from rl.run_directory.status import Status


@pytest.fixture
def run(tmp_path):
    Status(str(tmp_path), max_steps=8, leads=True).write(step=2)
    write_metrics(tmp_path, (1, 0.25), (2, 0.5))
    with (tmp_path / "stacks").open("w") as file:
        for rank in (0, 1):
            HeartbeatWriter(str(tmp_path), rank, PhaseTracker(PhaseLimits(), file)).write()
    return tmp_path


def write_metrics(directory, *steps, end="\n", mode="w"):
    lines = [json.dumps({"training/global_step": n, "critic/score/mean": score}) for n, score in steps]
    with (directory / "metrics.jsonl").open(mode) as file:
        file.write("\n".join(lines) + end)


def rewards(view):
    return [(each["training/global_step"], each["critic/score/mean"]) for each in view.records]


def test_watch_prints_step_curve_and_slow_rank(run, capsys):
    assert call(COMMANDS["watch"], [str(run), "--once"]) == 0
    text = capsys.readouterr().out
    assert "step 2/8" in text and "\u2581\u2588" in text and "slowest now: rank" in text


def test_watch_names_the_slowest_rank_and_the_usual_time_of_a_phase(run, capsys):
    heartbeat = run / "heartbeat" / "rank_0.json"
    heartbeat.write_text(json.dumps({**json.loads(heartbeat.read_text()), "phase": "generate"}))
    last = {"perf/slowest_rank": 1, "perf/slowest_rank_late_s": 2.5, "timing_s/gen": 250.0}
    records = [{"training/global_step": n, **last} for n in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    assert call(COMMANDS["watch"], [str(run), "--once"]) == 0
    host = json.loads((run / "heartbeat" / "rank_1.json").read_text())["host"]
    text = " ".join(capsys.readouterr().out.split())
    assert f"slowest in step 2: rank 1 on {host}, 2.5 s after the first" in text
    assert "of usually 4 min" in text


def test_watch_reads_what_was_added_and_starts_over(run):
    files = RunFiles(run)
    assert rewards(files.read()) == [(1, 0.25), (2, 0.5)]
    write_metrics(run, (3, 0.75), mode="a")
    write_metrics(run, (4, 1.0), end="", mode="a")  # half of a line
    assert rewards(files.read()) == [(1, 0.25), (2, 0.5), (3, 0.75)]
    write_metrics(run, (1, 0.25))  # a resume from step 1
    assert rewards(files.read()) == [(1, 0.25)]


def test_watch_reports_the_end_and_its_reason(run, capsys):
    Status(str(run), max_steps=8, leads=True).fail("rank 1 died")
    assert call(COMMANDS["watch"], [str(run), "--once"]) == 0
    text = capsys.readouterr().out
    assert "failed" in text and "rank 1 died" in text


def test_watch_refuses_a_directory_without_a_run(tmp_path, capsys):
    assert call(COMMANDS["watch"], [str(tmp_path)]) == 2
    assert "has no status.json" in capsys.readouterr().err
