"""tools/trace.py: which timelines it finds."""

import json

from tools import trace


def test_a_step_without_timelines_is_refused_with_the_steps_that_have_some(tmp_path, capsys):
    (tmp_path / "trace").mkdir()
    assert trace.main([str(tmp_path)]) == 2
    assert "has no timelines; run with trace.steps=[...]." in capsys.readouterr().err
    record = {"training/global_step": 6, "timing_s/step": 3.0, "timing_s/gen": 2.0, "actor/lr": 9.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert trace.main([str(tmp_path), "--step", "6"]) == 2
    assert (
        "run with trace.steps=[6]; without it the log has the seconds of each phase: step 3 s, gen 2 s."
        in (capsys.readouterr().err)
    )
    for name in ("step_2_rank_0", "step_2_rank_1", "step_4_rank_0"):
        (tmp_path / "trace" / f"{name}.json").write_text("{}")
    for arguments in (["--step", "6"], ["--ranks", "2:5"]):
        assert trace.main([str(tmp_path), *arguments]) == 2
        assert "it has them of steps 2 and 4, ranks 0 to 1, so name" in capsys.readouterr().err
    assert trace.main([str(tmp_path / "absent")]) == 2
    assert "there is no directory" in capsys.readouterr().err
