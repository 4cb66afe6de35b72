"""Runs test code in one process, and the program that it tests in another process.

In the process of the tests, a program could read the expected values, replace `==` and write the result
itself. Therefore the tests get stand-ins for the names that the program defines. A call of a stand-in sends
its arguments to the program's process and receives plain values: numbers, text, containers, and the types
that `_WIRE` names. Objects of the program stay in its process, and access to their attributes, methods and
items is a call, too. `==` between such an object and a value of the tests is False, and arithmetic and order
comparisons between them fail. Otherwise the program would receive the expected value and could decide the
result.

Some tests cannot run apart. For example, they import packages outside the standard library, are asynchronous,
derive classes from the program's classes, or pass their own functions or objects to the program. The answer
of such tests is TOGETHER. The program must not be able to cause this answer. Therefore names that the tests
import, classes of Python, and exceptions that the program raised do not lead to it.
"""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from rl.sandbox.sandbox import ProgramOutcome

TOGETHER = "together"
"""Answer of tests that need the program in the same process."""

# Code that both processes run. A value is sent as plain JSON, or as a list of a tag and the parts of the
# value.
_WIRE = """
import ast, builtins, collections, decimal, fractions, importlib, json, operator, os, sys, types
sys.set_int_max_str_digits(0)
KINDS = {"t": tuple, "s": set, "f": frozenset, "q": collections.deque}
TEXTS = {"D": decimal.Decimal, "F": fractions.Fraction}
class Unsupported(Exception):
    pass
def encode(value, other):
    if value is None or type(value) in (bool, str):
        return value
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, dict):
        return ["d", *([encode(k, other), encode(v, other)] for k, v in value.items())]
    for tag, kind in {"l": list, **KINDS}.items():
        if isinstance(value, kind):
            return [tag, *(encode(item, other) for item in value)]
    if isinstance(value, (bytes, bytearray)):
        return ["b", bytes(value).hex()]
    if isinstance(value, complex):
        return ["c", value.real, value.imag]
    for tag, kind in TEXTS.items():
        if isinstance(value, kind):
            return [tag, str(value)]
    return other(value)
def decode(sent, other):
    if not isinstance(sent, list):
        return sent
    tag, *parts = sent
    if tag == "d":
        return {decode(k, other): decode(v, other) for k, v in parts}
    if tag == "l" or tag in KINDS:
        return KINDS.get(tag, list)(decode(part, other) for part in parts)
    if tag == "b":
        return bytes.fromhex(parts[0])
    if tag == "c":
        return complex(*parts)
    return TEXTS[tag](parts[0]) if tag in TEXTS else other(tag, *parts)
job = json.loads(sys.stdin.read())
"""

_PROGRAM = (
    _WIRE
    + """
asked, answers = (os.fdopen(int(fd), mode) for fd, mode in zip(sys.argv[1:], "rw"))
os.dup2(2, 1)
objects = []
def other(value):
    objects.append(value)
    is_error = isinstance(value, type) and issubclass(value, BaseException)
    return ["e", *(base.__name__ for base in value.__mro__)] if is_error else ["o", len(objects) - 1]
def resolve(tag, *parts):
    if tag == "o":
        return objects[parts[0]]
    if tag == "r":
        return range(*parts)
    found = importlib.import_module(parts[0])
    for name in parts[1].split("."):
        found = getattr(found, name)
    return found
prelude = types.ModuleType("prelude")
exec(compile(job["prelude"], "prelude.py", "exec"), vars(prelude))
sys.modules["solution"] = types.ModuleType("solution")  # dataclasses and typing look it up by name
names = vars(sys.modules["solution"])
names.update({k: v for k, v in vars(prelude).items() if not k.startswith("__")})
exec(compile(job["solution"], "solution.py", "exec"), names)
def own(name):
    if name not in names or names[name] is vars(prelude).get(name, names):
        raise NameError(name)
    return names[name]
ACTIONS = {"get": own, "call": lambda f, args, named: f(*args, **named), "getattr": getattr, "is": isinstance}
for line in asked:
    action, *given = json.loads(line)
    given = [decode(part, resolve) for part in given]
    try:
        act = ACTIONS.get(action) or getattr(builtins, action.strip("_"), None) or getattr(operator, action)
        value = encode(act(*given), other)
        answer = ["v", value, encode(given[1] if action == "call" else [], other)]
    except BaseException as error:
        told = [argument for argument in error.args if isinstance(argument, (str, int))]
        answer = ["x", other(type(error)), encode(told, other)]
    answers.write(json.dumps(answer) + "\\n")
    answers.flush()
"""
)

