"""Code reward: run the program in the response on its tests, in `rl.sandbox`, with one process per test.

The expected outputs of tests with inputs stay in this process, so the program cannot read them. Asserts run
apart from the program (`rl.sandbox.apart`), so that a program that replaces __eq__, reads its caller's
variables or exits early does not pass them. Not promised: asserts that cannot be run apart (they import
packages, are asynchronous, or give the program functions or objects of their own) run in the program's
process; with `allow_unprotected` nothing separates two processes; a program recognises a test by its
arguments, and its own objects decide `f(1) == f(2)` and methods such as `equals`.
"""

import functools
import json
import math
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from rl.config.container import read_container
from rl.sandbox.apart import TOGETHER, run_apart
from rl.sandbox.sandbox import Limits, Outcome, run_program

PRELUDE = """from typing import *
import bisect, collections, functools, heapq, itertools, math, random, re, string
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache, lru_cache, reduce
from heapq import heapify, heappop, heappush
from itertools import accumulate, combinations, permutations, product
from math import ceil, floor, gcd, inf, sqrt
"""
"""Imports run before a program that is judged by calls or asserts: part of what LeetCode provides."""
RTOL, ATOL = 1e-5, 1e-8
"""Tolerances for numbers with a point or an exponent: numpy's defaults, as in APPS (arXiv:2105.09938)."""

_FENCE = re.compile(r"[ \t]*```[ \t]*([a-zA-Z0-9_+-]*)")
_PYTHON = {"python", "python3", "py"}
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")

# Reads the job from standard input and redirects the solution's standard output, so that only the answer is
# written to the original one: the value as JSON after a call, the token after all asserts have passed.
_HARNESS = """
import json, os, sys, types
job = json.loads(sys.stdin.read())
answer = os.dup(1)
os.dup2(2, 1)
# A registered module, because dataclasses and typing look it up by name.
sys.modules["solution"] = types.ModuleType("solution")
names = vars(sys.modules["solution"])
exec(compile(job["prelude"], "prelude.py", "exec"), names)
exec(compile(job["solution"], "solution.py", "exec"), names)
if "fn_name" in job:
    function = names.get(job["fn_name"])
    if function is None:
        function = getattr(names["Solution"](), job["fn_name"])
    text = json.dumps({"value": function(*job["arguments"])})
else:
    exec(compile(job["test"], "test.py", "exec"), names)
    text = job["token"]
os.write(answer, text.encode())
"""


@dataclass(frozen=True)
class Case:
    """One test of a program."""

    stdin: str | None = None
    fn_name: str = ""
    arguments: tuple[Any, ...] | None = None
    """Arguments of the call of `fn_name`."""
    test: str | None = None
    """Code that raises if the program is wrong."""
    expected: Any = None
    """Expected output, or expected value of the call."""


