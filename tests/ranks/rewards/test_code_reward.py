import json
from types import SimpleNamespace

import numpy as np
import pytest

from rl.config.reward_sources import make_plan
from rl.rewards import code as code_reward
from rl.rewards.code import (
    check_truth,
    extract_program,
    read_cases,
    same_output,
    same_value,
    score,
    try_truth,
)
from rl.rewards.pool.pool import ScoringPool
from rl.sandbox import sandbox
from rl.sandbox.sandbox import ProgramOutcome, Protections, protections
from tests.tables import cells, rows
from tests.timing import assert_linear_in_text

DOUBLE = {"inputs": ["1\n", "2\n", "5\n"], "outputs": ["2\n", "4\n", "10\n"]}
RIGHT = "```python\nprint(2 * int(input()))\n```"
WRONG_ABOVE_4 = "```python\nn = int(input())\nprint(2 * n if n < 5 else 0)\n```"
ADD = {"fn_name": "add", "inputs": [[1, 2], [0.1, 0.2], [[1], [2]]], "outputs": [3, 0.3, [1, 2]]}


@pytest.fixture
def confined():
    found = protections()
    if not (found.network and found.files):
        pytest.skip(f"this machine confines nothing: {found.reasons}")


def reward(response, ground_truth, **kwargs):
    return score("", response, ground_truth, data_source="code", extra_info={}, **kwargs)


PROGRAMS = [
    ("```python\na\n```", "a\n"),
    ("```python\na\n```\nor\n```python\nb\n```\nso", "b\n"),
    ("```python\na\n```\noutput:\n```\n7\n```", "a\n"),
    ("```py\na\n```", "a\n"),
    ("```Python3\na\n```", "a\n"),
    ("```\na\n```\n```cpp\nb\n```", "b\n"),
    ("  ```python\n  a\n  ```", "  a\n"),
    ("```python\na\nb", "a\nb"),
    ("```python\na\n```python\nb\n```", "b\n"),
    ("print(1)", "print(1)"),
    ("", ""),
]


@pytest.mark.parametrize("response, program", PROGRAMS)
def test_the_last_python_block_is_the_program(response, program):
    assert extract_program(response) == program


UNITS = ["1", "```", "```python\n", "```\n", "`", "\n", " ", "a\n", "```python\na\n```\n"]


@pytest.mark.parametrize("unit", UNITS)
def test_time_grows_linearly_up_to_100_000_characters(unit):
    assert_linear_in_text(extract_program, unit)
    assert_linear_in_text(lambda text: same_output(text, text + "x"), unit)
    assert_linear_in_text(lambda text: same_output(text + "x", "1"), unit)


def test_each_form_of_ground_truth_also_as_json():
    for form in (lambda tests: tests, json.dumps):
        assert [case.stdin for case in read_cases(form(DOUBLE))] == DOUBLE["inputs"]
        assert [case.arguments for case in read_cases(form(ADD))] == [(1, 2), (0.1, 0.2), ([1], [2])]
        for asserts in (["assert a", "assert b"], "assert a\nassert b"):
            found = [case.test for case in read_cases(form({"asserts": asserts}))]
            assert found == ([asserts] if isinstance(asserts, str) else asserts)
    assert [case.test for case in read_cases("assert add(1, 2) == 3")] == ["assert add(1, 2) == 3"]
    for tests, expected in (
        # LiveCodeBench: one argument per line of text. Parquet: numpy arrays.
        ({"fn_name": "f", "inputs": ['[1, 2]\n"a"'], "outputs": ["[3]"]}, (([1, 2], "a"), [3])),
        ({"fn_name": "f", "inputs": np.array([np.array([1, 2])]), "outputs": np.array([3])}, ((1, 2), 3)),
    ):
        (case,) = read_cases(tests)
        assert (case.arguments, case.expected) == expected
    assert read_cases(np.array(["assert a"], dtype=object)) == read_cases('["assert a"]')
    (case,) = read_cases({"inputs": [["1", "2"]], "outputs": [["3"]]})  # APPS: lists of lines
    assert (case.stdin, case.expected) == ("1\n2", "3")


