"""Exact-match reward: the response equals the ground truth, ignoring surrounding white space."""

from typing import Any

from rl.rewards.answers import accepted, ascii_signs


def score(
    prompt: str, response: str, ground_truth: Any, *, literal: bool = False, **extra: Any
) -> dict[str, float | str]:
    """Return `score` and `acc`: 1.0 if the stripped response equals an accepted answer, else 0.0.

    The stripped response is also returned as `pred`, the answer that majority votes count.

    Args:
        ground_truth: one or several accepted answers (`rl.rewards.answers.accepted`).
        literal: whether a text is compared as it is, even if it spells a list or a mapping of texts.

    Raises ValueError if the prompt has no ground truth, or an unreadable ground truth.
    """
    answers = check_truth(ground_truth, literal=literal)
    answer = _stripped(response)
    acc = float(answer in map(_stripped, answers))
    return {"score": acc, "acc": acc, "pred": answer}


def check_truth(ground_truth: Any, *, literal: bool = False, **kwargs: Any) -> list[str]:
    """Return the accepted answers. Raises ValueError if no response could be right."""
    if literal and isinstance(ground_truth, str):
        return [ground_truth]
    try:
        return accepted(ground_truth)
    except ValueError as error:
        remedy = " With reward.kwargs.literal=true exact match compares the text unchanged."
        raise ValueError(f"{error}{remedy * isinstance(ground_truth, str)}") from error


def _stripped(text: str) -> str:
    return ascii_signs(text).strip()
