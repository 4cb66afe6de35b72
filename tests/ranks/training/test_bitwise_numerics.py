"""With model.numerics=bitwise the trainer, in every layout, computes the bits of the engine's log-probs."""

import json
from pathlib import Path

import pytest

from tests import bounds
from tests.checkpoints import SIZES, save_tiny
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "bitwise_numerics_worker.py"
FAMILIES = ("Qwen2ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM")
FURTHER = ("LlamaForCausalLM", "MixtralForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM")
GRADIENT = bounds.of_gradient(3, SIZES["hidden_size"])


def assert_no_bit_differs(directory, family, samples, rollout_tp, layouts, dtype="float32"):
    checkpoint = save_tiny(family, directory / "model", seed=3)
    out = directory / "out.json"
    run_ranks(2, WORKER, checkpoint, out, dtype, samples, rollout_tp, *layouts, timeout=900)
    results = json.loads(out.read_text())
    print(family, "rollout tp", rollout_tp, results)
    for layout in layouts:
        found = results[layout]
        assert found["samples"] == samples and found["tokens"] > 10 * samples
        assert found["differ"] == 0, (family, rollout_tp, layout)
    if dtype == "float32":
        assert results[layouts[-1]]["gradient"][0] <= GRADIENT


@pytest.mark.parametrize("family, rollout_tp", [(FAMILIES[0], 1), (FAMILIES[2], 2)])
def test_trainer_and_engine_agree_bitwise(tmp_path, family, rollout_tp):
    assert_no_bit_differs(tmp_path, family, 24, rollout_tp, ("1x1", "2x1"))


@pytest.mark.slow
@pytest.mark.parametrize("rollout_tp", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_thousand_samples_agree_bitwise(tmp_path, family, rollout_tp):
    assert_no_bit_differs(tmp_path, family, 1000, rollout_tp, ("1x1", "1x2", "2x1"))


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *FURTHER])
def test_bfloat16_and_further_layouts_agree_bitwise(tmp_path, family):
    # Recomputed (r), and without shared prompts (p).
    assert_no_bit_differs(tmp_path, family, 100, 2, ("1x1", "2x1r", "2x1p"), "bfloat16")
