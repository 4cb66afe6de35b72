"""A checkpoint of one layout continues in another: weights, optimizer, log-probs, the next step."""

import json
import math
from pathlib import Path

import pytest
import torch

from tests import bounds
from tests.checkpoints import SIZES, save_qwen2, save_tiny
from tests.spawn import run_ranks

WORKER = Path(__file__).with_name("store_worker.py")
LAYOUTS = ("2x1x1", "1x2x1", "1x1x1")
LAYERS, WIDTH, TOKENS = SIZES["num_hidden_layers"], SIZES["hidden_size"], 136
LOGPROB = bounds.of_logits(LAYERS, WIDTH)
GRADIENT = bounds.of_gradient(LAYERS, WIDTH)
# A mean, to which each token adds its own error.
BFLOAT16_LOSS = bounds.of_logits(LAYERS, 1, torch.bfloat16) / math.sqrt(TOKENS)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict[str, float]]:
    directory = tmp_path_factory.mktemp("layouts")
    model = save_qwen2(directory / "model", seed=7, tie=True)
    run_ranks(2, WORKER, "layouts", model, directory, "float32,bfloat16", *LAYOUTS, timeout=400)
    return json.loads((directory / "layouts.json").read_text())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_layout_takes_the_same_next_step(found, layout):
    differences = found[f"float32 {layout}"]
    assert differences["weights"] == 0
    assert max(differences["logprobs"], differences["loss"]) <= LOGPROB
    assert differences["grad_norm"] <= GRADIENT
    # The gradient is clipped to a norm of 1, so GRADIENT is the absolute error of its elements.
    step = bounds.of_adam_step(**found["adam"], gradient=GRADIENT)
    # A step from another optimizer state would differ by about as much as it moves the weights.
    assert differences["next weights"] <= step < differences["step"] / 50


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_layout_loads_the_same_bfloat16_weights(found, layout):
    differences = found[f"bfloat16 {layout}"]
    assert differences["weights"] == 0 and differences["loss"] <= BFLOAT16_LOSS


def test_its_own_layout_continues_bitwise(found):
    for dtype in ("float32", "bfloat16"):
        differences = found[f"{dtype} 2x1x1"]
        assert all(
            differences[name] == 0 for name in ("weights", "logprobs", "loss", "grad_norm", "next weights")
        )


def test_a_mixture_with_its_routers_bias_continues_in_any_layout(tmp_path):
    checkpoint = save_tiny("DeepseekV3ForCausalLM", tmp_path / "model", seed=0)
    layouts = ("1x1x2", "2x1x2", "1x1x1", "1x2x1")
    run_ranks(2, WORKER, "layouts", checkpoint, tmp_path, "float32", *layouts, timeout=400)
    found = json.loads((tmp_path / "layouts.json").read_text())
    step = bounds.of_adam_step(**found.pop("adam"), gradient=bounds.of_gradient(layers=3, width=WIDTH))
    for layout, differences in found.items():
        assert differences["weights"] == 0, layout
        assert differences["next weights"] <= step < differences["step"] / 50, (layout, differences)


def test_bfloat16_moments_in_host_memory_continue_bitwise(tmp_path):
    """Another layout shards the state, and the host's share of it, in another way."""
    model = save_qwen2(tmp_path / "model", seed=7, tie=True)
    run_ranks(
        2, WORKER, "layouts", model, tmp_path, "bfloat16/0.5,float32/0.5", "1x1x1", "2x1x1", timeout=400
    )
    found = json.loads((tmp_path / "layouts.json").read_text())
    del found["adam"]
    assert all(differences["weights"] == 0 for differences in found.values())
    for dtype in ("bfloat16/0.5", "float32/0.5"):
        assert {
            found[f"{dtype} 1x1x1"][name] for name in ("logprobs", "loss", "grad_norm", "next weights")
        } == {0}
    assert found["float32/0.5 1x1x1"]["step"] > 0