_TESTS = (
    _WIRE
    + """
import ctypes, subprocess
answer = os.dup(1)
os.dup2(2, 1)
def finish(text):
    os.write(answer, text.encode())
    os._exit(0)
if "program" in job:  # in a container: nothing there may look into this process
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
    (heard, theirs), (mine, said) = os.pipe(), os.pipe()
    command = [sys.executable, "-I", "-B", "-X", "utf8", "-c", job["program"], str(mine), str(theirs)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL, pass_fds=(mine, theirs), text=True)
    os.close(mine), os.close(theirs)
    process.stdin.write(json.dumps({"prelude": job["prelude"], "solution": job["solution"]}))
    process.stdin.close()
else:
    heard, said = map(int, sys.argv[1:])
answers, asks = os.fdopen(heard, "r"), os.fdopen(said, "w")
def other(value):
    if isinstance(value, Remote):
        return ["o", object.__getattribute__(value, "_number")]
    kind = value if isinstance(value, type) else type(value)
    if kind.__module__ == "__main__" or (isinstance(value, BaseException) and kind.__module__ != "tests"):
        raise TypeError("the program does not get back what it raised")  # it would choose to run together
    if isinstance(value, range):
        return ["r", value.start, value.stop, value.step]
    if isinstance(value, (type({}.keys()), type({}.values()), type({}.items()))):
        return encode(list(value), other)
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "<")
    if module in sys.stdlib_module_names and "<" not in name and module != "__main__":
        return ["n", module, name]
    raise Unsupported
errors = {}
def error_class(names):
    known = getattr(builtins, names[0], None)
    if isinstance(known, type) and issubclass(known, Exception):
        return known
    if names[0] not in errors:
        known = [getattr(builtins, name, None) for name in names]
        base = next((k for k in known if isinstance(k, type) and issubclass(k, Exception)), Exception)
        errors[names[0]] = type(str(names[0]), (base,), {})
    return errors[names[0]]
def remote(tag, *parts):
    if tag == "e":
        return error_class(parts)
    made = object.__new__(Remote)
    object.__setattr__(made, "_number", int(parts[0]))
    return made
def ask(action, *given):
    asks.write(json.dumps([action, *(encode(part, other) for part in given)]) + "\\n")
    asks.flush()
    kind, value, after = json.loads(answers.readline())
    if kind == "x":
        raise decode(value, remote)(*decode(after, remote))
    for mine, theirs in zip(given[1], decode(after, remote)) if action == "call" else ():
        if isinstance(mine, list) and isinstance(theirs, list):  # changed in place
            mine[:] = theirs
        elif isinstance(mine, (dict, set)) and type(theirs) in (dict, set):
            mine.clear()
            mine.update(theirs)
    return decode(value, remote)
class Remote:
    def __call__(self, *args, **named):
        return ask("call", self, list(args), named)
    def __getattr__(self, name):
        return ask("getattr", self, name)
    def __setattr__(self, name, value):
        ask("setattr", self, name, value)
    def __instancecheck__(self, value):
        return isinstance(value, Remote) and ask("is", value, self)
    def __eq__(self, value):
        return isinstance(value, Remote) and ask("__eq__", self, value)
    def __hash__(self):
        return hash(("remote", object.__getattribute__(self, "_number")))
def forward(name, is_between):
    def method(self, *given):
        if is_between and not all(isinstance(value, Remote) for value in given):
            return NotImplemented
        return ask(name, self, *given)
    setattr(Remote, name, method)
for name in "len iter next getitem setitem delitem str repr bool int float index abs neg round".split():
    forward(f"__{name}__", False)
for name in "lt le gt ge add sub mul truediv floordiv mod pow matmul and or xor".split():
    forward(f"__{name}__", True)
tree = ast.parse(job["test"])
nodes = list(ast.walk(tree))
modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
modules |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
modules = {name.partition(".")[0] for name in modules} - {"solution"}
stored = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
stored |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
stored |= {alias.asname or alias.name for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))
           for alias in node.names if getattr(node, "module", "") != "solution"}
free = {node.id for node in nodes if isinstance(node, ast.Name)} - stored
free |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "solution"
         for alias in node.names}
bases = {base.id for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases
         if isinstance(base, ast.Name)}
is_async = any(isinstance(node, (ast.Await, ast.AsyncFunctionDef)) for node in nodes) or "asyncio" in modules
names = {"__name__": "tests"}
exec(compile(job["prelude"], "prelude.py", "exec"), names)
def defined(wanted):
    found = {}
    for name in sorted(wanted):
        try:
            found[name] = ask("get", name)
        except NameError:
            continue
    return found
# A name of the prelude or of Python means the program's only if the tests use nothing else of it.
layers = free - set(names) - set(vars(builtins)), free & set(names), free & set(vars(builtins))
found = next(filter(None, map(defined, layers)), {})
is_derived = bool(bases & layers[0] & {name for name, value in found.items() if isinstance(value, Remote)})
if modules - sys.stdlib_module_names or is_async or is_derived:
    finish("TOGETHER")
solution = sys.modules["solution"] = types.ModuleType("solution")
vars(solution).update(found)
names.update(found)
try:
    exec(compile(tree, "test.py", "exec"), names)
except Unsupported:
    finish("TOGETHER")
finish(job["token"])
"""
).replace("TOGETHER", TOGETHER)


def run_apart(
    run: Callable[..., ProgramOutcome],
    program: str,
    test: str,
    *,
    token: str,
    prelude: str,
    is_container: bool,
) -> ProgramOutcome:
    """Run test code beside a program. Return the outcome of the tests, or of the program if it exceeded a
    limit.

    Args:
        run: `run_program`, or `run_program_in` for a container, with its settings.
        token: text that the tests print after they have passed.
        prelude: code that runs before the program and before the tests.
        is_container: whether `run` uses a container. In a container the tests start the program themselves,
            which the sandbox does not permit.
    """
    tests = {"prelude": prelude, "test": test, "token": token}
    if is_container:
        return run(_TESTS, stdin=json.dumps({**tests, "program": _PROGRAM, "solution": program}))
    (heard, theirs), (mine, said) = os.pipe(), os.pipe()
    with ThreadPoolExecutor(1) as pool:
        job = json.dumps({"prelude": prelude, "solution": program})
        answering = pool.submit(run, _PROGRAM, stdin=job, pipes=(mine, theirs))
        outcome = run(_TESTS, stdin=json.dumps(tests), pipes=(heard, said))
    ended = answering.result()
    return outcome if ended.end in ("exit", "signal") or outcome.ok else ended
