"""Reads the tests of the code reward from a ground truth.

A ground truth is a mapping or list of one of these forms, or the JSON or Python text of it, or test code:

    {"inputs": [str, ...], "outputs": [str, ...]}              standard input and output; APPS: lists of lines
    {"fn_name": str, "inputs": [[...], ...], "outputs": [...]} arguments and value of a function or method of
        the class Solution; an argument or value may be the text of one, and LiveCodeBench's text has one
        argument per line. One argument need not be in a list.
    [{"input": ..., "output": ...}, ...]                       LiveCodeBench, PrimeIntellect (`test_cases`);
        with `fn_name` or `metadata.func_name` for calls
    {"asserts": [str, ...] or str}, or a list of texts         test code; each text is one test (MBPP:
        `test_list`, after `test_imports` and `test_setup_code`)
    {"test": str, "entry_point": str}                          HumanEval: code that defines `check`
    any other text                                             test code

If `inputs` or `outputs` is a single text or number instead of a list, it belongs to one test.
"""

import ast
import builtins
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.rewards.answers import container, plain


@dataclass(frozen=True)
class Case:
    """One test of a program."""

    stdin: str | None = None
    fn_name: str = ""
    arguments: tuple[Any, ...] | None = None
    """Arguments of the call of `fn_name`."""
    test: str | None = None
    """Test code, which raises an exception if the program is wrong."""
    expected: Any = None
    """Expected standard output, or expected value of the call."""


def refusal(ground_truth: Any, reason: str) -> ValueError:
    """Return the error for tests that cannot judge a program."""
    return ValueError(f"reward_model.ground_truth={ground_truth!r:.300}: {reason}.")


# ---- forms ----


def read_cases(ground_truth: Any) -> list[Case]:
    """Return the tests in a ground truth. Raises ValueError if it is malformed or holds no test."""
    tests = plain(ground_truth)
    if isinstance(tests, str):
        found = container(tests)
        tests = tests if found is None else found
    try:
        cases = _cases(tests)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _malformed(ground_truth, f" ({error})" if type(error) is ValueError else "") from error
    if not cases:
        raise _malformed(ground_truth, "")
    return cases


def _malformed(ground_truth: Any, why: str) -> ValueError:
    return refusal(
        ground_truth,
        "the code reward needs `inputs` and `outputs` of equal, positive length (with `fn_name` for calls), "
        f"or `asserts`, or test code{why}",
    )


def _cases(tests: Any) -> list[Case]:
    if isinstance(tests, str):
        return [Case(test=tests)] if tests.strip() else []
    if isinstance(tests, Mapping):
        language = str(tests.get("language") or "python")
        if not language.lower().startswith("py"):
            raise ValueError(f"language={language}; programs run as Python, so leave the row out")
        for key in ("asserts", "test_list", "test_cases"):
            if tests.get(key) is not None:
                listed = _listed(tests[key])
                if key == "test_cases":
                    return _cases([{"fn_name": tests.get("fn_name"), **_mapping(each)} for each in listed])
                setup = [*_listed(tests.get("test_imports") or []), tests.get("test_setup_code") or ""]
                return _cases(["\n".join([*setup, each]).lstrip() for each in listed])
        if isinstance(tests.get("test"), str):
            call = f"\ncheck({tests['entry_point']})" if tests.get("entry_point") else ""
            return [Case(test=tests["test"] + call)]
        fn_name, inputs, outputs = tests.get("fn_name"), _listed(tests["inputs"]), _listed(tests["outputs"])
        if len(inputs) != len(outputs):
            raise ValueError(f"{len(inputs)} inputs, {len(outputs)} outputs")
        return [_case(fn_name, *pair) for pair in zip(inputs, outputs)]
    if all(isinstance(each, str) for each in tests):
        return [Case(test=each) for each in tests if each.strip()]
    return [_listed_case(_mapping(each)) for each in tests]


def _mapping(case: Any) -> Mapping[str, Any]:
    case = container(case) if isinstance(case, str) else case
    if not isinstance(case, Mapping):
        raise ValueError("a list of tests holds texts, or mappings with input and output")
    return case


def _listed_case(case: Mapping[str, Any]) -> Case:
    """Return the test that a mapping of LiveCodeBench or PrimeIntellect describes."""
    about: Any = case.get("metadata") or {}
    about = container(about) or {} if isinstance(about, str) else about
    fn_name = case.get("fn_name") or about.get("func_name")
    kind = case.get("type") or case.get("testtype") or ""
    if not fn_name and "func" in kind:
        raise ValueError(f"a test of type {kind} has no fn_name")
    return _case(fn_name, case["input"], case["output"])


def _case(fn_name: str | None, given: Any, expected: Any) -> Case:
    given, expected = plain(given), plain(expected)
    if not fn_name:
        return Case(stdin=_text(given), expected=_text(expected))
    return _call(fn_name.rpartition(".")[2], given, expected)  # Solution().f


