"""Guess a number: the model must remember the environment's answers of earlier turns."""

from typing import Any


class GuessTheNumber:
    """Answers each guess with higher, lower or correct; any reply that is not the number is wrong."""

    def __init__(self, guesses: int = 5):
        self._left = guesses

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self._number = int(row["ground_truth"])
        self._solved = False
        return row["messages"]

    def step(self, text: str) -> tuple[str, float, bool]:
        self._left -= 1
        guess = int(text) if text.isdecimal() else 0
        self._solved = guess == self._number
        answer = "correct" if self._solved else "higher" if guess < self._number else "lower"
        return answer, 0.0, self._solved or self._left == 0

    def score(self) -> dict[str, float]:
        return {"score": float(self._solved), "acc": float(self._solved)}
