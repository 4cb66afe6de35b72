"""For every architecture: Hugging Face, Megatron in every layout, and vLLM after a refit compute the same
log-probs, Megatron and Hugging Face the same gradients, and an export equals the checkpoint that was read."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import bounds
from tests.checkpoints import PARTICULAR, SIZES, save_tiny
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "parity_worker.py"
FEW = ["2x2x1", "2x1x1x0x2"]
DENSE = ["1x1x1", "2x1x1", "1x2x1", "2x2x1", "2x1x1x0x2"]
EXPERTS = ["1x1x1", "2x1x1", "1x2x1", "1x1x2", "2x1x2", "1x1x2x2", "2x1x2x2", "1x2x2", "2x2x2", "1x1x2x0x2"]
"""TP x PP x EP (x ETP (x CP)) on four ranks: the experts' own tensor parallel size is TP without EP and 1
with it where it is not given (0), and their data parallel groups are others than the dense weights' in
2x1x2."""
CASES = {
    "qwen2": ("Qwen2ForCausalLM", False, DENSE),
    "qwen2-tied": ("Qwen2ForCausalLM", True, DENSE),
    "qwen3": ("Qwen3ForCausalLM", False, DENSE),
    "llama3": ("LlamaForCausalLM", False, DENSE),
    "llama3-tied": ("LlamaForCausalLM", True, ["1x1x1", "2x2x1", "1x1x1x0x4"]),
    "mistral": ("MistralForCausalLM", False, DENSE),
    "mixtral": ("MixtralForCausalLM", False, EXPERTS),
    "qwen3-moe": ("Qwen3MoeForCausalLM", False, EXPERTS),
    "deepseek-v2": ("DeepseekV2ForCausalLM", False, EXPERTS),
    "deepseek-v3": ("DeepseekV3ForCausalLM", False, ["2x1x2", "1x1x2x2", "2x2x2", "2x1x2x0x2", "1x2x2x0x2"]),
    "deepseek-v3-all": ("DeepseekV3ForCausalLM", False, EXPERTS),
    "seed-oss": ("SeedOssForCausalLM", False, FEW),
    "smollm3": ("SmolLM3ForCausalLM", True, FEW),
    "granite": ("GraniteForCausalLM", True, FEW),
    "granite4": ("GraniteMoeHybridForCausalLM", True, FEW),
    "phi4": ("Phi3ForCausalLM", False, FEW),
    "gemma3": ("Gemma3ForCausalLM", True, DENSE),
    "minimax-m2": ("MiniMaxM2ForCausalLM", False, ["2x1x1", "1x1x2x2", "2x2x2", "2x1x2x0x2"]),
    "gpt-oss": ("GptOssForCausalLM", False, ["1x1x1", "1x2x1", "1x1x2", "2x1x2", "2x2x2", "2x1x2x0x2"]),
    "qwen3-next": ("Qwen3NextForCausalLM", False, EXPERTS),
    "qwen3.5": ("Qwen3_5ForCausalLM", True, ["1x1x1", "2x1x1", "1x2x1", "2x2x1", "2x1x1x0x2"]),
    "qwen3.5-moe": ("Qwen3_5MoeForCausalLM", False, ["1x1x1", "2x1x2", "1x1x2x2", "2x2x2", "2x1x2x0x2"]),
    "moonlight": ("DeepseekV3ForCausalLM", False, EXPERTS),
    "glm4-moe": ("Glm4MoeForCausalLM", False, EXPERTS),
    "glm4-moe-air": ("Glm4MoeForCausalLM", False, ["2x2x2", "2x1x2x0x2"]),
    "glm4-moe-yarn": ("Glm4MoeForCausalLM", False, ["2x1x2", "1x1x2x0x2"]),
    "glm4-moe-lite": ("Glm4MoeLiteForCausalLM", False, ["1x1x1", "2x2x2", "2x1x2x0x2"]),
    "qwen3-yarn": ("Qwen3ForCausalLM", False, ["1x2x1", "2x1x1x0x2"]),
    "qwen3-moe-yarn": ("Qwen3MoeForCausalLM", False, ["2x1x2", "1x1x2x0x2"]),
    "mistral-linear": ("MistralForCausalLM", False, ["2x2x1", "2x1x1x0x2"]),
}
"""Name -> (architecture, whether the embedding is the head, training layouts)."""
YARN_TOO = (
    "qwen2 llama3 mistral mixtral deepseek-v2 deepseek-v3 seed-oss smollm3 granite granite4 "
    "minimax-m2 gpt-oss qwen3-next qwen3.5 qwen3.5-moe glm4-moe-lite"
).split()
"""Further families; their configs can have YaRN."""
ROPE = {
    "yarn": dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=16, rope_theta=1e4),
    "linear": dict(rope_type="linear", factor=4, rope_theta=1e4),
}
"""Scalings of the cases so named; the sequences are up to four times as long as YaRN's original window."""
LATENT_ROPE = dict(mscale=1.0, mscale_all_dim=1.0)
"""Further parameters that YaRN has in every config with latent attention."""
OPTIONS = {
    "moonlight": dict(
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=3,
        n_shared_experts=2,
        rope_parameters=dict(rope_type="default", rope_theta=5e4),
    ),
    "mixtral-yarn": dict(head_dim=32),  # without it transformers has YaRN fail
    "glm4-moe-air": dict(use_qk_norm=False, first_k_dense_replace=0, routed_scaling_factor=1.0),
}
"""Options of further cases: what sets models of one architecture apart."""
ALWAYS = ("llama3-tied", "deepseek-v3")
"""The others are for `--slow`: what sets them apart is also seen below (qwen2 on two ranks), in
tests/unit/models, in tests/unit/training/test_rotary.py with tests/runs/test_rope_scaling.py, and in
tests/ranks/refit."""
LAYERS = 4  # the most that one of the models has
LOGPROB = bounds.of_logits(LAYERS, SIZES["hidden_size"])
GRADIENT = bounds.of_gradient(LAYERS, SIZES["hidden_size"])


