"""tools/export_hf.py: which checkpoints it can export."""

import argparse
import sys

import pytest

from rl.runtime.ranks import discover
from tools.export_hf import complete_checkpoints, export


def test_a_checkpoint_that_is_missing_or_incomplete_is_named_with_the_complete_ones(tmp_path):
    with pytest.raises(ValueError, match="has no complete checkpoint; train until one is saved"):
        complete_checkpoints(tmp_path, None)
    for name in ("step_000002", "step_000004", "step_000006.partial", "step_000008"):
        (tmp_path / name).mkdir()
    for name in ("step_000002", "step_000004", "step_000006.partial"):
        (tmp_path / name / "checkpoint.json").write_text("{}")
    assert list(complete_checkpoints(tmp_path, 4)) == [2, 4]
    for step in (6, 8, 9):
        with pytest.raises(ValueError, match=f"of step {step}; use --step with one of step 2, step 4."):
            complete_checkpoints(tmp_path, step)


def test_wrong_paths_are_refused_before_the_long_imports(tmp_path, monkeypatch):
    (tmp_path / "checkpoints" / "step_000002").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_000002" / "checkpoint.json").write_text("{}")
    for name in ("rl.checkpoint.directory", "rl.runtime.session"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it raises
    new = tmp_path / "new"
    for run, out, step, said in (
        (new, new, None, "there is no directory"),
        (tmp_path, tmp_path, None, "exists already: name another directory"),
        (tmp_path, new, 9, "step 9; use --step with one of step 2"),
    ):
        with pytest.raises(ValueError, match=said):
            export(discover(), argparse.Namespace(run_dir=str(run), out=str(out), step=step))
