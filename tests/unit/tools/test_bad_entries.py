"""Tools that read run directories, with one bad entry: it is named in a line and the rest is shown."""

import errno
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import status, sweep_report, watch
from rl.run_directory import event_files, rollout_files
from rl.run_directory.bad_entries import sentence_of
from rl.run_directory.consumed import ConsumedLog
from rl.run_directory.metric_log import MetricLog, keep_lines_up_to
from tests.ordinary_user import as_ordinary_user
from tests.stored_run import save_run
from tools import consumed, report, rollouts, trace

STEP = '{"training/global_step": %s}\n'
CONTENTS = {
    "half": '{"training/global_step": 2, "ti',
    "empty": "",
    "list": "[1]",
    "null": "null",
    "deep": "[" * 50000,
    "binary": b"\xff\x00\x81PAR1",
    "other": '{"a": {"b": [1e999, NaN, "x"]}}',
}
"""Damaged contents of a file that should hold JSON, YAML or parquet."""
FILES = (
    "status.json",
    "metrics.jsonl",
    "consumed.jsonl",
    "tokens.json",
    "config.yaml",
    "environment.json",
    "launch/jobs.jsonl",
    "launch/sweep.json",
    "heartbeat/rank_0.json",
    "rollouts/step_000002.parquet",
    "rollouts/step_x.parquet",
    "trace/step_1_rank_0.json",
    "events/step_x",
)


OF_STATUS = ("step", "max_steps", "state", "restarts", "reason", "job")


def values(key: str, *texts: str) -> dict[str, Callable[[Path], None]]:
    """Return damages that set a key of the last record, or of the status, to a value that JSON may hold."""

    def put(path: Path, text: str) -> None:
        lines = path.read_text().splitlines()
        record = json.loads(lines[-1]) | {key: "@"}
        path.write_text("\n".join([*lines[:-1], json.dumps(record).replace('"@"', text)]) + "\n")

    name = "status.json" if key in OF_STATUS else "metrics.jsonl"
    return {f"{key}={text[:8]}": lambda run, text=text: put(run / name, text) for text in texts}


def write(name: str, content: str | bytes) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        path = run / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return damage


def middle(run: Path) -> None:
    path = run / "metrics.jsonl"
    first, *others = path.read_text().splitlines()
    path.write_text("\n".join([first, CONTENTS["half"], '"', STEP % "null", *others]) + "\n")


def directory(name: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).mkdir(parents=True)

    return damage


ODD = ("null", "NaN", "-Infinity", "1e999", '"x"', "[1]", "true", "1" + "0" * 400)
DAMAGES: dict[str, Callable[[Path], None]] = {
    f"{name}: {kind}": write(name, content) for name in FILES for kind, content in CONTENTS.items()
}
DAMAGES |= {f"{name}: directory": directory(name) for name in FILES}
DAMAGES |= {"half a line in the middle": middle}
for own in ("critic/score/mean", "val-core/sums/acc/mean@1", "time", "timing_s/step", "training/global_step"):
    DAMAGES |= values(own, *ODD)
for own in OF_STATUS:
    DAMAGES |= values(own, "null", "-1.5", '"x"', "[1]")


def resume(run: Path) -> None:
    """Do to the files of a run what a start after step 1 does."""
    MetricLog(run, resume_step=1).close()
    if (run / "consumed.jsonl").exists():
        keep_lines_up_to(run / "consumed.jsonl", 1)
    rollout_files.remove_after(run, 1)
    event_files.remove_after(str(run), 1)


TOOLS: dict[str, Callable[[Path, Path], object]] = {
    "status": lambda good, bad: status.main([str(good.parent)]),
    "watch": lambda good, bad: watch.main([str(bad), "--once"]),
    "sweep report": lambda good, bad: sweep_report.main([str(good), str(bad), "--out", str(good.parent)]),
    "report": lambda good, bad: report.main([str(good), str(bad)]),
    "report of one": lambda good, bad: report.main([str(bad)]),
    "rollouts": lambda good, bad: rollouts.main([str(bad)]),
    "table of rollouts": lambda good, bad: rollouts.main([str(bad), "--table", "--text", "two"]),
    "export of rollouts": lambda good, bad: rollouts.main([str(bad), "--export", str(bad / "a.jsonl")]),
    "trace": lambda good, bad: trace.main([str(bad)]),
    "cost of traces": lambda good, bad: trace.main([str(bad), "--cost"]),
    "consumed": lambda good, bad: consumed.main([str(bad)]),
    "resume": lambda good, bad: resume(bad),
}
SHOW_GOOD = {"status": None, "sweep report": "report.html", "report": None}
"""Tool that shows other runs, too -> file with the runs; None if the tool prints them."""
DIRECTORY_IN_PLACE = {"resume": ("metrics.jsonl: directory", "consumed.jsonl: directory")}
"""Damages that nobody's crash leaves, and that a run refuses."""


