"""Mutation run: does a test fail when the program is changed? Run by hand; pytest does not collect this file.

    python -m tests.mutants                     every mutant of tests/mutants.txt
    python -m tests.mutants --only grpo kl      those with grpo or kl in their name
    python -m tests.mutants --list              names, functions and tests; runs no test

Prints `NAME OUTCOME SECONDS` for each:

    caught      a test failed, or the tests did not end in time
    survived    no test failed
    stale       the table does not fit the program: a function, an expression or a test file has another name
    error       pytest ended in some other way; its output follows

A name that begins with hole- marks a mutant that no test has caught yet. The exit code is 0 if all others are
caught.

The table has sections `[tests]` with the stems of test files and options of pytest, and entries
`name: function: old => new`; an indented line continues the one before it. The name of the function suffices.
The last parts of its qualified name, such as `qkv.vllm`, or `@stem` with the stem of its file are needed only
where several functions contain the expression. `#2` takes the second of several equal expressions.

A mutant replaces one expression or statement of one function. Expressions are compared as syntax. Functions
and test files are found by name, so an entry remains valid when files are formatted or moved, or a class is
renamed. Mutants are written into a temporary copy of the working tree. The tests run in forks of this
process, which has imported torch. They are run once without any mutant, and must pass.
"""

import argparse
import ast
import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy  # noqa: F401  imported for the forks
import pytest
import torch  # noqa: F401  imported for the forks

from tests.doc_commands import copy_files

TABLE = Path(__file__).with_suffix(".txt")
PROGRAM = ("rl", "launch", "train_rl.py")
LIMIT_S = 300
"""Seconds after which the tests of a mutant are ended: a mutant may loop without end."""
HOLE = "hole-"

Tests = tuple[str, ...]
"""Stems of test files and options of pytest, as the table has them."""


@dataclass(frozen=True)
class Mutant:
    name: str
    function: str
    stem: str
    """Stem of the file that defines the function; empty for any."""
    number: int
    """Number of the replaced expression among equal ones, from 1; 0 requires a single one."""
    old: str
    new: str
    tests: Tests


class Stale(Exception):
    """An entry of the table does not fit the program."""


def read_table(text: str) -> list[Mutant]:
    """Read the mutants from the text of the table."""
    mutants: list[Mutant] = []
    tests: Tests = ()
    for line in re.sub(r"\n +", " ", text).splitlines():
        if section := re.fullmatch(r"\[(.+)\]", line):
            stems, dash_k, expression = section[1].partition(" -k ")
            tests = (*stems.split(), *(("-k", expression) if dash_k else ()))
        elif line and not line.startswith("#"):
            entry = re.fullmatch(r"([\w-]+): ([\w.]+)(?:@(\w+))?(?:#(\d+))?: (.+) => (.+)", line)
            assert entry, f"not an entry of the table: {line}"
            name, function, stem, number, old, new = entry.groups()
            mutants.append(Mutant(name, function, stem or "", int(number or 0), old, new, tests))
    names = [mutant.name for mutant in mutants]
    assert len(set(names)) == len(names), "a name occurs twice in the table"
    return mutants


Definition = tuple[Path, str, ast.AST]
"""File, qualified name and syntax tree of a function."""


def functions(path: Path, tree: ast.AST, prefix: str = "") -> Iterator[Definition]:
    """Find all functions of a file, nested ones included. Qualified names begin with a dot."""
    for node in ast.iter_child_nodes(tree):
        name = prefix
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{prefix}.{node.name}"
            if not isinstance(node, ast.ClassDef):
                yield path, name, node
        yield from functions(path, node, name)


def matches(function: ast.AST, old: str) -> list[ast.expr | ast.stmt]:
    """Find the expressions or statements of a function that equal `old`, in their order."""
    [wanted] = ast.parse(old).body
    kind = ast.expr if isinstance(wanted, ast.Expr) else ast.stmt
    text = ast.unparse(wanted)
    found = [node for node in ast.walk(function) if isinstance(node, kind) and ast.unparse(node) == text]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))


def mutated(mutant: Mutant, program: list[Definition]) -> tuple[Path, str]:
    """Return the file that a mutant changes and its new text. Raises Stale unless exactly one place fits."""
    is_defined, places = False, []
    for path, name, function in program:
        if name.endswith(f".{mutant.function}") and mutant.stem in ("", path.stem):
            is_defined, found = True, matches(function, mutant.old)
            if mutant.number:
                found = found[mutant.number - 1 : mutant.number]
            places += [(path, node) for node in found]
    if not is_defined:
        raise Stale(f"no function {mutant.function}")
    if len(places) != 1:
        raise Stale(f"{len(places)} times in {mutant.function}: {mutant.old}")
    [(path, node)] = places
    text = path.read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    first = starts[node.lineno - 1] + node.col_offset
    last = starts[node.end_lineno - 1] + node.end_col_offset
    new = f"({mutant.new})" if isinstance(node, ast.expr) else mutant.new
    changed = (text[:first] + new.encode() + text[last:]).decode()
    compile(changed, str(path), "exec")
    return path, changed


