"""Environment: GSM8K with a tool that says whether an answer is right.

    agents:
      environment: rl.features.agents.shipped.gsm8k:Gsm8k
      tools: [rl.features.agents.shipped.calculator:calculate]      # optional

The score is 1 if the number in the last message is right, less `penalty` for each wrong check. If the last
message has no number, the last checked number counts. For example, a right answer after two wrong checks
scores 0.8 with the default penalty of 0.1.
"""

from typing import Any

from rl.rewards.gsm8k import check_truth as check_truth
from rl.rewards.gsm8k import last_number, score


class Gsm8k:
    def __init__(self, max_checks: int = 3, penalty: float = 0.1):
        self.max_checks, self.penalty = max_checks, penalty

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]] | str:
        self.ground_truth = row["ground_truth"]
        self.checks, self.wrong, self.is_right = 0, 0, False
        return row["messages"] or row["prompt"]

    def check_answer(self, answer: str) -> str:
        """Check whether a number is the answer to the question.

        Args:
            answer: the number
        """
        self.checks += 1
        if self.checks > self.max_checks:
            raise ValueError(f"no more than {self.max_checks} answers are checked")
        self.is_right = self._judge(answer)
        self.wrong += not self.is_right
        return "right" if self.is_right else "wrong"

    def score(self, messages: list[dict[str, Any]]) -> dict[str, float]:
        last = messages[-1].get("content") if messages[-1]["role"] == "assistant" else None
        is_right = self.is_right
        if isinstance(last, str) and last_number(last, strict=False) is not None:
            is_right = self._judge(last)
        acc = float(is_right)
        return {"score": acc - self.penalty * self.wrong, "acc": acc, "checks": self.checks}

    def _judge(self, answer: str) -> bool:
        return score("", answer, self.ground_truth, method="flexible")["acc"] == 1.0