INC = "def f(x): return x + 1"
INC_ALL = "def f(xs): return [x + 1 for x in xs]"
INC_INPUT = "print(int(input()) + 1)"
STDIN = {"type": "stdin_stdout", "input": "1\n", "output": "2\n"}
FORMS = [
    (INC, {"fn_name": "f", "inputs": [1, 2], "outputs": [2, 3]}),
    (INC, {"fn_name": "f", "inputs": 5, "outputs": 6}),
    (INC, {"fn_name": "f", "inputs": [[1], [2]], "outputs": ["2", "3"]}),
    (INC, {"test_list": np.array(["assert f(1) == 2"], dtype=object)}),
    (INC, {"test_list": ["assert f(one) == 2"], "test_setup_code": "one = 1", "test_imports": ["import os"]}),
    (INC, {"fn_name": "Solution().f", "inputs": [[1]], "outputs": [2]}),
    (INC, ["assert f(1) == 2", "assert f(2) == 3"]),
    (INC, '["assert f(1) == 2"]'),
    (INC, {"test": "def check(candidate):\n    assert candidate(1) == 2", "entry_point": "f"}),
    (INC, "from solution import f\ndef test_f():\n    assert f(1) == 2\ntest_f()"),
    (INC, {"test_cases": [{"type": "function_call", "fn_name": "f", "input": [1], "output": [2]}]}),
    (INC_ALL, {"fn_name": "f", "inputs": [[[1, 2]]], "outputs": ["[2, 3]"]}),
    (INC_ALL, {"fn_name": "f", "inputs": [["[1, 2]"]], "outputs": [[2, 3]]}),
    (INC_ALL, {"fn_name": "f", "inputs": "[[[1, 2]]]", "outputs": "[[2, 3]]"}),
    (INC_ALL, '[{"input": "[1, 2]", "output": "[2, 3]", "metadata": {"func_name": "f"}}]'),
    (INC_INPUT, {"inputs": "1\n", "outputs": "2\n"}),
    (INC_INPUT, {"inputs": [1, 2], "outputs": [2, 3]}),
    (INC_INPUT, {"inputs": '["1", "2"]', "outputs": '["2", "3"]'}),
    (INC_INPUT, "{'inputs': ['1'], 'outputs': ['2']}"),
    (INC_INPUT, [{"input": "1", "output": "2", "testtype": "stdin"}]),
    (INC_INPUT, {"language": "python", "test_cases": [STDIN]}),
    ("def f(x): return x + 'd'", {"fn_name": "f", "inputs": [["abc"]], "outputs": ["abcd"]}),
    ("def f(x): pass", "assert f(2) is None"),
    ("def sum(a, b): return a + b", "assert sum(10, 15) == 25"),
    ("class Solution:\n    def f(self, x): return x + 1", "s = Solution()\nassert s.f(1) == 2"),
]


@pytest.mark.parametrize("program, ground_truth", FORMS)
def test_forms_of_other_data_sets_are_read(confined, program, ground_truth):
    try_truth(ground_truth)
    assert reward(program, ground_truth)["acc"] == 1.0
    assert reward(program.replace("+", "- 3 +").replace("pass", "return 3"), ground_truth)["acc"] == 0.0


