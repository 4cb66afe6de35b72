"""Estimators of advantages by hand; tests/unit/checks/test_advantage_checks.py compares them with the check's
second computation."""

import math

import numpy as np
import pytest
import torch

from rl.objectives.advantages.gdpo import gdpo as gdpo_of_details
from rl.objectives.advantages.gpg import gpg
from rl.objectives.advantages.grpo import grpo
from rl.objectives.advantages.grpo_passk import grpo_passk
from rl.objectives.advantages.opo import opo as opo_of_tokens
from rl.objectives.advantages.remax import remax
from rl.objectives.advantages.rloo import rloo
from tests.each import each


def gdpo(columns, groups, *, weights, **options):
    names = [f"column {k}" for k in range(columns.shape[1])]
    details = dict(zip(names, columns.unbind(1)))
    return gdpo_of_details(details, groups, reward_columns=names, reward_weights=weights.tolist(), **options)


def opo(rewards, groups, counts):
    """One advantage per sample, from samples of one masked token and `counts` unmasked ones."""
    lengths, ends = counts + 1, (counts + 1).cumsum(0)
    mask = torch.ones(int(lengths.sum())).index_fill(0, ends - 1, 0.0)
    advantages = opo_of_tokens(rewards, groups, lengths, mask)
    assert torch.equal(advantages, advantages[ends - 1].repeat_interleave(lengths))
    return advantages[ends - 1]


# Each is a function of (columns [N, 3], groups [N], lengths [N]).
ESTIMATORS = {
    "grpo": lambda c, g, n: grpo(c[:, 0], g, normalize_by_std=True),
    "dr_grpo": lambda c, g, n: grpo(c[:, 0], g, normalize_by_std=False),
    "passk": lambda c, g, n: grpo_passk(c[:, 0], g, normalize_by_std=False),
    "passk_std": lambda c, g, n: grpo_passk(c[:, 0], g, normalize_by_std=True),
    "gdpo": lambda c, g, n: gdpo(c, g, weights=torch.tensor([1.0, 0.5, 2.0])),
    "rloo": lambda c, g, n: rloo(c[:, 0], g),
    "opo": lambda c, g, n: opo(c[:, 0], g, n),
    "gpg": lambda c, g, n: gpg(c[:, 0], g, norm=0.7),
}
every_estimator = pytest.mark.parametrize("name", ESTIMATORS)


