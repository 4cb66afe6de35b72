"""Mathematics reward: compare the content of the last \\boxed{} with the ground truth.

Answers are compared as strings in the normal form of the MATH data set (Hendrycks et al., arXiv:2103.03874,
and the equivalence test published with it). If these differ, they are compared as expressions with
`math-verify` (huggingface/Math-Verify), if it is installed: 1/2 and 0.5, (x+1)^2 and x^2+2x+1.

A policy may write any expression. Those that could take sympy long are not passed to it (`is_costly`), and a
comparison is aborted after COMPARE_CPU_S.
"""

import contextlib
import functools
import logging
import math
import re
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)

MAX_ANSWER_CHARS = 1000
"""Maximum length of a box that counts as an answer, in characters; the longest in MATH-500 has 159."""
MAX_EXPRESSION_CHARS = 300
"""Maximum characters of an expression that is compared symbolically."""
MAX_DIGITS = 20_000
"""Decimal digits that an expression's value may have; signals cannot interrupt arithmetic in C."""
COMPARE_CPU_S = 2.0
"""Seconds of processor time that one symbolic comparison may take; it usually takes 10 to 50 ms."""

_BOXES = ("\\boxed", "\\fbox")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# sympy would evaluate these term by term.
_UNBOUNDED = re.compile(r"\\(?:sum|prod|i*int|oint|lim|cdots|ldots|dots)(?![a-zA-Z])")
_BINOMIAL = re.compile(r"\\[dt]?binom|\\choose")
_NUMBER = re.compile(r"[0-9]+")
_SCIENTIFIC = re.compile(r"[0-9.][eE][+-]?[0-9]{4,}")
# \text{...} at the end, but not "or less", "and 4", "p.m.", nor one with a number that is no exponent; or
# several with nothing but signs between them, as in \text{ m}/\text{s}^2.
_ONE_UNIT = (
    r"\\text\{(?=( )?)(?! *(?:or|and|[apAP]\.?[mM])\b)(?:[^{}0-9^]|\^[0-9])*\}(?:\^(?:[0-9]|\{-?[0-9]\}))?"
)
_UNIT = re.compile(rf"{_ONE_UNIT}(?:(?:[\s/.]|\\cdot|\\[,;! ])*{_ONE_UNIT})*(?:\s|\\[,;! ])*$")
_UNIT_FRACTION = re.compile(r"\\[dt]?frac\{(\\text\{[^{}]*\})\}\{(\\text\{[^{}]*\})\}")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_NO_WORDS = {"", "or", "and", "st", "nd", "rd", "th"}
_NOON = re.compile(r"\\text\{ *([apAP])\.?[mM]\.? *\}")
_INEQUALITY = re.compile(
    r"[<>\u2260\u2264\u2265]|!=|\\(?:le|ge|lt|gt|leq|geq|leqslant|geqslant|ne|neq|not)(?![a-zA-Z])"
)
_SPELLINGS = (
    (re.compile(r"<=|\u2264|\\(?:leq|leqslant)(?![a-zA-Z])"), r"\\le "),
    (re.compile(r">=|\u2265|\\(?:geq|geqslant)(?![a-zA-Z])"), r"\\ge "),
    (re.compile(r"!=|\u2260|\\neq(?![a-zA-Z])"), r"\\ne "),
)
_SET = re.compile(r"[(\[{]|\\in(?![a-zA-Z])")
_VARIABLE = re.compile(r"^\s*[A-Za-z][A-Za-z0-9']?\s*=")
_TOKEN = re.compile(r"-?(?:[0-9.]+|\\[a-zA-Z]+|.)(?:\^.*)?", re.DOTALL)


