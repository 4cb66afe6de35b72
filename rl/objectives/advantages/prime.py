"""PRIME (arXiv:2502.01456, equation 5): implicit process rewards and outcomes, each minus its leave-one-out
baseline.

    A_t = process_coef * sum_{s >= t} gamma^(s - t) * (r_s - mean of the others' mean r)
        + outcome_coef * (outcome - mean of the others' outcome)

whitened over the tokens of the batch at the end, as in the authors' code, which also has the coefficients (5
and 5). "The others" are the other samples of the group; a sample's mean r is over its unmasked tokens ("the
averaged implicit process rewards"), and a sample without such tokens is not among the others. The outcome is
not discounted. The authors' code instead subtracts (sum of all means - r_s) / (n - 1). It leaves out the
token's own reward, not its sample's mean; with gamma 1 both formulas agree at the first token only. Here the
equation of the paper is used.

Without others a term is 0; a group of one enters the whitening with 0, as in `reinforce_pp_baseline`. The
algorithm (`rl/algorithms/prime.py`) calls this function.
"""

import torch
from torch import Tensor

from rl.objectives.advantages.rloo import rloo
from rl.objectives.returns import kept, put_back, require_fraction, reward_to_go, whiten_kept
from rl.objectives.segments import expand, segment_mean

NEEDS = ("implicit_reward", "groups")
PER_TOKEN = True
FORMULA = "process and outcome rewards, each less leave-one-out, summed to go, whitened"
SOURCE = "2502.01456"


@torch.no_grad()
def prime(
    process_rewards: Tensor,
    labels: Tensor,
    groups: Tensor,
    lengths: Tensor,
    mask: Tensor,
    *,
    process_coef: float,
    outcome_coef: float,
    gamma: float,
) -> Tensor:
    """Return advantages [T], 0 at masked positions.

    Args:
        process_rewards: floating [T], beta * log-ratio of the implicit reward model to its reference.
        labels: floating [N], the verifier's outcome.
        groups: int64 [N].
        lengths: int64 [N].
        mask: bool or 0/1 [T].
        process_coef: weight of the process term.
        outcome_coef: weight of the outcome term.
        gamma: discount of the process rewards per unmasked token, in [0, 1].

    Raises:
        ValueError: gamma outside [0, 1].
    """
    require_fraction("gamma", gamma)
    keep, counts = kept(lengths, mask)
    rewards = process_rewards[keep].double()
    present = counts > 0
    means = segment_mean(rewards, counts)[present]
    _, group, sizes = torch.unique(groups[present], return_inverse=True, return_counts=True)
    # rloo is mean - mean of the others. For a sample without others it is 0, and `has_others` drops the term.
    others_mean = expand(means - rloo(means, groups[present]), counts[present])
    has_others = torch.repeat_interleave(sizes[group] > 1, counts[present])
    process = reward_to_go(torch.where(has_others, rewards - others_mean, 0.0), counts, gamma)
    outcome = expand(rloo(labels.double(), groups), counts)
    advantages = whiten_kept(process_coef * process + outcome_coef * outcome)
    return put_back(advantages, keep, process_rewards.dtype)
