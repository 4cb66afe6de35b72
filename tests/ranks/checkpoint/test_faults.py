"""Faults of disks and files end as docs/checkpoints.md describes, and an older checkpoint stays intact."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.checkpoints import save_qwen2
from tests.spawn import run_ranks

WORKER = Path(__file__).with_name("store_worker.py")


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory):
    """A file system of 8 MiB; an empty string where one cannot be mounted."""
    mount = tmp_path_factory.mktemp("disk")
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        yield ""
        return
    yield str(mount)
    subprocess.run(["umount", str(mount)], check=True)


@pytest.fixture(scope="module")
def found(tmp_path_factory, small_disk) -> dict:
    directory = tmp_path_factory.mktemp("faults")
    model = save_qwen2(directory / "model", seed=7, tie=True)
    other = save_qwen2(directory / "other", seed=7, tie=True, intermediate_size=128)
    run_ranks(2, WORKER, "faults", model, other, directory, small_disk, timeout=400)
    return json.loads((directory / "faults.json").read_text())


def test_an_intact_checkpoint_restores_its_random_states(found):
    assert found["whole"] == 3 and found["random states return"]


@pytest.mark.parametrize(
    "fault", ["truncated", "flipped bit", "missing file", "missing manifest", "flipped manifest"]
)
def test_the_one_before_a_damaged_checkpoint_is_used(found, fault):
    assert found[fault] == 2


def test_without_verification_only_sizes_are_compared(found):
    assert found["truncated, unverified"] == 2


def test_two_damaged_checkpoints_are_skipped(found):
    assert found["two damaged"] == 1


def test_a_run_with_only_damaged_checkpoints_is_refused(found):
    text = found["all damaged"]
    assert "all checkpoints in" in text and "rank_00001.safetensors is damaged" in text


def test_latest_is_not_needed(found):
    assert found["no latest"] == 3


def test_a_newer_format_is_refused_and_not_skipped(found):
    assert "has format 2, but this version of Lockstep reads up to 1" in found["of the future"]


def test_a_damaged_checkpoint_is_renamed_by_the_next_save(found):
    assert found["set aside"] == ["latest", "step_000002", "step_000003", "step_000003.damaged"]


def test_a_checkpoint_of_another_model_is_refused(found):
    assert (
        "is a checkpoint of another policy: model.layers.0.mlp.down_proj.weight is [128, 96] there and "
        "[128, 128] here" in (found["other model"])
    )
    assert "model.dtype=float32, not bfloat16" in found["other dtype"]


def test_a_full_disk_ends_the_save(found):
    if "full before" not in found:
        pytest.skip("no file system can be mounted here")
    for fault in ("full while writing", "full in the background"):
        text = found[fault]
        assert "the checkpoint of step 5 could not be written by rank" in text and "is full" in text
        assert "step_000003 is still the newest checkpoint; free space" in text
        assert found[f"{fault}: left"] == ["latest", "step_000003"]
    assert "the checkpoint of step 5 needs 0." in found["full before"] and "GiB free" in found["full before"]
    assert found["full before: left"] == ["latest", "step_000003"] and found["full: loaded"] == 3


def test_a_background_save_holds_the_weights_of_its_step(found):
    assert found["background, before it is complete"] == [3] and found["background"] == [3, 4]
    assert found["background, weights of 3"] == found["background, weights of 4"] == 0
