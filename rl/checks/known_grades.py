"""Check that the reward functions of `rl.rewards` grade a few known answers as they should.

No second source exists for a grade, so at each start these functions grade answers whose grades are written
here. `rl.rewards.code`, which starts processes, and your own functions are not checked.
"""

from typing import Any

from rl.checks.batches import CheckFailed
from rl.config.functions import load_function
from rl.config.reward_sources import RewardPlan

NUMBERS = {"target": 16, "numbers": [3, 5, 2]}
FRACTION = r"\frac{1}{2}"
BOTH = "<think>4 + 3</think><answer>7</answer>"
KNOWN: dict[str, list[tuple[str, Any, float]]] = {
    "exact": [("7", "7", 1), (" 7\n", "7", 1), ("70", "7", 0), ("7", "70", 0), ("", "7", 0), ("b", "B", 0)],
    "gsm8k": [
        *(("5 #### 1,234", "1234", 1), ("#### 5\n#### 7.0", "7", 1), ("#### 7\n#### 5", "7", 0)),
        *(("#### 75", "7", 0), ("#### -7", "7", 0), ("7", "7", 0)),
    ],
    "math": [
        *((r"\boxed{5} \boxed{\frac12}", FRACTION, 1), (r"\boxed{7} \boxed{5}", "7", 0)),
        *((r"\boxed{75}", "7", 0), (r"\boxed{7}", "75", 0), ("7", "7", 0)),
    ],
    "dapo": [
        *(("Answer: 5\nAnswer: 7", "7", 1), ("Answer: 7\nAnswer: 5", "7", -1)),
        *(("Answer: 75", "7", -1), ("Answer: 7", "75", -1), ("7", "7", -1)),
    ],
    "countdown": [
        *(("<answer>(3 + 5) * 2 = 16</answer>", NUMBERS, 1), ("(3 + 5) * 2", NUMBERS, 1)),
        *(("<answer>8 * 2</answer>", NUMBERS, 0.1), ("3 + 5 * 2", NUMBERS, 0)),
    ],
    "qa": [
        *(("<answer>The Seine.</answer>", "seine", 1), ("the Seine", ["Rhine", "Seine"], 1)),
        *(("Seine in Paris", "Seine", 0), ("Seine", "Seine in Paris", 0), ("", "Seine", 0)),
    ],
    "format": [(BOTH, "8", 1), (BOTH + "7", "7", 0), ("<answer>7</answer>", "7", 0), (2 * BOTH, "7", 0)],
}
"""Module of `rl.rewards` -> responses, ground truths, and scores without kwargs (math: symbolic=False)."""


def check_known_grades(plan: RewardPlan) -> None:
    """Raise CheckFailed if a reward function of a plan gives a known answer another score than KNOWN."""
    for function in {each.function for parts in (plan.default, *plan.sources.values()) for each in parts}:
        module = function.removeprefix("rl.rewards.").removesuffix(":score")
        kwargs = {"symbolic": False} if module == "math" else {}
        if module not in KNOWN:
            continue
        score = load_function(function, key="reward.function")
        for response, truth, expected in KNOWN[module]:
            found = score(prompt="", response=response, ground_truth=truth, **kwargs)["score"]
            if found != expected:
                raise CheckFailed(
                    f"score check: reward.function={function} gives {response!r} the score {found:g} for the "
                    f"ground truth {truth!r}, which must be {expected:g}: the function has changed."
                )
