"""Returns and advantages per token: from rewards, values and group comparisons to one number per response token.

Shapes: `N` samples of the whole batch of a step, over all ranks, so that statistics over groups and over the batch need no
collective; `T` response tokens of all samples, laid end to end; `T'` those of them that the mask keeps.

In every function `lengths` is int64 [N], tokens of each sample, summing to T, zeros allowed; `mask` is bool or 0/1 [T],
zeros also in the middle of a response (output of a tool). A masked token is no time step: the token before it is followed
by the next unmasked one. Masked positions may hold anything, NaN included, and get 0. `groups` is int64 [N]: samples with
the same number have the same prompt; any numbers, in any order, of any sizes. Inside is float64, results have the dtype of
the first argument, and nothing is differentiable.

Functions first drop the masked tokens and work on what is left, so that no formula below has a mask in it.
"""

import torch
from torch import Tensor

from rl.objectives.advantages import grpo, rloo
from rl.objectives.segments import expand, segment_mean, segment_sum


@torch.no_grad()
def place_at_end(scores: Tensor, lengths: Tensor, mask: Tensor) -> Tensor:
    """A reward for each response as a reward per token: on its last unmasked token, 0 elsewhere.

    Args:
        scores: floating [N]. That of a sample without unmasked tokens has nowhere to go and is dropped.
        lengths: int64 [N].
        mask: bool or 0/1 [T].

    Returns:
        [T] token rewards of the dtype of `scores`.
    """
    assert scores.shape == lengths.shape, f"{tuple(scores.shape)} scores for {tuple(lengths.shape)} lengths"
    keep, counts = _kept(lengths, mask)
    present = counts > 0
    rewards = scores.new_zeros(int(counts.sum()))
    rewards[counts.cumsum(0)[present] - 1] = scores[present]
    return _put_back(rewards, keep, scores.dtype)