def batch(seed):
    """Scattered groups of 1 to 16 samples, two of one; columns [N, 3], groups [N], lengths [N] with a group
    all empty."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(rng.choice(1000, 9, replace=False) - 500, [1, 2, 3, 5, 8, 1, 4, 7, 16])
    lengths = rng.integers(0, 20, len(groups))
    lengths[3:6] = 0
    columns = rng.normal(size=(len(groups), 3))
    order = rng.permutation(len(groups))
    return [torch.tensor(array[order]) for array in (columns, groups, lengths)]


# ------------------------------------------------------------------------------------------------- every
# estimator


@every_estimator
def test_sample_without_companions_gets_exactly_zero(name):
    columns, groups = (
        torch.tensor([[5.0, 2.0, 3.0], [1.0, 0.0, 1.0], [2.0, 4.0, 1.0]]),
        torch.tensor([0, 1, 1]),
    )
    advantages = ESTIMATORS[name](columns, groups, torch.tensor([4, 2, 7]))
    assert advantages[0] == 0 and (advantages[1:] != 0).any()
    alone = ESTIMATORS[name](columns[:1], groups[:1], torch.tensor([4]))
    assert alone.tolist() == [0.0]


@every_estimator
@each("dtype", [torch.float32, torch.float64])
@each("size", range(2, 17))
def test_equal_scores_give_exactly_zero(name, size, dtype):
    # 0.1 is no binary fraction: its mean is off by a rounding error, which the small std would blow up.
    lengths = torch.arange(size) * 7
    assert not ESTIMATORS[name](
        torch.full((size, 3), 0.1, dtype=dtype), torch.zeros(size).long(), lengths
    ).any()


def test_equal_scores_give_zero_also_without_eps():
    equal, groups = torch.full((4,), 0.1), torch.tensor([0, 0, 0, 1])
    assert not grpo(equal, groups, normalize_by_std=True, eps=0.0).any()
    assert not grpo_passk(equal, groups, normalize_by_std=True, eps=0.0).any()
    assert not gdpo(equal[:, None], groups, weights=torch.ones(1), eps=0.0).any()


@every_estimator
def test_order_of_samples_does_not_matter(name):
    columns, groups, lengths = batch(5)
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(0))
    direct = ESTIMATORS[name](columns, groups, lengths)
    shuffled = ESTIMATORS[name](columns[order], groups[order], lengths[order])
    torch.testing.assert_close(direct[order], shuffled, rtol=1e-13, atol=1e-14)


@every_estimator
@each("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtype_is_kept_and_no_graph(name, dtype):
    columns, groups, lengths = batch(6)
    advantages = ESTIMATORS[name](columns.to(dtype).requires_grad_(), groups, lengths)
    assert advantages.dtype == dtype and not advantages.requires_grad and advantages.shape == groups.shape


@every_estimator
def test_empty_batch(name):
    nothing = torch.zeros(0, dtype=torch.int64)
    assert ESTIMATORS[name](torch.zeros(0, 3), nothing, nothing).shape == (0,)


# -------------------------------------------------------------------------------------------------- hand
# numbers


def test_grpo_hand_numbers_with_std():
    # Scores 1, 0, 0, 1: mean 1/2, unbiased variance 4 * (1/4) / 3 = 1/3.
    advantages = grpo(
        torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([7, 7, 7, 7]), normalize_by_std=True, eps=0.0
    )
    torch.testing.assert_close(advantages, torch.tensor([1.0, -1.0, -1.0, 1.0]) * math.sqrt(3) / 2)


def test_grpo_hand_numbers_without_std_in_interleaved_groups():
    scores, groups = torch.tensor([1.0, 10.0, 3.0, 40.0, 5.0]), torch.tensor([2, -1, 2, -1, 2])
    assert grpo(scores, groups, normalize_by_std=False).tolist() == [-2.0, -15.0, 0.0, 15.0, 2.0]


def test_grpo_eps_is_added_to_the_std():
    scores, groups = torch.tensor([0.0, 2.0], dtype=torch.float64), torch.tensor([0, 0])
    expected = 1 / (math.sqrt(2) + 0.5)
    advantages = grpo(scores, groups, normalize_by_std=True, eps=0.5)
    torch.testing.assert_close(advantages, torch.tensor([-expected, expected], dtype=torch.float64))


def test_passk_pays_the_lead_of_the_best_sample():
    scores, groups = torch.tensor([3.0, 1.0, 1.0, 7.0, 2.0, 1.0]), torch.tensor([0, 1, 1, 0, 0, 1])
    assert grpo_passk(scores, groups, normalize_by_std=False).tolist() == [0.0, 0.0, 0.0, 4.0, 0.0, 0.0]
    # Scores 3, 7, 2: mean 4, unbiased variance (1 + 9 + 4) / 2 = 7.
    with_std = grpo_passk(scores, groups, normalize_by_std=True, eps=1.0)
    assert with_std[3].item() == pytest.approx(4 / (math.sqrt(7) + 1))


def test_gdpo_keeps_apart_what_grpo_of_the_sum_merges():
    # The example of the paper: two binary rewards, two samples. Sums (0, 1) and (0, 2) are the same to GRPO.
    one, two = torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    columns, groups = torch.cat([one, two]).double(), torch.tensor([0, 0, 1, 1])
    merged = grpo(columns.sum(1), groups, normalize_by_std=True, eps=0.0)
    assert merged[1] == pytest.approx(merged[3].item())
    advantages = gdpo(columns, groups, weights=torch.ones(2), eps=0.0)
    # Per group and reward +-1/sqrt(2): sums -a, a, -2a, 2a with a^2 = 1/2; batch variance 10 a^2 / 3 = 5/3.
    expected = torch.tensor([-1.0, 1.0, -2.0, 2.0], dtype=torch.float64) * math.sqrt(0.5) / math.sqrt(5 / 3)
    torch.testing.assert_close(advantages, expected)


def test_gdpo_weights_the_normalised_rewards_not_the_rewards():
    columns, groups = torch.randn(8, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1] * 4)
    scaled = columns * torch.tensor([1.0, 1000.0])
    weights = torch.tensor([1.0, 0.25])
    torch.testing.assert_close(
        gdpo(columns, groups, weights=weights), gdpo(scaled, groups, weights=weights), rtol=1e-4, atol=1e-5
    )
    only_first = gdpo(columns, groups, weights=torch.tensor([1.0, 0.0]))
    assert (only_first * columns[:, 0]).sum() > 0 and not torch.allclose(
        only_first, gdpo(columns, groups, weights=weights)
    )


def test_rloo_hand_numbers():
    scores, groups = torch.tensor([1.0, 5.0, 3.0, 8.0, 2.0]), torch.tensor([4, 9, 4, 4, 9])
    # Group 4: 1 - 11/2, 3 - 9/2, 8 - 4/2. Group 9: 5 - 2 and 2 - 5.
    assert rloo(scores, groups).tolist() == pytest.approx([-4.5, 3.0, -1.5, 6.0, -3.0])


def test_opo_weights_the_baseline_by_length():
    # (3 * 1 + 1 * 0) / 4 = 0.75; a group without tokens falls back to its mean.
    advantages = opo(
        torch.tensor([1.0, 0.0, 2.0, 4.0]), torch.tensor([0, 0, 1, 1]), torch.tensor([3, 1, 0, 0])
    )
    assert advantages.tolist() == [0.25, -0.75, -1.0, 1.0]


def test_gpg_scales_by_all_samples_over_those_in_mixed_groups():
    # Group 0 is mixed (2 of 6 samples), group 1 all right, group 2 alone: alpha 3, norm 2.
    scores, groups = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1, 1, 2])
    assert gpg(scores, groups, norm=2.0).tolist() == [0.75, -0.75, 0.0, 0.0, 0.0, 0.0]


@each("norm", [0.0, -1.0, float("nan")])
def test_gpg_refuses_a_norm_that_is_not_positive(norm):
    with pytest.raises(ValueError, match="of gpg divides the advantages and must be positive"):
        gpg(torch.zeros(2), torch.zeros(2).long(), norm=norm)


def test_remax_subtracts_each_samples_baseline():
    scores = torch.tensor([1.0, 0.5, -2.0], requires_grad=True)
    advantages = remax(scores, torch.tensor([1.0, 1.0, 3.0]))
    assert advantages.tolist() == [0.0, -0.5, -5.0] and not advantages.requires_grad
    assert remax(scores.bfloat16(), torch.zeros(3)).dtype == torch.bfloat16
    assert remax(torch.zeros(0), torch.zeros(0)).shape == (0,)
