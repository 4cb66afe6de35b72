"""tools/export_hf.py: which checkpoints it can export."""

import pytest

from tools.export_hf import complete_checkpoints


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
