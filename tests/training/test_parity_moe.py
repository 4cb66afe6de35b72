"""Mixtures of experts: Hugging Face, Megatron in layouts with expert parallelism and vLLM after a refit give the same log-probs,
Megatron's gradients are Hugging Face's in every layout, and what is exported is what was read."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.moe_checkpoints import save_moe
from tests.ranks import run_ranks

WORKER = Path(__file__).parent / "moe_parity_worker.py"
LAYOUTS = ["1x1x1", "2x1x1", "1x2x1", "1x1x2", "2x1x2", "1x2x2", "2x2x2"]
"""TP x PP x EP on four ranks: the experts' own tensor parallel size is TP without EP and 1 with it, and their data parallel
groups are others than the dense weights' in 2x1x2."""
ARCHITECTURES = [
    "DeepseekV3ForCausalLM",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("Qwen3MoeForCausalLM", "MixtralForCausalLM", "DeepseekV2ForCausalLM")),
]


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_any_training_layout_with_experts_serves_two_replicas_of_tp_2(tmp_path, architecture):
    checkpoints = [save_moe(architecture, tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    run_ranks(4, WORKER, *checkpoints, tmp_path, 2, *LAYOUTS, timeout=600)
    results = json.loads((tmp_path / "out.json").read_text())
    # Weights b come after a: what is compared in the engine was written by a refit over other weights.
    assert results.keys() == {f"{layout} {weights}" for layout in LAYOUTS for weights in "ab"}
    for case, found in results.items():
        assert found["sampled_tokens"] > 50, case
        for side in ("megatron", "entropy", "sum_p_squared", "vllm"):
            assert found[side] < 1e-4, (case, side)
        if case.endswith("b"):
            assert found["gradient"] < 1e-4, (case, found["worst_gradient"])
    exported, source = (tensors_of(tmp_path / name) for name in ("export", "b"))
    assert exported.keys() == source.keys()
    for name, tensor in source.items():  # from TP 2 x PP 2 x EP 2
        assert exported[name].dtype is tensor.dtype and torch.equal(exported[name], tensor), name
