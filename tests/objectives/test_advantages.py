import math

import numpy as np
import pytest
import torch

from rl.objectives.advantages import grpo


def reference(scores, groups, normalize_by_std, eps):
    """Sample by sample, float64."""
    advantages = []
    for score, group in zip(scores, groups):
        same = np.array([s for s, g in zip(scores, groups) if g == group], dtype=np.float64)
        if len(same) == 1:
            advantages.append(0.0)
            continue
        advantage = score - same.mean()
        advantages.append(advantage / (same.std(ddof=1) + eps) if normalize_by_std else advantage)
    return np.array(advantages)


def test_hand_numbers_with_std():
    # Scores 1, 0, 0, 1: mean 1/2, unbiased variance 4 * (1/4) / 3 = 1/3.
    advantages = grpo(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([7, 7, 7, 7]), normalize_by_std=True, eps=0.0)
    torch.testing.assert_close(advantages, torch.tensor([1.0, -1.0, -1.0, 1.0]) * math.sqrt(3) / 2)


def test_hand_numbers_without_std_in_interleaved_groups():
    scores, groups = torch.tensor([1.0, 10.0, 3.0, 40.0, 5.0]), torch.tensor([2, -1, 2, -1, 2])
    assert grpo(scores, groups, normalize_by_std=False).tolist() == [-2.0, -15.0, 0.0, 15.0, 2.0]


def test_eps_is_added_to_the_std():
    scores, groups = torch.tensor([0.0, 2.0], dtype=torch.float64), torch.tensor([0, 0])
    expected = 1 / (math.sqrt(2) + 0.5)
    advantages = grpo(scores, groups, normalize_by_std=True, eps=0.5)
    torch.testing.assert_close(advantages, torch.tensor([-expected, expected], dtype=torch.float64))


@pytest.mark.parametrize("normalize_by_std", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_random_unequal_scattered_groups_against_the_reference(seed, normalize_by_std):
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.repeat(rng.choice(1000, 9, replace=False), [1, 2, 3, 5, 8, 1, 4, 7, 16]))
    scores = rng.normal(size=len(groups))
    advantages = grpo(torch.tensor(scores), torch.tensor(groups), normalize_by_std=normalize_by_std)
    np.testing.assert_allclose(advantages, reference(scores, groups, normalize_by_std, 1e-6), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("normalize_by_std", [False, True])
def test_sample_without_companions_gets_zero(normalize_by_std):
    advantages = grpo(torch.tensor([5.0, 1.0, 2.0]), torch.tensor([0, 1, 1]), normalize_by_std=normalize_by_std)
    assert advantages[0] == 0 and (advantages[1:] != 0).all()


@pytest.mark.parametrize("size", range(2, 17))
def test_equal_scores_give_exactly_zero(size):
    # 0.1 is no binary fraction: a float32 mean is off by a rounding error, which the small std would blow up.
    assert not grpo(torch.full((size,), 0.1), torch.zeros(size, dtype=torch.int64), normalize_by_std=True).any()


def test_order_of_samples_does_not_matter():
    generator = torch.Generator().manual_seed(0)
    scores, groups = torch.randn(40, generator=generator), torch.randint(0, 6, (40,), generator=generator)
    order = torch.randperm(40, generator=generator)
    direct, shuffled = (grpo(scores[i], groups[i], normalize_by_std=True) for i in (torch.arange(40), order))
    torch.testing.assert_close(direct[order], shuffled)


def test_empty_batch_and_dtype():
    assert grpo(torch.zeros(0), torch.zeros(0, dtype=torch.int64), normalize_by_std=True).shape == (0,)
    assert grpo(torch.ones(2, dtype=torch.bfloat16), torch.tensor([0, 1]), normalize_by_std=True).dtype == torch.bfloat16
