"""Code reward: runs the program in a response on the tests of its prompt, each in a process of `rl.sandbox`.

If a test has inputs and outputs, the expected outputs stay in this process, so the program cannot read them.
If a test is an assert, it runs in another process than the program (`rl.sandbox.apart`). Therefore a program
does not pass it by replacing __eq__, by reading the variables of its caller, or by exiting early. This
protection has limits:

- Some asserts cannot run apart: they import packages, are asynchronous, or pass their own functions or
  objects to the program. They run in the process of the program.
- With `allow_unprotected` nothing separates the two processes.
- A program can recognise a test by its arguments. If a test compares two results of the program, as in
  `f(1) == f(2)`, or calls a method of a result, such as `equals`, then the program's own objects decide.
"""

import functools
import json
import math
import re
import secrets
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from rl.config.container import read_container
from rl.rewards.code_tests import Case, check_test, idle_program, literal, read_cases, refusal
from rl.sandbox.apart import TOGETHER, run_apart
from rl.sandbox.sandbox import ProgramLimits, ProgramOutcome, run_program

PRELUDE = """from typing import *
import bisect, collections, functools, heapq, itertools, math, random, re, string
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache, lru_cache, reduce
from heapq import heapify, heappop, heappush
from itertools import accumulate, combinations, permutations, product
from math import ceil, floor, gcd, inf, sqrt
"""
"""Imports that run before a program that is judged by calls or asserts. LeetCode provides them, among
others."""
RTOL, ATOL = 1e-5, 1e-8
"""Relative and absolute tolerance for numbers with a point or an exponent: numpy's defaults, as in APPS
(arXiv:2105.09938)."""
PROOF_S = 3.0
"""Minimum time in seconds for `_prove`, which tries the tests without a solution after a response has passed
them. It may exceed `total_s`."""
IDLE_VALUES = ("None", "Idle")
"""Values that the functions of `idle_program` return, one after the other. A test that expects None passes
with the first one only. A test that passes with both checks nothing."""

_FENCE = re.compile(r"[ \t]*```[ \t]*([a-zA-Z0-9_+-]*)")
_PYTHON = {"python", "python3", "py"}
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")

# The harness reads the job from standard input. It redirects the standard output of the solution, so that
# only the answer is written to the original standard output: after a call, the returned value as JSON; after
# asserts that have all passed, the token.
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
class CodeOptions:
    """Keyword arguments of the reward (`reward.kwargs`)."""

    partial: bool = False
    """Whether the score is `passed`. Otherwise the score is `acc`, and testing stops at the first failure.
    The remaining tests then count as neither passed nor timed out."""
    max_cases: int | None = None
    """Run only the first `max_cases` tests, 1 or more."""
    total_s: float = 25.0
    """Time for all tests of a response, in seconds. Unfinished tests count as not passed. Keep it some
    seconds below reward.timeout_s: that limit ends the whole call, and the sample loses its score."""
    wall_s: float = 12.0
    """wall_s, cpu_s and memory_mib are the limits of one test (`rl.sandbox.sandbox.ProgramLimits`)."""
    cpu_s: float = 6
    memory_mib: int = 1024
    interpreter: str | None = None
    """Path of the Python that runs the programs (`rl.sandbox.sandbox.run_program`)."""
    allow_unprotected: bool = False
    """Whether programs run even if nothing keeps them away from the network and from the user's files."""
    container: Mapping[str, Any] | None = None
    """Settings of `rl.config.container.Container`. If given, each test runs in a fresh container. It is run
    by the container's `python3`, or by `interpreter`, which is then a path in the image. The limits of the
    container replace `cpu_s` and `memory_mib`."""

    def __post_init__(self) -> None:
        if self.max_cases is not None and (not isinstance(self.max_cases, int) or self.max_cases < 1):
            raise ValueError(
                f"reward.kwargs.max_cases={self.max_cases} must be 1 or more, or null for all tests."
            )


