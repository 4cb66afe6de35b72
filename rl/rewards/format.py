"""Format reward: the response must have the requested form. Its content is not judged.

The default form is DeepSeek-R1's (arXiv:2501.12948, table 1): reasoning in <think> </think>, then the answer
in <answer> </answer>, each tag exactly once, and only white space around the two blocks. For example,
"<think>2 + 2 is 4</think><answer>4</answer>" scores 1.
"""

import functools
import re
from typing import Any

OPEN_THINK, CLOSE_THINK, OPEN_ANSWER, CLOSE_ANSWER = TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def score(
    prompt: str,
    response: str,
    ground_truth: Any,
    *,
    pattern: str | None = None,
    max_chars: int = 2000,
    think_in_prompt: bool = False,
    **extra: Any,
) -> dict[str, float]:
    """Return `score`: 1.0 if the response has the form, else 0.0. There is no `acc`.

    Args:
        pattern: regular expression that the whole stripped response must match; `.` also matches line breaks.
            None stands for the default form, which is checked in linear time. Avoid nested quantifiers such
            as (a+)+. Python's matcher backtracks, so they take exponential time.
        max_chars: if the response is longer, `pattern` is matched with its first and last `max_chars` / 2
            characters, joined by a line break.
        think_in_prompt: whether the prompt ends with <think>, so that the response must not begin with it.

    Raises ValueError if `pattern` is not a regular expression, or max_chars is below 2.
    """
    if pattern is None:
        return {"score": float(has_think_and_answer(response, think_in_prompt=think_in_prompt))}
    if max_chars < 2:
        raise ValueError(f"reward.kwargs.max_chars={max_chars} must be 2 or more.")
    text = response.strip()
    if len(text) > max_chars:
        half = max_chars // 2
        text = text[:half] + "\n" + text[-half:]
    return {"score": float(_compile(pattern).fullmatch(text) is not None)}


def has_think_and_answer(text: str, *, think_in_prompt: bool = False) -> bool:
    """Return whether `text` is <think>...</think><answer>...</answer> with an answer that is not blank."""
    text = text.strip()
    if think_in_prompt:
        text = OPEN_THINK + text
    if any(text.count(tag) != 1 for tag in TAGS):
        return False
    thought, _, rest = text.partition(CLOSE_THINK)
    between, _, answer = rest.partition(OPEN_ANSWER)
    return (
        thought.startswith(OPEN_THINK)
        and not between.strip()
        and answer.endswith(CLOSE_ANSWER)
        and bool(answer.removesuffix(CLOSE_ANSWER).strip())
    )


def last_answer(text: str) -> str | None:
    """Return the stripped content of the last complete <answer> </answer> that has content; None if there is
    none.

    Tags without content do not count, because a text may end with a mention of the empty tags.
    """
    last, end = None, len(text)
    while (close := text.rfind(CLOSE_ANSWER, 0, end)) >= 0:
        end = text.rfind(OPEN_ANSWER, 0, close)
        if end < 0:
            break
        start = end + len(OPEN_ANSWER)
        content = text[start : text.index(CLOSE_ANSWER, start)].strip()
        if content:
            return content
        last = content
    return last


def last_line(text: str) -> str:
    """Return the last line that is not blank, stripped; empty if there is none."""
    return text.rstrip().rpartition("\n")[2].strip()


@functools.lru_cache(maxsize=16)
def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(
            f"reward.kwargs.pattern={pattern!r} must be a regular expression: {error}."
        ) from error
