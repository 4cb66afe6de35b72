"""Declarations of a batch's columns: what is one value per token, what losses read, what is stored.

A field of `rl.data.batch.Batch` declares a column that every algorithm has, with `per_token` or `per_sample`.
EXTRA declares the columns of single algorithms and options, which `Batch.extra` holds. Packing, losses,
checks and stored rollouts derive their lists from these declarations (`rl.data.batch.COLUMNS`).
"""

from dataclasses import MISSING, dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Column:
    """Owner, type and use of a column."""

    is_per_token: bool
    """One value per response token, [T]; else one per sample, [N]."""
    dtype: torch.dtype = torch.float32
    in_loss: bool = False
    """Whether losses may read it; then micro-batches contain it."""
    stored: str = ""
    """Type in stored rollouts; empty: not stored."""
    stored_as: str = ""
    """Name in stored rollouts; empty: the column's name."""
    learned: bool = False
    """Whether `learn` fills it, and not `collect`."""


def per_token(dtype: torch.dtype = torch.float32, **facts: Any) -> Any:
    """Return the field of a token column, which is None until a phase fills it. facts: of `Column`."""
    return field(default=None, metadata={"column": Column(True, dtype, **facts)})


def per_sample(dtype: torch.dtype = torch.float32, *, required: bool = False, **facts: Any) -> Any:
    """Return the field of a sample column. required: it is never None. facts: of `Column`."""
    return field(default=MISSING if required else None, metadata={"column": Column(False, dtype, **facts)})


EXTRA: dict[str, Column] = {
    # 1 for tokens that a loss treats differently, selected by statistics over the whole mini-batch.
    "selected_tokens": Column(True, in_loss=True),
    # Importance weight of each token's loss, for the mismatch between engine and trainer.
    "loss_weights": Column(True, in_loss=True),
    # Sum of the squared probabilities over the vocabulary, for the advantage optimal_token_baseline.
    "sum_p_squared": Column(True),
    # Number of counted tokens in the trajectory of each token, if a trajectory has several rows.
    "trajectory_tokens": Column(True, in_loss=True),
    # Reward of each turn by its environment on the turn's last token, 0 elsewhere; filled with `turns`.
    "turn_rewards": Column(True, stored="float32"),
    # Log-prob by the sample's teacher.
    "teacher_logprobs": Column(True),
    # The critic's value of the state before each token, before this step's updates, and its target.
    "old_values": Column(True, in_loss=True),
    "returns": Column(True, in_loss=True),
    # remax: the reward of the greedy response to the sample's prompt.
    "baselines": Column(False, stored="float32", stored_as="baseline"),
    # prime: log-prob by the initial implicit reward model.
    "implicit_ref_logprobs": Column(True, in_loss=True),
    # kto, prime, sppo: target of a loss per sample, for example 1 for a correct response and 0 for others.
    "labels": Column(False, in_loss=True, stored="float32", stored_as="label"),
}
"""Columns of single algorithms and options, by name."""
