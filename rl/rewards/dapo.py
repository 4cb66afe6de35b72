"""DAPO's reward for competition mathematics (AIME): the last `Answer: X` of the response is right or wrong, +1 or -1.

The recipe published with DAPO (arXiv:2503.14476, section 3.3 and its code in verl): only the end of the response is looked
at, and the strings are compared after the normalisation of Minerva (Lewkowycz et al., arXiv:2206.14858, appendix D.1).
What that normalisation does is kept to the letter, odd as some of it is ("a " vanishes inside words too): scores must be
comparable with published ones.

The published code (verl's math_dapo.compute_score) has two modes, and so has this function. The default mode
reads only the last `Answer:` line, which DAPO's prompt asks for: a right \\boxed{42} without `Answer:` scores
-1, there and here. A box on the `Answer:` line is unwrapped. The other mode, `strict_box` (there
`strict_box_verify`), reads only the last box. For prompts that ask for a box set
`reward.kwargs.strict_box=true`, or use `rl.rewards.math:score`, which scores 1 or 0.
"""

import re
from typing import Any

TAIL_CHARS = 300
"""Characters at the end that are looked at. The longest answer in MATH-500 has 159."""
STRICT_TAIL_CHARS = 100
"""The same with `strict_box`."""
NO_ANSWER = "[INVALID]"
"""What the published code takes for the answer of a response that has none."""

_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_BOX = "\\boxed{"

# Replaced, then removed, one after the other in this order; appendix D.1 of Minerva.
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
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm "
    "pounds meters meals edges students childrentickets multiples"
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
    prompt: str, response: str, ground_truth: Any, *, strict_box: bool = False, **extra: Any
) -> dict[str, float | str]:
    """Return `score` 1.0 for a right answer, else -1.0; `acc` 1.0 or 0.0; and the answer as `pred`.

    The answer is what follows the last `Answer:` in the last 300 characters, up to the end of the line,
    normalised like the ground truth; a box elsewhere is not read. With `strict_box` the answer is the content
    of the last \\boxed{} in the last 100 characters, compared without normalisation, and `Answer:` is not
    read.

    Raises ValueError for a prompt without ground truth.
    """
    if ground_truth is None:
        raise ValueError("the DAPO reward needs reward_model.ground_truth, and the prompt has none.")
    truth = str(ground_truth)
    if strict_box:
        found = _boxed(response[-STRICT_TAIL_CHARS:])
        pred = NO_ANSWER if found is None else found
    else:
        answers = _ANSWER.findall(response[-TAIL_CHARS:])
        pred, truth = normalize(answers[-1] if answers else NO_ANSWER), normalize(truth)
    right = pred == truth
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": pred}


def normalize(answer: str) -> str:
    """Minerva's normal form: the right side of the last `=`, without units, text commands, dollar signs and commas."""
    answer = answer.rpartition("=")[2]
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    for text in _REMOVED:
        answer = answer.replace(text, "")
    # Of a line with mathematics in it only the first formula stays.
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
    """The content of the last \\boxed{}, every brace counted; None if there is none or it is not closed."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    start += len(_BOX)
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return None
