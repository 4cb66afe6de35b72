"""Question-answering reward: exact match and token F1 after the normalisation of SQuAD.

Rajpurkar et al. 2016 (arXiv:1606.05250, section 6.1): lower case, no punctuation, no articles, white space
collapsed. The best match among several accepted answers counts. As in Search-R1 (arXiv:2503.09516), the
response gives its answer in <answer> </answer>.
"""

import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from rl.rewards.format import last_answer, last_line

MAX_ANSWER_CHARS = 2000
"""Characters of the answer that are compared; accepted answers are much shorter."""

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

    The answer is the content of the last <answer> </answer>. Without the tag it is the last line that is not
    blank; with `require_tag` such a response scores 0.

    Args:
        ground_truth: the accepted answer, a list of several, or a mapping with them under `target` (as in the
            files of Search-R1) or `answers`.

    Raises ValueError for an unknown metric, or if there is no accepted answer.
    """
    if metric not in ("em", "f1"):
        raise ValueError(f"reward.kwargs.metric={metric!r}: choose em or f1.")
    accepted = [normalize(answer) for answer in accepted_answers(ground_truth)]
    answer = last_answer(response)
    if answer is None:
        answer = "" if require_tag else last_line(response)
    found = normalize(answer[:MAX_ANSWER_CHARS])
    acc = float(bool(found) and found in accepted)
    f1 = max(token_f1(found, answer) for answer in accepted)
    return {"score": acc if metric == "em" else f1, "acc": acc, "f1": f1, "pred": found}


def accepted_answers(ground_truth: Any) -> list[str]:
    """Return the accepted answers. Raises ValueError if there is none."""
    answers = ground_truth
    if isinstance(answers, Mapping):
        answers = answers.get("target", answers.get("answers"))
    if isinstance(answers, (str, int, float)):
        answers = [answers]
    # No truth value here: lists read from Parquet are numpy arrays.
    accepted = [str(answer) for answer in answers] if answers is not None else []
    if not accepted:
        raise ValueError(
            f"reward_model.ground_truth={ground_truth!r:.200}: question answering needs an answer, "
            "a list of answers, or a mapping with target or answers."
        )
    return accepted


def normalize(text: str) -> str:
    """Return the text in lower case without punctuation, articles and repeated white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def token_f1(found: str, accepted: str) -> float:
    """Return the harmonic mean of precision and recall over the words of two normalised texts."""
    ours, theirs = Counter(found.split()), Counter(accepted.split())
    if not ours or not theirs:
        return 0.0
    shared = (ours & theirs).total()
    return 2 * shared / (ours.total() + theirs.total())
