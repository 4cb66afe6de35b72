"""Reward functions: shipped graders with truths in random forms, random expressions, tests of programs, and
functions of users that return or raise anything."""

import json
import math
import random
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

from rl.config.reward_sources import make_plan
from rl.rewards import code, dapo, exact, gsm8k, qa
from rl.rewards import math as mathematics
from rl.rewards.pool.pool import ScoringPool
from tests.fuzz.cases import Case, Silent

GRADERS = {
    "gsm8k": (gsm8k.score, "I think.\n#### {}"),
    "dapo": (dapo.score, "I think.\nAnswer: {}"),
    "math": (mathematics.score, "I think, so \\boxed{{{}}}."),
    "qa": (qa.score, "<answer>{}</answer>"),
    "exact": (exact.score, "{}"),
}
TRUTHS = {
    "text": str,
    "integer": int,
    "float": float,
    "text of a float": lambda n: f"{n}.0",
    "spaces": lambda n: f"  {n}\n",
    "list": lambda n: [str(n)],
    "list of an integer": lambda n: [n],
    "JSON text of a list": lambda n: json.dumps([str(n)]),
    "SQuAD": lambda n: {"text": [str(n)], "answer_start": [0]},
    "mapping": lambda n: {"answer": str(n)},
    "null": lambda n: None,
    "nan": lambda n: math.nan,
    "empty": lambda n: "",
    "empty list": lambda n: [],
    "list of nulls": lambda n: [None, str(n)],
    "true": lambda n: True,
    "bytes": lambda n: str(n).encode(),
    "a solution of GSM8K": lambda n: f"It is {n + 3}.\n#### {n}",
    "a solution of MATH": lambda n: f"Since $x={n + 3}$, it is $\\boxed{{{n}}}$.",
    "thousands": lambda n: f"{n:,}",
    "dollars": lambda n: f"${n}",
    "LaTeX": lambda n: f"${n}$",
    "minus of typography": lambda n: f"\u2212{n}",
}
EXACT_TEXTS = (
    "text of a float",
    "thousands",
    "dollars",
    "LaTeX",
    "a solution of GSM8K",
    "a solution of MATH",
)
"""Truths that are other texts than the answer."""
RESULTS = (
    *(
        "1.0",
        "1",
        "True",
        "None",
        "'1'",
        "'one'",
        "float('nan')",
        "float('inf')",
        "1e39",
        "-1e39",
        "1j",
        "[1]",
        "()",
    ),
    *(
        "{}",
        "{'score': None}",
        "{'score': 'x'}",
        "{'score': 1, 'acc': float('nan')}",
        "{'score': [1]}",
        "10**400",
    ),
    *("{1: 2, 'score': 1}", "{'score': 1, 'pred': 3}", "{'score': 1, 'feedback': 7}", "{'score': 1, '': 2}"),
    *(
        "object()",
        "b'1'",
        "__import__('numpy').float32(0.5)",
        "__import__('numpy').array([1.0, 2.0])",
        "score",
    ),
    *(
        "(_ for _ in ())",
        "{'score': 1, 'x' * 9000: 1}",
        "{'score': 1, 'a\\nb': 1}",
        "{'score': 1, '\\ud800': 1}",
    ),
    *(
        "__import__('decimal').Decimal('0.5')",
        "__import__('fractions').Fraction(1, 3)",
        "{'score': 1} | extra",
    ),
)
BODIES = (
    *(
        "raise ValueError('bad \\ud800')",
        "raise KeyError(1)",
        "raise SystemExit(3)",
        "raise KeyboardInterrupt",
    ),
    *(
        "raise Exception()",
        "raise BaseException('x')",
        "import os; os._exit(0)",
        "import os, signal; os.kill(os.getpid(), 9)",
    ),
    *(
        "while True: pass",
        "import time; time.sleep(1e6)",
        "return score(prompt, response, ground_truth)",
        "print('x' * 10**6); return 1",
    ),
    *(
        "import sys; sys.stdout.close(); return 1",
        "import os; os.close(1); os.close(0); return 1",
        "import os; os.fork(); return 1",
    ),
    *(
        "x = 'a' * 10**11; return 1",
        "import sys; sys.setrecursionlimit(10**9); f = lambda n: f(n + 1); return f(0)",
    ),
    *(
        "raise RuntimeError('y' * 10**7)",
        "import threading; threading.Thread(target=input).start(); return 1",
        "assert False",
    ),
)


def try_truth_of_run(grader: Any, truth: Any) -> None:
    """Raise ValueError for a truth that a run refuses before its first step (`rl.phases.truths`)."""
    module = sys.modules[grader.__module__]
    for check in ("check_truth", "try_truth"):
        if check in vars(module):
            vars(module)[check](truth)


def case(rng: random.Random, directory: Path) -> Case:
    return rng.choice((_truth, _truth, _expression, _answer, _program, _function))(rng, directory)


