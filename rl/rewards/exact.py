"""Exact-match reward: the response equals the ground truth, ignoring surrounding white space."""

from typing import Any


def score(prompt: str, response: str, ground_truth: Any, **extra: Any) -> dict[str, float]:
    """Return `score` and `acc`: 1.0 if the stripped response equals the stripped ground truth, else 0.0.

    Raises ValueError for a prompt without ground truth.
    """
    if ground_truth is None:
        raise ValueError(
            "reward_model.ground_truth is missing: exact match needs the expected response there."
        )
    acc = float(response.strip() == str(ground_truth).strip())
    return {"score": acc, "acc": acc}
