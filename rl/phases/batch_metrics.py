"""Numbers of a batch for the log: pure functions, alike on every rank. Metric names are verl's."""

import torch
from torch import Tensor

from rl.data.batch import Batch


def spread(name: str, values: Tensor) -> dict[str, float]:
    """Mean, largest and smallest of some values [n]; nothing for none."""
    if not len(values):
        return {}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def token_mean(values: Tensor, mask: Tensor) -> float:
    """Mean of a token column [T] over the tokens that count."""
    kept = torch.where(mask > 0, values, 0.0)
    return float(kept.double().sum() / mask.sum().clamp(min=1))


def length_metrics(batch: Batch) -> dict[str, float]:
    """Lengths of responses and prompts in tokens."""
    clipped = {"response_length/clip_ratio": float(batch.truncated.float().mean())}
    return (
        spread("response_length", batch.lengths.float())
        | spread("prompt_length", batch.prompt_lengths.float())
        | clipped
    )


def score_metrics(batch: Batch) -> dict[str, float]:
    """What the reward function gave."""
    metrics = {"reward/failures": float(batch.score_details["failed"].sum())} | spread(
        "critic/score", batch.scores
    )
    details = ((name, column) for name, column in batch.score_details.items() if name != "failed")
    return metrics | {f"reward/{name}/mean": float(column.nanmean()) for name, column in details}


def engine_gap(batch: Batch, logprobs: Tensor) -> dict[str, float]:
    """How far the engine's probabilities of the sampled tokens are from the trainer's (`logprobs` [T])."""
    if batch.rollout_logprobs is None:
        return {}
    gap = torch.where(batch.mask > 0, (logprobs.exp() - batch.rollout_logprobs.exp()).abs(), 0.0)
    return {
        "training/rollout_probs_diff_mean": token_mean(gap, batch.mask),
        "training/rollout_probs_diff_max": float(gap.max()) if len(gap) else 0.0,
    }