def _truth(rng: random.Random, directory: Path) -> Case:
    name, form = rng.choice(list(GRADERS)), rng.choice(list(TRUTHS))
    if name == "exact" and form in EXACT_TEXTS or name == "qa" and "solution" in form:
        form = "integer"
    if name in ("qa", "dapo") and form == "text of a float":
        form = "integer"  # both compare texts, and a file's text 7.0 is not rewritten
    n = rng.choice((7, 72, 1234, 1000000, 0, 10))
    truth = TRUTHS[form](n)
    right_answer = "True" if form == "true" else n  # a flag is an answer in words
    sign = "-" if form == "minus of typography" else ""
    grader, shape = GRADERS[name]

    def run() -> str:
        try_truth_of_run(grader, truth)
        right, wrong = (
            grader("question", shape.format(f"{sign}{answer}"), truth, data_source="d", extra_info={})
            for answer in (right_answer, n + 1)
        )
        scores = [found["score"] if isinstance(found, dict) else found for found in (right, wrong)]
        if scores[1] > 0:
            raise Silent(f"the wrong answer {n + 1} is rewarded with {scores[1]}; the truth is {truth!r}")
        if scores[0] <= 0:
            raise Silent(f"the right answer {right_answer} is never rewarded; the truth is {truth!r}")
        return "right and wrong are told apart"

    return Case(f"{name}, truth {form} of {n}", run)


def _expression(rng: random.Random, directory: Path) -> Case:
    (one, first), (other, second) = _random_expression(rng, 2), _random_expression(rng, 2)
    if rng.random() < 0.5:  # the same text but for one character
        place = rng.randrange(len(one))
        other = one[:place] + rng.choice("0123456789+-'_^") + one[place + 1 :]
        second = None

    def run() -> str:
        found = mathematics.score("q", f"\\boxed{{{other}}}", one)["score"]
        same = mathematics.score("q", f"\\boxed{{{one}}}", one)["score"]
        if same != 1:
            raise Silent(f"{one} does not equal itself")
        if found > 0 and second is not None and second != first:
            raise Silent(f"{one} = {first} counts as equal to {other} = {second}")
        if found > 0 and second is None and other != one:
            return f"equal: {one} and {other}"  # for a person to look at
        return f"{found}"

    return Case(f"math, {one} and {other}", run)


def _random_expression(rng: random.Random, depth: int) -> tuple[str, Any]:
    if depth == 0 or rng.random() < 0.3:
        n = rng.randrange(1, 20)
        return rng.choice(
            ((str(n), Fraction(n)), (f"{n}.5", Fraction(2 * n + 1, 2)), (f"-{n}", Fraction(-n)))
        )
    (a, x), (b, y) = _random_expression(rng, depth - 1), _random_expression(rng, depth - 1)
    form = rng.randrange(5)
    if form == 0:
        return f"{a}+({b})", x + y
    if form == 1:
        return f"{a}-({b})", x - y
    if form == 2:
        return f"({a})({b})", x * y
    if form == 3 and y:
        return f"\\frac{{{a}}}{{{b}}}", x / y
    n = rng.randrange(0, 4)
    return f"({a})^{{{n}}}", x**n


def _answer(rng: random.Random, directory: Path) -> Case:
    """Two spellings of one value must be equal, and spellings of two values must differ."""
    make = rng.choice((_number, _number, _surd, _bounds, _elements, _matrix, _measure, _base))
    (first, spellings), (second, others) = make(rng), make(rng)
    one, same, other = rng.choice(spellings), rng.choice(spellings), rng.choice(others)

    def run() -> str:
        if mathematics.score("q", f"\\boxed{{{same}}}", one)["score"] != 1:
            raise Silent(f"{same} does not equal {one}")
        if second != first and mathematics.score("q", f"\\boxed{{{other}}}", one)["score"] > 0:
            raise Silent(f"{other} counts as equal to {one}")
        return "equal and different are told apart"

    return Case(f"math, {one}, {same}, {other}", run)


Spelled = tuple[Any, list[str]]
"""A value, and spellings of it in LaTeX."""


