"""Comparison of the data's responses with a second source: the rows of the files, read again one by one.

A shifted row, exchanged sides of a pair or a wrong label changes no shape, and the loss still falls.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rl.config.schema import Data
from rl.data.preferences import Labelled, PreferencePair
from rl.data.prompts import GROUND_TRUTH, Prompt, value_at
from rl.data.reading import FileRow, read_row, row_bytes
from rl.data.special_tokens import hide, special_ids

NUM_COMPARED = 32
"""Number of rows that are compared, evenly spread over the data."""
READ_BYTES = 256 << 20
"""Bytes of files above which fewer rows are compared, at least one."""


def check_responses(rows: Sequence[Any], tokenizer: PreTrainedTokenizerBase, data: Data) -> None:
    """Raise ValueError if the tokens of a response are not the text of its row, or a label is not the row's.

    rows: pairs, labelled responses, or prompts; prompts without a response are not compared.
    """
    special, ends = special_ids(tokenizer), list[bool]()
    cost = max((row_bytes(row.place) for row in rows[-1:] if row.place), default=0)
    number = max(1, min(NUM_COMPARED, READ_BYTES // max(1, cost)))
    for row in rows[:: -(-len(rows) // number) or 1]:
        if not row.place:
            continue
        file_row = read_row(row.place)
        for name, ids, value in _sides(row, file_row, data):
            text = _last_text(value)
            if text is None or hide(text, tokenizer) != text or "</think>" in text:
                continue  # the template may leave out reasoning
            expected, found = (
                "".join(str(tokenizer.decode(part, skip_special_tokens=True)).split())
                for part in (tokenizer.encode(text, add_special_tokens=False), ids)
            )
            is_cut = len(ids) > 0 and int(ids[-1]) not in special  # at a limit, perhaps within a character
            if expected not in found and not (is_cut and found[:-2] in expected):
                raise ValueError(
                    f"row check: {row.place}: the tokens of {name} say {found!r:.80}, but its column "
                    f"{text!r:.80}: rows or sides were exchanged, or the loss covers other tokens."
                )
            if expected in found and name != "the last turn":  # a template may end turns in its own way
                ends.append(not is_cut)
        if isinstance(row, Prompt) and row.response_mask is not None:
            _check_header(row, tokenizer, file_row.values.get(data.messages_key))
        if isinstance(row, Labelled) and row.label != bool(file_row.values[data.label_key]):
            raise ValueError(
                f"row check: {row.place}: its label is read as {row.label}, unlike the column's."
            )
    if len(ends) > 1 and not any(ends):
        raise ValueError(
            f"row check: none of {len(ends)} complete responses of the data ends with an end token, so the "
            "policy would not learn to stop."
        )


def _check_header(row: Prompt, tokenizer: PreTrainedTokenizerBase, messages: Any) -> None:
    """Raise ValueError if the loss covers the end of the header that the template writes before a turn."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        return
    own = row.token_ids.tolist()
    whole = own if row.response_ids is None else own + row.response_ids.tolist()
    for place in [i for i, message in enumerate(messages) if message["role"] == "assistant" and i]:
        try:
            found: Any = tokenizer.apply_chat_template(messages[:place], add_generation_prompt=True)
        except Exception:  # a template may refuse a part of a conversation
            continue
        header = list(found["input_ids"] if hasattr(found, "keys") else found)
        if own == header:
            return
        if len(own) < len(header) and header == whole[: len(header)]:
            raise ValueError(
                f"row check: {row.place}: the loss covers {tokenizer.decode(header[len(own) :])!r:.80}, the "
                "end of the header before the assistant's turn, which the policy never samples."
            )


def _sides(row: Any, file_row: FileRow, data: Data) -> Iterator[tuple[str, np.ndarray, Any]]:
    """Yield (name, tokens with a loss, value of the column) of each response of a row."""
    values = file_row.values
    if isinstance(row, PreferencePair):
        yield "the chosen response", row.chosen_ids[row.chosen_mask > 0], values.get(data.chosen_key)
        yield "the rejected response", row.rejected_ids[row.rejected_mask > 0], values.get(data.rejected_key)
    elif isinstance(row, Labelled):
        name = data.response_key or "completion"
        yield "the response", row.response_ids[row.response_mask > 0], values.get(name)
    elif isinstance(row, Prompt) and row.response_ids is not None:
        ids, mask = row.response_ids, row.response_mask
        if mask is None:
            path = (data.response_key or GROUND_TRUTH).split(".")
            yield "the target", ids, value_at(file_row, path)
        elif len(row.token_ids) + len(ids) < data.max_prompt_tokens:
            yield "the last turn", ids[mask > 0], values.get(data.messages_key)


def _last_text(value: Any) -> str | None:
    """Return a text, or the content of the last message of the assistant; None if there is no plain text."""
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        last = value[-1]
        is_answer = last.get("role", last.get("from")) in ("assistant", "gpt") and last.get("weight") != 0
        value = last.get("content", last.get("value")) if is_answer and not last.get("tool_calls") else None
    return value if isinstance(value, str) and value.lstrip()[:1] not in ("[", "{") else None
