"""Weights of PF-PPO by hand."""

import pytest
import torch

from rl.objectives.filtration import sample_weights
from tests.each import each

THIRD = 1 / 3


@each(
    "filtration, rewards, weights",
    [
        ("best", [0.1, 0.9, 0.5, 0.2], [0, 4, 0, 0]),
        ("best", [1.0, 0.0, 1.0, 0.0], [2, 0, 2, 0]),  # two best share
        ("best-random", [1.0, 0.0, 0.0, 0.0], [2, 2 * THIRD, 2 * THIRD, 2 * THIRD]),
        ("best-random", [0.4, 0.3], [1, 1]),
        ("best-worst", [0.1, 0.9, 0.5, 0.2], [2, 2, 0, 0]),
        ("best-worst", [1.0, 0.0, 0.0, 0.0], [2, 2 * THIRD, 2 * THIRD, 2 * THIRD]),
        ("best-worst", [0.5, 0.5, 0.5], [1, 1, 1]),
        ("power", [1.0, -2.0, 0.0, 3.0], [4 / 14, 16 / 14, 0, 36 / 14]),
        ("power", [0.0, 0.0], [1, 1]),
        ("best", [7.0], [1]),
        ("best-random", [7.0], [1]),
        ("best-worst", [7.0], [1]),
    ],
)
def test_weights_of_one_prompt(filtration, rewards, weights):
    found = sample_weights(
        torch.tensor(rewards),
        torch.zeros(len(rewards), dtype=torch.int64),
        filtration=filtration,
        filtration_power=2.0,
    )
    assert found.dtype == torch.float32 and found.tolist() == pytest.approx(weights)


def test_ranks_are_those_of_a_prompt():
    rewards, groups = torch.tensor([0.5, 9.0, 0.1, 8.0, 0.5]), torch.tensor([3, -1, 3, -1, 3])
    options = dict(filtration="best-worst", filtration_power=2.0)
    assert sample_weights(rewards, groups, **options).tolist() == pytest.approx([0.75, 1, 1.5, 1, 0.75])
    order = torch.tensor([4, 2, 0, 1, 3])
    again = sample_weights(rewards[order], groups[order], **options)
    assert torch.equal(again, sample_weights(rewards, groups, **options)[order])
