"""Mathematics with the answer in a box: is the content of the last \\boxed{} the right one?

Compared as strings in the normal form of the MATH data set (Hendrycks et al., arXiv:2103.03874, and the equivalence test
published with it), and where these differ, as expressions with `math-verify` (huggingface/Math-Verify), if it is installed:
1/2 and 0.5, (x+1)^2 and x^2+2x+1, {1,2} and {2,1}.

Expressions come from a policy that may write anything. What could take sympy long is not given to it, and a comparison that
takes long all the same is given up: see `is_costly` and COMPARE_CPU_S.
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
"""A longer content of a box is no answer; the longest in MATH-500 has 159 characters."""
MAX_EXPRESSION_CHARS = 300
"""Longer expressions are compared as strings only."""
MAX_DIGITS = 20_000
"""Numbers that an expression may have digits for, by an upper bound: arithmetic in C, which no signal interrupts."""
COMPARE_CPU_S = 2.0
"""Seconds of processor time that one symbolic comparison may take; a usual one takes 10 to 50 ms."""

_BOXES = ("\\boxed", "\\fbox")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# sympy would carry these out, term by term.
_UNBOUNDED = re.compile(r"\\(?:sum|prod|i*int|oint|lim|cdots|ldots|dots)(?![a-zA-Z])")
_BINOMIAL = re.compile(r"\\[dt]?binom|\\choose")
_NUMBER = re.compile(r"[0-9]+")
_SCIENTIFIC = re.compile(r"[0-9.][eE][+-]?[0-9]{4,}")


def score(
    prompt: str, response: str, ground_truth: Any, *, symbolic: bool = True, **extra: Any
) -> dict[str, float | str]:
    """`score` and `acc`: 1.0 if the last box holds the answer, 0.0 if another one or none. `pred`: its content, normalised.

    Args:
        ground_truth: the answer in LaTeX, or a solution with the answer in its last box.
        symbolic: also compare as expressions. Without math-verify that is left out, and said once in the log.

    Raises ValueError for a prompt without ground truth.
    """
    if ground_truth is None:
        raise ValueError("the math reward needs reward_model.ground_truth, and the prompt has none.")
    truth = last_boxed(str(ground_truth))
    truth = str(ground_truth) if truth is None else truth
    answer = last_boxed(response)
    if answer is None:
        return {"score": 0.0, "acc": 0.0, "pred": ""}
    acc = float(is_equivalent(answer, truth, symbolic=symbolic))
    return {"score": acc, "acc": acc, "pred": normalize(answer)}


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} or \fbox{...}, or of \boxed 7 up to the next $ or line break.

    None if there is none, or if its braces do not close within MAX_ANSWER_CHARS. \{ and \} are no braces. Linear.
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
    """Whether two answers in LaTeX are the same: as normalised strings, or else (`symbolic`) as expressions."""
    normal, normal_truth = normalize(answer), normalize(truth)
    if normal == normal_truth:
        return bool(normal)
    # Not the normal forms: a\\b of a matrix and \pi r have lost what a parser needs.
    return symbolic and compare_symbolically(answer, truth)


# ---- as strings ----


def normalize(answer: str) -> str:
    r"""The normal form of an answer, after the equivalence test of MATH.

    Removed: line breaks, blanks, \!, \left, \right, degrees, dollar and percent signs, a unit (\text{ ...} at the end), a
    variable in front (x=). Written out: \tfrac and \dfrac as \frac, \frac12 as \frac{1}{2}, \sqrt2 as \sqrt{2}, .5 as 0.5,
    a/b of whole numbers as a fraction, 0.5 as \frac{1}{2}.

    Beyond MATH: dollar signs without a backslash, a full stop at the end, \text{...} around the whole, and {,} are removed.
    """
    text = _strip(answer).replace("\\\\", "\\").replace("{,}", ",").removesuffix(".")
    text = re.sub(r"^\\(?:text|mathrm|textbf)\{([^{}]*)\}$", r"\1", text)
    text = re.sub(r"\\[dt]frac(?![a-zA-Z])", r"\\frac", text)
    text = re.sub(r"\\(?:left|right)(?![a-zA-Z])", "", text)  # not of \leftarrow
    text = text.replace("^{\\circ}", "").replace("^\\circ", "")
    text = text.partition("\\text{ ")[0].replace("\\%", "").replace("%", "")
    text = re.sub(r"(^|[ {(\[,+-])\.(?=[0-9])", r"\g<1>0.", text)
    variable, equals, value = text.partition("=")
    if equals and len(variable.strip()) <= 2 and "=" not in value:
        text = value
    text = re.sub(r"\\sqrt *([0-9a-zA-Z])", r"\\sqrt{\1}", text)
    text = re.sub(r"\\frac *([0-9a-zA-Z]) *([0-9a-zA-Z])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac *([0-9a-zA-Z]) *(?=\{)", r"\\frac{\1}", text)
    text = "".join(text.split())
    if text == "0.5":
        return "\\frac{1}{2}"
    return re.sub(r"^(-?[0-9]+)/(-?[0-9]+)$", r"\\frac{\1}{\2}", text)


def _strip(answer: str) -> str:
    """An answer without what never has a meaning: dollar signs, line breaks, negative space."""
    return answer.replace("\\$", "").replace("\\!", "").replace("\n", " ").strip().strip("$").strip()


# ---- as expressions ----


def compare_symbolically(answer: str, truth: str) -> bool:
    """math-verify's judgement, its own timeouts off: they would take SIGALRM, which the caller may need. False if it is not
    installed, if either expression is costly, and if it takes longer than COMPARE_CPU_S (in the main thread).
    """
    answer, truth = _strip(answer), _strip(truth)
    if is_costly(answer) or is_costly(truth):
        return False
    tools = _math_verify()
    if tools is None:
        return False
    parse, verify = tools
    try:
        with _cpu_limit(COMPARE_CPU_S):
            gold, found = (parse(f"${text}$", parsing_timeout=None) for text in (truth, answer))
            return bool(gold and found and verify(gold, found, timeout_seconds=None))
    except _TookTooLong:
        log.warning("a symbolic comparison took too long and counts as unequal: %r and %r", answer, truth)
        return False
    # Parsers and sympy fail in many ways on text that is no mathematics.
    except Exception:
        log.debug("symbolic comparison of %r and %r failed", answer, truth, exc_info=True)
        return False


def is_costly(expression: str) -> bool:
    """Whether an expression is too long for sympy, or holds what it might compute for minutes: a number of more than
    MAX_DIGITS digits (10^{10^{10}}), a large factorial or binomial coefficient, a sum, product, integral or limit.
    """
    if (
        len(expression) > MAX_EXPRESSION_CHARS
        or _UNBOUNDED.search(expression)
        or _SCIENTIFIC.search(expression)
    ):
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
    """Upper bound of the decimal digits of anything that an expression of numbers, + * and ^ can be; inf from 10^300 on.

    All numbers outside exponents are multiplied (each plus 2, so that sums are covered), and the product is raised to all
    exponents one after the other.
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
    """An expression without its outermost exponents, and these; one in no braces or brackets is a number or one token."""
    pieces, exponents, position = [], [], 0
    while (caret := expression.find("^", position)) >= 0:
        pieces.append(expression[position:caret])
        start = caret + 1
        end = _end_of_group(expression, start)
        exponents.append(expression[start:end])
        position = end
    return "".join([*pieces, " ", expression[position:]]), exponents


