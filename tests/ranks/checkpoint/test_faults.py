"""Faults of disks and files end as docs/checkpoints.md describes, and an older checkpoint stays intact."""

import json
import os
import re
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
    run_ranks(2, WORKER, "faults", model, directory, other, small_disk, timeout=400)
    return json.loads((directory / "faults.json").read_text())


LOADED = {
    "whole": 3,
    "no latest": 3,
    "truncated": 2,
    "truncated, unverified": 2,
    "flipped bit": 2,
    "missing file": 2,
    "missing manifest": 2,
    "flipped manifest": 2,
    "brackets in the manifest": 2,
    "a directory as manifest": 2,
    "EIO of the manifest": 2,
    "a directory as state": 2,
    "a directory as tensors": 2,
    "brackets in a header": 2,
    "a file as checkpoint": 2,
    "two damaged": 1,
}
"""Fault -> the step that is loaded."""
REFUSED = {
    "all damaged": "all checkpoints in .*rank_00001.safetensors is damaged",
    "of the future": "has format 2, but this version of Lockstep reads up to 1",
    "other model": r"another policy: .*.0.mlp.down_proj.weight is \[128, 96\] there and \[128, 128\] here",
    "other dtype": "model.dtype=float32 of the policy, not bfloat16",
}
"""Fault -> what the error says."""


def test_the_newest_intact_checkpoint_is_used(found):
    assert {fault: found[fault] for fault in LOADED} == LOADED and found["random states return"]
    assert found["set aside"] == ["latest", "step_000002", "step_000003", "step_000003.damaged"]


@pytest.mark.parametrize("fault", REFUSED)
def test_what_cannot_be_loaded_is_refused(found, fault):
    assert re.search(REFUSED[fault], found[fault], re.DOTALL)


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
