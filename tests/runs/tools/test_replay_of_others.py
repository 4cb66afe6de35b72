"""tools/replay.py on a run directory that somebody else may have written."""

import pytest

from tests.spawn import ROOT, RanksFailed, run_ranks

CODE = "open('executed', 'w')\ndef order(epoch, prompts, scores): return []\n"


def test_no_config_that_others_may_have_written_is_replayed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text(CODE)
    run = tmp_path / "above" / "run"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(f"data: {{curriculum: '{tmp_path}/evil.py:order'}}\n")
    for open_to_all in run, run.parent:
        open_to_all.chmod(0o777)
        with pytest.raises(RanksFailed, match=f"{open_to_all} can be written by other users"):
            run_ranks(1, ROOT / "tools" / "replay.py", run, 1)
        open_to_all.chmod(0o755)
    assert not (tmp_path / "executed").exists()