def arguments_of(tests: Tests, root: Path) -> list[str]:
    """Return the arguments of pytest, with all files of the stems. Raises Stale for a stem without a file."""
    out: list[str] = []
    for word in tests:
        # tests/unit before tests/runs and tests/ranks, which take longer to fail.
        files = sorted((root / "tests").rglob(f"{word}.py"), reverse=True) if word.startswith("test_") else []
        if word.startswith("test_") and not files:
            raise Stale(f"no file {word}.py in tests")
        out += map(str, files or [word])
    return out


def start(arguments: list[str], copy: Path, *, keep_bytecode: bool) -> int:
    """Start pytest in a fork, with the copy as its working tree, and return its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 3
    try:
        os.setsid()
        os.chdir(copy)
        output = os.open(log_of(copy), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.environ["PYTHONPATH"] = sys.path[0] = str(copy)
        # Compiled files remain those of the program; a mutant's file is newer and is compiled in memory.
        if not keep_bytecode:
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            sys.dont_write_bytecode = True
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", f"--rootdir={copy}", *arguments])
    finally:
        sys.stdout.flush()
        os._exit(code)


def outcome_of(pid: int, limit_s: float) -> str:
    """Wait for a fork and return what its exit code stands for."""
    limit = time.monotonic() + limit_s
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > limit:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "caught"
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # processes that a failed test left behind
    return {0: "survived", 1: "caught"}.get(os.waitstatus_to_exitcode(ended[1]), "error")


def log_of(copy: Path) -> Path:
    """Return the file for the output of pytest."""
    return copy.with_name("pytest.log")


def pass_unchanged(selections: set[Tests], copy: Path) -> bool:
    """Whether the tests pass without a mutant. Files that are run whole share one pytest."""
    whole = tuple(sorted({word for tests in selections if "-k" not in tests for word in tests}))
    for tests in [whole, *sorted(tests for tests in selections if "-k" in tests)]:
        pid = start(arguments_of(tests, copy), copy, keep_bytecode=True) if tests else 0
        if pid and outcome_of(pid, limit_s=3600) != "survived":
            print(f"without a mutant, {' '.join(tests)} fail:\n{log_of(copy).read_text()}")
            return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="list the mutants and run no test")
    parser.add_argument("--only", metavar="TEXT", nargs="+", default=[""], help="mutants with TEXT in it")
    options = parser.parse_args()
    begin = time.monotonic()
    table = read_table(TABLE.read_text())
    mutants = [mutant for mutant in table if any(text in mutant.name for text in options.only)]
    if options.list:
        for mutant in mutants:
            tests = " ".join(mutant.tests)
            print(f"{mutant.name}: {mutant.function}: {mutant.old} => {mutant.new} [{tests}]")
    outcomes: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        copy = Path(directory, "lockstep")
        copy.mkdir()
        copy_files(copy)
        found = (file for part in PROGRAM for file in (copy / part, *(copy / part).rglob("*.py")))
        program = [
            function
            for file in found
            if file.is_file()
            for function in functions(file, ast.parse(file.read_text()))
        ]
        planned = []
        for mutant in mutants:
            try:
                planned.append((mutant, *mutated(mutant, program), arguments_of(mutant.tests, copy)))
            except (Stale, SyntaxError) as error:
                outcomes[mutant.name] = "stale"
                print(f"{mutant.name} stale: {error}", flush=True)
        if options.list:
            return int(bool(outcomes))
        if not pass_unchanged({mutant.tests for mutant, *_ in planned}, copy):
            return 2
        print(f"the tests pass without a mutant ({time.monotonic() - begin:.0f} s)", file=sys.stderr)
        for mutant, file, text, arguments in planned:
            started, original = time.monotonic(), copy.with_name("original.py")
            shutil.copy2(file, original)
            file.write_text(text)
            outcome = outcome_of(start(arguments, copy, keep_bytecode=False), LIMIT_S)
            shutil.copy2(original, file)
            outcomes[mutant.name] = outcome
            print(f"{mutant.name} {outcome} {time.monotonic() - started:.1f}", flush=True)
            if outcome == "error":
                print(log_of(copy).read_text(), flush=True)
    counts = ", ".join(f"{number} {kind}" for kind, number in sorted(Counter(outcomes.values()).items()))
    print(f"{len(mutants)} mutants: {counts}; {time.monotonic() - begin:.0f} s")
    return int(any(outcome != "caught" and not name.startswith(HOLE) for name, outcome in outcomes.items()))


if __name__ == "__main__":
    raise SystemExit(main())