def score(
    prompt: str,
    response: str,
    ground_truth: Any,
    data_source: Any = None,
    extra_info: Any = None,
    **kwargs: Any,
) -> dict[str, float]:
    """Return `score`, `acc` (1.0 if all tests pass, else 0.0), and the fractions of tests `passed` and
    `timed_out`.

    The program is the last block fenced as ```python. Without one it is the last fenced block, and without
    any fenced block the whole response.

    Args:
        ground_truth: tests in a form of `rl.rewards.code_tests`.
        kwargs: `CodeOptions`.

    Raises:
        ValueError: the ground truth is malformed or holds no test, or this machine cannot confine programs.
            Also if the tests pass without a program. This is tried after a response has passed the tests,
            once per process for the same tests.
        OSError: a program could not be started or confined.
    """
    settings, cases = CodeOptions(**kwargs), check_truth(ground_truth, **kwargs)
    program = extract_program(response)
    passed = timed_out = 0
    deadline = time.monotonic() + settings.total_s
    for case in cases if program.strip() else []:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        outcome, right = run_case(program, case, settings, left_s)
        passed += right
        timed_out += outcome.end == "time"
        if not right and not settings.partial:
            break
    if passed == len(cases) or (settings.partial and passed):
        _prove(cases, ground_truth, settings, max(deadline, time.monotonic() + PROOF_S))
    fraction, acc = passed / len(cases), float(passed == len(cases))
    return {
        "score": fraction if settings.partial else acc,
        "acc": acc,
        "passed": fraction,
        "timed_out": timed_out / len(cases),
    }


def check_truth(ground_truth: Any, **kwargs: Any) -> list[Case]:
    """Return the tests without running code. Raises ValueError if there is none, or if test code checks
    nothing.

    kwargs: `CodeOptions`.
    """
    settings = CodeOptions(**kwargs)
    own_python = settings.interpreter is None and settings.container is None
    cases = [
        case for case in read_cases(ground_truth) if check_test(case, ground_truth, own_python=own_python)
    ]
    if not cases:
        raise refusal(
            ground_truth,
            "its test code asserts nothing and calls nothing; add calls whose results it asserts",
        )
    return cases[: settings.max_cases]


def try_truth(ground_truth: Any, **kwargs: Any) -> None:
    """Raise ValueError if the tests pass without a program, or with functions that do nothing.

    kwargs: `CodeOptions`.
    """
    settings = CodeOptions(**kwargs)
    deadline = time.monotonic() + max(settings.total_s, PROOF_S)
    _prove(check_truth(ground_truth, **kwargs), ground_truth, settings, deadline)


_proved: set[int] = set()
"""Hashes of the tests for which `_prove` has found, in this process, that they fail without a solution."""


def _prove(cases: Sequence[Case], ground_truth: Any, settings: CodeOptions, deadline: float) -> None:
    """Raise ValueError if tests pass with an empty program, or with functions of two different values.

    A test that passes with both values ignores the result; a test that expects None passes only with None.
    Normally the error is raised if all tests pass in this way. With `partial`, where each test earns a part
    of the score, one such test is enough. Tests that are unfinished at the deadline count as not passed.
    """
    key = zlib.crc32(f"{settings.partial}{cases!r}".encode("utf-8", "replace"))
    if key in _proved:
        return

    def passes(program: str, case: Case) -> bool:
        left_s = deadline - time.monotonic()
        return left_s > 0 and run_case(program, case, settings, left_s)[1]

    counts = any if settings.partial else all
    which = "with partial=true one of its tests passes" if settings.partial else "its tests pass"
    if counts(passes("pass", case) for case in cases):
        raise refusal(ground_truth, f"{which} without any program; they must fail without a solution")
    calls = [case for case in cases if case.stdin is None]
    ignores = (all(passes(idle_program(case, value), case) for value in IDLE_VALUES) for case in calls)
    if (calls == cases or settings.partial) and counts(ignores):
        raise refusal(ground_truth, f"{which} with functions that do nothing; they must check results")
    _proved.add(key)


# ---- what to run ----


