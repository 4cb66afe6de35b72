"""PF-PPO: weights of samples by the ranks of their rewards (policy filtration, arXiv:2409.06957).

A reward model is most reliable for its best and its worst responses. The policy therefore learns from the
samples of a prompt as if they were drawn again, with a probability by rank. Of G samples, sorted by reward:

    best          1 for the best one (BoN)
    best-random   1/2 for the best one, 1/2 divided among the others (BR)
    best-worst    1/2 for the best one, 1/2 for the worst one (BW)
    power         |reward|^power, over the whole batch and not by rank, as in the authors' branch of verl

Samples with equal rewards share what their ranks get. The weight of a sample is its expected number of draws,
so that weights have a mean of 1 and nothing is drawn. For example, the rewards 1, 0, 0, 0 with best-random
have the weights 2, 2/3, 2/3, 2/3.
"""

import torch
from torch import Tensor

from rl.objectives.groups import by_group, restore
from rl.objectives.segments import expand, segment_mean


@torch.no_grad()
def sample_weights(rewards: Tensor, groups: Tensor, *, filtration: str, filtration_power: float) -> Tensor:
    """Return the weight of each sample in the policy loss, [N], at least 0, with a mean of 1.

    A group of one has the weight 1, except with power.

    Args:
        rewards: floating [N].
        groups: int64 [N].
        filtration: best, best-random, best-worst or power.
        filtration_power: exponent of power. If all rewards are 0, all weights are 1.
    """
    order, ascending, sizes = by_group(rewards, groups)
    if filtration == "power":
        weights = ascending.abs() ** filtration_power
        mean = weights.mean()
        return restore(weights / mean if mean > 0 else torch.ones_like(weights), order, rewards.dtype)
    size = expand(sizes, sizes)
    place = torch.arange(len(size), device=size.device) - expand(sizes.cumsum(0) - sizes, sizes)
    best, worst = (place == size - 1).double(), (place == 0).double()
    weights = {
        "best": best * size,
        "best-random": (best + (1 - best) / (size - 1).clamp(min=1)) * size / 2,
        "best-worst": (best + worst) * size / 2,
    }[filtration]
    weights = torch.where(size > 1, weights, 1.0)
    starts = (place == 0) | (ascending != ascending.roll(1))
    equal = starts.nonzero().squeeze(1)
    ties = torch.diff(equal, append=equal.new_tensor([len(size)]))
    return restore(expand(segment_mean(weights, ties), ties), order, rewards.dtype)
