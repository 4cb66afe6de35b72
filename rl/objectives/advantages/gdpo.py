"""GDPO (arXiv:2601.05242): several rewards, each normalised within its group before they are added.

    sum_k = weights_k * (column_k - group mean) / (group std + eps);   A = sum / (batch std of sum + eps)

Adding first would let different combinations of rewards collapse into the same advantage: for example,
rewards (1, 0) and (0, 1) both add up to 1. Both standard deviations are unbiased. The batch statistics are
over samples, as in the paper; verl whitens over tokens. The paper also subtracts the batch mean of the sum,
which is 0, because the sum is 0 over each group.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl.objectives.advantages.grpo import grpo
from rl.objectives.groups import divide

NEEDS = ("groups",)
FORMULA = "each reward column normalised in G, weighted sum, over the batch's std"
SOURCE = "2601.05242"

NOT_REWARDS = ("acc", "failed", "judge", "reward_model", "score")
"""Details of a score that are not rewards of their own."""


@dataclass
class GdpoOptions:
    reward_columns: list[str] = field(default_factory=list)
    """Numbers of the reward function that are normalised separately, in place of the score. Empty: all that
    it returns besides `score` and `acc`."""
    reward_weights: list[float] = field(default_factory=list)
    """Weight of each of `reward_columns`. Empty: 1."""


@torch.no_grad()
def gdpo(
    score_details: dict[str, Tensor],
    groups: Tensor,
    *,
    reward_columns: list[str],
    reward_weights: list[float],
    eps: float = 1e-6,
) -> Tensor:
    """Return the advantages of several rewards, [N].

    Args:
        score_details: numbers of the reward function, floating [N] each; NaN, where a sample lacks one,
            counts as 0.
        groups: int64 [N].
        reward_columns: names of the rewards. Empty: all but NOT_REWARDS.
        reward_weights: weight of each. Empty: 1.
        eps: added to both standard deviations.

    Raises:
        ValueError: the reward function does not return a column, or none at all.
    """
    names = reward_columns or [name for name in sorted(score_details) if name not in NOT_REWARDS]
    missing = [name for name in names if name not in score_details]
    if missing or not names:
        raise ValueError(
            f"objective.reward_columns requires {', '.join(missing) or 'at least one number'} besides the "
            "score, "
            f"but the reward function returns {', '.join(sorted(score_details)) or 'none'}; change either."
        )
    columns = [score_details[name].nan_to_num(0.0) for name in names]
    weights = torch.tensor(reward_weights or [1.0] * len(names))
    normalized = [grpo(column.double(), groups, normalize_by_std=True, eps=eps) for column in columns]
    total = torch.stack(normalized, 1) @ weights.double()
    batch_std = (total.square().sum() / max(len(total) - 1, 1)).sqrt()
    return divide(total, batch_std + eps).to(columns[0].dtype)
