"""Comparison of the prompts' tokens with a second source.

transformers renders and tokenizes some of the prompts again, in one call and without this project's code. The
compared prompts include prompts that begin or end differently from most prompts of the set.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rl.data.chat_template import template_of
from rl.data.prompts import Prompt
from rl.data.special_tokens import first_special, hide

NUM_COMPARED = 32
"""Number of prompts that are compared, evenly spread over a set; fewer if the set has fewer prompts."""
MAX_COMPARED = 256
"""Maximum number of prompts of a set that are compared, with the prompts that begin or end differently."""


def check_rendering(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, *, key: str, max_prompt_tokens: int
) -> None:
    """Raise ValueError if the tokens of a prompt differ from what transformers makes of the prompt.

    key: config key of the prompts.

    Whole conversations are not compared here, but when they are read (`rl.data.chats`). Messages that contain
    special tokens as text are not compared, because transformers would read them as special tokens.
    """

    def is_plain(prompt: Prompt) -> bool:
        parts = [prompt.messages, prompt.tools]
        return hide(parts, tokenizer) == parts

    prompts = [prompt for prompt in prompts if prompt.response_mask is None and is_plain(prompt)]
    for rendered in (True, False):
        chosen = [prompt for prompt in prompts if (prompt.messages is not None) == rendered]
        for prompt in _chosen(chosen, tokenizer):
            expected = tokens_again(prompt, tokenizer)
            ids = prompt.rendered_ids
            if not np.array_equal(ids, expected[-max_prompt_tokens:]):
                what = _difference(ids, expected, tokenizer)
                raise ValueError(
                    f"prompt check: prompt {prompt.index} of {key} {what}; "
                    f"the {'chat template' if rendered else 'tokenizer'} of {tokenizer.name_or_path} gives "
                    f"{expected[:4].tolist()} ... {expected[-4:].tolist()}, the prompt has "
                    f"{ids[:4].tolist()} ... {ids[-4:].tolist()}."
                )


def warn_of_unlike_prompts(prompts: Sequence[Any], held_out: Sequence[Prompt]) -> str:
    """Return a warning if only one of two sets of prompts is rendered by the chat template; "" otherwise.

    prompts: rows of data.train; pairs are ignored. held_out: rows of data.val.
    """
    train, val = (
        {row.messages is not None for row in rows if isinstance(row, Prompt) and row.response_mask is None}
        for rows in (prompts, held_out)
    )
    if not train or not val or train & val:
        return ""
    names = ("data.train", "data.val") if train == {True} else ("data.val", "data.train")
    return (
        f"warning: data check: the chat template renders the prompts of {names[0]}, but those of {names[1]} "
        "are strings without it, so validation does not measure what is trained."
    )


def note_of_strings(prompts: Sequence[Any], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a note if prompts are strings though the model has a chat template; "" otherwise.

    prompts: rows of data.train; conversations and pairs are ignored.
    """
    strings = (
        row
        for row in prompts
        if isinstance(row, Prompt) and row.messages is None and row.response_mask is None
    )
    first = next(strings, None)
    if first is None or tokenizer.chat_template is None or first_special(first.text, tokenizer):
        return ""
    file = first.place.rpartition(", row ")[0] or "data.train"
    return (
        f"note: the prompts of {file} are strings, so the model's chat template is not applied; to "
        "apply it set data.string_prompts=user, or write them as lists of {role, content}."
    )


def _chosen(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Return the prompts to compare: some from all parts of the set, and some that begin or end differently.

    prompts: either all of them have messages, or none has.
    """
    if not prompts:
        return []
    step = -(-len(prompts) // NUM_COMPARED)
    spread = prompts[::step]
    first = spread[0]
    ending = "" if first.messages is None else _generation_prompt(first, tokenizer)
    begins = Counter(int(prompt.token_ids[0]) for prompt in prompts).most_common(1)[0][0]
    others = [p for p in prompts if int(p.token_ids[0]) != begins or not p.text.endswith(ending)]
    return [*spread, *others[: MAX_COMPARED - len(spread)]]


def _generation_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text that the template appends to the messages so that a response follows; "" if none."""
    assert prompt.messages is not None
    bare, whole = (
        template_of(tokenizer).render(prompt.messages, prompt.tools, generation_prompt=appends)
        for appends in (False, True)
    )
    return whole[len(bare) :] if whole.startswith(bare) else ""


def tokens_again(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Return the tokens that transformers alone makes of a prompt, int32 [P], before truncation."""
    if prompt.messages is not None:
        adapted = [template_of(tokenizer).adapt(message) for message in prompt.messages]
        options: dict[str, Any] = dict(tools=list(prompt.tools) or None, add_generation_prompt=True)
        found: Any = tokenizer.apply_chat_template(adapted, tokenize=True, return_dict=True, **options)
    else:
        has_bos = bool(tokenizer.bos_token) and prompt.text.startswith(str(tokenizer.bos_token))
        found = tokenizer(prompt.text, add_special_tokens=not has_bos, verbose=False)
    return np.array(found["input_ids"], np.int32)


def _difference(ids: np.ndarray, expected: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what is wrong with the tokens of a prompt, as the end of a sentence that begins with the
    prompt."""
    if np.array_equal(ids, expected[1:]):
        return f"lacks its first token, {tokenizer.convert_ids_to_tokens(int(expected[0]))!r}"
    if np.array_equal(ids[1:], expected):
        return f"begins with {tokenizer.convert_ids_to_tokens(int(ids[0]))!r}, which must not be there"
    if np.array_equal(ids, expected[: len(ids)]):
        end = tokenizer.decode(expected[len(ids) :])
        return f"lacks its end, {end!r}, such as the generation prompt"
    return "has other tokens"
