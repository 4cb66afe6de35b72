"""DAPO's reward for competition mathematics (AIME): +1 if the last `Answer: X` is right, else -1.

This follows DAPO (arXiv:2503.14476, section 3.3, and its code in verl). Only the end of the response is read.
Answers are compared as strings after the normalisation of Minerva (Lewkowycz et al., arXiv:2206.14858,
appendix D.1). The normalisation is reproduced exactly, so that scores are comparable with published scores.
This includes its oddities: for example, "a " is removed inside words, too.

The default mode reads only the last `Answer:` line, which DAPO's prompt requires: a right \\boxed{42} without
`Answer:` scores -1, as in verl's math_dapo.compute_score up to version 0.9.0. If the `Answer:` line has a
box, the content of the box is read. With `bare_box`, a response without `Answer:` is judged by its last box,
as in verl 0.9.1. With `strict_box` (`strict_box_verify` in verl) only the last box is read. For prompts that
require a box, set `reward.kwargs.strict_box=true`, or use `rl.rewards.math:score`, which scores 1 or 0.
"""

import re
from typing import Any

from rl.rewards.answers import ascii_signs, refusal, single
from rl.rewards.score import INVALID

TAIL_CHARS = 300
"""Number of characters read from the end of the response. The longest answer in MATH-500 has 159."""
STRICT_TAIL_CHARS = 100
"""Number of characters at the end of the response in which a box is looked for."""

_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_BOX = "\\boxed{"

# First texts that are replaced, then texts that are removed, in the order of appendix D.1 of Minerva.
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_UNITS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents "
    "degrees cm gm pounds meters meals edges students childrentickets multiples"
).split()
_REMOVED = (
    *_UNITS,
    "\\text{s}",
    "\\text{.}",
    "\\text{\ns}",
    "\\text{}^2",
    "\\text{}^3",
    "\\text{\n}",
    "\\text{}",
    "\\mathrm{th}",
    "^\\circ",
    "^{\\circ}",
    "\\;",
    ",\\!",
    "{,}",
    '"',
    "\\dots",
)


def score(
    prompt: str,
    response: str,
    ground_truth: Any,
    *,
    strict_box: bool = False,
    bare_box: bool = False,
    **extra: Any,
) -> dict[str, float | str]:
    """Return `score` (1.0 if the answer is right, else -1.0), `acc` (1.0 or 0.0) and `pred` (the answer).

    The answer is the rest of the line after the last `Answer:` in the last 300 characters. It is normalised
    in the same way as the ground truth. With `strict_box`, the answer is the unchanged content of the last
    \\boxed{} in the last 100 characters. With `bare_box`, this also holds if there is no `Answer:` line.

    Raises ValueError if the prompt has no ground truth, or an unreadable ground truth.
    """
    truth = check_truth(ground_truth, strict_box=strict_box)
    right, pred = _judge(ascii_signs(response), truth, strict_box, bare_box)
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": pred}


def _judge(response: str, truth: str, strict_box: bool, bare_box: bool) -> tuple[bool, str]:
    answers = [] if strict_box else _ANSWER.findall(response[-TAIL_CHARS:])
    found = _boxed(response[-STRICT_TAIL_CHARS:]) if strict_box or (bare_box and not answers) else None
    if answers:
        pred, truth = normalize(answers[-1]), normalize(truth)
    else:
        pred = INVALID if found is None else found
    return bool(pred) and pred == truth, pred


def check_truth(ground_truth: Any, *, strict_box: bool = False, **kwargs: Any) -> str:
    """Return the answer of a ground truth. If the ground truth is a solution, this is the content of its last
    box.

    Raises ValueError if there is no answer, if the normal form of the answer is empty, or if a response with
    this answer would be wrong.
    """
    text = ascii_signs(single(ground_truth))
    truth = _boxed(text) or text
    if not normalize(truth):
        raise refusal(ground_truth, "its normal form by Minerva's rules is empty")
    if not _judge(f"\\boxed{{{truth}}}" if strict_box else f"Answer: {truth}", truth, strict_box, False)[0]:
        raise refusal(
            ground_truth, "it has several lines, unmatched braces, or more characters than are read"
        )
    return truth


def normalize(answer: str) -> str:
    """Return Minerva's normal form: the right side of the last `=` without units, text commands and `$`.

    For example, `x = 1,000 dollars` becomes `1000`.
    """
    answer = answer.rpartition("=")[2]
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    for text in _REMOVED:
        answer = answer.replace(text, "")
    # Reduce each line that contains mathematics to its first formula.
    answer = re.sub(r"^[^$\n]*\$([^$\n]*)\$.*", r"$\1$", answer, flags=re.MULTILINE)
    for command in ("text", "textbf", "overline"):
        answer = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", answer)
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", answer)
    # \frac12 and \sqrt2 are shorthand for \frac{1}{2} and \sqrt{2}.
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return digits if digits.isdigit() else answer.strip()


def _boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{} with content; None if there is none, or if it is not
    closed."""
    end = len(text)
    while (start := text.rfind(_BOX, 0, end)) >= 0 and text[start + len(_BOX) :].lstrip().startswith("}"):
        end = start
    if start < 0:
        return None
    start += len(_BOX)
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return None
