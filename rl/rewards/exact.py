"""Exact match: the response is the ground truth, but for white space around it."""

from typing import Any


def score(prompt: str, response: str, ground_truth: Any, **extra: Any) -> dict[str, float]:
    """`score` and `acc`: 1.0 if the stripped response equals the stripped ground truth, 0.0 otherwise.

    Raises ValueError for a prompt without ground truth.
    """
    if ground_truth is None:
        raise ValueError("exact match needs reward_model.ground_truth, and the prompt has none.")
    acc = float(response.strip() == str(ground_truth).strip())
    return {"score": acc, "acc": acc}
