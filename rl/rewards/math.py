"""Mathematics reward: compare the content of the last \\boxed{} with the ground truth.

Answers are first compared as strings in the normal form of the MATH data set (Hendrycks et al.,
arXiv:2103.03874, and the equivalence test published with it). If the strings differ and `math-verify`
(huggingface/Math-Verify) is installed, the answers are compared as expressions. For example, 1/2 then equals
0.5, and (x+1)^2 equals x^2+2x+1. An answer with an unknown part is compared as a string only. One answer may
leave out a unit, a percent or degree sign, or a name before `=`, although the other answer has it. If both
have one, they must be the same.
"""

import re
from typing import Any

from rl.rewards.answers import refusal, single
from rl.rewards.expressions import compare_symbolically
from rl.rewards.latex import NAME, split_name, strip, unit, unit_of, without_degrees

MAX_ANSWER_CHARS = 1000
"""Maximum length of a box that counts as an answer, in characters; the longest in MATH-500 has 159."""
_ABOUT = re.compile(r"\u2248|\\approx(?![a-zA-Z])")
_BOX = re.compile(r"\\(?:boxed|fbox)")
_MENTION = re.compile(r"\s*\{\s*\}|(?! *\{)(?! +(?:[-+\\(0-9.]|[A-Za-z]\s*(?:[$.\n]|$)))")
"""Text behind the word `\\boxed` if the word only mentions boxes: empty braces, or neither a number nor a
single letter."""
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_NOON = re.compile(r"\\text\{ *([apAP])\.?[mM]\.? *\}")
_VARIABLE = re.compile(r"^\s*[A-Za-z][A-Za-z0-9']?\s*=")


