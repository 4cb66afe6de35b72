"""An engine in FP8 holds the quantised bfloat16 values bit for bit, and misses none of them."""

import json
from pathlib import Path

import pytest

from tests.checkpoints import save_tiny
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "fp8_refit_worker.py"
SIZES = dict(
    hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=4, head_dim=64
)


def results(directory: Path, family: str, ranks: int, *overrides: str, **sizes) -> dict:
    checkpoint = save_tiny(family, directory / "model", seed=1, **SIZES | sizes)
    run_ranks(ranks, WORKER, checkpoint, directory / "found.json", *overrides, timeout=600)
    return json.loads((directory / "found.json").read_text())


TP2 = ("training.tp=2", "rollout.tp=2")
EXPERTS = dict(moe_intermediate_size=256)
MOE, MINIMAX, DEEPSEEK = "Qwen3MoeForCausalLM", "MiniMaxM2ForCausalLM", "DeepseekV3ForCausalLM"
LATENTS = dict(q_lora_rank=128, head_dim=128)
IMAGES, NARROW = ("data.image_key=images",), dict(num_attention_heads=8, num_key_value_heads=8, head_dim=32)


@pytest.mark.parametrize(
    "family, ranks, overrides, sizes",
    [
        ("Qwen3ForCausalLM", 1, (), {}),
        pytest.param("Qwen3ForCausalLM", 2, TP2, {}, marks=pytest.mark.slow),
        pytest.param("Qwen3ForCausalLM", 2, ("training.tp=2",), {}, marks=pytest.mark.slow),
        pytest.param(MOE, 1, (), EXPERTS, marks=pytest.mark.slow),
        (MOE, 2, TP2, EXPERTS),
        pytest.param(
            MOE, 2, ("training.ep=2", "rollout.tp=2", "rollout.ep=2"), EXPERTS, marks=pytest.mark.slow
        ),
        pytest.param(MOE, 2, ("training.pp=2",), EXPERTS, marks=pytest.mark.slow),
        pytest.param(MINIMAX, 2, TP2, {}, marks=pytest.mark.slow),
        pytest.param(DEEPSEEK, 2, ("training.ep=2",), EXPERTS | LATENTS, marks=pytest.mark.slow),
        pytest.param("Qwen2_5_VLForConditionalGeneration", 1, IMAGES, NARROW, marks=pytest.mark.slow),
    ],
)
def test_quantised_values_arrive(tmp_path, family, ranks, overrides, sizes):
    found = results(tmp_path, family, ranks, *overrides, **sizes)
    assert found["wrong"] == [[]] * ranks
    assert found["traffic"]["perf/refit_bytes_fallback"] == 0
    assert any("experts" in name for name in found["names"]) == (family in (MOE, MINIMAX, DEEPSEEK))
    assert not any(
        part in name for name in found["names"] for part in ("embed", "norm", "head", ".gate.", "visual")
    )
    # The engine computes with the quantised values: a trainer that has them differs by bfloat16 only.
    assert found["gap_of_quantised"] < found["gaps"][-1], found
    assert "o_proj.weight[1, " in found["changed"] and f" on rank {ranks - 1}: engine" in found["changed"]
    assert "elements did not arrive" in found["dropped"]
