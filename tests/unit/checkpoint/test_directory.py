"""Checkpoint directories: which directories count as checkpoints, which are kept, and what a killed run
leaves.
"""

import contextlib
import json
import random
from pathlib import Path

import pytest

from rl.checkpoint import directory as on_disk
from rl.checkpoint.directory import Saved, commit, complete, kept, read_manifest, retire
from rl.checkpoint.shards import DamagedError
from rl.config.options import ConfigError


def make(directory, step: int, **manifest):
    partial = directory / f"step_{step:06d}.partial"
    partial.mkdir(parents=True)
    usual = {"format": 1, "step": step, "files": {}, "metrics": {}, "git_revision": "abc"}
    commit(partial, partial.with_suffix(""), usual | manifest)
    return partial.with_suffix("")


def steps(directory) -> list[int]:
    return [saved.step for saved in complete(directory)]


def test_committed_directories_count_in_order_of_steps(tmp_path):
    for step in (999_999, 5, 1_000_000):
        make(tmp_path, step)
    for name in ("step_000007.partial", "step_000008.removed", "step_000009.damaged", "step_x"):
        (tmp_path / name).mkdir()
    assert steps(tmp_path) == [5, 999_999, 1_000_000]
    assert (tmp_path / "latest").read_text() == "step_1000000\n"


def test_a_complete_checkpoint_without_its_latest_does_not_end_the_run(tmp_path, caplog):
    """The run ended with `step 6 could not be written ... step_000006 is still the newest checkpoint`."""
    (tmp_path / "latest.partial").mkdir()
    make(tmp_path, 6)
    assert steps(tmp_path) == [6] and "latest does not name step_000006: " in caplog.text


def test_leftovers_are_removed_and_damaged_ones_stay(tmp_path):
    for name in ("step_000007.partial", "step_000008.removed", "step_000009.damaged"):
        (tmp_path / name / "x").mkdir(parents=True)
    on_disk.clear_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000009.damaged"]


def test_a_retired_checkpoint_no_longer_counts(tmp_path):
    make(tmp_path, 3)
    retired = retire(make(tmp_path, 4))
    assert steps(tmp_path) == [3] and (retired / "checkpoint.json").exists()
    on_disk.clear_leftovers(tmp_path)
    assert steps(tmp_path) == [3] and not retired.exists()


def test_a_step_saved_again_replaces_the_old_one(tmp_path):
    make(tmp_path, 3, metrics={"a": 1.0})
    assert read_manifest(make(tmp_path, 3, metrics={"a": 2.0}))["metrics"] == {"a": 2.0}
    on_disk.clear_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000003"]


def test_any_changed_or_missing_byte_damages_a_manifest(tmp_path):
    file = make(tmp_path, 3) / "checkpoint.json"
    whole = file.read_bytes()
    numbers = random.Random(0)
    body = len(whole) - 1  # the last byte is a newline
    for changed in [whole[:place] for place in range(0, body, 7)] + [
        whole[:place] + bytes([whole[place] ^ (1 << numbers.randrange(7))]) + whole[place + 1 :]
        for place in range(body)
    ]:
        file.write_bytes(changed)
        with contextlib.suppress(DamagedError):
            assert read_manifest(file.parent)["step"] == 3
            assert json.loads(changed) == json.loads(whole)  # only white space differs


def test_a_newer_format_is_refused_with_its_revision(tmp_path):
    with pytest.raises(ConfigError, match="has format 2, .* reads up to 1: .* git revision abc"):
        read_manifest(make(tmp_path, 3, format=2))


class TestRetention:
    metrics = {10: 0.5, 20: 0.9, 30: None, 40: 0.9, 50: 0.1}
    found = [Saved(step, Path(f"step_{step:06d}"), metric) for step, metric in metrics.items()]

    @pytest.mark.parametrize(
        "options, steps",
        [
            (dict(last=2), [40, 50]),
            (dict(last=9), [10, 20, 30, 40, 50]),
            (dict(last=0, best=1), [10, 20, 30, 40, 50]),
            (dict(every=20), [20, 40, 50]),
            (dict(best=1), [40, 50]),  # of equal ones the newer
            (dict(best=2), [20, 40, 50]),
            (dict(best=2, highest=False), [10, 50]),
            (dict(best=9), [10, 20, 40, 50]),  # one without the metric is never best
        ],
    )
    def test_options_decide_what_is_kept(self, options, steps):
        assert sorted(kept(self.found, **dict(last=1, every=0, best=0, highest=True) | options)) == steps

    def test_metrics_come_from_intact_manifests(self, tmp_path):
        for step in (1, 2, 3):
            make(tmp_path, step, metrics={"acc": step / 4})
        (tmp_path / "step_000002" / "checkpoint.json").unlink()
        found = on_disk.with_metrics(complete(tmp_path), "acc")
        assert [saved.metric for saved in found] == [0.25, None, 0.75]