CASE = "import unittest\nclass Test(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)\n"
SUITE = "unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(Test))"
UNREAD = [
    "assert True",
    "x = 1\nassert x == 1",
    "def test_f():\n    assert f(1) == 2",
    "def check(candidate):\n    assert candidate(1) == 2",
    "def f(x): return x + 1\nassert f(1) == 2",
    "assert f(1) == 2,",
    "assert f(1) ==",
    "[1, 2]",
    "Alice",
    {"language": "javascript", "test_cases": [STDIN]},
    "eJxrYJlqwwABPRbR1UqZeQWlJUpWCkqGMXlK+OgpK/aUlUAEj",
    '["import math", "x = 1"]',
    '["assert f(1) == 2", 3]',
    "import doctest\ndoctest.testmod()",
    "import pytest\npytest.main()",
    "import sys\nassert f(1) == 2\nsys.exit(0)",
]
UNREAD += [CASE, CASE + "if __name__ == '__main__':\n    unittest.main()", CASE + "unittest.main()"]
UNREAD += [{"asserts": ["pass", "# nothing"]}, {"fn_name": "f", "inputs": [{"a": 1}], "outputs": [1]}]
UNREAD += [
    {"inputs": [{"a": 1}], "outputs": ["1"]},
    [{"input": "1", "output": "1", "testtype": "functional"}],
]
PASSES = [
    "print('ok')",
    "print(f(1))",
    "f(1) == 2",
    "assert f",
    "assert callable(f)",
    "assert (f(1) == 2, 'x')",
    "assert f(1) == f(1)",
    "lambda: f(1) == 2",
    "if False:\n    assert f(1) == 2",
    "for x in []:\n    assert f(x) == 1",
    "try:\n    assert f(1) == 2\nexcept Exception:\n    pass",
    "async def t():\n    assert f(1) == 2\nt()",
]
PASSES += [CASE + "unittest.main(exit=False)", CASE + SUITE, {"inputs": ["1\n"], "outputs": [""]}]
PASSES += [{"test": "def check(candidate):\n    pass", "entry_point": "f"}]


@pytest.mark.parametrize("ground_truth", UNREAD)
def test_test_code_that_checks_nothing_is_refused_unrun(ground_truth, monkeypatch):
    monkeypatch.setattr(code_reward, "run_case", None)
    with pytest.raises(ValueError, match="reward_model.ground_truth="):
        check_truth(ground_truth)


@pytest.mark.parametrize("ground_truth", PASSES)
def test_tests_that_pass_without_a_solution_are_refused_and_earn_nothing(confined, ground_truth):
    check_truth(ground_truth)
    with pytest.raises(ValueError, match="its tests pass with"):
        try_truth(ground_truth)
    with pytest.raises(ValueError, match="its tests pass with"):
        reward("def f(x): return 7" if "inputs" not in ground_truth else "x = 1", ground_truth)


@pytest.mark.parametrize(
    "empty", ["f(1)", "def g(): f(1)\nprint(g)", "try: assert f(1) == 2\nexcept Exception: pass"]
)
def test_one_empty_test_among_others_earns_no_fraction(confined, empty):
    tests = ["assert f(1) == 2", empty]
    try_truth(tests)  # all or nothing: the other test decides
    assert reward("def f(x): return 7", tests)["score"] == 0.0
    for call in (
        lambda: try_truth(tests, partial=True),
        lambda: reward("def f(x): return 7", tests, partial=True),
    ):
        with pytest.raises(ValueError, match="with partial=true one of its tests passes"):
            call()


def test_the_pool_tries_truths_without_a_response(confined):
    plan = make_plan("rl.rewards.code:score", {}, {})
    sample = {"prompt": "", "response": None, "data_source": "code", "extra_info": {}}
    with ScoringPool(plan, failure_score=0.0, workers=2, timeout_s=30, memory_mib=0) as pool:
        pool.score([sample | {"ground_truth": truth} for truth in ("assert f(1) == 2", "f(1)")])
        assert list(pool.failures) == [1] and "functions that do nothing" in pool.failures[1]


WITHOUT_TESTS = [None, "", "{}", 7, [], {}, {"inputs": ["1"]}, {"asserts": []}]
WITHOUT_TESTS += [{"inputs": inputs, "outputs": []} for inputs in (["1"], [])]


