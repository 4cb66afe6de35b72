"""Compares two answers in LaTeX as expressions, with the parser and the rules of `math-verify`.

A policy may write any expression. Expressions that could take sympy long are not compared (`is_costly`), and
a comparison is aborted after COMPARE_CPU_S. Numbers are compared exactly, with one exception: a decimal may
stand for a number that has no finite decimal, for example 0.333333 for 1/3. Both must then agree to six
places (math-verify's rule) and must not be below 0.001.
"""

import contextlib
import functools
import itertools
import logging
import math
import re
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from rl.rewards.latex import INEQUALITY, has_decimals, has_words, read, split_name, strip, without_unit

log = logging.getLogger(__name__)

MAX_EXPRESSION_CHARS = 300
"""Maximum number of characters of an expression that is compared symbolically."""
MAX_DIGITS = 20_000
"""Maximum number of decimal digits of the value of an expression. Without a limit, arithmetic in C could take
long, and signals cannot interrupt it."""
COMPARE_CPU_S = 2.0
"""Seconds of processor time that one symbolic comparison may take; it usually takes 10 to 50 ms."""

# sympy would evaluate expressions with these commands term by term.
_UNBOUNDED = re.compile(r"\\(?:sum|prod|i*int|oint|lim|cdots|ldots|dots)(?![a-zA-Z])")
_BINOMIAL = re.compile(r"\\[dt]?binom|\\choose")
_FACTORIAL = re.compile(r"(?:(?<![0-9!)}^])([0-9]+|[a-z])|(?<!\^)(\([0-9a-z+ -]+\)))!(?!!)")
_NUMBER = re.compile(r"[0-9]+")
_SCIENTIFIC = re.compile(r"[0-9.][eE][+-]?[0-9]{4,}")
_TOKEN = re.compile(r"-?(?:[0-9.]+|\\[a-zA-Z]+|.)(?:\^.*)?", re.DOTALL)
_COMPLEX = re.compile(r"(?<![a-zA-Z\\])i(?![a-zA-Z])|\\mathbb\{C\}")
_TINY = re.compile(r"\^\s*\{?\s*-\s*[0-9]{2}")


def compare_symbolically(answer: str, truth: str) -> bool:
    """Return whether two answers are equal as expressions.

    Returns False if math-verify is not installed, if `read` does not know a part of an answer, if an answer
    is costly, and after COMPARE_CPU_S (the time is limited only in the main thread).
    """
    percents = ["%" in text for text in (answer, truth)]
    answer, truth = strip(answer), strip(truth)
    # Words, and inequalities without a left side, are compared as strings only.
    if any(has_words(text) or INEQUALITY.match(text) for text in (answer, truth)):
        return False
    (name, value), (other_name, other) = split_name(answer), split_name(truth)
    # One answer may leave out the name, but x=5 is not y=5, and x \\in (0,1) is not 0<y<1.
    if name == other_name or not re.search(r"=|" + INEQUALITY.pattern, truth if name else answer):
        answer, truth = value, other
    if is_costly(answer) or is_costly(truth):
        return False
    found, gold = (read(without_unit(text)) for text in (answer, truth))
    if not found or not gold or _differ_in_case(found, gold) or (functions := _math_verify()) is None:
        return False
    parse, verify = functions
    is_real = not (_COMPLEX.search(found) or _COMPLEX.search(gold))
    parse = functools.partial(parse, is_real=is_real)
    equal = _Comparison(parse, verify, approximates=has_decimals(answer) != has_decimals(truth)).equal
    try:
        with _cpu_limit(COMPARE_CPU_S):
            if equal(found, gold):
                return True
            # 50% equals 50, as in MATH, and it also equals 0.5.
            found, gold = (f"({text})/100" if p else text for text, p in zip((found, gold), percents))
            return percents[0] != percents[1] and equal(found, gold)
    except _TookTooLong:
        log.warning("a symbolic comparison took too long and counts as unequal: %r and %r", answer, truth)
        return False
    # Parsers and sympy raise all kinds of exceptions on text that is not mathematics.
    except Exception:
        log.debug("symbolic comparison of %r and %r failed", answer, truth, exc_info=True)
        return False


