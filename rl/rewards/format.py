"""Format reward: does the response have the form that was asked for? What it says does not count.

The default form is that of DeepSeek-R1 (arXiv:2501.12948, table 1): reasoning in <think> </think>, then the answer in
<answer> </answer>, each tag once, nothing but white space around the two.
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
    """`score`: 1.0 if the response has the form, 0.0 otherwise. No `acc`: nothing is said about the answer.

    Args:
        response: text of any length. The default form is checked in linear time.
        pattern: a regular expression that the response without surrounding white space must match as a whole (`.`
            matches line breaks too); None for the default form. Python's matcher backtracks, so of a longer response
            the first and the last `max_chars` / 2 characters, joined by a line break, are all that it sees; write it
            without nested quantifiers, (a+)+, which take exponential time at any length.
        max_chars: see `pattern`.
        think_in_prompt: the prompt ends with <think>, so the response must not begin with it.

    Raises:
        ValueError: `pattern` is no regular expression, or max_chars is below 2.
    """
    if pattern is None:
        return {"score": float(has_think_and_answer(response, think_in_prompt=think_in_prompt))}
    if max_chars < 2:
        raise ValueError(f"reward.kwargs.max_chars is {max_chars}: at least 2 characters must be looked at.")
    text = response.strip()
    if len(text) > max_chars:
        half = max_chars // 2
        text = text[:half] + "\n" + text[-half:]
    return {"score": float(_compile(pattern).fullmatch(text) is not None)}


def has_think_and_answer(text: str, *, think_in_prompt: bool = False) -> bool:
    """Whether `text` is <think>...</think><answer>...</answer> with something other than white space in the answer."""
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
    """The content of the last complete <answer> </answer> without surrounding white space; None if there is none."""
    start = text.rfind(OPEN_ANSWER, 0, max(0, text.rfind(CLOSE_ANSWER)))
    if start < 0:
        return None
    start += len(OPEN_ANSWER)
    return text[start : text.index(CLOSE_ANSWER, start)].strip()


def last_line(text: str) -> str:
    """The last line that is not blank, without surrounding white space; empty if there is none."""
    return text.rstrip().rpartition("\n")[2].strip()


@functools.lru_cache(maxsize=16)
def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"reward.kwargs.pattern {pattern!r} is no regular expression: {error}.") from error
