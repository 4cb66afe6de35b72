"""Pairs of responses to one prompt, of which one is preferred: what dpo and reward models learn from.

Rows have a prompt, a chosen and a rejected response, in the forms of TRL's data sets
(https://huggingface.co/docs/trl/dataset_formats#preference):

    prompt     messages, or a string, as for `rl.data.prompts`
    chosen     the response: a string, or messages of which the last is the assistant's. Messages before it repeat the
    rejected   prompt; they must be the same in both columns, and agree with the prompt column.

A string as prompt with whole conversations as responses (UltraFeedback) is the content of one of the user's messages; the
conversation is then the prompt, so that the chat template is applied. With `prompt_key` "" there is no prompt column, and the
repeated messages are the prompt (TRL's implicit prompt).
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
    """One prompt with a preferred response and another."""

    index: int
    """Row in the concatenation of the files, counted before any pair was dropped."""
    prompt_ids: np.ndarray
    """np.int32 [P]: after the chat template with generation prompt, after truncation."""
    chosen_ids: np.ndarray
    """np.int32 [R]: the preferred response without special tokens, then the end-of-sequence token, after truncation."""
    rejected_ids: np.ndarray
    """np.int32 [R']: the other response, likewise."""
    text: str
    """The rendered prompt before truncation."""
    data_source: str
    """Column `data_source`, or the name of the file without its ending."""


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
    """Read `files` in order and tokenize them; the same list on every rank that reads the same files.

    prompt_key: column with the prompt, or "" where the prompt is only in the messages of both responses.
    max_response_tokens: longest response in tokens, its end-of-sequence token among them.
    overlong: what to do with a pair of which the prompt or a response exceeds its limit. "error"; "drop": leave it out;
        "truncate_left" (the name is that of prompts): keep the last tokens of the prompt and the first of a response, which
        then has no end-of-sequence token, as a sample that was cut off at the limit has none.
    max_pairs: read only the first so many rows, before any is dropped. 0: all.

    Raises ValueError for a missing, unreadable or empty file, a missing column, a prompt or response that is not text,
    conversations that disagree, a tokenizer that cannot render messages or has no eos_token, and `overlong`.
    """
    required = {chosen_key: "name the column with the preferred response in data.chosen_key"}
    required[rejected_key] = "name the column with the other response in data.rejected_key"
    if prompt_key:
        required[prompt_key] = (
            'name the column with the prompt in data.prompt_key ("": it is in the responses only)'
        )
    rows = read_rows(files, required=required, optional=["data_source"], max_rows=max_pairs)

    texts, templated, responses = [], [], {chosen_key: [], rejected_key: []}
    for row in rows:
        before, answers = _split_responses(row, (chosen_key, rejected_key))
        prompt = _prompt(row, before, column=prompt_key)
        templated.append(not isinstance(prompt, str))
        texts.append(
            prompt
            if isinstance(prompt, str)
            else render(prompt, tokenizer, row, column=prompt_key or chosen_key)
        )
        for column, answer in zip(responses, answers, strict=True):
            responses[column].append(answer)

    prompt_ids = tokenize(texts, templated, tokenizer, rows, column=prompt_key or chosen_key)
    chosen_ids = tokenize_targets(responses[chosen_key], tokenizer)
    rejected_ids = tokenize_targets(responses[rejected_key], tokenizer)
    kept = _keep(
        prompt_ids,
        chosen_ids,
        rejected_ids,
        overlong,
        prompt_limit=max_prompt_tokens,
        response_limit=max_response_tokens,
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
        for index in kept
    ]


def _split_responses(row: Row, columns: tuple[str, str]) -> tuple[Messages | None, list[str]]:
    """The messages that both responses begin with (None if they have none), and the two responses."""
    parts = [_split_response(row.values[column], row, column=column) for column in columns]
    (chosen_before, chosen), (rejected_before, rejected) = parts
    if chosen_before != rejected_before:
        raise ValueError(
            f"{row.place}: the messages before the last one differ between column {columns[0]!r} and column "
            f"{columns[1]!r}: both must be responses to one prompt."
        )
    return chosen_before, [chosen, rejected]


def _split_response(value: Any, row: Row, *, column: str) -> tuple[Messages | None, str]:
    """The messages before the response (None: there are none), and the response."""
    if isinstance(value, str):
        return None, value
    if not is_chat(value):
        raise ValueError(
            f"{row.place}: column {column!r} must be the response, or messages that end with it, it is {describe(value)}."
        )
    *before, last = without_nulls(value)
    if last["role"] != "assistant" or not isinstance(last.get("content"), str):
        raise ValueError(
            f"{row.place}: column {column!r} must end with a message of the assistant with text, the response; its last "
            f"message is {describe(last)}."
        )
    return before or None, last["content"]


def _prompt(row: Row, before: Messages | None, *, column: str) -> Messages | str:
    """The prompt of a row, given the messages that both responses begin with."""
    if before is not None:
        before = to_messages(before, row, column=f"{column or 'chosen'} (as the responses repeat it)")
    if not column:
        if before is None:
            raise ValueError(
                f"{row.place}: there is no prompt: the responses are not conversations that begin with it, and "
                "data.prompt_key is empty. Name the column with the prompt in data.prompt_key."
            )
        return before
    prompt = row.values[column]
    messages = to_messages(prompt, row, column=column)
    if before is None:
        return prompt if messages is None else messages
    if messages is None:
        agree = any(
            message["role"] == "user" and str(message.get("content")).strip() == prompt.strip()
            for message in before
        )
    else:
        agree = messages == before
    if not agree:
        raise ValueError(
            f"{row.place}: the messages before the response are not the prompt in column {column!r}, which is "
            f'{describe(prompt)}. If they are right, set data.prompt_key to "" and the column is not read.'
        )
    return before


def _keep(
    prompts: list[np.ndarray],
    chosen: list[np.ndarray],
    rejected: list[np.ndarray],
    overlong: str,
    *,
    prompt_limit: int,
    response_limit: int,
) -> list[int]:
    """Indices of the pairs to keep; all of them where the caller cuts."""
    kept = within_limit(np.array([len(ids) for ids in prompts]), limit=prompt_limit, overlong=overlong)
    for noun, responses in (("chosen responses", chosen), ("rejected responses", rejected)):
        kept &= within_limit(
            np.array([len(ids) for ids in responses]),
            limit=response_limit,
            overlong=overlong,
            noun=noun,
            limit_key="rollout.max_response_tokens",
            kept_part="first",
        )
    if not kept.any():
        raise ValueError(
            f"of each of the {len(kept)} pairs the prompt or a response is too long: data.overlong_prompts = drop would "
            "leave nothing. Raise data.max_prompt_tokens or rollout.max_response_tokens, or choose truncate_left or error."
        )
    return np.flatnonzero(kept).tolist()
