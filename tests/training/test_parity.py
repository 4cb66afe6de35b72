"""Hugging Face, Megatron in every layout and vLLM after a refit give the same log-probs for the same weights and tokens."""

import json
from pathlib import Path

import pytest

from tests.checkpoints import save_qwen2
from tests.ranks import run_ranks

WORKER = Path(__file__).parent / "parity_worker.py"


def run_parity(directory, world_size: int, rollout_tp: int, layouts: list[str], *, tie: bool) -> dict:
    checkpoints = [save_qwen2(directory / name, seed=seed, tie=tie) for seed, name in enumerate("ab")]
    run_ranks(world_size, WORKER, *checkpoints, directory / "out.json", rollout_tp, *layouts, timeout=400)
    return json.loads((directory / "out.json").read_text())


def assert_equal_logprobs(results: dict, layouts: list[str]) -> None:
    # Weights b come after a: what is compared in the engine was written by a refit over other weights.
    assert results.keys() == {f"{layout} {weights}" for layout in layouts for weights in "ab"}
    for case, found in results.items():
        assert found["sampled_tokens"] > 50, case
        for side in ("megatron", "entropy", "sum_p_squared", "vllm"):
            assert found[side] < 1e-4, (case, side)


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_any_training_layout_serves_two_replicas_of_tp_2(tmp_path, tie):
    layouts = ["1x1", "2x1", "1x2", "2x2"]
    assert_equal_logprobs(run_parity(tmp_path, 4, 2, layouts, tie=tie), layouts)


def test_one_replica_with_more_ranks_than_key_value_heads(tmp_path):
    assert_equal_logprobs(run_parity(tmp_path, 4, 4, ["2x2"], tie=False), ["2x2"])


def test_a_replica_per_rank(tmp_path):
    layouts = ["1x1", "2x1", "1x2"]
    assert_equal_logprobs(run_parity(tmp_path, 2, 1, layouts, tie=False), layouts)
