"""Countdown: combine the given numbers with + - * / to the target. The task of TinyZero (github.com/Jiayi-Pan/TinyZero).

The expression is taken apart with `ast` and computed over fractions: nothing is evaluated as Python, and division is exact.
"""

import ast
import json
from collections import Counter
from fractions import Fraction
from typing import Any

from rl.rewards.format import last_answer, last_line

MAX_CHARS = 500
"""A longer answer is no expression: six numbers of three digits with all brackets and blanks take about 60."""

_SIGNS = {
    "\u00d7": "*",
    "\u22c5": "*",
    "\u00f7": "/",
    "\u2212": "-",
    "\\times": "*",
    "\\cdot": "*",
    "\\div": "/",
}


def score(
    prompt: str,
    response: str,
    ground_truth: Any,
    *,
    format_score: float = 0.1,
    use_all: bool = True,
    require_tag: bool = False,
    **extra: Any,
) -> dict[str, float | str]:
    """`score`, `acc` (1.0 if the expression is right, else 0.0) and `pred` (the expression without blanks).

    The score is 1.0 for an expression that uses the numbers and gives the target, `format_score` for any other content of
    <answer> </answer>, and 0.0 without it. The expression is the content of the last <answer> </answer>; without one the
    last line that is not blank is tried, which can earn 1.0 but no `format_score` (unless `require_tag`: 0.0). A trailing
    `= target` is allowed, with any other number it is wrong.

    Args:
        ground_truth: {"target": int, "numbers": [int, ...]}, or that as JSON.
        format_score: 0.1 as in TinyZero.
        use_all: each number exactly once, as in TinyZero; otherwise at most once.

    Raises:
        ValueError: the ground truth has another form.
    """
    target, numbers = read_task(ground_truth)
    tagged = last_answer(response)
    text = tagged if tagged is not None else "" if require_tag else last_line(response)
    expression, right = _split_equation(text, target)
    value = evaluate(expression, numbers, use_all=use_all) if right else None
    acc = float(value == target)
    return {
        "score": 1.0 if acc else format_score if tagged is not None else 0.0,
        "acc": acc,
        "pred": "".join(expression.split()),
    }


def read_task(ground_truth: Any) -> tuple[int, list[int]]:
    """Target and numbers. Raises ValueError if they are not there."""
    form = 'countdown needs reward_model.ground_truth of the form {"target": 24, "numbers": [1, 5, 6, 8]}'
    try:
        task = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        # Numbers read from Parquet are numpy integers.
        target, numbers = int(task["target"]), [int(number) for number in task["numbers"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{form}, it is {ground_truth!r:.200}.") from error
    return target, numbers


def evaluate(expression: str, numbers: list[int], *, use_all: bool = True) -> Fraction | None:
    """The value of an expression of whole numbers, + - * / and brackets; None if it is none, uses another number or one too
    often (with `use_all`: or leaves one out), or divides by zero.
    """
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
        used = Counter(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        given = Counter(numbers)
        # Before anything is computed: what the numbers can give is small, what 99999**9 or a literal gives is not.
        if not (used == given if use_all else used <= given):
            return None
        return _value(tree)
    except (SyntaxError, ValueError, ZeroDivisionError, MemoryError, RecursionError):
        return None


def _value(node: ast.expr) -> Fraction:
    """Raises ValueError for anything that is no arithmetic, ZeroDivisionError."""
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return Fraction(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left) - _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left) * _value(right)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _value(left) / _value(right)
    raise ValueError(f"{type(node).__name__} is no arithmetic")


def _split_equation(text: str, target: int) -> tuple[str, bool]:
    """The left side of `expression = number` in ASCII, and whether the number, if there is one, is the target."""
    if len(text) > MAX_CHARS:
        return "", False
    for sign, ascii_sign in _SIGNS.items():
        text = text.replace(sign, ascii_sign)
    expression, equals, right = text.partition("=")
    return expression.strip(), not equals or right.strip() == str(target)
