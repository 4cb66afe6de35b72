"""Evaluates the conditions of a sweep file: comparisons and arithmetic over the config keys of a point.

    training.tp * training.pp > 8
    training.optimizer.lr >= 1e-5 and rollout.samples_per_prompt in [4, 8]

A condition is parsed as a Python expression, and its syntax tree may contain only a few node types. Calls,
attributes of objects, indexing and loops are refused. A sweep file is therefore data and cannot run code.
"""

import ast
import difflib
import operator
from collections.abc import Callable, Mapping
from typing import Any

from rl.config.options import ConfigError

BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
LITERALS = (int, float, str, bool, type(None))


def holds(condition: str, values: Mapping[str, Any]) -> bool:
    """Return whether the condition is true for these values (dotted key -> value).

    Raises ConfigError for an invalid condition.
    """
    try:
        tree = ast.parse(condition, mode="eval")
    except (SyntaxError, ValueError):
        raise ConfigError(
            f"'{condition}' is not a condition; write e.g. training.tp * training.pp > 8."
        ) from None
    try:
        return bool(_value(tree.body, values, condition))
    except (TypeError, ArithmeticError) as error:
        raise ConfigError(f"'{condition}' cannot be decided for {dict(values)}: {error}.") from None


def _value(node: ast.expr, values: Mapping[str, Any], condition: str) -> Any:
    def of(inner: ast.expr) -> Any:
        return _value(inner, values, condition)

    if isinstance(node, ast.Constant) and isinstance(node.value, LITERALS):
        return node.value
    if isinstance(node, (ast.List, ast.Tuple)):
        return [of(element) for element in node.elts]
    if isinstance(node, (ast.Name, ast.Attribute)):
        return _key(node, values, condition)
    if isinstance(node, ast.BoolOp):
        # As in Python, the evaluation ends at the first part that decides the result.
        decided = isinstance(node.op, ast.Or)
        return next((True for part in node.values if bool(of(part)) == decided), False) == decided
    if isinstance(node, ast.UnaryOp) and type(node.op) in UNARY:
        return UNARY[type(node.op)](of(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        return BINARY[type(node.op)](of(node.left), of(node.right))
    if isinstance(node, ast.Compare) and all(type(op) in COMPARE for op in node.ops):
        terms = [of(term) for term in (node.left, *node.comparators)]
        return all(COMPARE[type(op)](a, b) for op, a, b in zip(node.ops, terms, terms[1:]))
    raise ConfigError(
        f"'{condition}' contains '{ast.unparse(node)}', but a condition has only keys, numbers, strings, "
        "lists, comparisons, arithmetic, and, or and not."
    )


def _key(node: ast.expr, values: Mapping[str, Any], condition: str) -> Any:
    """Return the value of a dotted key, which Python's grammar parses as attributes of a name."""
    dotted = ast.unparse(node)
    constants = {"true": True, "false": False, "null": None}
    if dotted in constants:
        return constants[dotted]
    if dotted not in values:
        near = difflib.get_close_matches(dotted, list(values), n=1)
        advice = f"; did you mean {near[0]}?" if near else "."
        raise ConfigError(f"'{condition}' names {dotted}, which is not a config key{advice}")
    return values[dotted]
