"""Pairs of a preferred and a rejected response to one prompt, for dpo and kin, and responses with a label.

Rows have the forms of TRL's data sets (https://huggingface.co/docs/trl/dataset_formats#preference):

    prompt     messages, or a string, as in `rl.data.prompts`
    chosen     the preferred response: a string, or messages that end with the assistant's
    rejected   the other response, in the same form

For kto a row has one response and its label, as in TRL's unpaired preference:

    completion  the response, in the same form
    label       true or 1 if it is desirable, false or 0 if not

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


@dataclass(frozen=True, eq=False)
class Labelled:
    """One prompt with a response and its label. The other fields are as in Preference."""

    index: int
    prompt_ids: np.ndarray
    response_ids: np.ndarray
    label: bool
    """Whether the response is desirable."""
    text: str
    data_source: str


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
    limits = dict(max_prompt_tokens=max_prompt_tokens, max_response_tokens=max_response_tokens)
    nouns = {chosen_key: "chosen responses", rejected_key: "rejected responses"}
    rows, kept = _load(
        files, tokenizer, nouns, required, prompt_key, overlong=overlong, max_rows=max_pairs, **limits
    )
    return [
        Preference(
            index=index,
            prompt_ids=prompt_ids,
            chosen_ids=chosen_ids,
            rejected_ids=rejected_ids,
            text=text,
            data_source=data_source(rows[index]),
        )
        for index, text, prompt_ids, (chosen_ids, rejected_ids) in kept
    ]


def load_labelled(
    files: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_key: str,
    response_key: str,
    label_key: str,
    max_prompt_tokens: int,
    max_response_tokens: int,
    overlong: str,
) -> list[Labelled]:
    """Read `files` in order and tokenize prompts and responses; arguments and errors are those of pairs.

    Also raises ValueError for a label that is neither a bool nor 0 or 1.
    """
    required = {response_key: "name the column with the response in data.response_key"}
    required[label_key] = "name the column with the label in data.label_key"
    limits = dict(max_prompt_tokens=max_prompt_tokens, max_response_tokens=max_response_tokens)
    nouns = {response_key: "responses"}
    rows, kept = _load(files, tokenizer, nouns, required, prompt_key, overlong=overlong, **limits)
    return [
        Labelled(
            index=index,
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            label=_label(rows[index], label_key),
            text=text,
            data_source=data_source(rows[index]),
        )
        for index, text, prompt_ids, (response_ids,) in kept
    ]


def _label(row: Row, column: str) -> bool:
    value = row.values[column]
    if value not in (0, 1):
        raise ValueError(
            f"{row.place}: column {column!r} must be true or false, or 1 or 0, not {describe(value)}."
        )
    return bool(value)


def _load(
    files: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    nouns: dict[str, str],
    required: dict[str, str],
    prompt_key: str,
    *,
    max_prompt_tokens: int,
    max_response_tokens: int,
    overlong: str,
    max_rows: int = 0,
) -> tuple[list[Row], list[tuple[int, str, np.ndarray, list[np.ndarray]]]]:
    """Return all rows, and of each row within the limits (its index, rendered prompt, prompt ids, and the ids
    of its responses).

    nouns: column of a response -> name of such responses in messages.
    """
    if prompt_key:
        required = required | {
            prompt_key: 'name the prompt\'s column in data.prompt_key ("" if only the responses have it)'
        }
    rows = read_rows(files, required=required, optional=["data_source"], max_rows=max_rows)

    column = prompt_key or next(iter(nouns))
    texts, templated, responses = [], [], [[] for _ in nouns]
    for row in rows:
        before, answers = _split_responses(row, tuple(nouns))
        prompt = _prompt(row, before, column=prompt_key)
        templated.append(not isinstance(prompt, str))
        texts.append(render(prompt, tokenizer, row, column=column) if templated[-1] else prompt)
        for texts_of_column, answer in zip(responses, answers, strict=True):
            texts_of_column.append(answer)

    prompt_ids = tokenize(texts, templated, tokenizer, rows, column=column)
    response_ids = [tokenize_targets(answers, tokenizer) for answers in responses]
    kept = within_limit(np.array([*map(len, prompt_ids)]), limit=max_prompt_tokens, overlong=overlong)
    for noun, ids in zip(nouns.values(), response_ids, strict=True):
        kept &= within_limit(
            np.array([*map(len, ids)]),
            limit=max_response_tokens,
            overlong=overlong,
            noun=noun,
            limit_key="rollout.max_response_tokens",
            kept_part="first",
        )
    if not kept.any():
        raise ValueError(
            f"each of the {len(kept)} rows has a prompt or response beyond its limit, so "
            "data.overlong_prompts=drop would drop all. Raise data.max_prompt_tokens or "
            "rollout.max_response_tokens, or choose truncate_left."
        )
    return rows, [
        (
            index,
            texts[index],
            prompt_ids[index][-max_prompt_tokens:],
            [ids[index][:max_response_tokens] for ids in response_ids],
        )
        for index in np.flatnonzero(kept).tolist()
    ]


def _split_responses(row: Row, columns: tuple[str, ...]) -> tuple[Messages | None, list[str]]:
    """Return the messages that all responses begin with (None if there are none), and the responses."""
    parts = [_split_response(row.values[column], row, column=column) for column in columns]
    befores, responses = zip(*parts, strict=True)
    if befores[0] != befores[-1]:
        raise ValueError(
            f"{row.place}: the messages before the last one differ between column {columns[0]!r} and column "
            f"{columns[1]!r}; both must answer the same prompt."
        )
    return befores[0], list(responses)


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
