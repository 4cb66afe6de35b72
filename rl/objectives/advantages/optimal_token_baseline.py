"""Optimal token baseline (OTB, arXiv:2602.07078): reward to go minus the baseline of least gradient variance.

With G_t the undiscounted reward to go of a sample at its t-th unmasked token, and sums over the samples of
the group that have a t-th token:

    A_t = G_t - sum(G_t * W_t) / sum(W_t),   W_t = sum_{j <= t} weights_j^2 * (1 - 2 * p_j + sum_v p_j(v)^2)

The bracket is the squared norm of the gradient of log p_j with respect to the logits, |onehot - p|^2, and
stands for the squared norm with respect to the parameters (the paper's logit-gradient proxy, "realized
energy"). This is verl's tir_optimal_token_baseline, which equals its optimal_token_baseline wherever no mask
is inside a response. There are two differences. The denominator has no epsilon: if all W_t are 0 the baseline
is the plain mean; such tokens were certain and have no gradient. A group of one sample gets 0; in verl it
gets its reward to go.
"""

import torch
from torch import Tensor

from rl.objectives.returns import kept, put_back, reward_to_go, tokens_after
from rl.objectives.segments import expand, segment_sum

NEEDS = ("groups",)
PER_TOKEN = True
FORMULA = "reward to go - sum_G(G_t W_t)/sum_G(W_t), W_t = sum_{j<=t} w_j^2 (1 - 2 p_j + sum_v p_j(v)^2)"
SOURCE = "2602.07078"


@torch.no_grad()
def optimal_token_baseline(
    token_rewards: Tensor,
    groups: Tensor,
    lengths: Tensor,
    mask: Tensor,
    old_logprobs: Tensor,
    sum_p_squared: Tensor,
    loss_weights: Tensor | None = None,
    *,
    zero_tail: bool = True,
) -> Tensor:
    """Return advantages [T], 0 at masked positions.

    Args:
        token_rewards: floating [T].
        groups: int64 [N].
        lengths: int64 [N].
        mask: bool or 0/1 [T].
        old_logprobs: floating [T], log p of each token under the policy before the update, nats.
        sum_p_squared: floating [T], sum over the vocabulary of the squared probabilities at each token, in
            (0, 1].
        loss_weights: floating [T], importance weights of the tokens against the policy that generated them;
            None: 1.
        zero_tail: True sets the baseline to 0, so A_t = G_t, at positions that only one sample of the group
            reaches (verl's default). False keeps the formula: the sample is its own baseline there, and A_t =
            0.
    """
    keep, counts = kept(lengths, mask)
    to_go = reward_to_go(token_rewards[keep].double(), counts, 1.0)
    # Mathematically at least (1 - p)^2. A negative rounding error could make the denominator 0.
    energy = (1 - 2 * old_logprobs[keep].double().exp() + sum_p_squared[keep].double()).clamp(min=0)
    if loss_weights is not None:
        energy = energy * loss_weights[keep].double().square()
    energy = reward_to_go(energy.flip(0), counts.flip(0), 1.0).flip(0)

    _, group, group_sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    order, cell_sizes = by_group_and_position(group, counts)
    to_go, energy = to_go[order], energy[order]
    # Relative to the first token of the cell, equal rewards to go give exactly 0.
    relative = to_go - expand(to_go[cell_sizes.cumsum(0) - cell_sizes], cell_sizes)
    energy = torch.where(expand(segment_sum(energy, cell_sizes), cell_sizes) > 0, energy, 1.0)
    baseline = segment_sum(energy * relative, cell_sizes) / segment_sum(energy, cell_sizes)
    centered = relative - expand(baseline, cell_sizes)
    if zero_tail:
        has_peers = torch.repeat_interleave(group_sizes[group] > 1, counts)[order]
        tail = torch.repeat_interleave(cell_sizes == 1, cell_sizes) & has_peers
        centered = torch.where(tail, to_go, centered)
    advantages = torch.empty_like(centered)
    advantages[order] = centered
    return put_back(advantages, keep, token_rewards.dtype)


def by_group_and_position(group: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Lay tokens end to end by cells; a cell has the tokens of one group at one position, in sample order.

    group: int64 [N] in 0..P-1, counts: int64 [N] -> (order int64 [T'], sizes of the cells int64 [C]).
    """
    per_token = torch.repeat_interleave(counts, counts)
    position = per_token - 1 - tokens_after(counts)
    longest = int(counts.max()) if len(counts) else 0
    cell = torch.repeat_interleave(group, counts) * longest + position
    order = torch.argsort(cell, stable=True)
    _, sizes = torch.unique_consecutive(cell[order], return_counts=True)
    return order, sizes