def run_parity(
    directory, world_size: int, rollout: int | str, layouts: list[str], case: str, worker: Path = WORKER
) -> dict:
    scaling = case.rpartition("-")[2]
    architecture, tie, _ = CASES.get(case) or CASES[case.removesuffix("-yarn")]
    options = dict(OPTIONS.get(case, {}))
    if scaling in ROPE:
        particular = PARTICULAR[architecture]
        default = LATENT_ROPE if "kv_lora_rank" in particular else particular.get("rope_parameters", {})
        options["rope_parameters"] = default | ROPE[scaling]
    checkpoints = [
        save_tiny(architecture, directory / name, seed=seed, tie=tie, **options)
        for seed, name in enumerate("ab")
    ]
    run_ranks(world_size, worker, *checkpoints, directory, rollout, *layouts, timeout=600)
    results = json.loads((directory / "out.json").read_text())
    sides = ("megatron", "entropy", "sum_p_squared", "vllm", "gradient")
    print(case, {side: max(found.get(side, 0) for found in results.values()) for side in sides})
    return results


def assert_equal_logprobs(results: dict, layouts: list[str], *, fallback: bool = False) -> None:
    # Weights b come after a: what is compared in the engine was written by a refit over other weights.
    assert results.keys() == {f"{layout} {weights}" for layout in layouts for weights in "ab"}
    for case, found in results.items():
        assert found["sampled_tokens"] > 50 and bool(found["fallback"]) == fallback, case
        for side in ("megatron", "entropy", "sum_p_squared", "vllm"):
            assert found[side] <= LOGPROB * found["largest"], (case, side)


def assert_equal_gradients(results: dict, layouts: list[str]) -> None:
    for layout in layouts:
        found = results[f"{layout} b"]
        where = (layout, found["worst_gradient"], found["norm"])
        assert max(found["gradient"], found["norm"]) <= GRADIENT, where


def assert_same_tensors(exported: Path, source: Path) -> None:
    """The same names, and the same bits under each."""
    found, expected = (
        {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}
        for directory in (exported, source)
    )
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name].view(torch.int32), tensor.view(torch.int32)), name


@pytest.mark.parametrize(
    "case", [case if case in ALWAYS else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_any_training_layout_serves_two_replicas_of_tp_2(tmp_path, case):
    layouts = CASES[case][2]
    results = run_parity(tmp_path, 4, 2, layouts, case)
    assert_equal_logprobs(results, layouts)
    assert_equal_gradients(results, layouts)
    assert_same_tensors(tmp_path / "export", tmp_path / "b")  # from TP 2 x PP 2, and EP 2


@pytest.mark.slow
@pytest.mark.parametrize("name", YARN_TOO)
def test_families_agree_beyond_the_window_of_yarn(tmp_path, name):
    layouts = ["1x1x1x0x2"]
    results = run_parity(tmp_path, 2, 1, layouts, f"{name}-yarn")
    assert_equal_logprobs(results, layouts)
    assert_equal_gradients(results, layouts)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen2", "mixtral"])
def test_a_replica_with_more_ranks_than_kv_heads(tmp_path, case):
    assert_equal_logprobs(run_parity(tmp_path, 4, 4, ["2x2x1"], case), ["2x2x1"])


@pytest.mark.parametrize(
    ("case", "rollout"),
    [
        (case, rollout)
        if (case, rollout) == ("qwen3-moe", "1x2")
        else pytest.param(case, rollout, marks=pytest.mark.slow)
        for case in ("qwen3-moe", "deepseek-v3")
        for rollout in ("2x2", "4x4", "1x2", "2x4", "1x4")
    ],
)
def test_ranks_of_the_engine_may_hold_whole_experts(tmp_path, case, rollout):
    """TP x EP of the engine; where EP is larger, replicas share experts and step together."""
    tp, ep = map(int, rollout.split("x"))
    results = run_parity(tmp_path, 4, rollout, ["2x1x2"], case)
    assert_equal_logprobs(results, ["2x1x2"])
    for found in results.values():
        assert found["not_greedy"] == 0
        # Its steps have one token, fewer than the replica has ranks.
        assert found["lone"] <= LOGPROB * found["largest"]
        # One replica computes a prompt, and replicas that share its experts take as many dummy steps. As they
        # agree one step ahead, that replica takes one, too.
        idle = [steps for steps in found["dummy_steps"] if steps > 1]
        assert len(idle) == ep - tp and len(set(idle)) <= 1


def test_a_replica_per_rank(tmp_path):
    layouts = ["1x1x1", "2x1x1", "1x2x1"]
    assert_equal_logprobs(run_parity(tmp_path, 2, 1, layouts, "qwen2"), layouts)


def test_packed_weights_use_the_engines_loader(tmp_path):
    layouts = ["1x1x1", "2x1x1"]
    results = run_parity(tmp_path, 2, 2, layouts, "qwen2", WORKER.parent / "packed_worker.py")
    assert_equal_logprobs(results, layouts, fallback=True)
