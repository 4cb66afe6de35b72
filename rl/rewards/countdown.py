"""Countdown reward (TinyZero's task): the given numbers, combined with + - * /, must equal the target.

See github.com/Jiayi-Pan/TinyZero. The expression is parsed with `ast` and computed with fractions. So nothing
is executed as Python, and division is exact. For example, for the numbers 3, 5, 2 and the target 16,
(3 + 5) * 2 is right, and 8 * 2 is wrong.
"""

import ast
from collections import Counter
from fractions import Fraction
from typing import Any

from rl.rewards.answers import ascii_signs, container, decoded, plain
from rl.rewards.format import last_answer, last_line

MAX_CHARS = 500
"""Maximum number of characters of an answer that is parsed. Six three-digit numbers with brackets take about
60."""

_SIGNS = "\u00d7 * \u22c5 * \u00f7 / \\times * \\cdot * \\div /".split()
"""Operators in other spellings, each followed by its ASCII form."""


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
    """Return `score`, `acc` (1.0 if the expression is right, else 0.0) and `pred`, the expression.

    The expression is the content of the last <answer> </answer>. It scores 1.0 if it uses the numbers and
    equals the target, otherwise `format_score`. If there is no tag, the expression is the last line that is
    not blank. It scores 1.0 or 0.0, and with `require_tag` always 0.0. The expression may end with
    `= target`; an equation with any other number is wrong.

    Args:
        ground_truth: {"target": int, "numbers": [int, ...]}, or the text of such a mapping.
        format_score: score of a wrong expression within the tag; the default 0.1 is the value of TinyZero.
        use_all: whether each number must be used exactly once, as in TinyZero; otherwise at most once.

    Raises ValueError for a malformed ground truth.
    """
    target, numbers = check_truth(ground_truth)
    tagged = last_answer(response)
    text = tagged if tagged is not None else "" if require_tag else last_line(response)
    expression, right = _split_equation(text, target)
    acc = float(right and evaluate(expression, numbers, use_all=use_all) == target)
    partial = format_score if tagged is not None else 0.0
    return {"score": 1.0 if acc else partial, "acc": acc, "pred": "".join(expression.split())}


def check_truth(ground_truth: Any, **kwargs: Any) -> tuple[int, list[int]]:
    """Return the target and the numbers. Raises ValueError if one is missing, or is not a whole number."""
    try:
        task = decoded(ground_truth)
        numbers = plain(task["numbers"])
        if isinstance(numbers, str):
            numbers = container(numbers)
        return _whole(task["target"]), [_whole(number) for number in numbers]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"reward_model.ground_truth={ground_truth!r:.200}: countdown needs the form "
            '{"target": 24, "numbers": [1, 5, 6, 8]}.'
        ) from error


def _whole(value: Any) -> int:
    """Return a whole number, also from 24.0 or "24". Raises ValueError or TypeError for anything else."""
    if isinstance(plain(value), bool) or int(value) != float(value):
        raise ValueError(f"{value!r:.40} is not a whole number")
    return int(value)


def evaluate(expression: str, numbers: list[int], *, use_all: bool = True) -> Fraction | None:
    """Return the value of an expression of whole numbers, + - * / and brackets.

    Returns None if the text is not such an expression, if it divides by zero, if it uses a number too often
    or a number that was not given, and, with `use_all`, if it leaves out a given number.
    """
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
        used = Counter(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        given = Counter(numbers)
        # The numbers are compared before anything is computed: an expression of the given numbers is cheap,
        # but a huge literal could take forever.
        return _value(tree) if (used == given if use_all else used <= given) else None
    except (SyntaxError, ValueError, ZeroDivisionError, MemoryError, RecursionError):
        return None


def _value(node: ast.expr) -> Fraction:
    """Compute a node. Raises ValueError for anything that is not arithmetic, ZeroDivisionError for x / 0."""
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
    raise ValueError(f"{type(node).__name__} is not arithmetic")


def _split_equation(text: str, target: int) -> tuple[str, bool]:
    """Split `expression = number`. Return the expression, and whether the number is the target or missing."""
    if len(text) > MAX_CHARS:
        return "", False
    for sign, ascii_sign in zip(_SIGNS[::2], _SIGNS[1::2]):
        text = text.replace(sign, ascii_sign)
    expression, equals, right = ascii_signs(text).partition("=")
    return expression.strip(), not equals or right.strip() == str(target)