def score(
    prompt: str,
    response: str,
    ground_truth: Any,
    *,
    partial: bool = False,
    max_cases: int | None = None,
    total_s: float = 25.0,
    wall_s: float = 12.0,
    cpu_s: int = 6,
    memory_mib: int = 1024,
    interpreter: str | None = None,
    allow_unprotected: bool = False,
    container: Mapping[str, Any] | None = None,
    **extra: Any,
) -> dict[str, float]:
    """Return `score`, `acc` (1.0 if all tests pass), and the fractions `passed` and `timed_out` of the tests.

    The program is the last block fenced as ```python, else the last fenced block, else the whole response.

    Args:
        ground_truth: a mapping, or JSON of one, of one of these forms; any other text is test code:
            {"inputs": [str, ...], "outputs": [str, ...]}               standard input and output
            {"fn_name": str, "inputs": [[...], ...], "outputs": [...]}  arguments and value of a function or
                method of the class Solution; JSON values, or LiveCodeBench's text with one argument per line
            {"asserts": [str, ...]} or {"asserts": str}                 test code; each string is one test
        partial: use `passed` as the score. Otherwise the score is `acc` and testing stops at the first
            failure; the remaining tests count as not passed and not timed out.
        max_cases: run only the first `max_cases` tests.
        total_s: seconds for all tests of a response; unfinished tests are not passed. Keep it some seconds
            below reward.timeout_s, which would end the whole call and cost the sample its score.
        wall_s, cpu_s, memory_mib: limits of one test, see sandbox.Limits.
        interpreter: the Python that runs the programs, see sandbox.run_program.
        allow_unprotected: run programs even if nothing keeps them from the network and the user's files.
        container: settings of `rl.config.container.Container`: each test runs in a fresh container, by its
            `python3` or by `interpreter`, a path in the image. Its limits replace `cpu_s` and `memory_mib`.

    Raises:
        ValueError: the ground truth is malformed or holds no test; this machine cannot confine programs.
        OSError: a program could not be started or confined.
    """
    cases = read_cases(ground_truth)[:max_cases]
    if not cases:
        raise ValueError(f"reward.kwargs.max_cases={max_cases} leaves no test: set it to 1 or more.")
    program = extract_program(response)
    passed = timed_out = 0
    deadline = time.monotonic() + total_s
    for case in cases if program.strip() else []:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        limits = Limits(wall_s=min(wall_s, left_s), cpu_s=math.ceil(cpu_s), memory_mib=memory_mib)
        outcome, right = run_case(
            program,
            case,
            limits=limits,
            interpreter=interpreter,
            allow_unprotected=allow_unprotected,
            container=container,
        )
        passed += right
        timed_out += outcome.end == "time"
        if not right and not partial:
            break
    fraction, acc = passed / len(cases), float(passed == len(cases))
    return {
        "score": fraction if partial else acc,
        "acc": acc,
        "passed": fraction,
        "timed_out": timed_out / len(cases),
    }


# ---- what to run ----


def extract_program(response: str) -> str:
    """Return the last block fenced as Python, else the last fenced block, else the whole text.

    A block that is not closed extends to the end of the text. Linear time.
    """
    blocks: list[tuple[str, str]] = []
    language, lines = None, []
    for line in response.splitlines(keepends=True):
        fence = _FENCE.match(line)
        if fence is None:
            lines.append(line)
        elif language is None:
            language, lines = fence[1].lower(), []
        elif not fence[1]:
            blocks.append((language, "".join(lines)))
            language = None
        else:  # a new block begins before the last one was closed
            blocks.append((language, "".join(lines)))
            language, lines = fence[1].lower(), []
    if language is not None:
        blocks.append((language, "".join(lines)))
    python = [text for name, text in blocks if name in _PYTHON]
    return python[-1] if python else blocks[-1][1] if blocks else response


def read_cases(ground_truth: Any) -> list[Case]:
    """Return the tests in a ground truth, see `score`. Raises ValueError if it is malformed or holds none."""
    tests = ground_truth
    if isinstance(tests, str):
        try:
            parsed = json.loads(tests)
            tests = parsed if isinstance(parsed, Mapping) else {"asserts": tests}
        except ValueError:
            tests = {"asserts": tests}
    if not isinstance(tests, Mapping):
        raise ValueError(_describe_form(ground_truth))
    if tests.get("asserts") is not None:
        asserts = tests["asserts"]
        asserts = [asserts] if isinstance(asserts, str) else list(asserts)
        cases = [Case(test=str(test)) for test in asserts if str(test).strip()]
    else:
        inputs, outputs, fn_name = tests.get("inputs"), tests.get("outputs"), tests.get("fn_name") or ""
        if inputs is None or outputs is None or len(inputs) != len(outputs):
            raise ValueError(_describe_form(ground_truth))
        pairs = zip(inputs, outputs, strict=True)
        cases = [_call(fn_name, *pair) if fn_name else _stdio(*pair) for pair in pairs]
    if not cases:
        raise ValueError(_describe_form(ground_truth))
    return cases


def _describe_form(ground_truth: Any) -> str:
    return (
        f"reward_model.ground_truth={ground_truth!r:.300}: the code reward needs `inputs` and `outputs` of "
        "equal, positive length (with `fn_name` for calls), or `asserts`, or test code."
    )


def _stdio(given: Any, expected: Any) -> Case:
    # APPS has inputs and outputs that are lists of lines.
    texts = [text if isinstance(text, str) else "\n".join(map(str, text)) for text in (given, expected)]
    return Case(stdin=texts[0], expected=texts[1])


