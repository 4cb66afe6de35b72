"""Comparison of the data's responses with a second source: the rows of the files, read again one by one."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rl.config.schema import Data
from rl.data.chat_template import template_of
from rl.data.preferences import Labelled, PreferencePair
from rl.data.prompts import GROUND_TRUTH, Prompt, value_at
from rl.data.reading import FileRow, read_row, row_bytes
from rl.data.special_tokens import hide, special_ids

NUM_COMPARED = 32
"""Number of rows that are compared, evenly spread over the data."""
NUM_TURNS = 3
"""Number of the first turns of a conversation that are rendered again, besides the last one."""
READ_BYTES = 256 << 20
"""Bytes of files above which fewer rows are compared, at least one."""


def check_responses(
    rows: Sequence[Any], tokenizer: PreTrainedTokenizerBase, data: Data, end_ids: Collection[int] = ()
) -> None:
    """Raise ValueError if the tokens of a response are not the text of its row, or a label is not the row's.

    rows: pairs, labelled responses, or prompts. end_ids: ids that end a response, besides the tokenizer's.
    """
    special, ends = special_ids(tokenizer), list[bool]()
    cost = max((row_bytes(row.place) for row in rows[-1:] if row.place), default=0)
    number = max(1, min(NUM_COMPARED, READ_BYTES // max(1, cost)))
    for row in rows[:: -(-len(rows) // number) or 1]:
        if not row.place:
            continue
        file_row = read_row(row.place)
        for name, before, response, mask, value, chat in _responses(row, file_row, data):
            ids, text = response[mask > 0], _last_text(value)
            # A template may leave out reasoning.
            if text is not None and hide(text, tokenizer) == text and "</think>" not in text:
                expected, found = (
                    "".join(str(tokenizer.decode(part, skip_special_tokens=True)).split())
                    for part in (tokenizer.encode(text, add_special_tokens=False), ids)
                )
                is_cut = len(ids) > 0 and int(ids[-1]) not in special  # perhaps within a character
                if expected not in found and not (is_cut and found[:-2] in expected):
                    raise ValueError(
                        f"row check: {row.place}: the tokens of {name} say {found!r:.80}, but its column "
                        f"{text!r:.80}: rows or sides were exchanged, or the loss covers other tokens."
                    )
                if expected in found and name != "the last turn":  # a template may end turns in its own way
                    ends.append(not is_cut)
            if chat and data.train_on != "all" and all(isinstance(m, dict) and "role" in m for m in chat):
                tokens, loss = [*before.tolist(), *response.tolist()], [*np.zeros(len(before)), *mask]
                all_ends = {*end_ids, tokenizer.eos_token_id}
                _check_turns(row.place, tokens, loss, chat, tokenizer, all_ends, data)
        if isinstance(row, Labelled) and row.label != bool(file_row.values[data.label_key]):
            raise ValueError(
                f"row check: {row.place}: its label is read as {row.label}, unlike the column's."
            )
    if len(ends) > 1 and not any(ends):
        raise ValueError(f"row check: none of {len(ends)} complete responses of the data has an end token.")


def _check_turns(
    place: str,
    ids: list[int],
    mask: list[float],
    messages: Any,
    tokenizer: PreTrainedTokenizerBase,
    ends: Collection[int],
    data: Data,
) -> None:
    """Raise ValueError if the loss covers only a part of a turn of the assistant, or a token beside it.

    A turn begins behind the generation prompt and ends with its token of `ends`, or with the one that
    follows. A template that marks turns may leave out a part. mask: 1 for tokens with a loss.
    """
    is_marked, is_whole = template_of(tokenizer).marks_turns, data.overlong_prompts in ("error", "drop")
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i]
    for number in turns[:NUM_TURNS] + turns[NUM_TURNS:][-1:]:
        try:
            rendered: list[Any] = [
                tokenizer.apply_chat_template(messages[:number], add_generation_prompt=True),
                tokenizer.apply_chat_template(messages[: number + 1]),
            ]
        except Exception:  # a template may refuse a part of a conversation
            continue
        header, turn = (list(found["input_ids"] if hasattr(found, "keys") else found) for found in rendered)
        first, last = len(header), len(turn)
        is_equal = first < len(ids) and header == ids[:first] and turn[: len(ids)] == ids[:last]
        if not is_equal or sum(token in ends for token in turn[first:]) > 1:
            continue  # the beginning of a conversation may be rendered in another way
        tokens = [*ids[:last], *(turn[len(ids) :] if is_whole else []), *ids[last : last + 1]]
        loss = np.array([*mask, *[0.0] * len(tokens)])[first - 1 : len(tokens)] > 0
        end = next((i for i in range(first, len(tokens)) if tokens[i] in ends), None)
        stop = last if end is None else end + 1
        own = np.arange(first - 1, len(tokens))
        expected = (own >= first) & (own < stop)
        compared = np.arange(1 if is_marked else len(own))
        if end is None:  # spaces after the turn may be left out
            compared = compared[(compared < 2) | (own[compared] == last)]
        if loss[expected].any() and (loss[compared] != expected[compared]).any():
            covered, sampled = (tokenizer.decode(np.array(tokens)[own[part]]) for part in (loss, expected))
            raise ValueError(
                f"row check: {place}: the loss of turn {number + 1} of the conversation covers "
                f"{covered!r:.80}, but the policy samples {sampled!r:.80}."
            )


def _responses(row: Any, file_row: FileRow, data: Data) -> Iterator[tuple]:
    """Yield (name, tokens before, tokens, mask, value of the column, messages or []) of a row's responses."""
    values = file_row.values
    if isinstance(row, PreferencePair):
        prompt = values.get(data.prompt_key)
        for side, key in (("chosen", data.chosen_key), ("rejected", data.rejected_key)):
            ids, mask, value = getattr(row, f"{side}_ids"), getattr(row, f"{side}_mask"), values.get(key)
            chat = [*(prompt if isinstance(prompt, list) else []), *value] if isinstance(value, list) else []
            yield f"the {side} response", row.prompt_ids, ids, mask, value, chat
    elif isinstance(row, Labelled):
        value = values.get(data.response_key or "completion")
        yield "the response", row.prompt_ids, row.response_ids, row.response_mask, value, []
    elif isinstance(row, Prompt) and row.response_ids is not None:
        ids, mask = row.response_ids, row.response_mask
        if mask is None:
            value = value_at(file_row, (data.response_key or GROUND_TRUTH).split("."))
            yield "the target", row.token_ids, ids, np.ones(len(ids)), value, []
        else:
            value = values.get(data.messages_key)
            text = None if data.overlong_prompts == "truncate_right" else value
            yield "the last turn", row.token_ids, ids, mask, text, value if isinstance(value, list) else []


def _last_text(value: Any) -> str | None:
    """Return a text, or the content of the last message of the assistant; None if there is no plain text."""
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        last = value[-1]
        is_answer = last.get("role", last.get("from")) in ("assistant", "gpt") and last.get("weight") != 0
        value = last.get("content", last.get("value")) if is_answer and not last.get("tool_calls") else None
    return value if isinstance(value, str) and value.lstrip()[:1] not in ("[", "{") else None
