"""Declarations of a batch's columns: which have one value per token, which losses read, which are stored.

A field of `rl.data.batch.Batch` declares a column that every algorithm has, with `per_token` or `per_sample`.
EXTRA declares the columns of single algorithms and options, which `Batch.extra` holds. Packing, losses,
checks and stored rollouts derive their lists from these declarations (`rl.data.batch.COLUMNS`).
"""

from dataclasses import MISSING, dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Column:
    """Type and use of a column."""

    is_per_token: bool
    """Whether it has one value per response token, [T]; otherwise it has one per sample, [N]."""
    dtype: torch.dtype = torch.float32
    in_loss: bool = False
    """Whether losses may read it. If so, micro-batches contain it."""
    stored: str = ""
    """Type in stored rollouts; empty: not stored."""
    stored_as: str = ""
    """Name in stored rollouts; empty: the column's name."""
    learned: bool = False
    """Whether `learn` fills it; otherwise `collect` does."""


def per_token(dtype: torch.dtype = torch.float32, **facts: Any) -> Any:
    """Return a dataclass field for a token column. It is None until a phase fills it.

    facts: further fields of `Column`.
    """
    return field(default=None, metadata={"column": Column(True, dtype, **facts)})


def per_sample(dtype: torch.dtype = torch.float32, *, required: bool = False, **facts: Any) -> Any:
    """Return a dataclass field for a sample column. It is None until a phase fills it.

    required: whether it is never None. facts: further fields of `Column`.
    """
    return field(default=MISSING if required else None, metadata={"column": Column(False, dtype, **facts)})


EXTRA: dict[str, Column] = {
    # 1 for tokens that a loss treats differently. They are selected by statistics of the whole mini-batch.
    "selected_tokens": Column(True, in_loss=True),
    # `mask` before `rollout_correction.reject` reduced it.
    "unrejected_mask": Column(True),
    # Importance weight of each token's loss, for the mismatch between engine and trainer.
    "loss_weights": Column(True, in_loss=True),
    # Weight of the sample in the policy loss, the same for all of its tokens (`objective.filtration`).
    "sample_weights": Column(True, in_loss=True),
    # Sum of the squared probabilities over the vocabulary, for the advantage optimal_token_baseline.
    "sum_p_squared": Column(True),
    # For each token, the number of tokens of its trajectory that count in the loss. Filled only if a
    # trajectory has several rows.
    "trajectory_tokens": Column(True, in_loss=True),
    # The reward that the environment gave a turn, at the last token of the turn, and 0 at all other tokens.
    # Filled together with `turns`.
    "turn_rewards": Column(True, stored="float32"),
    # Log-prob that the sample's teacher gave each token.
    "teacher_logprobs": Column(True),
    # The value that the critic, before the updates of this step, gave the state before each token, and the
    # target of that value.
    "old_values": Column(True, in_loss=True),
    "returns": Column(True, in_loss=True),
    # remax: reward of the greedy response to the prompt of the sample.
    "baselines": Column(False, stored="float32", stored_as="baseline"),
    # prime: log-prob that the initial implicit reward model gave each token.
    "implicit_ref_logprobs": Column(True, in_loss=True),
    # kto, prime, sppo: target of the loss of each sample, for example 1 for a correct response, otherwise 0.
    "labels": Column(False, in_loss=True, stored="float32", stored_as="label"),
}
"""Columns that only one algorithm or option has, by name."""