def _number(rng: random.Random) -> Spelled:
    """A rational number: as fraction, decimal, percent, repeating decimal or mixed number."""
    whole, above, below = (
        rng.randrange(4),
        rng.randrange(1, 30),
        rng.choice((1, 2, 3, 4, 5, 6, 8, 9, 11, 20, 25)),
    )
    value = whole + Fraction(above, below)
    n, d = value.as_integer_ratio()
    spellings = [
        f"\\frac{{{n}}}{{{d}}}",
        f"\\dfrac{{{3 * n}}}{{{3 * d}}}",
        f"{n}/{d}",
        f"x = \\tfrac{{{n}}}{{{d}}}",
    ]
    spellings += [f"{n} \\div {d}", f"\\frac{{{n}}} {{{d}}}", f"$\\frac{{{n}}}{{{d}}}$"]
    if d > 1 and n > d:
        spellings += [
            f"{n // d}\\frac{{{n % d}}}{{{d}}}",
            f"{n // d} \\dfrac{{{n % d}}}{{{d}}}",
            f"{n // d} {n % d}/{d}",
        ]
    if n < 10 and d < 10:
        spellings.append(f"\\frac{n}{d}")
    if 10**4 % d == 0:
        decimal = f"{n / d:.4f}".rstrip("0").rstrip(".")
        spellings += [decimal, decimal + "0" * ("." in decimal)]
        spellings += [decimal.replace(".", "{,}")] * (len(decimal.partition(".")[2]) != 3)
    if d in (3, 9):
        spellings.append(f"{n // d}.\\overline{{{n % d * 9 // d}}}")
    return value, spellings


def _surd(rng: random.Random) -> Spelled:
    """a * sqrt(b) + c * pi."""
    a, b, c = rng.randrange(2, 6), rng.choice((2, 3, 5, 7)), rng.randrange(1, 5)
    roots = [f"{a}\\sqrt{{{b}}}", f"{a}\\sqrt{b}", f"\\sqrt{{{a * a * b}}}", f"{a} \\cdot {b}^{{1/2}}"]
    roots += [f"\\frac{{{a * b}}}{{\\sqrt{{{b}}}}}", f"{a} {{\\sqrt {b}}}"]
    return (a * a * b, c), [form for root in roots for form in (f"{root} + {c}\\pi", f"{c} \\pi+{root}")]


def _bounds(rng: random.Random) -> Spelled:
    """An interval, or the inequality that it solves."""
    low, high = sorted(rng.sample(range(-5, 6), 2))
    left, right = (
        rng.choice(((True, "<", "("), (False, "\\le ", "["))),
        rng.choice(((True, "<", ")"), (False, "\\leq ", "]"))),
    )
    if rng.random() < 0.3:
        back = ">" if left[0] else "\\ge "
        forms = [
            f"x{back}{low}",
            f"{low}{left[1]}x",
            f"{left[2]}{low}, \\infty)",
            f"x \\in {left[2]}{low};+\\infty)",
        ]
        return (low, left[0]), forms
    inside = f"{left[2]}{low},{high}{right[2]}"
    forms = [f"{low}{left[1]}x{right[1]}{high}", f"x \\in \\left{left[2]}{low}, {high}\\right{right[2]}"]
    return (low, high, left[0], right[0]), [*forms, inside] if inside[0] + inside[-1] != "()" else forms


def _elements(rng: random.Random) -> Spelled:
    values = rng.sample(range(-9, 10), rng.randrange(2, 4))
    texts = [f"{value}" for value in values]
    turned = texts[::-1]
    named = [f"x={text}" for text in turned]
    return frozenset(values), [
        f"\\{{{','.join(texts)}\\}}",
        ", ".join(turned),
        "; ".join(texts),
        f"\\left\\{{ {', '.join(turned)} \\right\\}}",
        " \\text{ or } ".join(named),
        ", ".join(named),
    ]


def _matrix(rng: random.Random) -> Spelled:
    a, b, c, d = (rng.randrange(-9, 10) for _ in range(4))
    rows, halves = f"{a} & {b} \\\\ {c} & {d}", f"{a}&{2 * b}/2\\\\{c}&\\frac{{{3 * d}}}{{3}}"
    return (a, b, c, d), [
        f"\\begin{{pmatrix}} {rows} \\end{{pmatrix}}",
        f"\\begin{{bmatrix}}{halves}\\end{{bmatrix}}",
        f"\\left(\\begin{{array}}{{cc}}{rows}\\end{{array}}\\right)",
        f"\\left[\\begin{{array}}{{rr}}{halves}\\end{{array}}\\right]",
    ]


def _measure(rng: random.Random) -> Spelled:
    """A number with a unit; the unit may be left out."""
    n, unit = rng.randrange(1, 40), rng.choice(("cm", "cm^2", "degree", "percent", "dollar"))
    forms = {
        "cm": [f"{n}\\text{{ cm}}", f"{n} \\mathrm{{~cm}}", f"{n}\\,\\text{{centimeters}}", f"{n} cm"],
        "cm^2": [f"{n}\\text{{ cm}}^2", f"{n}\\ \\mathrm{{cm}}^{{2}}", f"{n}\\text{{ square centimeters}}"],
        "degree": [f"{n}^\\circ", f"{n}^{{\\circ}}", f"{n}\\text{{ degrees}}", f"{n}\u00b0"],
        "percent": [f"{n}\\%", f"{n}%", f"{n}\\text{{ percent}}"],
        "dollar": [f"\\${n}", f"{n}\\text{{ dollars}}", f"\\${n}.00"],
    }
    return (n, unit), forms[unit]


