"""Refits and samples between training and generating ranks. The ranks run link_worker.py."""

import json
from pathlib import Path

import pytest

from tests.checkpoints import save_qwen2, save_tiny
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "link_worker.py"


def run_cases(directory, checkpoint: str, *cases: str) -> list[list[tuple[list[dict], list[dict]]]]:
    """Results by case: the training ranks' results and the generating ranks' results."""
    num_train, num_rollout = map(int, cases[0].split(":")[0].split(","))
    run_ranks(num_train + num_rollout, WORKER, checkpoint, directory / "out", *cases, timeout=120)
    results = [json.loads((directory / f"out.{rank}").read_text()) for rank in range(num_train + num_rollout)]
    return [(list(case[:num_train]), list(case[num_train:])) for case in zip(*results)]


def check(trained: list[dict], generated: list[dict]) -> None:
    for rank in generated:
        # A broken message of the second refit is found by the check, on the rank that received it.
        broken = rank is generated[-1]
        assert rank["differing"][0] == [] and len(rank["differing"][1]) == broken
        assert rank["received"] == [rank["planned"]] * (1 if broken else 2)
        assert rank["planned"] == rank["needed"]
    for rank in trained:
        assert rank["sent"] == [rank["planned"]] * 2
    assert sum(rank["planned"] for rank in trained) == sum(rank["planned"] for rank in generated)
    last = len(trained) + len(generated) - 1
    text = generated[-1]["mismatch"]
    assert f"refit of version 1 1 weights of rank {last} differ: model.layers.1.mlp." in text
    assert any(f"differs from that of rank {source}" in text for source in range(len(trained)))
    assert not any(rank["mismatch"] for rank in generated[:-1])


def test_two_ranks_refit_and_deliver_samples(tmp_path):
    checkpoint = save_qwen2(tmp_path / "model", seed=1, tie=True)
    ((trained, generated),) = run_cases(tmp_path, checkpoint, "1,1:1x1x1:1")
    check(trained, generated)
    tokens = [0, 1, 2, 0.0, pytest.approx(1 / 3), pytest.approx(2 / 3)]
    assert trained[0]["deliveries"] == [[["group", number], 1, tokens, tokens] for number in range(2)]


def test_each_generator_receives_its_part_of_all_weights(tmp_path):
    checkpoint = save_qwen2(tmp_path / "model", seed=2, num_key_value_heads=4, intermediate_size=2048)
    cases = run_cases(tmp_path, checkpoint, "2,2:1x1x1:1", "2,2:2x1x1:1", "2,2:1x2x1:2")
    for trained, generated in cases:
        check(trained, generated)
        assert trained[0]["deliveries"] == trained[1]["deliveries"], "ranks received different samples"
    for (trained, _), leaders in zip(cases, ([2, 3], [2, 3], [2])):
        for leader in leaders:
            keys = [key for key, source, *_ in trained[0]["deliveries"] if source == leader]
            assert keys == [["group", 0], ["group", 1]]


def test_routed_experts_travel_between_roles(tmp_path):
    checkpoint = save_tiny("Qwen3MoeForCausalLM", tmp_path / "model", seed=1)
    for trained, generated in run_cases(tmp_path, checkpoint, "2,2:1x1x2:1", "2,2:1x1x2:2"):
        check(trained, generated)
