"""Weights as rows on the ranks of a copy, and the comparison of their gradients before and after the sum."""

import pytest
import torch

import rl.training  # noqa: F401  (before megatron.core)
from rl.features.transformers_backend import shards as shards_of
from rl.features.transformers_backend.memory import CopyRanks
from rl.features.transformers_backend.shards import Shards, check_sums
from rl.training.gradients import WrongReduction


def test_a_lost_gradient_ends_the_run():
    check_sums(100.0, 100.0 + 1e-5, 300.0, num_ranks=2)
    with pytest.raises(WrongReduction, match="2 ranks of a copy"):
        check_sums(100.0, 99.9, 300.0, num_ranks=2)
    with pytest.raises(WrongReduction):
        check_sums(float("nan"), 0.0, 1.0, num_ranks=2)


def test_a_tensor_at_the_address_of_a_released_parameter_is_kept(monkeypatch):
    def gather(out: torch.Tensor, own: torch.Tensor, group: CopyRanks) -> None:
        out.view(group.size(), -1)[:] = own

    monkeypatch.setattr(shards_of.dist, "all_gather_into_tensor", gather)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6))
    shards = Shards(model, CopyRanks(2))
    for parameter in model.parameters():
        parameter.data.fill_(1)
    inputs = torch.ones(6, requires_grad=True)

    def computed() -> torch.Tensor:
        return sum((inputs * number).sin().sum() for number in range(100))

    (expected,) = torch.autograd.grad(computed(), inputs)
    with shards.released():
        shards.whole_of(model[0])  # which nothing keeps, as after a concatenation
        out = computed()
    (found,) = torch.autograd.grad(out, inputs)
    assert found.equal(expected)
