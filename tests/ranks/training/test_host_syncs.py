"""The number of waits for the device in a pass does not depend on the number of micro-batches."""

import json
from pathlib import Path

import pytest

from tests.spawn import run_ranks

WORKER = Path(__file__).with_name("host_sync_worker.py")


@pytest.fixture(scope="module")
def results(toy) -> dict:
    return json.loads(run_ranks(1, WORKER, toy / "model")[0])


@pytest.mark.parametrize("name", ["forward", "update", "update, per sample"])
def test_no_wait_per_micro_batch(results, name):
    assert results[name].keys() == {"1", "8"}
    assert results[name]["8"] == results[name]["1"]
    assert 0 < sum(results[name]["1"].values()) <= 3  # results to the host; metrics and norm of an update
