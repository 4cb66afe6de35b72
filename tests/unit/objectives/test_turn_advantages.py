"""Advantages of single turns, against numbers computed by hand."""

import pytest
import torch

from rl.objectives.advantages.grpo import grpo
from rl.objectives.advantages.turn_return import turn_return
from rl.objectives.advantages.turn_spread import turn_spread

# Two samples of one group: 2 turns of 2 and 1 tokens with a tool's token between, and 1 turn of 2 tokens.
LENGTHS = torch.tensor([4, 2])
TURNS = torch.tensor([1, 1, 0, 2, 1, 1], dtype=torch.int32)
MASK = (TURNS > 0).float()
GROUPS = torch.tensor([0, 0])


def test_turn_return_compares_the_returns_of_all_turns():
    # The first sample: 1 for its first turn, 2 in all; so 1 is left for its last turn.
    turn_rewards = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    rewards = torch.tensor([2.0, 0.0])
    found = turn_return(
        rewards, GROUPS, LENGTHS, MASK, TURNS, turn_rewards, turn_gamma=0.5, normalize_by_std=False
    )
    # Returns: 1 + 0.5 * 1 = 1.5, then 1; 0 in the other sample. Their mean is 2.5 / 3.
    mean = 2.5 / 3
    assert found.tolist() == pytest.approx([1.5 - mean, 1.5 - mean, 0, 1 - mean, -mean, -mean])


def test_a_negative_discount_is_a_game_of_two_players():
    # The second turn wins 1, which the first turn's player loses; the other sample is a draw.
    turn_rewards = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    rewards = torch.tensor([1.0, 0.0])
    found = turn_return(
        rewards, GROUPS, LENGTHS, MASK, TURNS, turn_rewards, turn_gamma=-1.0, normalize_by_std=False
    )
    assert found.tolist() == [-1, -1, 0, 1, 0, 0]


def test_turn_spread_discounts_towards_the_first_turn():
    rewards = torch.tensor([1.0, 0.0])
    found = turn_spread(rewards, GROUPS, LENGTHS, MASK, TURNS, turn_gamma=0.5, normalize_by_std=False)
    assert found.tolist() == [0.25, 0.25, 0, 0.5, -0.5, -0.5]


@pytest.mark.parametrize("estimator", [turn_return, turn_spread])
def test_one_turn_per_sample_is_grpo(estimator):
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, 7.0]), torch.tensor([0, 0, 0, 1])
    lengths, mask = torch.tensor([2, 1, 0, 3]), torch.tensor([1.0, 1, 1, 1, 1, 0])
    found = estimator(rewards, groups, lengths, mask, turn_gamma=0.9, normalize_by_std=True)
    kept = torch.tensor([0, 1]) if estimator is turn_return else torch.tensor([0, 1, 2])
    expected = grpo(rewards[kept], groups[kept], normalize_by_std=True)
    # An empty sample has no turn, so its reward is compared with nothing.
    a, b = expected[:2].tolist()
    assert found.tolist() == pytest.approx([a, a, b, 0, 0, 0])


def test_a_group_of_one_sample_gets_nothing():
    found = turn_return(
        torch.tensor([2.0]),
        torch.tensor([0]),
        torch.tensor([4]),
        MASK[:4],
        TURNS[:4],
        torch.tensor([0.0, 1.0, 0.0, 0.0]),
        turn_gamma=1.0,
        normalize_by_std=True,
    )
    assert found.tolist() == [0.0] * 4
