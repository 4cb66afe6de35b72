"""Refits between real ranks: bytes moved, weights received, and the check's findings. The ranks run
refit_worker.py."""

import json
from pathlib import Path

import pytest
import torch

from rl.models.sizes import num_experts
from rl.refit.transfer import checksum
from tests.checkpoints import save_qwen2, save_tiny
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "refit_worker.py"
DENSE = ["1x1", "2x1", "4x1", "1x2", "2x2"]
EXPERTS = ["2x1x2x1", "1x2x2x1", "2x2x2x1", "2x1x2x2"]


def run_layouts(directory, checkpoint: str, engine: str, layouts: list[str]) -> list[list[dict]]:
    """Results by rank, then layout."""
    run_ranks(4, WORKER, checkpoint, directory / "out", engine, *layouts, timeout=600)
    return [json.loads((directory / f"out.{rank}").read_text()) for rank in range(4)]


def check_results(results: list[list[dict]]) -> None:
    for rank, cases in enumerate(results):
        for case in cases:
            where = (rank, case["layout"], case["rollout_tp"])
            assert case["differing"] == [], where
            assert case["received"] == case["lower_bound"], where
            assert case["reported"] == [case["received"], case["sent"], 0], where
            assert case["new_memory"] <= case["memory_limit"], where
            assert case["largest_call"] <= 32, where
    for cases in zip(*results):
        assert sum(case["received"] for case in cases) == sum(case["sent"] for case in cases)


def check_corruptions(results: list[list[dict]], weight: str, num_experts: int = 0) -> None:
    """weight: name of a weight. EXPERT in the name stands for the second expert on rank 3."""
    for cases in zip(*results):
        column = cases[-1]["changed"]["first_column"] + 3
        ep = int(cases[-1]["rollout_tp"].partition("x")[2] or 1)
        weight_here = weight.replace("EXPERT", str(3 % ep * num_experts // ep + 1))
        for rank, case in enumerate(cases):
            for change in ("element", "exchange"):
                text, where = case["changed"][change], f"{weight_here}[0, {column}] on rank 3: engine "
                assert where in text and "on rank 0" not in text, (rank, change, text)
            assert "(1 of" in case["changed"]["element"] and "(2 of" in case["changed"]["exchange"]


# The experts below and tests/ranks/training/test_parity.py have untied weights, too.
@pytest.fixture(scope="module", params=[pytest.param("untied", marks=pytest.mark.slow), "tied"])
def dense(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    # Training at tp 4 requires 4 KV heads; the MLP is larger than the buffer.
    sizes = dict(num_key_value_heads=4, intermediate_size=2048)
    checkpoint = save_qwen2(directory / "model", seed=1, tie=request.param == "tied", **sizes)
    return run_layouts(directory, checkpoint, "plain:1,2,4", DENSE)


def test_each_rank_receives_exactly_what_it_lacks(dense):
    assert [(case["layout"], case["rollout_tp"]) for case in dense[0]] == [
        (a, b) for a in DENSE for b in ("1", "2", "4")
    ]
    check_results(dense)


def test_a_changed_element_is_named_with_rank_and_place(dense):
    check_corruptions(dense, "model.layers.1.mlp.down_proj.weight")


def test_a_parameter_of_another_dtype_uses_the_loader(dense):
    for cases in dense:
        found = cases[-1]["fallback"]
        # bfloat16 cannot hold the float32 values.
        assert found["differing"] == [] and found["bfloat16_says"] == 1
        assert found["fallback"] == 128 * 128 * 4
        assert found["received"] == found["lower_bound"]


def test_training_replicas_that_drifted_apart_are_reported(dense):
    # At rollout tp 4, rank 1 receives some weights from rank 0 and some from rank 2, of the other replica.
    for cases in dense:
        (text,) = (case["replicas"] for case in cases if "replicas" in case)
        assert (
            "the weights of the replicas differ" in text and "on rank 1 differs from that of rank 2" in text
        )
        assert "on rank 2: engine" in text


@pytest.fixture(
    scope="module",
    params=[pytest.param("Qwen3MoeForCausalLM", marks=pytest.mark.slow), "DeepseekV3ForCausalLM"],
)
def experts(request, tmp_path_factory):
    """DeepSeek has two weights in one parameter of vLLM, and a float32 buffer in the refit."""
    directory = tmp_path_factory.mktemp("experts")
    checkpoint = save_tiny(request.param, directory / "model", seed=1)
    hf = json.loads((directory / "model" / "config.json").read_text())
    return hf, run_layouts(directory, checkpoint, "plain:2x2,4x4,1x4,1,2,4", EXPERTS)


def test_routed_experts_move_once_too(experts):
    hf, results = experts
    check_results(results)
    weight = f"model.layers.{hf['num_hidden_layers'] - 1}.mlp.experts.EXPERT.down_proj.weight"
    check_corruptions(results, weight, num_experts(hf))


@pytest.mark.slow
@pytest.mark.parametrize("rollout_tp", [1, 2, 4])
@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_vllm_parameters_equal_those_of_its_loader(tmp_path, rollout_tp, tie):
    checkpoint = save_qwen2(tmp_path / "model", seed=2, tie=tie)
    results = run_layouts(tmp_path, checkpoint, f"vllm:{rollout_tp}", ["1x1", "2x1", "1x2", "2x2"])
    check_results(results)
    check_corruptions(results, "model.layers.1.mlp.down_proj.weight")


def test_checksums_see_changed_exchanged_and_moved_bits():
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(3000, 900, generator=generator).to(torch.bfloat16)  # more than one block
    tensor = whole[:, 100:800]
    before = checksum(tensor)
    assert torch.equal(before, checksum(tensor.contiguous())) and torch.equal(before, checksum(tensor[None]))
    for row, column in ((0, 0), (2999, 699), (1500, 3)):
        changed = tensor.clone()
        changed[row, column] = changed[row, column] * 1.01 + 0.01
        assert not torch.equal(before, checksum(changed))
    exchanged = tensor.clone()
    exchanged[[0, 2000]] = exchanged[[2000, 0]]
    assert before[0] == checksum(exchanged)[0] and before[1] != checksum(exchanged)[1]
    zero, minus_zero = torch.zeros(4), -torch.zeros(4)
    assert not torch.equal(checksum(zero), checksum(minus_zero))
    assert torch.equal(checksum(torch.full((3,), torch.nan)), checksum(torch.full((3,), torch.nan)))