def _listed(value: Any) -> list[Any]:
    """Return a list: the value itself, the list that it spells as text, or a list with only the value."""
    value = plain(value)
    if isinstance(value, str):
        found = container(value)
        value = found if isinstance(found, list) else value
    if value is None or isinstance(value, Mapping):
        raise ValueError("a list of tests must be a list")
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def _text(value: Any) -> str:
    """Return standard input or output as text. value: a text, a number, or a list of lines."""
    lines = [plain(line) for line in value] if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(line, (str, int, float)) for line in lines):
        raise ValueError("standard input and output must be text, numbers or a list of lines")
    return "\n".join(map(str, lines))


def _call(fn_name: str, given: Any, expected: Any) -> Case:
    if isinstance(given, str):
        arguments = [literal(line) for line in given.splitlines() if line.strip()]
        expected = literal(expected) if isinstance(expected, str) else expected
    elif isinstance(given, Mapping):
        raise ValueError("arguments must be a list, not a mapping")
    else:
        arguments = [_read(each) for each in given] if isinstance(given, (list, tuple)) else [given]
    return Case(fn_name=fn_name, arguments=tuple(map(_json, arguments)), expected=_json(expected))


def _read(argument: Any) -> Any:
    """Return an argument; a text that spells a list or mapping becomes this list or mapping."""
    found = container(argument) if isinstance(argument, str) else None
    return argument if found is None else found


def literal(text: str, *default: Any) -> Any:
    """Return the value that a text spells in JSON or Python.

    If it spells none, return `default`, or raise ValueError without one.
    """
    for parse in (json.loads, ast.literal_eval):
        try:
            return _json(parse(text.strip()))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    if default:
        return default[0]
    raise ValueError(f"{text!r:.60} is not a value in JSON or Python")


def _json(value: Any) -> Any:
    """Convert arrays and numbers of numpy, which are read from Parquet files, to types of JSON."""
    return json.loads(json.dumps(value, default=lambda array: array.tolist()))


# ---- test code that checks nothing ----


def check_test(case: Case, ground_truth: Any, *, own_python: bool) -> bool:
    """Return whether a test checks anything, judged by its code alone, without running it.

    It returns False if the code only defines functions, imports modules and assigns values.

    own_python: whether the Python of this process will run the code. If so, code that it cannot parse is an
        error.

    Raises ValueError for such code, for code that uses no name that a program could define, and for code that
    ends the process before the result is known.
    """
    if case.test is None:
        return True
    try:
        tree = ast.parse(case.test)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if own_python:
            raise refusal(ground_truth, f"its test code cannot be read: {error}") from error
        return True
    run = [node for node in tree.body if not _only_defines(node)]
    calls = [part for node in run for part in ast.walk(node) if isinstance(part, ast.Call)]
    for call in calls:
        name = ast.unparse(call.func)
        if name in _ENDS and not any(keyword.arg == "exit" for keyword in call.keywords):
            raise refusal(
                ground_truth,
                f"its test code calls {name}, which ends the process before the result is known; call the "
                "tests and let a failure raise",
            )
    if not run:
        return False
    if not _outside_names(tree):
        raise refusal(ground_truth, "its test code uses nothing that a program could define")
    return True


_ENDS = ("unittest.main", "pytest.main", "sys.exit", "exit", "quit", "os._exit")


def _only_defines(node: ast.stmt) -> bool:
    """Return whether a statement checks nothing: a definition, an import, a value, or an `if __name__`
    block."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Pass():
            return True
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return True
        case ast.Assign(value=value) | ast.AnnAssign(value=value) | ast.Expr(value=value):
            return value is None or not any(isinstance(part, ast.Call) for part in ast.walk(value))
    return False


def _outside_names(tree: ast.AST) -> set[str]:
    """Return the names that test code reads but does not define, and the names that it imports from
    `solution`."""
    read, defined, imported = set[str](), set[str](), set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                read.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                defined.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                defined.add(name)
            case ast.ImportFrom(module="solution", names=names):
                imported |= {alias.name for alias in names}
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                defined |= {(alias.asname or alias.name).partition(".")[0] for alias in names}
                imported |= {"solution"} if any(alias.name == "solution" for alias in names) else set()
    return (read - defined) | imported


def idle_program(case: Case, value: str) -> str:
    """Return a program that does nothing, but defines the names that a test reads.

    A name becomes a function that returns `value`, or, with a capital first letter, a class of such methods.
    """
    try:
        names = {case.fn_name} if case.test is None else _outside_names(ast.parse(case.test))
    except (SyntaxError, ValueError):  # code for another version of Python
        names = set()
    names = {name for name in names if name.isidentifier()} - _BUILTINS
    lines = [
        "class Idle:",
        "    def __init__(self, *args, **kwargs): pass",
        f"    def __getattr__(self, name): return lambda *args, **kwargs: {value}",
        *(
            f"class {name}(Idle): pass"
            if name[0].isupper()
            else f"def {name}(*args, **kwargs): return {value}"
            for name in sorted(names)
        ),
    ]
    return "\n".join(lines)


_BUILTINS = frozenset(vars(builtins))