def _call(fn_name: str, given: Any, expected: Any) -> Case:
    if isinstance(given, str):
        given = [json.loads(line) for line in given.splitlines() if line.strip()]
        expected = json.loads(expected) if isinstance(expected, str) else expected
    return Case(fn_name=fn_name, arguments=tuple(_plain(given)), expected=_plain(expected))


def _plain(value: Any) -> Any:
    """Convert numpy arrays and numbers, which Parquet files are read as, to JSON's types."""
    return json.loads(json.dumps(value, default=lambda array: array.tolist()))


# ---- run and compare ----


def run_case(
    program: str,
    case: Case,
    *,
    limits: Limits,
    interpreter: str | None = None,
    allow_unprotected: bool = False,
    container: Mapping[str, Any] | None = None,
) -> tuple[Outcome, bool]:
    """Run a program on one test; return how it ended and whether it passed. Raises as `run_program`."""
    how: dict[str, Any] = {"limits": limits, "interpreter": interpreter}
    run = functools.partial(run_program, **how, allow_unprotected=allow_unprotected)
    if container is not None:
        from rl.sandbox.container import run_program_in
        from rl.sandbox.images import unpack

        settings = read_container(container, key="reward.kwargs.container")
        run = functools.partial(run_program_in, unpack(settings["image"]), settings, **how)
    if case.stdin is not None:
        outcome = run(program, stdin=case.stdin)
        return outcome, outcome.ok and same_output(outcome.stdout, case.expected)
    job = {"prelude": PRELUDE, "solution": program}
    if case.test is not None:
        token = secrets.token_hex(16)
        apart = {"token": token, "prelude": PRELUDE, "is_container": container is not None}
        outcome = run_apart(run, program, case.test, **apart)
        if not (outcome.ok and outcome.stdout == TOGETHER):
            return outcome, outcome.ok and outcome.stdout == token
        outcome = run(_HARNESS, stdin=json.dumps({**job, "test": case.test, "token": token}))
        return outcome, outcome.ok and outcome.stdout == token
    job |= {"fn_name": case.fn_name, "arguments": case.arguments}
    outcome = run(_HARNESS, stdin=json.dumps(job))
    return outcome, outcome.ok and _returned(outcome.stdout, case.expected)


def _returned(stdout: str, expected: Any) -> bool:
    """Return whether the harness's answer holds the expected value."""
    try:
        value = json.loads(stdout)["value"]
        if same_value(value, expected):
            return True
        # APPS puts some values into a list of one.
        wrapped = isinstance(expected, list) and len(expected) == 1 and not isinstance(value, list)
        return wrapped and same_value(value, expected[0])
    # The program may have written the answer itself: invalid JSON, no value, too many digits, deep nesting.
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return False


def same_output(output: str, expected: str) -> bool:
    """Return whether two texts have the same lines, ignoring outer blanks and empty lines at both ends.

    Lines that differ are compared word by word. Two numbers match if they are equal as decimals, as in
    LiveCodeBench (5 and 5.0), or, if the expected one has a decimal point or an exponent, within RTOL and
    ATOL, as in APPS.
    """
    ours, theirs = ([line.strip() for line in text.strip().split("\n")] for text in (output, expected))
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _same_line(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    words, expected = ours.split(), theirs.split()
    return len(words) == len(expected) and all(map(_same_word, words, expected))


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if not (_DECIMAL.fullmatch(word) and _DECIMAL.fullmatch(expected)):
        return False
    if Decimal(word) == Decimal(expected):
        return True
    return not expected.lstrip("+-").isdigit() and _is_close(float(word), float(expected))


def same_value(value: Any, expected: Any) -> bool:
    """Return whether two JSON values are equal, floats within RTOL and ATOL."""
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(same_value(value[key], expected[key]) for key in value)
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, (int, float)) and isinstance(expected, float):
        return value == expected or _is_close(value, expected)
    return value == expected


def _is_close(value: float, expected: float) -> bool:
    # As numpy.isclose: relative to the expected value, and only infinity is close to infinity.
    return math.isfinite(expected) and abs(value - expected) <= ATOL + RTOL * abs(expected)