def score(
    prompt: str, response: str, ground_truth: Any, *, symbolic: bool = True, **extra: Any
) -> dict[str, float | str]:
    """Return `score` and `acc` (1.0 if the last box holds the answer, else 0.0) and its content as `pred`.

    Args:
        ground_truth: the answer in LaTeX, or a solution with the answer in its last box or after ####.
        symbolic: also compare as expressions. Without math-verify this is skipped, and logged once.

    Raises ValueError if the prompt has no ground truth, or an unreadable ground truth.
    """
    truth = check_truth(ground_truth)
    answer = last_boxed(response)
    if answer is None:
        return {"score": 0.0, "acc": 0.0, "pred": ""}
    acc = float(any(is_equivalent(answer, value, symbolic=symbolic) for value in _values(truth)))
    return {"score": acc, "acc": acc, "pred": normalize(answer)}


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} or \fbox{...}, or of \boxed 7 up to the next $ or newline.

    A box without content and the bare word, as in "put it in \boxed{}", only mention boxes and do not count.
    Returns None if there is no other box, or if its braces do not close within MAX_ANSWER_CHARS. \{ and \} do
    not count as braces. Takes linear time.
    """
    ends = [box.end() for box in _BOX.finditer(text)]
    start = next((end for end in reversed(ends) if not _MENTION.match(text, end)), None)
    if start is None:
        return None
    content = text[start : start + MAX_ANSWER_CHARS]
    if not content.lstrip().startswith("{"):
        return re.split(r"[$\n]", content, maxsplit=1)[0].strip() if content.startswith(" ") else None
    depth = 0
    for brace in _BRACE.finditer(content):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return content[content.index("{") + 1 : brace.start()]
    return None


def check_truth(ground_truth: Any, **kwargs: Any) -> str:
    """Return the answer of a ground truth.

    Raises ValueError if there is none, or if no box could hold an equal answer.
    """
    text = single(ground_truth)
    boxed = last_boxed(text)
    truth = text.rpartition("####")[2].strip() if boxed is None else boxed
    if not normalize(truth):
        raise refusal(ground_truth, "it is empty without units and signs of typesetting")
    if last_boxed(f"\\boxed{{{truth}}}") != truth:
        raise refusal(
            ground_truth, f"no box holds it: braces do not match, or it is over {MAX_ANSWER_CHARS} characters"
        )
    return truth


def is_equivalent(answer: str, truth: str, *, symbolic: bool = True) -> bool:
    """Return whether two answers in LaTeX are equal as normalised strings or (`symbolic`) as expressions."""
    units = unit_of(answer), unit_of(truth)
    if units[0] != units[1] and all(units):
        return False
    names = split_name(strip(answer))[0], split_name(strip(truth))[0]
    normal = normalize(answer)
    if normal == normalize(truth) and (names[0] == names[1] or not all(names)):
        return bool(normal)
    # Use the original answers, because normalisation removes what a parser needs (\\ in matrices, \pi r).
    if any(re.fullmatch(r"\s*\\text\{[^{}]*\}[\s.]*", text) for text in (answer, truth)):
        # The first letter of a word may be a capital: \text{Yes} and yes.
        first, other = (normalize(text) for text in (answer, truth))
        if min(len(first), len(other)) > 1 and first[0].lower() + first[1:] == other[0].lower() + other[1:]:
            return True
    return symbolic and compare_symbolically(answer, truth)


def _values(truth: str) -> list[str]:
    r"""Return a ground truth. For x = \sqrt2 \approx 1.41, also return the exact and the rounded value."""
    parts = _ABOUT.split(truth)
    if len(parts) == 1:
        return parts
    return [truth, *(part for part in parts if normalize(part) and not NAME.fullmatch(part.strip()))]


# ---- as strings ----


def normalize(answer: str) -> str:
    r"""Return the normal form of an answer, following the equivalence test of MATH.

    Removed: line breaks, blanks, \!, \left, \right, degrees, dollar and percent signs, a unit (\text{ ...} at
    the end), a leading variable of one or two characters (x=). Rewritten: \tfrac and \dfrac to \frac, \frac12
    to \frac{1}{2}, \sqrt2 to \sqrt{2}, .5 to 0.5, a/b of whole numbers to a fraction, 0.5 to \frac{1}{2}.

    Three rules differ from MATH. Dollar signs without a backslash, a trailing period, \text around words, and
    {,} are removed, too. Inequalities are kept, in one spelling, whereas MATH reads x<=5 as 5. The text
    behind \text{ ...} is kept unless \text{ ...} is a unit at the end, whereas MATH reads 3 \text{ or } -3 as
    3.
    """
    text = strip(answer).replace("\\\\", "\\").removesuffix(".")
    # {,} in a number is a decimal comma (1{,}5) or separates thousands (1{,}500).
    text = re.sub(r"(?<=[0-9])\{,\}(?=[0-9](?![0-9]{2}(?![0-9])))", ".", text).replace("{,}", ",")
    text = re.sub(r"^\\(?:text|mathrm)\{([^{}]*)\}$", r"\1", text)
    text = _NOON.sub(lambda found: found[1].lower() + "m", text)
    text = without_degrees(text)
    found = unit(text)
    text = text[: found.start()] if found and found[1] else _TEXT.sub(r"\1", text)
    text = text.replace("\\%", "").replace("%", "")
    text = re.sub(r"(^|[ {(\[,+-])\.(?=[0-9])", r"\g<1>0.", text)
    text = _VARIABLE.sub("", text) if text.count("=") == 1 else text
    text = re.sub(r"([_^])\{([0-9a-zA-Z*])\}", r"\1\2", text)
    # 12 34 is not 1234, but 12 345 is 12345.
    text = re.sub(r"(?<=[0-9])\s+(?=[0-9]{3}(?![0-9]))", "", text)
    text = "".join(re.sub(r"(?<=[0-9])\s+(?=[0-9])", "~", text).split())
    if text == "0.5":
        return "\\frac{1}{2}"
    return re.sub(r"^(-?[0-9]+)/(-?[0-9]+)$", r"\\frac{\1}{\2}", text)