def _base(rng: random.Random) -> Spelled:
    n, base = rng.randrange(4, 60), rng.choice((2, 3, 5, 8))
    digits = ""
    left = n
    while left:
        digits, left = f"{left % base}{digits}", left // base
    return (n, base), [
        f"{digits}_{base}",
        f"{digits}_{{{base}}}",
        f"({digits})_{base}",
        f"{digits}_{{({base})}}",
    ]


MAIN = "\nif __name__ == '__main__':\n    print(add(*map(int, input().split())))"
PROGRAMS = {
    "right": "def add(a, b):\n    return a + b" + MAIN,
    "wrong": "def add(a, b):\n    return a - b" + MAIN,
    "empty": "",
    "exits": "import os\nos._exit(0)",
    "equal to all": """
class Equal:
    def __eq__(self, other): return True
    def __str__(self): return '4'
def add(a, b):
    return Equal()
""",
    "says passed": "print('passed')\nprint('OK')\nimport sys\nsys.exit(0)",
    "no assert": """
import builtins
builtins.AssertionError = ZeroDivisionError
def add(a, b):
    raise SystemExit(0)
""",
}
UNITTEST = """
import unittest
class TestAdd(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(2, 3), 5)
"""
TESTS: dict[str, Any] = {
    "assert": "assert add(2, 3) == 5",
    "assert, list": ["assert add(2, 3) == 5", "assert add(1, 1) == 2"],
    "check": "def check(candidate):\n    assert candidate(2, 3) == 5\n\ncheck(add)",
    "check, not called": "def check(candidate):\n    assert candidate(2, 3) == 5",
    "pytest": "def test_add():\n    assert add(2, 3) == 5",
    "unittest": UNITTEST,
    "unittest, called": UNITTEST + "unittest.main()",
    "functional": {"fn_name": "add", "inputs": [[2, 3]], "outputs": [5]},
    "functional, text": json.dumps({"fn_name": "add", "inputs": [[2, 3]], "outputs": [5]}),
    "functional, text inside": {"fn_name": "add", "inputs": ["2\n3"], "outputs": ["5"]},
    "functional, list output": {"fn_name": "add", "inputs": [[2, 3]], "outputs": [[5]]},
    "stdin": {"inputs": ["2 3\n"], "outputs": ["5\n"]},
    "stdin, list": [{"input": "2 3", "output": "5"}],
    "stdin, integers": {"inputs": ["2 3"], "outputs": [5]},
    "nothing": "",
    "comment": "# assert add(2, 3) == 5",
    "pass": "pass",
    "always true": "assert True",
    "print": "print(add(2, 3))",
    "null": None,
    "empty lists": {"inputs": [], "outputs": []},
    "more inputs": {"inputs": ["2 3", "1 1"], "outputs": ["5"]},
    "in a function": "def run():\n    assert add(2, 3) == 5",
    "try": "try:\n    assert add(2, 3) == 5\nexcept Exception:\n    pass",
}


def _program(rng: random.Random, directory: Path) -> Case:
    program, form = rng.choice(list(PROGRAMS)), rng.choice(list(TESTS))

    def run() -> str:
        try_truth_of_run(code.score, TESTS[form])
        found = code.score(
            "q", f"```python\n{PROGRAMS[program]}\n```", TESTS[form], data_source="d", extra_info={}
        )
        score = found["score"] if isinstance(found, dict) else found
        if program != "right" and score > 0:
            raise Silent(f"the program {program!r} passes with {score}")
        if program == "right" and score <= 0:
            raise Silent(f"the right program scores {score} and no program ever scores more")
        return f"{program}: {score}"

    return Case(f"code, tests {form}, program {program}", run)


def _function(rng: random.Random, directory: Path) -> Case:
    body = rng.choice(BODIES) if rng.random() < 0.4 else f"return {rng.choice(RESULTS)}"
    path = directory / "reward.py"
    path.write_text(f"def score(prompt, response, ground_truth, **extra):\n    {body}\n")
    samples = [
        {"prompt": "q", "response": f"r{n}", "ground_truth": "1", "data_source": "d", "extra_info": {}}
        for n in range(3)
    ]

    def run() -> str:
        plan = make_plan(f"{path}:score", {}, {})
        with ScoringPool(plan, failure_score=-0.25, workers=1, timeout_s=3, memory_mib=1024) as pool:
            pool.check()
            scores = pool.score(samples)
        for score in scores:
            values = score.values
            if not all(math.isfinite(value) for value in values.values()):
                raise Silent(f"values {values}")
            if values["failed"] and values["score"] != -0.25:
                raise Silent(f"a failed call scores {values['score']}")
        return f"{scores[0].values!r:.80}"

    return Case(f"function: {body}", run)