class _Comparison:
    """Compares two results of `read`. Its methods may raise any exception.

    approximates: whether only one of the answers has decimals, so that they may approximate the other answer.
    """

    def __init__(self, parse: Callable[..., Any], verify: Callable[..., Any], *, approximates: bool):
        self._parse, self._verify, self._approximates = parse, verify, approximates

    def equal(self, found: str, gold: str) -> bool:
        """Compare lists, sets, points and intervals element by element, and other answers as one
        expression."""
        if "".join(found.split()) == "".join(gold.split()):
            return True
        (opened, ours), (other, theirs) = _elements(found), _elements(gold)
        if opened == other == "\\{\\}" or (ours and theirs):
            is_ordered = opened[:1] in ("(", "[") or other[:1] in ("(", "[")
            # 1, 2 may stand for (1, 2) and for {1, 2}. With other brackets the answers differ.
            if len(ours) != len(theirs) or (opened != other and opened not in ("", "()", "\\{\\}")):
                return False
            if opened != other and {opened, other} not in ({"", "()"}, {"", "\\{\\}"}):
                return False
            return all(map(self.equal, ours, theirs)) if is_ordered else self._unordered(ours, theirs)
        if (ours or theirs) and not re.search(
            r"[<>=]|\\(?:le|ge|ne|in|infty|pm|mp|cup|cap|setminus)", found + gold
        ):
            return len(ours + theirs) == 1 and self.equal(*(ours or [found]), *(theirs or [gold]))
        if INEQUALITY.search(found) or INEQUALITY.search(gold):
            return self._same_solutions(found, gold)
        for sign in ("\\cup", "\\cap"):  # unions of intervals, or of letters, which the parser does not read
            ours, theirs = _split(found, sign), _split(gold, sign)
            if len(ours) == len(theirs) > 1 and self._unordered(ours, theirs):
                return True
        return self._same(found, gold)

    def _unordered(self, ours: list[str], theirs: list[str]) -> bool:
        left = list(theirs)
        for text in ours:
            match = next((other for other in left if self.equal(text, other)), None)
            if match is None:
                return False
            left.remove(match)
        return True

    def _same(self, found: str, gold: str) -> bool:
        from sympy import Eq, Expr, simplify
        from sympy.logic.boolalg import Boolean

        if ("=" in found) != ("=" in gold):  # 2x = 6 is not 6
            (name, found), (other, gold) = split_name(found), split_name(gold)
            if not (name or other):
                return False
        ours, theirs = self._parse(found), self._parse(gold)
        if all(isinstance(value, Expr) and value.is_number for value in (ours, theirs)):
            return _same_number(ours, theirs, self._approximates)
        if any(isinstance(value, Boolean) and not value.free_symbols for value in (ours, theirs)):
            return False  # 0=1 and 0=2 are both false
        if isinstance(ours, Eq) and isinstance(theirs, Eq):
            # math-verify would find two equations without a solution equal.
            ratio = simplify((ours.lhs - ours.rhs) / (theirs.lhs - theirs.rhs))
            return bool(ratio.is_number and ratio.is_finite and not ratio.is_zero)
        # math-verify rounds absolutely, so it would find two tiny numbers equal.
        if _TINY.search(found) or _TINY.search(gold):
            return ours == theirs
        return self._verify(theirs, ours)

    def _same_solutions(self, found: str, gold: str) -> bool:
        """Compare inequalities as written. Inequalities in one variable are also compared as sets."""
        from sympy import S

        (names, ours), (other_names, theirs) = map(self._solutions, (found, gold))
        if names and other_names and names != other_names:
            return False
        if ours is None or theirs is None:
            return "\\cup" not in found + gold and self._verify(self._parse(gold), self._parse(found))
        # Two inequalities that hold nowhere, or everywhere, do not count as equal.
        return ours == theirs and ours not in (S.EmptySet, S.Reals)

    def _solutions(self, text: str) -> tuple[Any, Any]:
        """Return the variables of a text and the set of its solutions, which is None unless there is one
        variable."""
        from sympy import Eq, Set, Union
        from sympy.logic.boolalg import Boolean

        values = [self._parse(part) for part in _split(text, "\\cup")]
        names = set().union(*(value.free_symbols for value in values))
        sets = []
        for value in values:
            if isinstance(value, Eq) and isinstance(value.rhs, Set):  # x in a set
                value = value.rhs
            elif isinstance(value, Boolean) and len(names) == 1:
                value = value.as_set()
            sets.append(value if isinstance(value, Set) else None)
        return names, None if None in sets else Union(*sets)


def _same_number(found: Any, gold: Any, approximates: bool) -> bool:
    """Return whether two numbers of sympy are equal, or one approximates the other."""
    found, gold = found.doit(), gold.doit()
    if found == gold:
        return found.is_finite is not False or bool(found.is_extended_real)  # 1/0 is no number
    if found.is_Rational and gold.is_Rational:
        if not approximates:
            return False
    else:
        size = max(abs(found.evalf(30)), abs(gold.evalf(30)))
        if not size.is_finite:
            return False
        if abs((found - gold).evalf(60)) <= size * 10**-40:
            return True
    if not approximates or min(abs(found.evalf(30)), abs(gold.evalf(30))) < 0.001:
        return False
    terminating = [value.is_Rational and 10**300 % value.q == 0 for value in (found, gold)]
    return not all(terminating) and found.round(6) == gold.round(6)


def _elements(text: str) -> tuple[str, list[str]]:
    """Return the brackets around a text and its elements between commas; no elements if it is not a list.

    One element in the brackets of a set is a list. In other brackets, or without brackets, a list has at
    least two elements.
    """
    text = text.strip()
    if len(parts := _split(text)) > 1:
        return "", parts
    for opening, closing in itertools.product(("\\{", "(", "["), ("\\}", ")", "]")):
        if text.startswith(opening) and text.endswith(closing):
            parts = _split(text[len(opening) : -len(closing)])
            if len(parts) > (opening != "\\{"):
                return opening + closing, parts
    return "", []


