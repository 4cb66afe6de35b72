"""The samples of a step. Alike on every rank, on the CPU: the algorithm is replicated, only the model is not.

N samples, T response tokens of all samples laid end to end in sample order. A token column is float32 [T]; a sample
column has shape [N]. Attributes are filled phase by phase and are None before.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

TOKEN_COLUMNS = ("mask", "rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages")


@dataclass
class Batch:
    prompt_ids: list[np.ndarray]
    """N arrays int32 [P_i]."""
    response_ids: list[np.ndarray]
    """N arrays int32 [R_i]; R_i may be 0."""
    groups: Tensor
    """int64 [N]: samples of one prompt of this step have one number, 0.. in the order drawn."""
    truncated: Tensor
    """bool [N]: the response ended at the length limit."""
    mask: Tensor | None = None
    """1 for tokens that the policy chose, 0 for others (tool output). Default: all 1."""
    rollout_logprobs: Tensor | None = None
    """Log-prob of each token in the distribution it was sampled from, by the engine."""
    old_logprobs: Tensor | None = None
    """Log-prob by the trainer, before this step's updates."""
    ref_logprobs: Tensor | None = None
    """Log-prob by the reference policy."""
    advantages: Tensor | None = None
    scores: Tensor | None = None
    """float32 [N]: what the reward function gave."""
    rewards: Tensor | None = None
    """float32 [N]: scores after the algorithm's own terms (penalties, KL); what advantages are made of."""
    score_details: dict[str, Tensor] = field(default_factory=dict)
    """Other numbers of the reward function, float32 [N] each, NaN where a sample lacks one."""
    plans: list | None = None
    """Micro-batches of each mini-batch (`rl.training.packing`), once they are planned."""

    def __post_init__(self):
        if self.mask is None:
            self.mask = torch.ones(int(self.lengths.sum()))

    def __len__(self) -> int:
        return len(self.response_ids)

    @property
    def lengths(self) -> Tensor:
        """Response tokens of each sample, int64 [N]."""
        return torch.tensor([len(ids) for ids in self.response_ids], dtype=torch.int64)

    @property
    def prompt_lengths(self) -> Tensor:
        """Prompt tokens of each sample, int64 [N]."""
        return torch.tensor([len(ids) for ids in self.prompt_ids], dtype=torch.int64)

    @property
    def offsets(self) -> Tensor:
        """First position of each sample in a token column, and the end: int64 [N + 1]."""
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])

    def token_columns(self) -> dict[str, Tensor]:
        """The token columns that are filled."""
        return {name: column for name in TOKEN_COLUMNS if (column := getattr(self, name)) is not None}
