"""tools/gpu_acceptance.py: stages that fail, hang or are skipped are shown; one stage of a rehearsal."""

import json
import re

import pytest

from tools import gpu_acceptance
from tools.acceptance.findings import Findings
from tools.acceptance.page import page
from tools.acceptance.stages import Stage, all_stages


def stage(**options):
    return Stage(**dict(name="absent", text="nothing", function="parity:run", seconds=60) | options)


def test_a_stage_that_crashes_or_hangs_fails(tmp_path):
    (tmp_path / "stages").mkdir()
    crashed = gpu_acceptance.run_stage(stage(), tmp_path, "rehearse", 1)
    late = gpu_acceptance.run_stage(stage(seconds=0), tmp_path, "rehearse", 1)
    for result, why in ((crashed, "exit code 1; StopIteration"), (late, "exceeded its time limit of 0 s")):
        assert gpu_acceptance.verdict(result["rows"]) == "fail"
        assert why in result["rows"][-1]["text"]


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
    monkeypatch.setattr(gpu_acceptance, "num_ranks", lambda mode: 1)
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
    assert len(results) == len(gpu_acceptance.all_stages())
    assert results["roles"] == results["router-replay-tp2"] == "skip" and results["router-replay"] == "pass"
    assert re.search(r"broken +on purpose", capsys.readouterr().out)


def test_the_acceptance_continues_from_a_stage(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(gpu_acceptance, "num_ranks", lambda mode: 1)
    monkeypatch.setattr(
        gpu_acceptance, "run_stage", lambda stage, *args: ran.append(stage.name) or dict(rows=[])
    )
    assert gpu_acceptance.main(["--out", str(tmp_path), "--stage", "trainer"]) == 0
    assert gpu_acceptance.main(["--out", str(tmp_path), "--from", "speed"]) == 0
    assert ran == ["trainer", "speed", "step"]
    assert [result["name"] for result in gpu_acceptance.results(tmp_path)] == ran


def test_each_stage_ends_within_a_call_of_ten_minutes():
    assert max(stage.seconds for stage in all_stages()) <= 540


@pytest.mark.slow  # ten minutes together
@pytest.mark.parametrize("name", [stage.name for stage in all_stages() if stage.rehearsed])
def test_each_stage_of_a_rehearsal_passes(tmp_path_factory, name):
    out = tmp_path_factory.getbasetemp() / "acceptance"
    assert gpu_acceptance.main(["--rehearse", "--stage", name, "--out", str(out)]) == 0
    result = next(result for result in gpu_acceptance.results(out) if result["name"] == name)
    assert result["rows"] and (out / "index.html").stat().st_size > 1000