def extract_program(response: str) -> str:
    """Return the last block fenced as Python; without one, the last fenced block; without any, the whole
    text.

    A block that is not closed extends to the end of the text. This takes linear time.
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
        else:  # a new block begins before the previous block was closed
            blocks.append((language, "".join(lines)))
            language, lines = fence[1].lower(), []
    if language is not None:
        blocks.append((language, "".join(lines)))
    python = [text for name, text in blocks if name in _PYTHON]
    return python[-1] if python else blocks[-1][1] if blocks else response


# ---- run and compare ----


def run_case(program: str, case: Case, settings: CodeOptions, left_s: float) -> tuple[ProgramOutcome, bool]:
    """Run a program on one test. Return how the program ended, and whether it passed.

    left_s: seconds left for all remaining tests. Raises the errors of `run_program`.
    """
    limits = ProgramLimits(
        wall_s=min(settings.wall_s, left_s), cpu_s=math.ceil(settings.cpu_s), memory_mib=settings.memory_mib
    )
    run = _runner(settings, limits)
    if case.stdin is not None:
        outcome = run(program, stdin=case.stdin)
        return outcome, outcome.ok and same_output(outcome.stdout, case.expected)
    job: dict[str, Any] = {"prelude": PRELUDE, "solution": program}
    if case.test is not None:
        token = secrets.token_hex(16)
        outcome = run_apart(
            run, program, case.test, token=token, prelude=PRELUDE, is_container=settings.container is not None
        )
        if not (outcome.ok and outcome.stdout == TOGETHER):
            return outcome, outcome.ok and outcome.stdout == token
        outcome = run(_HARNESS, stdin=json.dumps({**job, "test": case.test, "token": token}))
        return outcome, outcome.ok and outcome.stdout == token
    job |= {"fn_name": case.fn_name, "arguments": case.arguments}
    outcome = run(_HARNESS, stdin=json.dumps(job))
    return outcome, outcome.ok and _returned(outcome.stdout, case.expected)


def _runner(settings: CodeOptions, limits: ProgramLimits) -> Callable[..., ProgramOutcome]:
    """Return `run_program`, or its counterpart for containers, with the settings filled in."""
    how: dict[str, Any] = {"limits": limits, "interpreter": settings.interpreter}
    if settings.container is None:
        return functools.partial(run_program, **how, allow_unprotected=settings.allow_unprotected)
    from rl.config import wing

    key = "reward.kwargs.container"
    programs = wing.door_of("containers", "programs", needed_by=key)
    return functools.partial(programs(read_container(settings.container, key=key)), **how)


def _returned(stdout: str, expected: Any) -> bool:
    """Return whether the answer of the harness holds the expected value."""
    try:
        value = json.loads(stdout)["value"]
        if same_value(value, expected):
            return True
        # The ground truth may give the value as text: "[1, 2]" is a list.
        if isinstance(expected, str):
            return same_value(value, literal(expected, expected))
        # APPS puts some values into a list with one element.
        wrapped = isinstance(expected, list) and len(expected) == 1 and not isinstance(value, list)
        return wrapped and same_value(value, expected[0])
    # The program may have written the answer itself, for example invalid JSON, no value, a number with too
    # many digits, or a deeply nested value.
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return False


def same_output(output: str, expected: str) -> bool:
    """Return whether two texts have the same lines.

    Blanks around a line, and empty lines at both ends of a text, are ignored. Lines that differ are compared
    word by word. Two numbers match if they are equal as decimals, as in LiveCodeBench. If the expected number
    has a decimal point or an exponent, they also match within RTOL and ATOL, as in APPS. For example, 5.0
    matches 5, and 2.500001 matches 2.50, but 5.000001 does not match 5.
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
    """Return whether two JSON values are equal. Floats may differ by RTOL and ATOL."""
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
    # As in numpy.isclose: RTOL is relative to the expected value, and only infinity is close to infinity.
    return math.isfinite(expected) and abs(value - expected) <= ATOL + RTOL * abs(expected)