def score(
    prompt: str, response: str, ground_truth: Any, *, symbolic: bool = True, **extra: Any
) -> dict[str, float | str]:
    """Return `score` and `acc` (1.0 if the last box holds the answer, else 0.0) and its content as `pred`.

    Args:
        ground_truth: the answer in LaTeX, or a solution with the answer in its last box.
        symbolic: also compare as expressions. Without math-verify this is skipped, and logged once.

    Raises ValueError for a prompt without ground truth.
    """
    if ground_truth is None:
        raise ValueError("reward_model.ground_truth is missing: the math reward needs the answer there.")
    truth = last_boxed(str(ground_truth))
    truth = str(ground_truth) if truth is None else truth
    answer = last_boxed(response)
    if answer is None:
        return {"score": 0.0, "acc": 0.0, "pred": ""}
    acc = float(is_equivalent(answer, truth, symbolic=symbolic))
    return {"score": acc, "acc": acc, "pred": normalize(answer)}


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} or \fbox{...}, or of \boxed 7 up to the next $ or newline.

    Returns None if there is none, or if its braces do not close within MAX_ANSWER_CHARS; \{ and \} do not
    count as braces. Linear time.
    """
    command = max(_BOXES, key=text.rfind)
    start = text.rfind(command)
    if start < 0:
        return None
    start += len(command)
    content = text[start : start + MAX_ANSWER_CHARS]
    if not content.lstrip().startswith("{"):
        return re.split(r"[$\n]", content, maxsplit=1)[0].strip() if content.startswith(" ") else None
    depth = 0
    for brace in _BRACE.finditer(content):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return content[content.index("{") + 1 : brace.start()]
    return None


def is_equivalent(answer: str, truth: str, *, symbolic: bool = True) -> bool:
    """Return whether two answers in LaTeX are equal as normalised strings or (`symbolic`) as expressions."""
    normal = normalize(answer)
    if normal == normalize(truth):
        return bool(normal)
    # The original answers, because normalisation removes what a parser needs (\\ in matrices, \pi r).
    return symbolic and compare_symbolically(answer, truth)


# ---- as strings ----


def normalize(answer: str) -> str:
    r"""Return the normal form of an answer, following the equivalence test of MATH.

    Removed: line breaks, blanks, \!, \left, \right, degrees, dollar and percent signs, a unit (\text{ ...} at
    the end), a leading variable of one or two characters (x=). Rewritten: \tfrac and \dfrac to \frac, \frac12
    to \frac{1}{2}, \sqrt2 to \sqrt{2}, .5 to 0.5, a/b of whole numbers to a fraction, 0.5 to \frac{1}{2}.

    Beyond MATH, these are removed: dollar signs without a backslash, a trailing period, \text around words,
    and {,}. Inequalities are kept, in one spelling (MATH reads x<=5 as 5), and so is what follows \text{ ...}
    (MATH reads 3 \text{ or } -3 as 3), unless that is a unit at the end.
    """
    text = _strip(answer).replace("\\\\", "\\").replace("{,}", ",").removesuffix(".")
    text = re.sub(r"^\\(?:text|mathrm|textbf)\{([^{}]*)\}$", r"\1", text)
    text = re.sub(r"\\[dt]frac(?![a-zA-Z])", r"\\frac", text)
    text = re.sub(r"\\(?:left|right)(?![a-zA-Z])", "", text)  # not of \leftarrow
    text = text.replace("^{\\circ}", "").replace("^\\circ", "")
    text = _NOON.sub(lambda found: found[1].lower() + "m", text)
    unit = _unit(text)
    text = text[: unit.start()] if unit and unit[1] else _TEXT.sub(r"\1", text)
    text = text.replace("\\%", "").replace("%", "")
    text = re.sub(r"(^|[ {(\[,+-])\.(?=[0-9])", r"\g<1>0.", text)
    text = _VARIABLE.sub("", text) if text.count("=") == 1 else text
    for spelling, usual in _SPELLINGS:
        text = spelling.sub(usual, text)
    text = re.sub(r"\\sqrt *([0-9a-zA-Z])", r"\\sqrt{\1}", text)
    text = re.sub(r"\\frac *([0-9a-zA-Z]) *([0-9a-zA-Z])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac *([0-9a-zA-Z]) *(?=\{)", r"\\frac{\1}", text)
    text = "".join(text.split())
    if text == "0.5":
        return "\\frac{1}{2}"
    return re.sub(r"^(-?[0-9]+)/(-?[0-9]+)$", r"\\frac{\1}{\2}", text)


def _strip(answer: str) -> str:
    """Remove signs without a meaning: dollar signs, line breaks, negative space. Write units as m/s."""
    text = answer.replace("\\$", "").replace("\\!", "").replace("\n", " ").strip().strip("$").strip()
    return _UNIT_FRACTION.sub(r"\1/\2", text)


def _unit(text: str) -> re.Match[str] | None:
    """Return the unit with which an answer ends, if no other \\text{...} comes before."""
    start = text.find("\\text{")
    return _UNIT.match(text, start) if start >= 0 else None


# ---- as expressions ----


def compare_symbolically(answer: str, truth: str) -> bool:
    """Return whether math-verify finds two answers equal.

    Returns False if math-verify is not installed, if either expression is costly, or after COMPARE_CPU_S
    (main thread only). math-verify's own timeouts are disabled, because they use SIGALRM, which the caller
    may need.
    """
    answer, truth = _strip(answer), _strip(truth)
    # Words are compared as strings only, because math-verify ignores them: 5 feet 2 inches would equal 5.
    if _has_words(answer) or _has_words(truth) or _is_bound(answer, truth) or _is_bound(truth, answer):
        return False
    if is_costly(answer) or is_costly(truth) or (functions := _math_verify()) is None:
        return False
    parse, verify = functions
    try:
        with _cpu_limit(COMPARE_CPU_S):
            gold, found = (parse(f"${text}$", parsing_timeout=None) for text in (truth, answer))
            return bool(gold and found and verify(gold, found, timeout_seconds=None))
    except _TookTooLong:
        log.warning("a symbolic comparison took too long and counts as unequal: %r and %r", answer, truth)
        return False
    # Parsers and sympy raise all kinds of exceptions on text that is not mathematics.
    except Exception:
        log.debug("symbolic comparison of %r and %r failed", answer, truth, exc_info=True)
        return False


def _has_words(answer: str) -> bool:
    """Return whether the value of an answer has words in \\text{...} besides a unit, ordinals, or and and."""
    value = answer.rpartition("=")[2] if answer.count("=") == 1 else answer
    return not _unit(value) and not _NO_WORDS.issuperset(text.strip(" ,;") for text in _TEXT.findall(value))


def _is_bound(answer: str, other: str) -> bool:
    """Return whether an answer is an inequality without a left side, or has one although the other answer is
    neither an inequality nor a set."""
    if _INEQUALITY.match(answer):
        return True
    return bool(_INEQUALITY.search(answer)) and not (_INEQUALITY.search(other) or _SET.search(other))


def is_costly(expression: str) -> bool:
    """Return whether sympy might need minutes for an expression.

    This holds for a long expression, a number of more than MAX_DIGITS digits (10^{10^{10}}), a large
    factorial or binomial coefficient, a sum, product, integral or limit.
    """
    if len(expression) > MAX_EXPRESSION_CHARS:
        return True
    if _UNBOUNDED.search(expression) or _SCIENTIFIC.search(expression):
        return True
    numbers = [int(number) for number in _NUMBER.findall(expression)]
    if "!" in expression:
        plain = re.findall(r"(?<![0-9!)}^])([0-9]+)!(?!!)", expression)
        if expression.count("!") != len(plain) or any(int(number) > 1000 for number in plain):
            return True
    if _BINOMIAL.search(expression) and any(number > 1000 for number in numbers):
        return True
    return _max_digits(expression) > MAX_DIGITS


def _max_digits(expression: str) -> float:
    """Return an upper bound on the decimal digits of an expression of numbers, + * and ^; inf from 10^300 on.

    The bound multiplies all numbers outside exponents (each plus 2, which covers sums) and raises the product
    to all exponents in turn.
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
    """Return the end of the exponent at `start`; 2^10^10 and 2^{10}^{10} are read as 2^(10^10)."""
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


@functools.cache
def _math_verify() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        log.warning(
            "answers are compared as strings only (0.25 and 1/4 differ): %s. To compare expressions: "
            "pip install --no-deps math-verify latex2sympy2_extended antlr4-python3-runtime",
            error,
        )
        return None
    # It would warn in every process that its timeouts are disabled.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return parse, verify


class _TookTooLong(BaseException):
    """Raised by the timer. Not a subclass of Exception, because sympy and math-verify catch those."""


@contextlib.contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Raise _TookTooLong in the body after `seconds` of this process's processor time.

    Has no effect outside the main thread, or while the timer runs already. Uses SIGVTALRM, because the caller
    may use SIGALRM to limit the whole call.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _TookTooLong

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getitimer(signal.ITIMER_VIRTUAL)[0]:
        yield
        return
    before = signal.signal(signal.SIGVTALRM, interrupt)
    # Repeated every 0.1 s in case a bare except or a __del__ swallows the first one.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