def event(rank: int) -> dict:
    own = dict(rank=rank, role="", host="a", clock_error_ns=0, clock_offset_ns=0, unix_minus_clock_ns=0)
    return own | {"events": [["main", "update", 0, 5, {}]]}


def make_runs(place: Path) -> tuple[Path, Path]:
    good, bad = save_run(place / "good"), save_run(place / "bad")
    for run in (good, bad):
        more = {"max_steps": 9, "restarts": 0, "state": "running"}
        status_file = run / "status.json"
        status_file.write_text(json.dumps(json.loads(status_file.read_text()) | more))
        for name in ("launch", "heartbeat", "trace", "events"):
            (run / name).mkdir()
        (run / "launch" / "jobs.jsonl").write_text('{"job": "1", "time": 1.0}\n')
        (run / "heartbeat" / "rank_0.json").write_text('{"time": 1.0}')
        for rank in (0, 1):
            (run / "trace" / f"step_1_rank_{rank}.json").write_text(json.dumps(event(rank)))
        for step in (1, 2):
            ConsumedLog(run).append(step, num_drawn=step, consumed=[(step - 1, 0)], dropped=[], waiting=[])
    return good, bad


@pytest.mark.parametrize("tool", TOOLS)
def test_one_bad_entry_hides_nothing_else(tool, tmp_path, capsys, monkeypatch):
    if "report" in tool:
        monkeypatch.setattr("tools.report.draw_curves", lambda curves, png, **_: png.write_bytes(b""))
        monkeypatch.setattr(sweep_report, "draw_curves", lambda curves, png, **_: png.write_bytes(b""))
        monkeypatch.setattr("tools.report.draw", lambda records, png: None)
        monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "")
    monkeypatch.setattr("launch.slurm.states", lambda jobs: {})
    make_runs(tmp_path / "whole")
    problems = []
    for number, (name, damage) in enumerate(DAMAGES.items()):
        runs = shutil.copytree(tmp_path / "whole", tmp_path / str(number))
        good, bad = runs / "good", runs / "bad"
        damage(bad)
        code: object = 0
        try:
            code = TOOLS[tool](good, bad)
        except SystemExit as error:
            code = error.code
        except Exception as error:
            if name not in DIRECTORY_IN_PLACE.get(tool, ()) and not is_sentence(error):
                problems.append(f"{name}: {type(error).__name__}: {error}"[:200])
            continue
        out, err = capsys.readouterr()
        file = SHOW_GOOD.get(tool)
        shown = (good.parent / file).read_text() if file and not code else out
        if tool in SHOW_GOOD and (code != 0 or "good" not in shown):
            problems.append(f"{name}: the other run is not shown: {code} {err[:200]}")
        if len(err.splitlines()) > 6 or "Traceback" in err:
            problems.append(f"{name}: {err[:300]}")
    assert not problems, "\n".join(problems)


def is_sentence(error: Exception) -> bool:
    """Return whether the command shows this error as one sentence (lockstep/__main__.py)."""
    return type(error).__name__ == "ConfigError" and "\n" not in str(error)


def test_the_directory_of_another_user_is_named(tmp_path):
    good, bad = make_runs(tmp_path / "runs")
    for path in (tmp_path / "runs").rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    for path in (bad, good / "launch", good / "heartbeat"):
        path.chmod(0o700)
    picture = ["--png", f"{tmp_path}/a.png", "--html", f"{tmp_path}/a.html"]
    for command in (
        ["-m", "lockstep", "status", str(tmp_path / "runs")],
        ["-m", "lockstep", "sweep", "report", str(good), str(bad), "--out", str(tmp_path)],
        ["-m", "lockstep", "report", str(good), str(bad), *picture],
    ):
        done = as_ordinary_user(tmp_path, [sys.executable, *command])
        assert done.returncode == 0, done.stderr
        said = done.stdout + done.stderr
        assert "good" in said + str(list(tmp_path.glob("report.html"))) and "Traceback" not in said
        assert any("bad" in line and "Permission denied" in line for line in said.splitlines()), said


def test_an_error_of_a_file_has_its_path_and_a_remedy(tmp_path):
    with pytest.raises(OSError) as missing:
        (tmp_path / "absent" / "page.html").write_text("")
    path = tmp_path / "absent" / "page.html"
    expected = f"{path}: No such file or directory; correct the path, or its permissions."
    assert sentence_of(missing.value) == expected
    full = OSError(errno.ENOSPC, "No space left on device")
    assert sentence_of(full) == "the disk: No space left on device; free space, or use another disk."
    assert sentence_of(ValueError("as it is")) == "as it is"