@torch.no_grad()
def returns(token_rewards: Tensor, lengths: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Discounted reward to go: G_t = r_t + gamma * G_{t+1} over the unmasked tokens of a response.

    Args:
        token_rewards: floating [T].
        lengths: int64 [N].
        mask: bool or 0/1 [T].
        gamma: discount per unmasked token, in [0, 1].

    Returns:
        [T] of the dtype of `token_rewards`, 0 at masked positions.

    Raises:
        ValueError: gamma outside [0, 1].
    """
    _require_fraction("gamma", gamma)
    keep, counts = _kept(lengths, mask)
    return _put_back(_to_go(token_rewards[keep].double(), counts, gamma), keep, token_rewards.dtype)


@torch.no_grad()
def gae(
    token_rewards: Tensor, values: Tensor, lengths: Tensor, mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438, equation 16) and the targets of the value function.

        delta_t = r_t + gamma * V_{t+1} - V_t;   A_t = delta_t + gamma * lam * A_{t+1};   return_t = A_t + V_t

    t counts unmasked tokens: the next unmasked token's value is the bootstrap. The value after a response's last token
    is 0, also if it was cut off at the length limit, as in TRL and verl. Not whitened: see `whiten`.

    Args:
        token_rewards: floating [T].
        values: floating [T], the critic's value of the state in which each token was drawn.
        lengths: int64 [N].
        mask: bool or 0/1 [T].
        gamma: discount per unmasked token, in [0, 1].
        lam: in [0, 1]; 0 is the one-step estimate, 1 is discounted reward to go - value.

    Returns:
        (advantages, returns), both [T] of the dtype of `token_rewards`, 0 at masked positions.

    Raises:
        ValueError: gamma or lam outside [0, 1].
    """
    _require_fraction("gamma", gamma)
    _require_fraction("lam", lam)
    assert values.shape == token_rewards.shape, (
        f"{tuple(values.shape)} values, {tuple(token_rewards.shape)} rewards"
    )
    keep, counts = _kept(lengths, mask)
    rewards, values = token_rewards[keep].double(), values[keep].double()
    # roll brings the first value of the next response, where a response ends; `where` discards it, and a NaN with it.
    next_values = torch.where(_tokens_after(counts) > 0, values.roll(-1), 0.0)
    advantages = _to_go(rewards + gamma * next_values - values, counts, gamma * lam)
    dtype = token_rewards.dtype
    return _put_back(advantages, keep, dtype), _put_back(advantages + values, keep, dtype)


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(variance + eps) over all unmasked tokens of the batch; + mean again without `shift_mean`.

    The variance is the unbiased one (divided by count - 1), as in verl and TRL. One token has no variance: a batch of
    one unmasked token gets 0 (verl raises an error), with or without `shift_mean`.

    Args:
        x: floating [T].
        mask: bool or 0/1 [T].
        shift_mean: leave the mean at 0.
        eps: added to the variance.

    Returns:
        [T] of the dtype of `x`, 0 at masked positions.
    """
    keep = mask.bool()
    return _put_back(_whiten(x[keep].double(), shift_mean=shift_mean, eps=eps), keep, x.dtype)


@torch.no_grad()
def reinforce_pp(token_rewards: Tensor, lengths: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """REINFORCE++ (arXiv:2501.03262): discounted reward to go, whitened over all tokens of the batch.

    There is no comparison within a prompt; the paper's KL penalty is part of `token_rewards`, and its gamma is 1.

    Args:
        token_rewards: floating [T].
        lengths: int64 [N].
        mask: bool or 0/1 [T].
        gamma: discount per unmasked token, in [0, 1].

    Returns:
        [T] advantages of the dtype of `token_rewards`, 0 at masked positions.

    Raises:
        ValueError: gamma outside [0, 1].
    """
    return whiten(returns(token_rewards.double(), lengths, mask, gamma=gamma), mask).to(token_rewards.dtype)


@torch.no_grad()
def reinforce_pp_baseline(scores: Tensor, groups: Tensor, lengths: Tensor, mask: Tensor) -> Tensor:
    """REINFORCE++ with baseline (arXiv:2501.03262): score - mean of its group, on each token, whitened over the batch.

    A group of one enters with 0, as a group of equal scores does (verl: with its raw score). Whitening then moves these
    tokens off 0 together with the mean: longer responses count more in it, so it is 0 only if lengths are equal.

    Args:
        scores: floating [N].
        groups: int64 [N].
        lengths: int64 [N].
        mask: bool or 0/1 [T].

    Returns:
        [T] advantages of the dtype of `scores`, 0 at masked positions.
    """
    keep, counts = _kept(lengths, mask)
    centered = grpo(scores.double(), groups, normalize_by_std=False)
    return _put_back(_whiten(expand(centered, counts)), keep, scores.dtype)


@torch.no_grad()
def optimal_token_baseline(
    token_rewards: Tensor,
    groups: Tensor,
    lengths: Tensor,
    mask: Tensor,
    *,
    logprobs: Tensor,
    sum_p_squared: Tensor,
    weights: Tensor | None = None,
    zero_tail: bool = True,
) -> Tensor:
    """Reward to go less, at each position, the baseline of least gradient variance: OTB (arXiv:2602.07078).

    With G_t the undiscounted reward to go of a sample at its t-th unmasked token, and sums over the samples of the group
    that have a t-th token:

        A_t = G_t - sum(G_t * W_t) / sum(W_t),   W_t = sum_{j <= t} weights_j^2 * (1 - 2 * p_j + sum_v p_j(v)^2)

    The bracket is the squared norm of the gradient of log p_j with respect to the logits, |onehot - p|^2, and stands for
    that of the parameters (the paper's logit-gradient proxy, "realized energy"). As verl's tir_optimal_token_baseline,
    which is its optimal_token_baseline wherever no mask is inside a response. Deviations: no epsilon in the denominator
    (where all W_t are 0 the plain mean takes over; these tokens were certain and have no gradient), and a group of one
    sample gets 0 as everywhere here, in verl its reward to go.

    Args:
        token_rewards: floating [T].
        groups: int64 [N].
        lengths: int64 [N].
        mask: bool or 0/1 [T].
        logprobs: floating [T], log p of each token under the policy before the update, nats.
        sum_p_squared: floating [T], sum over the vocabulary of the squared probabilities at each token, in (0, 1].
        weights: floating [T], importance weights of the tokens against the policy that generated them, or None for 1.
        zero_tail: where only one sample of the group is that long, the baseline is 0 and A_t = G_t, verl's default.
            False is the formula as it stands: the sample is its own baseline there, and A_t = 0.

    Returns:
        [T] advantages of the dtype of `token_rewards`, 0 at masked positions.
    """
    keep, counts = _kept(lengths, mask)
    to_go = _to_go(token_rewards[keep].double(), counts, 1.0)
    # Not below 0, mathematically: at least (1 - p)^2. A negative rounding error could make the denominator 0.
    energy = (1 - 2 * logprobs[keep].double().exp() + sum_p_squared[keep].double()).clamp(min=0)
    if weights is not None:
        energy = energy * weights[keep].double().square()
    energy = _to_go(energy.flip(0), counts.flip(0), 1.0).flip(0)

    _, group, group_sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    order, cell_sizes = _by_group_and_position(group, counts)
    to_go, energy = to_go[order], energy[order]
    # Against the first of its cell: equal rewards to go then give exactly 0.
    relative = to_go - expand(to_go[cell_sizes.cumsum(0) - cell_sizes], cell_sizes)
    energy = torch.where(expand(segment_sum(energy, cell_sizes), cell_sizes) > 0, energy, 1.0)
    baseline = segment_sum(energy * relative, cell_sizes) / segment_sum(energy, cell_sizes)
    centered = relative - expand(baseline, cell_sizes)
    if zero_tail:
        in_company = torch.repeat_interleave(group_sizes[group] > 1, counts)[order]
        tail = torch.repeat_interleave(cell_sizes == 1, cell_sizes) & in_company
        centered = torch.where(tail, to_go, centered)
    advantages = torch.empty_like(centered)
    advantages[order] = centered
    return _put_back(advantages, keep, token_rewards.dtype)


@torch.no_grad()
def prime(
    process_rewards: Tensor,
    outcome: Tensor,
    groups: Tensor,
    lengths: Tensor,
    mask: Tensor,
    *,
    process_coef: float,
    outcome_coef: float,
    gamma: float,
) -> Tensor:
    """Implicit process rewards and outcome rewards, each less its leave-one-out baseline: PRIME (arXiv:2502.01456, eq. 5).

        A_t = process_coef * sum_{s >= t} gamma^(s - t) * (r_s - mean of the others' mean r)
            + outcome_coef * (outcome - mean of the others' outcome)

    whitened over the tokens of the batch at the end, as in the authors' code, which also has the coefficients (5 and 5).
    "The others" are the other samples of the group; a sample's mean r is over its unmasked tokens ("the averaged
    implicit process rewards"), and one without such tokens is no other. The outcome is not discounted. The authors' code
    instead subtracts (sum of all means - r_s) / (n - 1), leaving out the token's own reward and not its sample's mean: for
    gamma 1 the same at the first token, elsewhere not. This is the equation of the paper.

    Without others a term is 0; a group of one enters the whitening with 0, as in `reinforce_pp_baseline`.

    Args:
        process_rewards: floating [T], beta * log-ratio of the implicit reward model to its reference.
        outcome: floating [N], the verifier's score.
        groups: int64 [N].
        lengths: int64 [N].
        mask: bool or 0/1 [T].
        process_coef: weight of the process term.
        outcome_coef: weight of the outcome term.
        gamma: discount of the process rewards per unmasked token, in [0, 1].

    Returns:
        [T] advantages of the dtype of `process_rewards`, 0 at masked positions.

    Raises:
        ValueError: gamma outside [0, 1].
    """
    _require_fraction("gamma", gamma)
    keep, counts = _kept(lengths, mask)
    rewards = process_rewards[keep].double()
    present = counts > 0
    means = segment_mean(rewards, counts)[present]
    _, group, sizes = torch.unique(groups[present], return_inverse=True, return_counts=True)
    # rloo is mean - mean of the others; for a sample without others it is 0, and `has_others` drops the term.
    others_mean = expand(means - rloo(means, groups[present]), counts[present])
    has_others = torch.repeat_interleave(sizes[group] > 1, counts[present])
    process = _to_go(torch.where(has_others, rewards - others_mean, 0.0), counts, gamma)
    per_sample = rloo(outcome.double(), groups)
    return _put_back(
        _whiten(process_coef * process + outcome_coef * expand(per_sample, counts)),
        keep,
        process_rewards.dtype,
    )


def _require_fraction(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}; it must lie between 0 and 1, and 1.0 discounts nothing")


def _kept(lengths: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(keep bool [T], how many tokens of each sample it keeps, int64 [N]). RuntimeError if lengths do not sum to T."""
    keep = mask.bool()
    return keep, segment_sum(keep.double(), lengths).long()


def _put_back(kept: Tensor, keep: Tensor, dtype: torch.dtype) -> Tensor:
    """kept [T'] at the positions of keep [T], 0 elsewhere: [T] of `dtype`."""
    x = torch.zeros(keep.shape, dtype=dtype, device=keep.device)
    x[keep] = kept.to(dtype)
    return x


def _tokens_after(counts: Tensor) -> Tensor:
    """How many tokens of the same sample follow each token: int64 [T']."""
    ends = torch.repeat_interleave(counts.cumsum(0), counts)
    return ends - 1 - torch.arange(len(ends), device=counts.device)


def _to_go(x: Tensor, counts: Tensor, discount: float) -> Tensor:
    """y_t = x_t + discount * y_{t+1} within each sample: float64 [T'] -> [T'].

    By doubling: once y_t holds the `reach` terms from t on, adding discount^reach * y_{t+reach} makes it hold twice as
    many. log2(longest response) passes over flat tensors, where the recurrence would need a kernel per position, and no
    padding, which one long response among many would blow up.
    """
    after = _tokens_after(counts)
    longest = int(counts.max()) if len(counts) else 0
    y, reach = x.clone(), 1
    while reach < longest:
        # `where`, not a product with 0: NaN in one sample must not reach the one before it.
        y[:-reach] += torch.where(after[:-reach] >= reach, y[reach:], 0.0) * discount**reach
        reach *= 2
    return y


def _whiten(x: Tensor, *, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """`whiten` for float64 [T'] without masked tokens."""
    if len(x) < 2:
        return torch.zeros_like(x)
    # Against the first token: equal numbers then give exactly 0, where a rounding error of the mean would become 1e4
    # times larger.
    relative = x - x[0]
    centered = relative - relative.mean()
    whitened = centered * torch.rsqrt(centered.square().sum() / (len(x) - 1) + eps)
    return whitened if shift_mean else whitened + x.mean()


def _by_group_and_position(group: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Lay tokens of the same group and the same position in their response end to end, each such cell in sample order.

    group: int64 [N] in 0..P-1, counts: int64 [N] -> (order int64 [T'], sizes of the cells int64 [C]).
    """
    per_token = torch.repeat_interleave(counts, counts)
    position = per_token - 1 - _tokens_after(counts)
    longest = int(counts.max()) if len(counts) else 0
    cell = torch.repeat_interleave(group, counts) * longest + position
    order = torch.argsort(cell, stable=True)
    _, sizes = torch.unique_consecutive(cell[order], return_counts=True)
    return order, sizes
