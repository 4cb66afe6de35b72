"""A checkpoint of one layout continues in another: weights, optimizer, log-probs, the next step."""

import json
from pathlib import Path

import pytest

from tests.checkpoints import save_qwen2
from tests.spawn import run_ranks

WORKER = Path(__file__).with_name("store_worker.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict[str, float]]:
    directory = tmp_path_factory.mktemp("layouts")
    model = save_qwen2(directory / "model", seed=7, tie=True)
    run_ranks(2, WORKER, "layouts", model, directory, timeout=400)
    return json.loads((directory / "layouts.json").read_text())


@pytest.mark.parametrize("layout", ["2x1", "1x2", "1x1"])
def test_another_layout_takes_the_same_next_step(found, layout):
    differences = found[f"float32 {layout}"]
    assert differences["weights"] == 0
    assert differences["logprobs"] < 1e-6 and differences["loss"] < 1e-6 and differences["grad_norm"] < 1e-6
    # Of a step that moves weights by 1e-3; a step from another optimizer state would differ by as much.
    assert differences["next weights"] < 1e-6 < differences["step"]


@pytest.mark.parametrize("layout", ["2x1", "1x2", "1x1"])
def test_another_layout_loads_the_same_bfloat16_weights(found, layout):
    differences = found[f"bfloat16 {layout}"]
    assert differences["weights"] == 0 and differences["loss"] < 1e-2


def test_its_own_layout_continues_bitwise(found):
    for dtype in ("float32", "bfloat16"):
        differences = found[f"{dtype} 2x1"]
        assert all(
            differences[name] == 0 for name in ("weights", "logprobs", "loss", "grad_norm", "next weights")
        )
