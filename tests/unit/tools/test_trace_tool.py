"""tools/trace.py: which timelines it finds."""

from tools import trace


def test_a_step_without_timelines_is_refused_with_the_steps_that_have_some(tmp_path, capsys):
    (tmp_path / "trace").mkdir()
    assert trace.main([str(tmp_path)]) == 2
    assert "has no timelines; run with trace.steps=[...]." in capsys.readouterr().err
    for name in ("step_2_rank_0", "step_2_rank_1", "step_4_rank_0"):
        (tmp_path / "trace" / f"{name}.json").write_text("{}")
    for arguments in (["--step", "6"], ["--ranks", "2:5"]):
        assert trace.main([str(tmp_path), *arguments]) == 2
        assert "it has them of steps 2 and 4, ranks 0 to 1, so name" in capsys.readouterr().err
    assert trace.main([str(tmp_path / "absent")]) == 2
    assert "there is no directory" in capsys.readouterr().err
