"""ReMax (arXiv:2310.10505): a reward minus the reward of the greedy response to the same prompt."""

import torch
from torch import Tensor

NEEDS = ("greedy_baseline",)
FORMULA = "r - r(greedy response)"
SOURCE = "2310.10505"


@torch.no_grad()
def remax(rewards: Tensor, baselines: Tensor) -> Tensor:
    """Return rewards - baselines, [N]; baselines: reward of the greedy response to each sample's prompt."""
    assert rewards.shape == baselines.shape and rewards.dim() == 1, (
        f"{tuple(rewards.shape)} rewards for {tuple(baselines.shape)} baselines"
    )
    return (rewards.double() - baselines.double()).to(rewards.dtype)
