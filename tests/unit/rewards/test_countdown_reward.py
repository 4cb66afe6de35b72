import json
from fractions import Fraction

import numpy as np
import pytest

from rl.rewards.countdown import evaluate, score
from tests.tables import cells
from tests.timing import assert_linear_in_text

TASK = {"target": 24, "numbers": [1, 5, 6, 8]}


def reward(response, task=TASK, **kwargs):
    return score("", response, task, data_source="countdown", extra_info={}, **kwargs)


RIGHT = [
    ("(6 - 5 / 1 + 2) * 8", 24, [6, 5, 1, 2, 8]),
    ("8/(3-8/3)", 24, [3, 3, 8, 8]),  # only over fractions
    ("8 / (3 - 8 / 3) = 24", 24, [3, 3, 8, 8]),
    ("3 \u00d7 4 \u2212 2 \u00f7 1", 10, [1, 2, 3, 4]),
    ("3 \\times 4 - 2 \\div 1", 10, [1, 2, 3, 4]),
    ("-(1 - 5)", 4, [1, 5]),
    ("1 - 5", np.int64(-4), np.array([5, 1])),
]
WRONG = ["", "9" * 400, "(" * 250 + "1" + ")" * 250, "-" * 499 + "1", "1+5+6+8+" * 1000]
# Among others: 20, a number twice, one that is not given, one left out, division by zero.
WRONG += cells("""
    1 + 5 + 6 + 8 ;; (8 - 5 + 1) * 6 * 1 ;; (8 - 5 + 1) * 6 + 0 ;; 6 * (5 - 1) ;; 8 / (6 - 5 - 1) ;; 24 ;;
    8 * 6 / (1 + 5) = 8 ;; (8 - 5 + 1) * 6 = 25 ;; (8 - 5 + 1) * 6 = 24 = 24 ;; (8 - 5 + 1.0) * 6 ;;
    (8 - 5 + True) * 6 ;; (8 - 5) ** 1 * 6 ;; 8 // 5 + 6 % 1 ;; (8 - 5 + 1) * 6; 1 ;;
    __import__('os').system('true') ;; [8 - 5 + 1][0] * 6 ;; max(8 - 5 + 1, 6) ;; (8 - 5 + 1 * 6 ;;
    6 5 1 8 ;; ~(8 - 5 + 1) * 6 ;; 9**9**9**9 ;; 1 << 999999999
    """)


@pytest.mark.parametrize("expression, target, numbers", RIGHT)
def test_an_expression_that_gives_the_target_is_right(expression, target, numbers):
    task = {"target": target, "numbers": numbers}
    result = reward(f"So: <answer> {expression} </answer>", task)
    assert result["score"] == result["acc"] == 1.0
    assert reward(f"So it is\n{expression}\n", task)["score"] == 1.0
    assert " " not in result["pred"] and "=" not in result["pred"]
    if isinstance(numbers, list):
        assert reward(expression, json.dumps(task))["score"] == 1.0


@pytest.mark.parametrize("expression", WRONG)
def test_anything_else_in_the_tag_earns_the_format_score(expression):
    result = reward(f"<answer>{expression}</answer>")
    assert (result["score"], result["acc"]) == (0.1, 0.0)
    assert reward(f"<answer>{expression}</answer>", format_score=0.0)["score"] == 0.0
    assert reward(expression)["score"] == 0.0  # no tag


def test_the_last_tag_counts_and_can_be_required():
    right = "(8 - 5 + 1) * 6"
    assert reward(f"<answer>1</answer> <answer>{right}</answer>")["acc"] == 1.0
    assert reward(f"<answer>{right}</answer> <answer>1</answer>")["acc"] == 0.0
    assert reward(right)["score"] == 1.0 and reward(right, require_tag=True)["score"] == 0.0


def test_use_all_false_allows_unused_numbers():
    assert reward("<answer>6 * (5 - 1)</answer>", use_all=False)["score"] == 1.0
    assert reward("<answer>8 + 8 + 8</answer>", use_all=False)["score"] == 0.1


def test_values_are_exact():
    assert evaluate("1 / 3", [1, 3]) == Fraction(1, 3)
    assert evaluate("1/3 + 2/3", [1, 3, 2, 3]) == 1
    big = 10**30
    assert evaluate(f"{big} + 1", [big, 1]) == big + 1


@pytest.mark.parametrize(
    "task", [None, "", "24", "[1, 2]", {"target": 24}, {"numbers": [1]}, {"target": "x", "numbers": [1]}, 7]
)
def test_a_task_of_another_form_is_an_error(task):
    with pytest.raises(ValueError, match="countdown needs the form"):
        reward("<answer>1</answer>", task)


@pytest.mark.parametrize(
    "unit", ["(", "1+", "-", "<answer>", "</answer>", "=", "\n", " ", "1", "<answer>1</answer>"]
)
def test_time_grows_linearly_up_to_100_000_characters(unit):
    around = (("", ""), ("<answer>", "</answer>"), ("", "<answer>1</answer>"))
    assert_linear_in_text(reward, unit, around)
