"""Question-answering reward: exact match and token F1 after the normalisation of SQuAD.

The normalisation (Rajpurkar et al. 2016, arXiv:1606.05250, section 6.1) converts to lower case, removes
punctuation and articles, and collapses white space. If there are several accepted answers, the best match
counts. As in Search-R1 (arXiv:2503.09516), the response gives its answer in <answer> </answer>.
"""

import re
import string
from collections import Counter
from typing import Any, Literal

from rl.rewards.answers import accepted, ascii_signs, refusal
from rl.rewards.format import last_answer, last_line

MAX_ANSWER_CHARS = 2000
"""Number of characters of the answer that are compared. Accepted answers are much shorter."""

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(
    prompt: str,
    response: str,
    ground_truth: Any,
    *,
    metric: Literal["em", "f1"] = "em",
    require_tag: bool = False,
    **extra: Any,
) -> dict[str, float | str]:
    """Return `score` (selected by `metric`), `acc` (exact match, 1.0 or 0.0), `f1` (0.0 to 1.0) and `pred`.

    The answer is the content of the last <answer> </answer>. If there is no tag, it is the last line that is
    not blank, or, with `require_tag`, the response scores 0.

    Args:
        ground_truth: one or several accepted answers (`rl.rewards.answers.accepted`).

    Raises ValueError for an unknown metric, or if there is no accepted answer.
    """
    if metric not in ("em", "f1"):
        raise ValueError(f"reward.kwargs.metric={metric!r}: choose em or f1.")
    truths = check_truth(ground_truth)
    answer = last_answer(response)
    if answer is None:
        answer = "" if require_tag else last_line(response)
    found = normalize(answer[:MAX_ANSWER_CHARS])
    acc = float(bool(found) and found in truths)
    f1 = max(token_f1(found, truth) for truth in truths)
    return {"score": acc if metric == "em" else f1, "acc": acc, "f1": f1, "pred": found}


def check_truth(ground_truth: Any, **kwargs: Any) -> list[str]:
    """Return the accepted answers in normal form. Raises ValueError if no response could be right."""
    answers = [answer for answer in accepted(ground_truth) if len(answer) <= MAX_ANSWER_CHARS]
    truths = [text for answer in answers if (text := normalize(answer))]
    if not truths:
        raise refusal(
            ground_truth,
            f"it holds only punctuation, or more than the {MAX_ANSWER_CHARS} compared characters",
        )
    return truths


def normalize(text: str) -> str:
    """Return the text in lower case without punctuation, articles and repeated white space.

    A text that consists of articles alone, such as the choice "A", keeps its articles.
    """
    words = ascii_signs(text).lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", words).split() or words.split())


def token_f1(found: str, accepted: str) -> float:
    """Return the harmonic mean of precision and recall over the words of two normalised texts.

    For example, 0.8 for "eiffel tower paris" and "eiffel tower": precision 2/3, recall 1.
    """
    ours, theirs = Counter(found.split()), Counter(accepted.split())
    if not ours or not theirs:
        return 0.0
    shared = (ours & theirs).total()
    return 2 * shared / (ours.total() + theirs.total())