def _split(text: str, separator: str = ",") -> list[str]:
    """Return the parts of a text between separators outside of brackets; [] if the brackets do not match."""
    parts, depth = [""], 0
    for token in re.findall(r"\\(?:[a-zA-Z]+|[{}])|[\s\S]", text):
        depth += (token in ("(", "[", "{", "\\{")) - (token in (")", "]", "}", "\\}"))
        if depth < 0:
            return []
        if token == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += token
    return parts


def is_costly(expression: str) -> bool:
    """Return whether sympy might need minutes for an expression.

    This is so for a long expression, for a number of more than MAX_DIGITS digits such as 10^{10^{10}}, for a
    large factorial or binomial coefficient, and for a sum, product, integral or limit.
    """
    if len(expression) > MAX_EXPRESSION_CHARS:
        return True
    if _UNBOUNDED.search(expression) or _SCIENTIFIC.search(expression):
        return True
    numbers = [int(number) for number in _NUMBER.findall(expression)]
    factorials = [number or group for number, group in _FACTORIAL.findall(expression)]
    if expression.count("!") != len(factorials) or any(int(n) > 1000 for n in factorials if n.isdigit()):
        return True
    if not all(n.isdigit() for n in factorials) and any(number > 20 for number in numbers):
        return True
    if _BINOMIAL.search(expression) and any(number > 1000 for number in numbers):
        return True
    return _max_digits(expression) > MAX_DIGITS


def _max_digits(expression: str) -> float:
    """Return an upper bound on the decimal digits of an expression of numbers, + * and ^; inf if it exceeds
    10^300.

    The bound is the product of all numbers outside exponents, raised to all exponents in turn. 2 is added to
    each number before, so that the bound holds for sums, too.
    """
    outside, exponents = _split_exponents(expression.replace("**", "^"))
    digits = sum(math.log10(int(number) + 2) for number in _NUMBER.findall(outside))
    for exponent in exponents:
        inner = _max_digits(exponent)
        if inner > 300:
            return math.inf
        digits *= max(1.0, 10.0**inner)
    return digits


def _split_exponents(expression: str) -> tuple[str, list[str]]:
    """Return an expression without its outermost exponents, and these exponents."""
    pieces, exponents, position = [], [], 0
    while (caret := expression.find("^", position)) >= 0:
        pieces.append(expression[position:caret])
        start = caret + 1
        end = _end_of_group(expression, start)
        exponents.append(expression[start:end])
        position = end
    return "".join([*pieces, " ", expression[position:]]), exponents


def _end_of_group(expression: str, start: int) -> int:
    """Return the end of the exponent that begins at `start`. 2^10^10 and 2^{10}^{10} are read as
    2^(10^10)."""
    opening = expression[start : start + 1]
    if opening not in ("{", "("):
        token = _TOKEN.match(expression, start)
        return token.end() if token else len(expression)
    closing, depth = {"{": "}", "(": ")"}[opening], 0
    for position in range(start, len(expression)):
        depth += (expression[position] == opening) - (expression[position] == closing)
        if depth == 0:
            return len(expression) if expression[position + 1 :].lstrip().startswith("^") else position + 1
    return len(expression)


def _differ_in_case(found: str, gold: str) -> bool:
    """Return whether two expressions have the same letter in different cases, such as r and R.

    The parser ignores the case. The letters A to E, which are choices, may be written in either case.
    """
    if all(re.fullmatch(r"\(?[A-Ea-e]\)?", text) for text in (found, gold)):
        return False
    one, other = (set(re.findall(r"\\[a-zA-Z]+|[a-zA-Z]", text)) for text in (found, gold))
    return not {token.lower() for token in one - other}.isdisjoint(token.lower() for token in other - one)


@functools.cache
def _math_verify() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the two functions of math-verify that parse and compare; None if it is not installed."""
    try:
        from latex2sympy2_extended import latex2sympy
        from math_verify import verify
        from sympy import I
    except ImportError as error:
        log.warning(
            "answers are compared as strings only (0.25 and 1/4 differ): %s. To compare expressions: "
            "pip install --no-deps math-verify latex2sympy2_extended antlr4-python3-runtime",
            error,
        )
        return None
    # math-verify would warn in every process that its timeouts are disabled.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def parse(text: str, is_real: bool) -> Any:
        value = latex2sympy(text, is_real=is_real or None, convert_degrees=False, normalization_config=None)
        return value if is_real else value.subs({s: I for s in value.free_symbols if s.name == "i"})

    return parse, functools.partial(verify, numeric_precision=100, timeout_seconds=None)


class _TookTooLong(BaseException):
    """Raised by the timer. It is not a subclass of Exception, because sympy and math-verify would catch
    it."""


@contextlib.contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Raise _TookTooLong in the `with` block after `seconds` of processor time of this process.

    It has no effect outside the main thread, or if the timer already runs. It uses SIGVTALRM, because the
    caller may use SIGALRM to limit the whole call.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _TookTooLong

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getitimer(signal.ITIMER_VIRTUAL)[0]:
        yield
        return
    before = signal.signal(signal.SIGVTALRM, interrupt)
    # The timer fires again every 0.1 s, in case a bare except or a __del__ swallows the first exception.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
