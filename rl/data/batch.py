"""The samples of a step. Alike on every rank, on the CPU: the algorithm is replicated, only the model is not.

N samples, T response tokens of all samples laid end to end in sample order. A token column is float32 [T]; a sample
column has shape [N]. Attributes are filled phase by phase and are None before.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

TOKEN_COLUMNS = (
    "mask",
    "old_logprobs",
    "ref_logprobs",
    "advantages",
    "loss_weights",
    "chosen",
    "old_values",
    "returns",
    "implicit_ref_logprobs",
)
"""What losses read: the columns that travel into micro-batches."""

ALL_TOKEN_COLUMNS = (*TOKEN_COLUMNS, "rollout_logprobs", "token_rewards", "sum_p_squared")


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
    loss_weights: Tensor | None = None
    """Weight of each token's policy loss, for the engine's probabilities not being the trainer's."""
    chosen: Tensor | None = None
    """1 for tokens that a loss treats apart, by statistics over the whole mini-batch."""
    implicit_ref_logprobs: Tensor | None = None
    """prime: log-prob by the reward model as it was at the start."""
    token_rewards: Tensor | None = None
    """Reward of each token; they add up to `rewards`, but for samples without a token that counts."""
    old_values: Tensor | None = None
    """The critic's estimate before each token, before this step's updates."""
    returns: Tensor | None = None
    """What the critic learns."""
    sum_p_squared: Tensor | None = None
    """Sum over the vocabulary of the squared probabilities, at each token."""
    labels: Tensor | None = None
    """float32 [N]: what a loss per sample aims at, such as 1 for a right response and 0 for a wrong one."""
    samples_per_unit: int = 1
    """Number of consecutive samples kept in one micro-batch: 2 for pairs."""
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
        self._fingerprint: int | None = None

    def __len__(self) -> int:
        return len(self.response_ids)

    @property
    def fingerprint(self) -> int:
        """A number that tells its token ids from others."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self.prompt_ids + self.response_ids)
        return self._fingerprint

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

    def select(self, samples: list[int]) -> "Batch":
        """These samples, in this order, with all that was filled in; plans are to be made anew."""
        offsets, index = self.offsets, torch.tensor(samples, dtype=torch.int64)
        tokens = [torch.arange(int(offsets[i]), int(offsets[i + 1])) for i in samples]
        tokens = torch.cat([torch.zeros(0, dtype=torch.int64), *tokens])
        columns = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                columns[name] = value[tokens if name in ALL_TOKEN_COLUMNS else index]
        columns["score_details"] = {name: column[index] for name, column in self.score_details.items()}
        return replace(
            self,
            prompt_ids=[self.prompt_ids[i] for i in samples],
            response_ids=[self.response_ids[i] for i in samples],
            plans=None,
            **columns,
        )

    def keep_groups(self, groups: list[int]) -> "Batch":
        """The samples of these groups, which are numbered anew from 0 in the order given."""
        members = [(self.groups == group).nonzero().squeeze(1).tolist() for group in groups]
        kept = self.select([i for samples in members for i in samples])
        sizes = torch.tensor([len(samples) for samples in members])
        return replace(kept, groups=torch.arange(len(groups)).repeat_interleave(sizes))

    @property
    def outcomes(self) -> Tensor:
        """Right or wrong, float32 [N]: the reward function's `acc`; where it gives none the score, and 0 where it failed."""
        assert self.scores is not None, "the batch has not been scored"
        worth = self.scores.masked_fill(self.score_details["failed"] > 0, 0.0)
        accuracy = self.score_details.get("acc", worth)
        return torch.where(accuracy.isnan(), worth, accuracy)

    def token_columns(self) -> dict[str, Tensor]:
        """The token columns that are filled."""
        return {name: column for name in TOKEN_COLUMNS if (column := getattr(self, name)) is not None}


def concatenate(batches: Sequence[Batch]) -> Batch:
    """One batch of all samples, in order; groups are numbered on. The batches must have the same columns filled."""
    first = batches[0]
    columns: dict = {}
    for name, value in vars(first).items():
        if isinstance(value, Tensor) and name != "groups":
            columns[name] = torch.cat([getattr(batch, name) for batch in batches])
    groups, start = [], 0
    for batch in batches:
        groups.append(batch.groups + start)
        start = int(groups[-1].max()) + 1
    names = {name for batch in batches for name in batch.score_details}
    missing = torch.tensor(float("nan"))
    columns["score_details"] = {
        name: torch.cat([batch.score_details.get(name, missing.expand(len(batch))) for batch in batches])
        for name in sorted(names)
    }
    return replace(
        first,
        prompt_ids=[ids for batch in batches for ids in batch.prompt_ids],
        response_ids=[ids for batch in batches for ids in batch.response_ids],
        groups=torch.cat(groups),
        plans=None,
        **columns,
    )


def pair_up(*, chosen: Batch, rejected: Batch) -> Batch:
    """Pairs, sample k of each: the chosen response at 2k, the rejected one at 2k + 1, in the rejected one's group. Only tokens
    and masks."""
    assert len(chosen) == len(rejected), f"{len(chosen)} and {len(rejected)} responses"
    bare = [
        Batch(
            prompt_ids=b.prompt_ids,
            response_ids=b.response_ids,
            groups=b.groups,
            truncated=b.truncated,
            mask=b.mask,
        )
        for b in (chosen, rejected)
    ]
    pairs = concatenate(bare).select([i + side * len(chosen) for i in range(len(chosen)) for side in (0, 1)])
    return replace(pairs, groups=rejected.groups.repeat_interleave(2), samples_per_unit=2)


def fingerprint(arrays: Sequence[np.ndarray]) -> int:
    """A number of 63 bits made of int32 arrays, their lengths and their order."""
    lengths = np.fromiter(map(len, arrays), np.int32, len(arrays))
    digest = hashlib.blake2b(b"".join([lengths, *arrays]), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
