"""The files of event logs."""

from rl.rollout.stored_log import DIRECTORY, remove_after


def test_logs_of_later_steps_are_removed_at_a_resume(tmp_path):
    for step in (1, 2, 10):
        (tmp_path / DIRECTORY / f"step_{step}").mkdir(parents=True)
    remove_after(str(tmp_path), 2)
    assert sorted(path.name for path in (tmp_path / DIRECTORY).iterdir()) == ["step_1", "step_2"]