@pytest.mark.parametrize("ground_truth", WITHOUT_TESTS)
def test_a_ground_truth_without_tests_is_an_error(ground_truth):
    with pytest.raises(ValueError, match="reward_model.ground_truth=.* the code reward needs"):
        reward(RIGHT, ground_truth)


SAME = rows("""
    1  2 => 1 2 ;; 5.0 => 5 ;; 5 => 5.0 ;; 1e3 => 1000 ;; 0.333333 => 0.3333333333 ;;
    Case 1: 0.50000 => Case 1: 0.5 ;; 123456.9 => 123457.0
    """)
SAME += [
    ("1 2\n3\n", "1 2\n3"),
    ("1 2  \n3\n\n\n", "1 2\n3"),
    ("\n1", "1"),
    ("1\r\n2\r\n", "1\n2\n"),
    ("", "\n"),
]
# 50000000000000000 and 50000000000000001 are equal as floats.
OTHER = rows("""
    1\n2 => 1 2 ;; 1\n\n2 => 1\n2 ;; 1 => 2 ;; yes => YES ;; 100000 => 100001 ;; 100000.4 => 100000 ;;
    0.3334 => 0.3333 ;; 1 2 => 1 2 3 ;; nan => 0.5 ;; 1e9999 => 0.5 ;; 0x10 => 16 ;; 1_0 => 10 ;; => 1 ;;
    50000000000000000 => 50000000000000001
    """)


def test_outputs_are_compared_by_lines_and_numbers():
    for output, expected in SAME:
        assert same_output(output, expected), (output, expected)
    for output, expected in OTHER:
        assert not same_output(output, expected), (output, expected)


def test_values():
    assert same_value([1, {"a": 0.1 + 0.2}, None, "x"], [1, {"a": 0.3}, None, "x"])
    different = [(1, True), (1, "1"), ([1], [1, 1]), ({"a": 1}, {"b": 1}), (None, 0), (0.31, 0.3)]
    different += [(float("nan"), 0.3)]
    for value, expected in different:
        assert not same_value(value, expected)


def test_programs_with_input_and_output(confined):
    assert reward(RIGHT, DOUBLE) == {"score": 1.0, "acc": 1.0, "passed": 1.0, "timed_out": 0.0}
    all_or_nothing = reward(WRONG_ABOVE_4, DOUBLE)
    assert (all_or_nothing["score"], all_or_nothing["acc"], all_or_nothing["passed"]) == (0.0, 0.0, 2 / 3)
    assert reward(WRONG_ABOVE_4, DOUBLE, partial=True)["score"] == 2 / 3
    assert reward(WRONG_ABOVE_4, DOUBLE, max_cases=2)["score"] == 1.0
    guarded = "```python\nif __name__ == '__main__':\n    print(2 * int(input()))\n```"
    assert reward(guarded, DOUBLE)["score"] == 1.0
    for max_cases in (0, -1, 1.5):
        with pytest.raises(ValueError, match=f"max_cases={max_cases} must be 1 or more"):
            reward(RIGHT, DOUBLE, max_cases=max_cases)


BROKEN = [
    "",
    "I do not know.",
    "```python\nprint(2 * int(input())\n```",
    "```python\n1 / 0\n```",
    "```python\n```",
]


def test_no_program_or_a_broken_one_earns_nothing(confined):
    for response in BROKEN:
        found = reward(response, DOUBLE, partial=True)
        assert found == {"score": 0.0, "acc": 0.0, "passed": 0.0, "timed_out": 0.0}, response
    # The right output with a failing status is not passed.
    assert reward("print(2 * int(input()))\nraise SystemExit(1)", DOUBLE)["score"] == 0.0


TYPED = """
from dataclasses import dataclass
@dataclass
class Pair:
    a: 'int'
def add(a: List[int], b: Optional[int]): return a + b
"""
"""Types of signatures without an import, as LeetCode has them; a dataclass looks its module up."""


