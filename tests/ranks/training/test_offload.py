"""Training models in host memory between their phases: storages are freed, results are bitwise the same."""

import json
from pathlib import Path

import pytest

from tests.spawn import run_ranks

WORKER = Path(__file__).with_name("offload_worker.py")
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def results(toy) -> dict:
    """Rank 0's of two data parallel ranks."""
    return json.loads(run_ranks(2, WORKER, toy / "model", timeout=240)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["optimizer", "all", "all, overlapped"])
def test_offloading_changes_neither_metrics_nor_weights(results, dtype, mode):
    assert results[f"{dtype} {mode}"][0] == results[f"{dtype} none"][0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_offloaded_tensors_hold_no_byte_on_the_device(results, dtype):
    *away, back = results[f"{dtype} all"][1]
    assert away == [{"weights": 0, "gradients": 0, "optimizer": 0}] * 3
    assert back == results[f"{dtype} none"][1][-1] and all(size > 0 for size in back.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_stay_where_only_the_optimizer_moves(results, dtype):
    *away, back = results[f"{dtype} optimizer"][1]
    assert away == [{"weights": back["weights"], "gradients": 0, "optimizer": 0}] * 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["none", "all", "all, overlapped"])
def test_reference_is_initial_and_own_weights_return(results, dtype, mode):
    own_again, reference_and_initial, own_and_initial = results[f"{dtype} {mode}"][2]
    assert own_again == reference_and_initial == 0 < own_and_initial
