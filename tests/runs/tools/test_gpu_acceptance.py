"""tools/gpu_acceptance.py: stages that fail, hang or are skipped are shown; one stage of a rehearsal."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from rl.sandbox.leftovers import descendants
from tools import gpu_acceptance
from tools.acceptance import parity
from tools.acceptance.features import FEATURES
from tools.acceptance.findings import Findings
from tools.acceptance.page import page
from tools.acceptance.stages import Stage, all_stages
from tools.acceptance.worker import StageTask


def stage(**options):
    return Stage(**dict(name="absent", text="nothing", function="parity:run", seconds=60) | options)


def test_a_stage_that_crashes_or_hangs_fails(tmp_path):
    (tmp_path / "stages").mkdir()
    crashed = gpu_acceptance.run_stage(stage(), tmp_path, "rehearse", ["0"])
    late = gpu_acceptance.run_stage(stage(seconds=0), tmp_path, "rehearse", ["0"])
    for result, why in ((crashed, "exit code 1; StopIteration"), (late, "exceeded its time limit of 0 s")):
        assert gpu_acceptance.verdict(result["rows"]) == "fail"
        assert why in result["rows"][-1]["text"]


def test_a_stage_that_reports_nothing_fails(tmp_path, monkeypatch):
    (tmp_path / "stages").mkdir()
    monkeypatch.setattr(gpu_acceptance.sys, "executable", "true")
    result = gpu_acceptance.run_stage(stage(), tmp_path, "rehearse", ["0"])
    assert gpu_acceptance.verdict(result["rows"]) == "fail"


@pytest.mark.parametrize("names, ran", [(("llama",), ["llama"]), (("qwen2", "llama"), ["qwen2"])])
def test_a_named_stage_runs_its_architecture_in_every_mode(tmp_path, monkeypatch, names, ran):
    found = []
    monkeypatch.setattr(parity, "world", lambda task: nullcontext())
    case = SimpleNamespace(compare=lambda *_: None)
    monkeypatch.setattr(parity, "_Case", lambda task, device, name, dtype: found.append(name) or case)
    parity.run(
        StageTask(Findings(tmp_path / "x"), tmp_path, "quick"), architectures=names, dtypes=("bfloat16",)
    )
    assert found == ran


def test_the_stage_of_an_acceptance_that_was_killed_keeps_its_directory(tmp_path, capsys):
    arguments = ["--rehearse", "--stage", "versions", "--out", str(tmp_path)]
    process = subprocess.Popen([sys.executable, gpu_acceptance.__file__, *arguments])
    deadline = time.monotonic() + 60
    while not (stages := descendants(process.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    try:
        assert gpu_acceptance.main(arguments) == 2
        assert "a stage of one that was killed, writes to" in capsys.readouterr().err
    finally:
        for each in stages:
            os.kill(each, signal.SIGKILL)


def test_findings_are_on_disk_after_each_row(tmp_path):
    findings = Findings(tmp_path / "stage.json")
    findings.at_most("error", 0.5, 1.0)
    findings.at_most("not a number", float("nan"), 1.0)
    findings.target("speed", 0.1, 0.9, applies=False)
    findings.at_least("infinite", float("inf"), 2.0, unit="s")
    stored = json.loads((tmp_path / "stage.json").read_text())
    assert [row["verdict"] for row in stored["rows"]] == ["pass", "fail", "note", "pass"]
    assert stored["figures"]["speed"] == 0.1 and stored["rows"][2]["text"] == "on a GPU at least 0.9"


def test_the_page_is_one_file_and_escapes_what_it_shows():
    rows = [dict(name="<b>", verdict="fail", value="1 & 2", text="x" * 10), dict(name="y", verdict="skip")]
    result = dict(
        name="one", text="a<b", mode="full", verdict="fail", rows=rows, timeline={"gen": 2.0, "ref": 1.0}
    )
    text = page([result])
    assert "<b>" not in text.replace("</b>", "").replace("<b>2 s", "").replace("<b>1 s", "")
    assert "&lt;b&gt;" in text and "1 &amp; 2" in text and "a&lt;b" in text and "width:50.0%" in text
    assert "FAIL" in text and "skipped" in text and "<details open>" in text
    assert not re.search(r"(src|href)=|url\(|@import", text)


def test_a_failed_stage_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_acceptance, "visible_devices", lambda mode: ["0"])
    failed = dict(rows=[dict(name="broken", verdict="fail", text="on purpose")])
    passed = dict(rows=[dict(name="fine", verdict="pass")])
    monkeypatch.setattr(
        gpu_acceptance, "run_stage", lambda stage, *args: dict(failed if stage.name == "trainer" else passed)
    )
    assert gpu_acceptance.main(["--out", str(tmp_path)]) == 1
    results = {result["name"]: result["verdict"] for result in gpu_acceptance.results(tmp_path)}
    assert (
        results["trainer"] == "fail" and results["layouts-qwen2-tp1"] == "skip" and results["step"] == "pass"
    )
    assert len(results) == len(gpu_acceptance.all_stages()) - 1  # without two-nodes
    assert results["roles"] == results["router-replay-tp2"] == "skip" and results["router-replay"] == "pass"
    assert re.search(r"broken +on purpose", capsys.readouterr().out)


def test_stages_run_side_by_side_on_devices_of_their_own(tmp_path, monkeypatch):
    stages = [
        stage(name="trainer"),
        stage(name="roles", ranks=2),
        stage(name="speed"),
        *(stage(name=name) for name in ("engine-qwen2", "engine-llama")),
    ]
    begun = {each.name: threading.Event() for each in stages}
    together = {
        "trainer": "roles",
        "roles": "trainer",
        "engine-qwen2": "engine-llama",
        "engine-llama": "engine-qwen2",
    }
    used, log = {}, []

    def run_stage(each, out, mode, devices):
        log.append(each.name)
        used[each.name] = set(devices)
        begun[each.name].set()
        assert begun[together.get(each.name, each.name)].wait(60)
        log.append(f"{each.name} ends")
        return dict(rows=[dict(name="a", verdict="pass")])

    (tmp_path / "stages").mkdir()
    monkeypatch.setattr(gpu_acceptance, "run_stage", run_stage)
    assert gpu_acceptance.run_all(stages, tmp_path, "full", ["0", "1", "2"]) == []
    assert used["trainer"] | used["roles"] == {"0", "1", "2"} and len(used["roles"]) == 2
    assert used["speed"] == {"0", "1", "2"} and not used["engine-qwen2"] & used["engine-llama"]
    assert log.index("speed ends") == log.index("speed") + 1 == 5


def test_the_acceptance_continues_from_a_stage(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(gpu_acceptance, "visible_devices", lambda mode: ["0"])
    monkeypatch.setattr(
        gpu_acceptance, "run_stage", lambda stage, *args: ran.append(stage.name) or dict(rows=[])
    )
    assert gpu_acceptance.main(["--out", str(tmp_path), "--stage", "trainer"]) == 0
    assert gpu_acceptance.main(["--out", str(tmp_path), "--from", "speed"]) == 0
    assert ran == ["trainer", "speed", "step"]
    assert [result["name"] for result in gpu_acceptance.results(tmp_path)] == ran


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--from", "speeed"], "invalid choice: 'speeed'"),
        (["--from", "speed", "--stage", "step"], "not allowed with argument --from"),
        (["--quick", "--rehearse"], "not allowed with argument --quick"),
        (["--quick", "--from", "step"], "--from step is after the last stage of --quick"),
        (["--rehearse", "--out", "FILE"], "cannot be written (Not a directory)"),
        (["--rehearse", "--out", "LOCKED"], "another acceptance, or a stage"),
        (["--rehearse", "--out", "a,b"], "contains ','; use letters"),
        (["--quick"], "show no GPU; use --rehearse"),
    ],
)
def test_wrong_arguments_run_nothing(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.setattr(gpu_acceptance, "run_stage", lambda *args: pytest.fail("a stage ran"))
    monkeypatch.setattr(gpu_acceptance, "results", lambda *args: pytest.fail("a page was written"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    (tmp_path / "file").touch()
    (tmp_path / "locked").mkdir()
    places = {"FILE": str(tmp_path / "file" / "out"), "LOCKED": str(tmp_path / "locked")}
    arguments = [places.get(each, each) for each in arguments]
    with (tmp_path / "locked" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            code = gpu_acceptance.main(arguments)
        except SystemExit as error:
            code = error.code
    assert code == 2 and said in capsys.readouterr().err


def test_damaged_results_are_shown_and_do_not_stop_the_others(tmp_path, monkeypatch):
    stages = tmp_path / "stages"
    stages.mkdir()
    damaged = {
        "trainer": '{"rows": [',
        "bare-vllm": "[1]",
        "learning": '{"rows": [1], "verdict": "pass"}',
        "resume": '{"rows": [], "verdict": "pass"}',
    }
    for name, text in damaged.items():
        (stages / f"{name}.json").write_text(text)
    monkeypatch.setattr(gpu_acceptance, "visible_devices", lambda mode: ["0"])
    monkeypatch.setattr(
        gpu_acceptance, "run_stage", lambda *args: dict(rows=[dict(name="a", verdict="pass")])
    )
    assert gpu_acceptance.main(["--out", str(tmp_path), "--stage", "step"]) == 0
    found = {result["name"]: result["verdict"] for result in gpu_acceptance.results(tmp_path)}
    assert found == dict.fromkeys(damaged, "fail") | {"step": "pass"}
    text = (tmp_path / "index.html").read_text()
    assert "--stage trainer" in text and re.search(r"full; 20\d\d-\d\d-\d\d", text)
    task = StageTask(Findings(stages / "speed.json"), tmp_path, "full")
    assert task.stored("bare-vllm") == task.stored("absent") == {}


def test_an_interrupted_acceptance_keeps_its_page(tmp_path, monkeypatch):
    def run_stage(stage, *args):
        if stage.name == "step":
            raise KeyboardInterrupt
        return dict(rows=[dict(name="a", verdict="pass")])

    monkeypatch.setattr(gpu_acceptance, "visible_devices", lambda mode: ["0"])
    monkeypatch.setattr(gpu_acceptance, "run_stage", run_stage)
    with subprocess.Popen(["sleep", "60"]) as other:
        assert gpu_acceptance.main(["--out", str(tmp_path), "--from", "speed"]) == 130
        assert other.poll() is None  # only the stages are killed
        other.kill()
    assert [result["name"] for result in gpu_acceptance.results(tmp_path)] == ["speed"]


def test_a_signal_that_ends_the_acceptance_interrupts_it():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        gpu_acceptance.end_on_signals()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_visible_gpus_are_counted(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: a'; echo '  MIG 1g'; echo 'GPU 1: b'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_acceptance.visible_devices("full") == ["0", "1"]
    for visible, names in {"": "", "-1": "", "1": "1", "0,1": "01", "0,-1,1": "0", "7, 1,2": "71"}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpu_acceptance.visible_devices("quick") == [*names]


def test_each_stage_ends_within_a_call_of_ten_minutes():
    assert max(stage.seconds for stage in all_stages() if not stage.in_job) <= 540


@pytest.mark.slow  # ten minutes together
@pytest.mark.parametrize("name", [stage.name for stage in all_stages() if stage.runs_in("rehearse")])
def test_each_stage_of_a_rehearsal_passes(tmp_path_factory, name):
    out = tmp_path_factory.getbasetemp() / "acceptance"
    assert gpu_acceptance.main(["--rehearse", "--stage", name, "--out", str(out)]) == 0
    result = next(result for result in gpu_acceptance.results(out) if result["name"] == name)
    assert result["rows"] and (out / "index.html").stat().st_size > 1000


def test_a_rehearsal_without_an_engine_for_cpus_skips_generation(monkeypatch):
    monkeypatch.setattr(gpu_acceptance, "generates_on_cpu", lambda: False)
    skipped = {s.name for s in all_stages() if gpu_acceptance.reason_to_skip(s, "rehearse", 2)}
    left = {"versions", "trainer", "trainer-without-te", "collectives"}
    assert skipped == {stage.name for stage in all_stages()} - left


def test_every_stage_of_several_gpus_is_rehearsed_on_two_ranks():
    several = [stage for stage in all_stages() if stage.ranks > 1]
    assert {stage.ranks for stage in several} == {2, 4, 8} and all(stage.rehearsed for stage in several)
    assert all(
        FEATURES[stage.name].on_two for stage in several if stage.ranks > 2 and "name" in stage.arguments
    )
