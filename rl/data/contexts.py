"""Prompts for a teacher that is the policy itself.

A template (`teacher.template`) adds what the policy does not see, for example the correct answer.
"""

from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from rl.data.chat_template import template_of
from rl.data.prompts import Prompt
from rl.data.rendering import tokens_again
from rl.data.special_tokens import decode_hidden, encode, hide


def in_context(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    *,
    feedback: str | None,
    limit: int,
    opening: np.ndarray | None = None,
) -> np.ndarray:
    """Return the token ids of the template filled in with a prompt, int32 [P]: at most the last `limit` ones.

    For a chat, the content of the last message is filled into the template, and the result replaces this
    content. Special tokens are added as in `rl.data.prompts.load_prompts`.

    opening: int32 [P], the context of a row of a trajectory. If it is given, the filled template replaces the
        first occurrence of the prompt in this context. Raises ValueError if the prompt does not occur.
    """
    question = prompt.text if prompt.messages is None else str(prompt.messages[-1]["content"])
    parts = {"ground_truth": prompt.ground_truth, "feedback": feedback or ""}
    if prompt.messages is None or opening is not None:  # otherwise rendering the chat hides special tokens
        question = question if prompt.messages is None else hide(question, tokenizer)
        parts = hide(parts, tokenizer)
    text = template.format(prompt=question, **parts)
    is_bare = prompt.messages is None and opening is None
    if opening is not None:
        whole = decode_hidden(opening, tokenizer)
        if question not in whole:
            raise ValueError(
                f"teacher.template replaces the prompt in the conversation with an environment, but that of "
                f"prompt {prompt.index} does not contain it; let the environment open with the prompt."
            )
        text = whole.replace(question, text, 1)
    elif prompt.messages is not None:
        messages = [*prompt.messages[:-1], {**prompt.messages[-1], "content": text}]
        text = template_of(tokenizer).render(messages, prompt.tools)
    elif tokenizer.bos_token and text.startswith(tokenizer.bos_token):
        is_bare = False
    return encode([text], tokenizer, add_special_tokens=is_bare)[0][0][-limit:]


def check_context(
    ids: np.ndarray,
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    *,
    feedback: str | None,
    limit: int,
    sample: int,
) -> None:
    """Raise ValueError unless a teacher's context is that of the sample, rendered by transformers alone.

    Texts with special tokens are not compared. Arguments as for `in_context`.
    """
    question = prompt.text if prompt.messages is None else str(prompt.messages[-1]["content"])
    text = template.format(prompt=question, ground_truth=prompt.ground_truth, feedback=feedback or "")
    messages = prompt.messages and [*prompt.messages[:-1], {**prompt.messages[-1], "content": text}]
    if hide(text, tokenizer) != text or hide(messages, tokenizer) != messages:
        return
    expected = tokens_again(replace(prompt, text=text, messages=messages), tokenizer)[-limit:]
    if not np.array_equal(ids, expected):
        own, other = (tokenizer.decode(each) for each in (expected, ids))
        raise ValueError(
            f"context check: the teacher reads sample {sample} (prompt {prompt.index}) after {other!r:.200}, "
            f"but its prompt, answer and feedback make {own!r:.200}."
        )
