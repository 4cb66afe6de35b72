"""LUSPO, VESPO, FIPO, MaxRL, the off-policy sequence mask, tokens of high entropy, and the adaptive weight of
the entropy bonus: hand numbers and gradients."""

import math

import pytest
import torch

from rl.objectives.advantages.maxrl import maxrl
from rl.objectives.aggregate import aggregate
from rl.objectives.entropy_controller import EntropyController
from rl.objectives.losses.fipo import fipo
from rl.objectives.losses.gspo import gspo
from rl.objectives.losses.luspo import luspo
from rl.objectives.losses.ppo import ppo
from rl.objectives.losses.vespo import vespo
from rl.objectives.off_policy_mask import off_policy_mask
from rl.objectives.top_entropy import select_tokens

VESPO = dict(vespo_k_positive=2.0, vespo_lambda_positive=3.0, vespo_k_negative=3.0, vespo_lambda_negative=2.0)
PPO = dict(clip_low=0.2, clip_high=0.3, dual_clip=10.0)
FIPO = PPO | dict(fipo_half_life=1.0, fipo_low=0.5, fipo_high=2.0, fipo_safe_ratio=4.0)


def leaf(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def column(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_maxrl_hand_numbers():
    rewards, groups = column(1, 0, 0, 0, 1, 1, 0, 0), torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    expected = column(3, -1, -1, -1, 0, 0, 0, 0)
    assert torch.allclose(maxrl(rewards, groups, eps=0.0 + 1e-12), expected)


def test_maxrl_refuses_negative_rewards():
    with pytest.raises(ValueError, match="reward=-1 is below 0, but objective.advantage=maxrl"):
        maxrl(column(1, -1), torch.tensor([0, 0]))


def test_luspo_is_gspo_times_the_length():
    new, old, lengths = leaf(-1.0, -1.2, -0.9, -2.0), column(-1.1, -1.0, -1.0, -2.0), torch.tensor([3, 1])
    advantages, mask, clip = column(1, 1, 1, -2), torch.ones(4), dict(clip_low=0.05, clip_high=0.05)
    sizes = dict(num_tokens=4, num_samples=2)
    token_loss, _ = luspo(new, old, advantages, mask, lengths, **clip)
    value = aggregate(token_loss, mask, lengths, "seq-mean-token-sum", **sizes)
    (gradient,) = torch.autograd.grad(value, new)
    token_loss, _ = gspo(new, old, advantages, mask, lengths, **clip)
    means = [
        aggregate(token_loss[:3], mask[:3], lengths[:1], "seq-mean-token-mean", **sizes),
        token_loss[3] / 2,
    ]
    assert torch.allclose(value, 3 * means[0] + means[1])
    (expected,) = torch.autograd.grad(3 * means[0] + means[1], new)
    assert torch.allclose(gradient, expected) and (gradient != 0).all()


def test_vespo_hand_numbers():
    # Two samples of log w = 0.5 and -0.4; the masked token of the first one counts nowhere.
    new, old = leaf(-1.0, math.nan, -1.0, -2.0), column(-1.2, 0.0, -1.3, -1.6)
    mask, lengths = torch.tensor([1, 0, 1, 1]), torch.tensor([3, 1])
    advantages = column(2.0, math.nan, 2.0, -1.0)
    token_loss, stats = vespo(new, old, advantages, mask, lengths, **VESPO)
    up = math.exp(2 * 0.5 + 3 * (1 - math.exp(0.5)))
    down = math.exp(3 * -0.4 + 2 * (1 - math.exp(-0.4)))
    expected = column(2 * up, 0, 2 * up, -down * 2)
    assert torch.allclose(token_loss, expected)
    (gradient,) = torch.autograd.grad(token_loss.sum(), new)
    assert torch.allclose(gradient, column(-2 * up, 0, -2 * up, down))
    assert math.isclose(stats["vespo_weight"].item(), 2 * up + down)


def test_fipo_weighs_advantages_by_later_log_ratios():
    # Half-life of one token: F = d_t + d_{t+1} / 2 + ...; the ratio of the fourth token exceeds dual_clip.
    shifts = column(0.1, 0.2, -0.4, 3.0, 0.3)
    new, old = leaf(*(shifts - 1).tolist()), column(-1, -1, -1, -1, -1)
    lengths, mask, advantages = torch.tensor([4, 1]), torch.ones(5), column(1, 1, -1, 1, 1)
    token_loss, stats = fipo(new, old, advantages, mask, lengths, **FIPO)
    futures = [0.1 + 0.1 - 0.1, 0.2 - 0.2, -0.4, 0.0, 0.3]
    weights = column(*(math.exp(future) for future in futures))
    expected, _ = ppo(new, old, advantages * weights, mask, **PPO)
    assert torch.allclose(token_loss, expected) and token_loss[0] != token_loss[1]
    assert math.isclose(stats["fipo_weight"].item(), weights.sum().item())
    clipped, _ = fipo(new, old, advantages, mask, lengths, **FIPO | dict(fipo_low=1.0, fipo_high=1.05))
    weights = column(1.05, 1.0, 1.0, 1.0, 1.05)
    assert torch.allclose(clipped, ppo(new, old, advantages * weights, mask, **PPO)[0])


def test_fipo_weighs_a_risky_negative_token_by_at_most_one():
    # Ratios 6, 6, 2 and 6; only the first two are above 4 and have a negative advantage.
    shifts = column(6.0, 6.0, 2.0, 6.0).log()
    new, old, lengths = leaf(*(shifts - 3).tolist()), column(-3, -3, -3, -3), torch.ones(4, dtype=torch.int64)
    advantages = column(-1, -1, -1, 1)
    token_loss, stats = fipo(new, old, advantages, torch.tensor([1, 0, 1, 1]), lengths, **FIPO)
    assert torch.allclose(token_loss, column(6 * 1.0, 0, 2 * 2.0, -1.3 * 2.0))
    assert stats["fipo_weight"].item() == 5.0
    low = FIPO | dict(fipo_low=0.1, fipo_high=0.2)
    token_loss, _ = fipo(new, old, advantages, torch.tensor([1, 0, 1, 1]), lengths, **low)
    assert torch.allclose(token_loss, column(6 * 0.8, 0, 2 * 0.2, -1.3 * 0.2))


def test_fipo_drops_samples_with_two_tokens_at_the_dual_clip():
    ratios = column(20, 20, 1, 20, 1, 20, 20, 20, 1)  # samples of 3, 2, 2 and 2 tokens
    new, old = leaf(*(ratios.log() - 3).tolist()), torch.full((9,), -3.0, dtype=torch.float64)
    advantages, mask = column(-1, -1, -1, -1, -1, 1, 1, -1, -1), torch.ones(9)
    inputs = new, old, advantages, mask, torch.tensor([3, 2, 2, 2])
    token_loss, stats = fipo(*inputs, **FIPO)
    assert (token_loss != 0).tolist() == [False] * 3 + [True] * 6
    assert stats["fipo_dropped"].item() == 3
    (gradient,) = torch.autograd.grad(token_loss.sum(), new)
    assert (gradient != 0).tolist() == [False] * 4 + [True] + [False] * 3 + [True]
    masked, stats = fipo(new, old, advantages, mask.index_fill(0, torch.tensor([1]), 0), inputs[-1], **FIPO)
    assert masked[0] != 0 and stats["fipo_dropped"].item() == 0
    unbounded, stats = fipo(*inputs, **FIPO | dict(dual_clip=0.0))
    assert (unbounded != 0).all() and stats["fipo_dropped"].item() == 0


def test_vespo_takes_the_weights_of_the_engine_into_its_own():
    new, old = leaf(-1.0, math.nan, -1.0, -2.0), column(-1.2, 0.0, -1.3, -1.6)
    mask, lengths, advantages = (
        torch.tensor([1, 0, 1, 1]),
        torch.tensor([3, 1]),
        column(2.0, math.nan, 2.0, -1),
    )
    weights = column(1.5, 0.0, 0.8, 0.5)
    token_loss, _ = vespo(new, old, advantages, mask, lengths, weights, **VESPO)
    logs = [0.5 + math.log(1.5 * 0.8), -0.4 + math.log(0.5)]
    up = math.exp(2 * logs[0] + 3 * (1 - math.exp(logs[0])))
    down = math.exp(3 * logs[1] + 2 * (1 - math.exp(logs[1])))
    assert torch.allclose(token_loss, column(2 * up, 0, 2 * up, -down * 2))
    dropped, _ = vespo(new, old, advantages, mask, lengths, column(0.0, 1, 1, 1), **VESPO)
    assert dropped.abs()[:3].max() < 1e-10 and dropped[3] != 0


def test_off_policy_mask_hand_numbers():
    # Means of log(pi_sampling / pi) over the samples' tokens: 0.2 (a masked token aside), 0.2, -0.5 and 0.1.
    new = leaf(-1.3, math.nan, -1.1, -1.2, -0.5, -1.0, -1.1)
    sampling = column(-1.0, 0.0, -1.0, -1.0, -1.0, -1.0, -1.0)
    mask, lengths = torch.tensor([1, 0, 1, 1, 1, 0, 1]), torch.tensor([3, 1, 0, 1, 2])
    advantages = column(-1.0, math.nan, 0.5, 1.0, -1.0, -1.0, -1.0)
    inputs = new, sampling, advantages, mask, lengths
    # The first sample exceeds 0.15, but its last token has a positive advantage, as has the second sample.
    assert off_policy_mask(*inputs, bound=0.15).tolist() == [0, 1, 1, 1, 1, 1, 1]
    assert off_policy_mask(*inputs, bound=0.05).tolist() == [0, 1, 1, 1, 1, 1, 0]
    assert off_policy_mask(*inputs, bound=0.25).tolist() == [1] * 7
    assert not off_policy_mask(*inputs, bound=0.15).requires_grad


def test_top_entropy_selects_tokens_of_the_mini_batch():
    entropy, mask = column(0.3, 9.0, 0.1, 0.5, 0.4, 0.4), torch.tensor([1, 0, 1, 1, 1, 1])
    numbers = [
        select_tokens(entropy, mask, top_entropy=share).nonzero()[:, 0].tolist()
        for share in (0.1, 0.39, 0.4, 0.8, 1.0)
    ]
    assert numbers == [[3], [3], [3, 4, 5], [0, 3, 4, 5], [0, 2, 3, 4, 5]]
    assert not select_tokens(entropy, torch.zeros(6), top_entropy=0.5).any()


def test_entropy_bonus_acts_below_the_target():
    control = EntropyController(0.0, target=0.2, delta=0.005, low=0.0, high=0.012)
    weights = [control.update(entropy) for entropy in (0.1, 0.2, 0.15, 0.1, 0.3, 0.1)]
    assert weights == pytest.approx([0.0, 0.005, 0.01, 0.012, 0.0, 0.007])
    for _ in range(4):
        control.update(1.0)
    assert control.coef == 0.0


def test_entropy_controller_resumes_within_its_bounds():
    one, other = (EntropyController(0.0, target=0.2, delta=0.005, low=0.0, high=high) for high in (1, 0.004))
    one.update(0.1)
    other.load_state_dict(one.state_dict())
    assert (one.coef, other.coef) == (0.005, 0.004)
