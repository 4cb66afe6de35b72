"""The statements of the program that depend on CUDA, read from its source."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.spawn import ROOT

TERM = re.compile("cuda|nccl|pin_memory|record_stream")
ELSEWHERE = ("rl/rollout/cpu_support.py", "rl/training/cpu_support.py", "rl/dry_run/")
"""Files that are only for CPUs or use no device."""


@dataclass(frozen=True)
class Statement:
    """A statement that a rehearsal must execute."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def cuda_statements() -> list[Statement]:
    """Return every statement of rl/ that mentions CUDA, and the first of each branch that only CUDA takes.

    All statements of methods count if the name of their class begins with Cuda.
    """
    found = []
    for path in sorted((ROOT / "rl").rglob("*.py")):
        file = str(path.relative_to(ROOT))
        if not file.startswith(ELSEWHERE):
            found += _statements_of(path, file)
    return found


def _statements_of(path: Path, file: str) -> list[Statement]:
    source = path.read_text()
    lines = source.splitlines()
    found = {}
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, (ast.FunctionDef, ast.ClassDef, ast.Module)):
            flags = {name for node in _own(function.body) for name in _flag(node)}
            needed = _required(function.body, flags)
            if isinstance(function, ast.ClassDef) and function.name.startswith("Cuda"):
                methods = (part.body for part in function.body if isinstance(part, ast.FunctionDef))
                needed = (node for body in methods for node in _own(body) if _runs(node))
            for node in needed:
                found[node.lineno] = Statement(file, node.lineno, lines[node.lineno - 1].strip())
    return list(found.values())


def _runs(node: ast.stmt) -> bool:
    """Return whether a statement is no docstring."""
    return not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def _own(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a body, including nested ones except in functions and classes."""
    for node in body:
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            for part in ("body", "orelse", "finalbody"):
                yield from _own(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _own(handler.body)


def _flag(node: ast.stmt) -> Iterator[str]:
    """Yield the variables or attributes to which a statement assigns a condition on CUDA."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Name, ast.Attribute)):
        if ast.unparse(node.value).endswith((".is_cuda", "cuda.is_available()")):
            yield ast.unparse(node.targets[0]).removeprefix("self.")


def _required(body: list[ast.stmt], flags: set[str]) -> Iterator[ast.stmt]:
    for number, node in enumerate(body):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue  # visited separately
        header = _header(node)
        if any(_mentions(part, flags) for part in header):
            yield node
        if isinstance(node, ast.If) and (sign := _condition(node.test, flags)):
            taken = node.body if sign > 0 else node.orelse
            yield from _first(taken) if taken else body[number + 1 : number + 2]
        for part in ("body", "orelse", "finalbody"):
            yield from _required(getattr(node, part, []), flags)
        for handler in getattr(node, "handlers", []):
            yield from _required(handler.body, flags)


def _first(branch: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the first statement of a branch and, if it is an elif, the first statements of its branches."""
    yield from branch[:1]
    if len(branch) == 1 and isinstance(branch[0], ast.If):
        yield from _first(branch[0].body)
        yield from _first(branch[0].orelse)


def _header(node: ast.stmt) -> list[ast.AST]:
    """Return the expressions of a statement without the statements in it."""
    if not hasattr(node, "body"):
        return [node]
    parts = [getattr(node, name, None) for name in ("test", "iter", "subject")]
    return [part for part in parts if part is not None] + [i.context_expr for i in getattr(node, "items", [])]


def _mentions(node: ast.AST, flags: set[str]) -> bool:
    return any(_is_term(child, flags) for child in ast.walk(node))


def _is_term(node: ast.AST, flags: set[str]) -> bool:
    """Return whether a node depends on CUDA: a name with cuda or nccl in it, a flag, or pinned memory."""
    if isinstance(node, ast.keyword):
        return node.arg == "pin_memory"
    if isinstance(node, ast.Compare):
        return any(isinstance(side, ast.Constant) and side.value == "cuda" for side in node.comparators)
    name = getattr(node, "id", "") or getattr(node, "attr", "")
    return name in flags or bool(TERM.search(name))


def _condition(test: ast.AST, flags: set[str]) -> int:
    """Return 1 if a condition requires CUDA, -1 if it requires its absence, else 0."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return -_condition(test.operand, flags)
    if isinstance(test, ast.BoolOp):
        return next((sign for part in test.values if (sign := _condition(part, flags))), 0)
    return 1 if _mentions(test, flags) else 0