def _end_of_group(expression: str, start: int) -> int:
    opening = expression[start : start + 1]
    if opening not in ("{", "("):
        # 2^10^10: what follows belongs to the exponent for a reader from the right; the larger reading counts.
        token = re.compile(r"-?(?:[0-9.]+|\\[a-zA-Z]+|.)(?:\^.*)?", re.DOTALL).match(expression, start)
        return token.end() if token else len(expression)
    closing, depth = {"{": "}", "(": ")"}[opening], 0
    for position in range(start, len(expression)):
        depth += (expression[position] == opening) - (expression[position] == closing)
        if depth == 0:
            # 2^{10}^{10} likewise.
            return len(expression) if expression[position + 1 :].lstrip().startswith("^") else position + 1
    return len(expression)


@functools.cache
def _math_verify() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        log.warning(
            "answers are compared as strings only, so 0.5 is not 1/2 unless the normal form says so: %s. "
            "pip install --no-deps math-verify latex2sympy2_extended antlr4-python3-runtime",
            error,
        )
        return None
    # It says for every process that its timeouts are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return parse, verify


class _TookTooLong(BaseException):
    """No Exception: sympy and math-verify catch those."""


@contextlib.contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Raise _TookTooLong in the body after so much processor time of this process; without effect outside the main thread.

    SIGVTALRM, which hardly anybody uses, and not SIGALRM, with which the caller may bound the whole call. Not where the
    timer runs already.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _TookTooLong

    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getitimer(signal.ITIMER_VIRTUAL)[0]
    ):
        yield
        return
    before = signal.signal(signal.SIGVTALRM, interrupt)
    # Again every 0.1 s, should the first be swallowed by a bare except or a __del__.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