def test_functions_by_call(confined):
    for response, expected in (
        ("```python\ndef add(a, b):\n    print('noise')\n    return a + b\n```", 1.0),
        ("class Solution:\n    def add(self, a, b):\n        return a + b", 1.0),
        ("def add(a, b): return tuple(a) + tuple(b) if isinstance(a, list) else a + b", 1.0),
        (TYPED, 1.0),
        ("def add(a, b): return a - b", 0.0),
        ("def plus(a, b): return a + b", 0.0),
    ):
        assert reward(response, ADD, partial=True)["score"] == expected, response


@pytest.mark.parametrize(
    "body",
    cells("""
        return {1, 2} ;; return object() ;; return 10 ** 5000 ;; raise SystemExit ;;
        import os; os.write(3, b'{"value": 10000000000000000000000}'); os._exit(0) ;;
        import os; os.write(3, b'[' * 100000); os._exit(0) ;; import os; os.write(3, b'{}'); os._exit(0) ;;
        return type('A', (), {'__eq__': lambda *_: True})()
        """),
)
def test_values_that_are_none_of_json_or_odd_earn_nothing(confined, body):
    assert reward(f"def f():\n    {body}", {"fn_name": "f", "inputs": [[]], "outputs": [0.5]})["score"] == 0.0


def test_a_value_in_a_list_of_one_as_apps_has_it(confined):
    for value, expected in ("5", 1.0), ("[[5]]", 0.0):
        tests = {"fn_name": "f", "inputs": [[]], "outputs": [[5]]}
        assert reward(f"def f():\n    return {value}", tests)["score"] == expected


def test_asserts(confined):
    tests = {"asserts": ["assert add(1, 2) == 3", "assert add(5, 5) == 10"]}
    assert reward("def add(a, b):\n    return a + b", tests)["score"] == 1.0
    assert reward("def add(a, b):\n    return 3", tests, partial=True)["score"] == 0.5
    whole = "def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(add)"
    assert reward("def add(a, b):\n    return a + b", whole)["score"] == 1.0
    assert reward("def add(a, b):\n    return a", whole)["score"] == 0.0


TOGETHER_AND_PASS = """
import os, sys
frame = sys._getframe()
while frame:
    token = frame.f_globals.get("job", {}).get("token")
    for fd in range(20 if token else 0):
        try:
            os.write(fd, token.encode())
        except OSError:
            pass
    if token:
        os._exit(0)
    frame = frame.f_back
"""
PROVOKED = [
    ("class TestCase: pass", "from unittest import TestCase\nclass T(TestCase): pass\nassert f(1) == 2"),
    ("class Exception: pass", "class E(Exception): pass\nassert f(1) == 2"),
    ("class Own(BaseException): pass\ndef f(x): return Own\ng = f", "x = f(1)\nassert g(x) == 2"),
    (
        "import os\ndef f(x): raise KeyError\ng = f",
        "try: x = f(1)\nexcept Exception as e: x = e\nassert g(x) == 2",
    ),
    (
        "import os\ndef f(x): os._exit(0)\ng = f",
        "try: x = f(1)\nexcept Exception as e: x = e\nassert g(x) == 2",
    ),
]


@pytest.mark.parametrize("program, tests", PROVOKED)
def test_a_program_cannot_choose_the_process_of_its_tests(confined, program, tests):
    assert reward(f"{TOGETHER_AND_PASS}\n{program}", tests)["score"] == 0.0
    assert reward("def f(x): return 2\ndef g(x): return 2", tests)["score"] == 1.0


def test_leaving_before_the_asserts_does_not_pass_them(confined):
    for leave in ("import sys; sys.exit(0)", "import os; os._exit(0)", "print('token'); exit()", "quit()"):
        for program in (f"{leave}\ndef add(a, b):\n    return 0", f"def add(a, b):\n    {leave}"):
            assert reward(program, "assert add(1, 2) == 3")["score"] == 0.0, program


