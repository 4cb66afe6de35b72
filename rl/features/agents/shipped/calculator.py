"""Tool: calculator. The expression is parsed, never executed.

agents: {tools: [rl.features.agents.shipped.calculator:calculate]}
"""

import ast
import operator
from collections.abc import Callable
from typing import Any

MAX_CHARS = 1000
"""Maximum length of an expression in characters; it bounds the depth of the expression's tree."""
MAX_BITS = 10_000
"""Maximum power or product, in bits of an integer. For example, 10,000 bits are about 3,000 digits."""

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculate(expression: str) -> str:
    """Calculate the value of an arithmetic expression.

    Args:
        expression: numbers, parentheses and the operators + - * / // % and ** or ^ for powers, such as
            (12 + 3) * 7
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression has more than {MAX_CHARS} characters")
    try:
        tree = ast.parse(expression.strip().replace("^", "**").replace(",", ""), mode="eval")
        value = _value(tree.body)
        return str(value) if isinstance(value, int) else f"{value:.12g}"
    except (SyntaxError, RecursionError, MemoryError) as error:  # MemoryError: the parser's stack
        raise ValueError(f"{expression!r} is no arithmetic expression") from error


def _value(node: ast.expr) -> int | float:
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and not isinstance(node.value, bool)
    ):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            bits = abs(right) * (left.bit_length() if isinstance(left, int) else 1)
        else:
            bits = max(x.bit_length() if isinstance(x, int) else 1 for x in (left, right))
        if bits > MAX_BITS:
            raise ValueError("the numbers are too large")
        value = _BINARY[type(node.op)](left, right)
        if isinstance(value, complex):
            raise ValueError("the value is not a real number")
        return value
    raise ValueError("only numbers, parentheses and the operators + - * / // % ** are allowed")
