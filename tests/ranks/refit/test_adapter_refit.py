"""Refits of low-rank adapters between real ranks, merged into the weights and beside them: after each one,
engine and trainer compute the same log-probs. The ranks run adapter_refit_worker.py."""

import json
from pathlib import Path

import pytest

from tests import bounds
from tests.checkpoints import SIZES, save_tiny
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "adapter_refit_worker.py"
DENSE = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
ATTENTION = "q_proj,k_proj,v_proj,o_proj"
LATENTS = "q_a_proj,q_b_proj,kv_a_proj_with_mqa,o_proj,shared_experts.gate_proj,shared_experts.down_proj"
MIXED = f"{ATTENTION},in_proj_qkvz,in_proj_ba,out_proj,shared_expert.gate_proj,shared_expert.down_proj"
SEPARATE = f"{DENSE},in_proj_b,in_proj_a,out_proj"
CASES = {
    "qwen2": ("Qwen2ForCausalLM", "lora", DENSE, ["1x1x1", "2x1x1", "1x2x1"]),
    "llama": ("LlamaForCausalLM", "dora", DENSE, ["1x1x1", "2x1x1", "1x2x1"]),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "rslora", ATTENTION, ["1x1x1", "2x1x1", "1x1x2"]),
    "phi4": ("Phi3ForCausalLM", "dora", "qkv_proj,o_proj,gate_up_proj,down_proj", ["1x1x1", "2x1x1"]),
    "gemma3": ("Gemma3ForCausalLM", "lora", DENSE, ["1x1x1", "2x1x1"]),
    "gpt-oss": ("GptOssForCausalLM", "rslora", ATTENTION, ["1x1x1", "1x2x1", "1x1x2"]),
    "minimax-m2": ("MiniMaxM2ForCausalLM", "lora", ATTENTION, ["1x1x1", "2x1x1", "1x1x2"]),
    "qwen3-next": ("Qwen3NextForCausalLM", "lora", MIXED, ["1x1x1", "2x1x1", "1x1x2"]),
    "qwen3.5": ("Qwen3_5ForCausalLM", "dora", SEPARATE, ["1x1x1", "2x1x1"]),
    "deepseek-v3": ("DeepseekV3ForCausalLM", "dora", LATENTS, ["1x1x1", "2x1x1", "1x1x2"]),
}
"""Name -> architecture, kind of the merged adapters, layers with an adapter beside the weights, training
layouts of two ranks."""
ALWAYS = [("qwen2", 2)]
LIMIT = bounds.of_logits(3, SIZES["hidden_size"])
SCALES = {"qwen3-next": 4, "qwen3.5": 4}
"""Case -> factor of LIMIT: the norms of delta nets scale up small outputs with their rounding errors."""


@pytest.mark.parametrize(
    "case, rollout_tp",
    [
        pytest.param(case, tp, marks=() if (case, tp) in ALWAYS else pytest.mark.slow)
        for case in CASES
        for tp in (1, 2)
    ],
)
def test_engine_equals_trainer_in_both_forms(tmp_path, case, rollout_tp):
    architecture, kind, targets, layouts = CASES[case]
    checkpoint = save_tiny(architecture, tmp_path / "model", seed=1)
    out = tmp_path / "out.json"
    run_ranks(2, WORKER, checkpoint, out, rollout_tp, kind, targets, *layouts, timeout=600)
    results = json.loads(out.read_text())
    limit = LIMIT * SCALES.get(case, 1)
    print(case, rollout_tp, json.dumps(results, indent=1))
    assert results.pop("old cache") < limit
    assert results.keys() == {f"{form} {of}" for form in ("merged", "adapter") for of in layouts} | {"two"}
    whole = results[f"merged {layouts[0]}"]["bytes"][0]
    for name, found in results.items():
        if name == "two":
            assert found < limit
            continue
        assert max(found["gaps"]) < limit, name
        assert "weights differ" in found["before"] and "o_proj" in found["changed"], name
        assert ".lora_" in found["changed"] or name.startswith("merged"), name
        first, later = found["bytes"]
        if name.startswith("merged"):
            assert first == later == whole
        else:
            assert later < 0.2 * whole
