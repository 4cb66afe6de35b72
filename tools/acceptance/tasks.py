"""A reward and an environment for models that are never right: they score how varied a response is."""

from typing import Any


def score(prompt: str, response: str, ground_truth: str, **extra: object) -> float:
    """Return the share of different characters, so that samples of one prompt get different scores."""
    return len(set(response)) / max(1, len(response))


class Echo:
    """A game of three turns that repeats a part of the policy's text."""

    def __init__(self) -> None:
        self._turns = 0

    def reset(self, row: dict[str, Any]) -> Any:
        return row["prompt"]

    def step(self, text: str) -> tuple[str, float, bool]:
        self._turns += 1
        return f"+{text[-2:]}=", len(set(text)) / 6, self._turns == 3
