"""Pairs of a preferred and a rejected response to one prompt, for dpo and reward models.

Rows have the forms of TRL's data sets (https://huggingface.co/docs/trl/dataset_formats#preference):

    prompt     messages, or a string, as in `rl.data.prompts`
    chosen     the preferred response: a string, or messages that end with the assistant's
    rejected   the other response, in the same form

Messages before the response repeat the prompt. They must be the same in both columns and agree with the
prompt column. If the prompt is a string and the responses are conversations (UltraFeedback), the string must
be the content of a user message; the conversation is then the prompt, so that the chat template is applied.
With `prompt_key` "" there is no prompt column, and the repeated messages are the prompt (TRL's implicit
prompt).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rl.data.prompts import (
    Messages,
    data_source,
    is_chat,
    render,
    to_messages,
    tokenize,
    tokenize_targets,
    within_limit,
    without_nulls,
)
from rl.data.reading import Row, describe, read_rows


@dataclass(frozen=True, eq=False)  # eq would compare arrays, which has no single truth value
class Preference:
    """One prompt with a preferred and a rejected response."""

    index: int
    """Row in the concatenation of the files, counted before any pair was dropped."""
    prompt_ids: np.ndarray
    """np.int32 [P]: after the chat template with generation prompt, after truncation."""
    chosen_ids: np.ndarray
    """np.int32 [R]: the preferred response and the end-of-sequence token, after truncation."""
    rejected_ids: np.ndarray
    """np.int32 [R']: the rejected response in the same form."""
    text: str
    """The rendered prompt before truncation."""
    data_source: str
    """Column `data_source`, or the name of the file without its extension."""


def load_preferences(
    files: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_key: str,
    chosen_key: str,
    rejected_key: str,
    max_prompt_tokens: int,
    max_response_tokens: int,
    overlong: str,
    max_pairs: int = 0,
) -> list[Preference]:
    """Read `files` in order and tokenize the pairs.

    prompt_key: column with the prompt, or "" if the prompt is only in the messages of both responses.
    max_response_tokens: maximum tokens of a response, including its end-of-sequence token.
    overlong: what to do with a pair whose prompt or response exceeds its limit: "error", "drop", or
        "truncate_left", which keeps the last tokens of the prompt and the first tokens of a response. The
        response then lacks its end-of-sequence token, as a sample that reached the limit.
    max_pairs: maximum number of rows to read, before any is dropped; 0 reads all.

    Raises ValueError for an invalid file, a missing column, a prompt or response that is not text,
    conversations that disagree, a tokenizer that cannot render messages or has no eos_token, and overlong
    pairs according to `overlong`.
    """
    required = {chosen_key: "name the column with the preferred response in data.chosen_key"}
    required[rejected_key] = "name the column with the rejected response in data.rejected_key"
    if prompt_key:
        required[prompt_key] = (
            'name the prompt\'s column in data.prompt_key ("" if only the responses have it)'
        )
    rows = read_rows(files, required=required, optional=["data_source"], max_rows=max_pairs)

    column = prompt_key or chosen_key
    texts, templated, responses = [], [], ([], [])
    for row in rows:
        before, answers = _split_responses(row, (chosen_key, rejected_key))
        prompt = _prompt(row, before, column=prompt_key)
        templated.append(not isinstance(prompt, str))
        texts.append(render(prompt, tokenizer, row, column=column) if templated[-1] else prompt)
        for texts_of_column, answer in zip(responses, answers, strict=True):
            texts_of_column.append(answer)

    prompt_ids = tokenize(texts, templated, tokenizer, rows, column=column)
    chosen_ids, rejected_ids = (tokenize_targets(answers, tokenizer) for answers in responses)
    kept = within_limit(np.array([*map(len, prompt_ids)]), limit=max_prompt_tokens, overlong=overlong)
    for noun, response_ids in (("chosen responses", chosen_ids), ("rejected responses", rejected_ids)):
        kept &= within_limit(
            np.array([*map(len, response_ids)]),
            limit=max_response_tokens,
            overlong=overlong,
            noun=noun,
            limit_key="rollout.max_response_tokens",
            kept_part="first",
        )
    if not kept.any():
        raise ValueError(
            f"each of the {len(kept)} pairs has a prompt or response beyond its limit, so "
            "data.overlong_prompts=drop would drop all. Raise data.max_prompt_tokens or "
            "rollout.max_response_tokens, or choose truncate_left."
        )
    return [
        Preference(
            index=index,
            prompt_ids=prompt_ids[index][-max_prompt_tokens:],
            chosen_ids=chosen_ids[index][:max_response_tokens],
            rejected_ids=rejected_ids[index][:max_response_tokens],
            text=texts[index],
            data_source=data_source(rows[index]),
        )
        for index in np.flatnonzero(kept).tolist()
    ]


def _split_responses(row: Row, columns: tuple[str, str]) -> tuple[Messages | None, list[str]]:
    """Return the messages that both responses begin with (None if there are none), and the two responses."""
    parts = [_split_response(row.values[column], row, column=column) for column in columns]
    (chosen_before, chosen), (rejected_before, rejected) = parts
    if chosen_before != rejected_before:
        raise ValueError(
            f"{row.place}: the messages before the last one differ between column {columns[0]!r} and column "
            f"{columns[1]!r}; both must answer the same prompt."
        )
    return chosen_before, [chosen, rejected]


def _split_response(value: Any, row: Row, *, column: str) -> tuple[Messages | None, str]:
    """Return the messages before the response (None if there are none), and the response."""
    if isinstance(value, str):
        return None, value
    if not is_chat(value):
        raise ValueError(
            f"{row.place}: column {column!r} must be a string or messages that end with the response, "
            f"not {describe(value)}."
        )
    *before, last = without_nulls(value)
    if last["role"] != "assistant" or not isinstance(last.get("content"), str):
        raise ValueError(
            f"{row.place}: column {column!r} must end with a text message of the assistant, not "
            f"{describe(last)}."
        )
    return before or None, last["content"]


def _prompt(row: Row, before: Messages | None, *, column: str) -> Messages | str:
    """Return the prompt of a row, given the messages that both responses begin with."""
    if before is not None:
        before = to_messages(before, row, column=f"{column or 'chosen'} (as the responses repeat it)")
    if not column:
        if before is None:
            raise ValueError(
                f"{row.place}: there is no prompt: data.prompt_key is empty, and the responses are not "
                "conversations that begin with the prompt. Name the column with the prompt in "
                "data.prompt_key."
            )
        return before
    prompt = row.values[column]
    messages = to_messages(prompt, row, column=column)
    if before is None:
        return prompt if messages is None else messages
    if messages is None:
        asked = [str(message.get("content")).strip() for message in before if message["role"] == "user"]
        agree = prompt.strip() in asked
    else:
        agree = messages == before
    if not agree:
        raise ValueError(
            f"{row.place}: the messages before the response differ from the prompt in column {column!r}, "
            f'{describe(prompt)}. If the messages are right, set data.prompt_key="" to ignore the column.'
        )
    return before
