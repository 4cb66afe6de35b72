"""Question answering with short answers: exact match and token F1 after the normalisation of SQuAD.

Rajpurkar et al. 2016 (arXiv:1606.05250, section 6.1): lower case, no punctuation, no articles, white space collapsed. Of
several accepted answers the best counts. The form of Search-R1 (arXiv:2503.09516): the answer in <answer> </answer>.
"""

import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from rl.rewards.format import last_answer, last_line

MAX_ANSWER_CHARS = 2000
"""A longer answer is cut: no accepted answer is nearly as long."""

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
    """`score` (what `metric` names), `acc` (exact match, 1.0 or 0.0), `f1` (0.0 to 1.0) and `pred`.

    The answer is the content of the last <answer> </answer>, or without one the last line that is not blank, unless
    `require_tag`: then the response gets 0.

    Args:
        ground_truth: the accepted answer, a list of several, or a mapping that has it under `target` (as in the files of
            Search-R1) or `answers`.

    Raises:
        ValueError: another metric; no accepted answer.
    """
    if metric not in ("em", "f1"):
        raise ValueError(f"reward.kwargs.metric is {metric!r}: choose em or f1.")
    accepted = [normalize(answer) for answer in accepted_answers(ground_truth)]
    answer = last_answer(response)
    if answer is None:
        answer = "" if require_tag else last_line(response)
    found = normalize(answer[:MAX_ANSWER_CHARS])
    acc = float(bool(found) and found in accepted)
    f1 = max(token_f1(found, answer) for answer in accepted)
    return {"score": acc if metric == "em" else f1, "acc": acc, "f1": f1, "pred": found}


def accepted_answers(ground_truth: Any) -> list[str]:
    """The accepted answers, at least one. Raises ValueError if there is none."""
    answers = ground_truth
    if isinstance(answers, Mapping):
        answers = answers.get("target", answers.get("answers"))
    if isinstance(answers, (str, int, float)):
        answers = [answers]
    # Lists read from Parquet are numpy arrays: their truth value is not asked for.
    accepted = [str(answer) for answer in answers] if answers is not None else []
    if not accepted:
        raise ValueError(
            f"question answering needs reward_model.ground_truth: an answer, a list of answers, or a mapping with target "
            f"or answers; it is {ground_truth!r:.200}."
        )
    return accepted


def normalize(text: str) -> str:
    """Lower case, punctuation and articles removed, words separated by one space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def token_f1(found: str, accepted: str) -> float:
    """Harmonic mean of precision and recall of the words of two normalised texts, counted with their number."""
    ours, theirs = Counter(found.split()), Counter(accepted.split())
    if not ours or not theirs:
        return 0.0
    shared = (ours & theirs).total()
    return 2 * shared / (ours.total() + theirs.total())