CHEATS = {
    "equal to everything": "class A:\n    def __eq__(self, other): return True\ndef add(a, b): return A()",
    "a number like all": "class A(int):\n    def __eq__(self, other): return True\n"
    "    __ne__ = lambda *_: False\ndef add(a, b): return A(7)",
    "the token from a frame": "import os, sys\ndef add(a, b):\n"
    "    frame = sys._getframe()\n    while frame:\n"
    "        token = frame.f_globals.get('job', {}).get('token')\n        if token:\n"
    "            for fd in range(3, 20):\n                try: os.write(fd, token.encode())\n"
    "                except OSError: pass\n            os._exit(0)\n"
    "        frame = frame.f_back\n    return 0",
    "its own end": "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): return 0",
    "a replaced compile": "import builtins\nbuiltins.compile = lambda *a, **k: (lambda: None).__code__\n"
    "def add(a, b): return 0",
    "a replaced exec": "import builtins\nbuiltins.exec = lambda *a: None\ndef add(a, b): return 0",
    "names of the tests": "def sorted(x): return 1\ndef abs(x): return 0\ndef add(a, b): return 0",
    "an odd number": "class A:\n    __sub__ = __rsub__ = lambda *_: 0.0\n"
    "    __lt__ = __gt__ = lambda *_: True\n"
    "    __contains__ = lambda *_: True\ndef add(a, b): return A()",
    "the word for tests in one process": "import os\nfor fd in range(1, 20):\n"
    "    try: os.write(fd, b'together')\n    except OSError: pass\ndef add(a, b): return 0",
}


@pytest.mark.parametrize(
    "test",
    [
        "assert add(1, 2) == 3",
        "assert abs(add(1, 2) - 3) < 0.1",
        "assert 3 in [add(1, 2)]",
        "assert sorted([add(1, 2)]) == [3]",
    ],
)
@pytest.mark.parametrize("program", CHEATS.values(), ids=CHEATS)
def test_a_program_does_not_decide_the_asserts(confined, program, test):
    assert reward(program, test)["score"] == 0.0


APART = {
    "in place": ("def f(x): x.sort()", "x = [2, 1]\nf(x)\nassert x == [1, 2]"),
    "containers": (
        "def f(x): return {(1, 'a'): {x}, 2: [None, 2.5, b'x']}",
        "assert f(3) == {(1, 'a'): {3}, 2: [None, 2.5, b'x']}",
    ),
    "counters": (
        "def f(x): return Counter(x), deque(x)",
        "assert f('aab') == (Counter(a=2, b=1), deque('aab'))",
    ),
    "errors": (
        "class Bad(ValueError): pass\ndef f(x): raise Bad('no')",
        "try:\n    f(1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'no'\n"
        "try:\n    f(1)\n    assert False\nexcept Bad: pass",
    ),
    "objects": (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "    def __len__(self): return len(self.items)",
        "s = Stack()\ns.push(4)\nassert len(s) == 1 and s.items == [4] and isinstance(s, Stack)",
    ),
    "generators": (
        "def f(n):\n    yield from range(n)",
        "assert list(f(3)) == [0, 1, 2] and next(f(1)) == 0",
    ),
    "a name of the prelude": ("def gcd(a, b): return 7", "assert gcd(14, 21) == 7\nassert gcd(1, 1) == 7"),
    "a module": (
        "def f(x): return x + 1",
        "import solution\nfrom solution import f\nassert f(1) == solution.f(1) == 2",
    ),
    "a candidate": (
        "def f(x): return x + 1",
        "def check(candidate):\n    assert candidate(1) == 2\ncheck(f)",
    ),
    "a function of the tests": ("def f(g): return g(1)", "assert f(lambda x: x + 1) == 2"),
    "an object of the tests": ("def f(x): return x.y", "class A: y = 3\nassert f(A()) == 3"),
    "a function of Python": (
        "def f(g, x): return g(x)",
        "assert f(len, 'abc') == 3 and f(math.sqrt, 4) == 2",
    ),
    "a class derived": ("class A:\n    def f(self): return 1", "class B(A): pass\nassert B().f() == 1"),
    "a coroutine": ("async def f(): return 1", "import asyncio\nassert asyncio.run(f()) == 1"),
    "large numbers": ("def f(n): return 10 ** n", "assert f(6000) == 10 ** 6000"),
}


@pytest.mark.parametrize("program, test", APART.values(), ids=APART)
def test_asserts_pass_for_a_right_program(confined, program, test):
    assert reward(program, test)["score"] == 1.0


@pytest.fixture
def seen(monkeypatch):
    """Replace the sandbox and return the list of programs and options that reach it."""
    seen = []

    def run_program(source, **options):
        seen.append((source, options))
        return ProgramOutcome(end="exit", code=0, stdout="2", stderr="", seconds=0.1)

    monkeypatch.setattr(code_reward, "run_program", run_program)
    return seen


def test_the_program_cannot_read_expected_values(seen):
    function = {"fn_name": "f", "inputs": [[1]], "outputs": [271828]}
    for ground_truth in ({"inputs": ["1"], "outputs": ["271828"]}, function):
        assert reward(RIGHT, ground_truth)["score"] == 0.0
    assert len(seen) == 2 and "271828" not in repr(seen)


def test_limits_of_time_and_memory(confined):
    slow = reward("while True: pass", DOUBLE, wall_s=0.5, partial=True)
    assert slow == {"score": 0.0, "acc": 0.0, "passed": 0.0, "timed_out": 1.0}
    large = "a = bytearray(600 << 20)\nprint(2 * int(input()))"
    assert reward(large, DOUBLE)["score"] == 1.0
    assert reward(large, DOUBLE, memory_mib=256)["score"] == 0.0


def test_total_s_limits_all_tests_of_a_response(monkeypatch):
    """On a clock that only the programs move: each runs for as long as it may."""
    now, allowed = 100.0, []

    def run_program(source, *, limits, **options):
        nonlocal now
        now += limits.wall_s
        allowed.append(limits.wall_s)
        return ProgramOutcome(end="time", code=0, stdout="", stderr="", seconds=limits.wall_s)

    monkeypatch.setattr(code_reward, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(code_reward, "run_program", run_program)
    fifty = {"inputs": [""] * 50, "outputs": ["1"] * 50}
    many = reward("import time\ntime.sleep(9)", fifty, partial=True, total_s=1.5, wall_s=1)
    assert allowed == [1, 0.5] and many["timed_out"] == 2 / 50


def test_without_protection_nothing_is_run_unless_told_to(monkeypatch):
    found = Protections(layers=(), network=False, files=True, reasons={"seccomp": "refused"})
    monkeypatch.setattr(sandbox, "protections", lambda: found)
    message = "nothing on this machine keeps them from the network.*allow_unprotected=true"
    with pytest.raises(ValueError, match=message):
        reward(RIGHT, DOUBLE)
    assert reward(RIGHT, DOUBLE, allow_unprotected=True)["score"] == 1.0


def test_options_reach_the_sandbox(seen, monkeypatch):
    monkeypatch.setattr(code_reward, "_prove", lambda *_: None)
    options = dict(interpreter="/bin/python", allow_unprotected=True)
    reward(RIGHT, DOUBLE, max_cases=1, wall_s=3, cpu_s=1.5, memory_mib=77, **options)
    ((source, found),) = seen
    assert source == "print(2 * int(input()))\n" and found["stdin"] == "1\n"
    assert options.items() <= found.items()
    limits = found["limits"]
    assert (limits.wall_s, limits.cpu_s, limits.memory_mib) == (3, 2, 77)
