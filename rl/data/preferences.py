"""Rated responses: pairs of a preferred and a rejected response (dpo and others), or labelled responses
(kto).

Rows have the forms of TRL's data sets (https://huggingface.co/docs/trl/dataset_formats#preference):

    prompt     messages, or a string, as in `rl.data.prompts`
    chosen     the preferred response: a string, or messages that end with a message of the assistant
    rejected   the other response, in the same form

For example, {"prompt": "What is 2 + 2?", "chosen": "4", "rejected": "5"}.

For kto, a row has one response and its label (TRL's unpaired preference):

    completion  the response, in the same form
    label       true or 1 if it is desirable, false or 0 if not

A column with a response may repeat the prompt: its messages before the response are the prompt. These
messages must be the same in both columns and must agree with the prompt column. The prompt column may hold a
string although the responses are conversations (UltraFeedback). Then the string must be the content of a user
message of the conversations, and the prompt is the conversation up to the response, so that the chat template
is applied. With `prompt_key` "" there is no prompt column. Then the messages with which both responses begin
are the prompt (TRL's implicit prompt).

A response made of messages is rendered by the chat template. It may have several messages, such as tool calls
and the output of tools. Then the column `tools` has the schemas of the tools, and only the tokens of the
assistant's turns have a loss (`rl.data.chats`). If the response or its prompt is a string, the response is
its text, followed by the end-of-sequence token.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from rl.data.chat_template import template_of
from rl.data.chats import AssistantTurns, tokenize_chats
from rl.data.messages import COLUMNS, INPUTS, MessageReader, Messages, tools_of
from rl.data.prompts import data_source, read_prompt, refuse_answer, render, tokenize_targets, within_limit
from rl.data.reading import FileRow, describe, read_rows
from rl.data.special_tokens import show


@dataclass(frozen=True, eq=False, kw_only=True)  # eq would compare arrays, which has no single truth value
class Asked:
    """The fields of a row with rated responses that concern its prompt."""

    index: int
    """Index of the row in the concatenation of the files, counted before any row was dropped."""
    prompt_ids: np.ndarray
    """Tokens of the rendered prompt, with the generation prompt, after truncation: np.int32 [P]."""
    text: str
    """The rendered prompt before truncation."""
    data_source: str
    """Column `data_source`, or the name of the file without its extension."""
    source: int
    """Index of its file in `files`."""
    place: str = ""
    """Its file and row, for error messages."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PreferencePair(Asked):
    """One prompt with a preferred and a rejected response."""

    chosen_ids: np.ndarray
    """The preferred response with its end-of-sequence token, after truncation: np.int32 [R]."""
    chosen_mask: np.ndarray
    """np.float32 [R]: 0 for tokens that the policy was given, such as the output of a tool; 1 for others."""
    rejected_ids: np.ndarray
    """The rejected response in the same form: np.int32 [R']."""
    rejected_mask: np.ndarray


@dataclass(frozen=True, eq=False, kw_only=True)
class Labelled(Asked):
    """One prompt with a response, in the same form as `PreferencePair.chosen_ids`, and its label."""

    response_ids: np.ndarray
    response_mask: np.ndarray
    label: bool
    """Whether the response is desirable."""


def load_preferences(
    files: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    chosen_key: str,
    rejected_key: str,
    **options: Any,
) -> list[PreferencePair]:
    """Read `files` in order and tokenize the pairs.

    options: see `_load`. Raises ValueError as `_load` does.
    """
    required = {chosen_key: "name the column with the preferred response in data.chosen_key"}
    required[rejected_key] = "name the column with the rejected response in data.rejected_key"
    nouns = {chosen_key: "chosen responses", rejected_key: "rejected responses"}
    return [
        PreferencePair(
            **asked,
            chosen_ids=chosen.ids,
            chosen_mask=chosen.mask,
            rejected_ids=rejected.ids,
            rejected_mask=rejected.mask,
        )
        for _, asked, (chosen, rejected) in _load(files, tokenizer, nouns, required, **options)
    ]


def load_labelled(
    files: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    response_key: str,
    label_key: str,
    **options: Any,
) -> list[Labelled]:
    """Read `files` in order and tokenize prompts and responses. options: see `_load`.

    Raises ValueError as `_load` does, and for a label that is neither a bool nor 0 or 1.
    """
    required = {response_key: "name the column with the response in data.response_key"}
    required[label_key] = "name the column with the label in data.label_key"
    loaded = _load(files, tokenizer, {response_key: "responses"}, required, **options)
    return [
        Labelled(
            **asked, response_ids=response.ids, response_mask=response.mask, label=_label(row, label_key)
        )
        for row, asked, (response,) in loaded
    ]


def _label(row: FileRow, column: str) -> bool:
    value = row.values[column]
    if value not in (0, 1):
        raise ValueError(
            f"{row.place}: column {column!r} must be true or false, or 1 or 0, not {describe(value)}."
        )
    return bool(value)


class _Response(NamedTuple):
    ids: np.ndarray
    mask: np.ndarray

    def cut(self, start: int, end: int) -> "_Response":
        return _Response(self.ids[start:end], self.mask[start:end])


def _load(
    files: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    nouns: dict[str, str],
    required: dict[str, str],
    *,
    prompt_key: str,
    max_prompt_tokens: int,
    max_response_tokens: int,
    overlong: str,
    end_token_ids: Collection[int] = (),
    max_pairs: int = 0,
) -> list[tuple[FileRow, dict[str, Any], list[_Response]]]:
    """Return for each row within the limits: the row, the fields of `Asked`, and its responses.

    nouns: column with a response -> noun for these responses in error messages.
    required: required column -> remedy for the error if it is missing.
    prompt_key: column with the prompt, or "" if the prompt is only in the messages of the responses.
    max_response_tokens: maximum tokens of a response, including its end-of-sequence token.
    overlong: what to do with a row whose prompt or response exceeds its limit: "error", "drop", or
        "truncate_left", which keeps the last tokens of the prompt and the first tokens of a response. A
        truncated response has no end-of-sequence token, like a sample that reached the length limit.
    end_token_ids: ids that stop generation, besides the tokenizer's eos.
    max_pairs: maximum number of rows to read, before any is dropped; 0 reads all.

    Raises ValueError for an invalid file, a missing column, a prompt or response that is not text,
    conversations of one row with different prompts, a tokenizer that cannot render messages or has no
    eos_token, a template that `rl.data.chats` refuses, and for overlong rows if `overlong` is "error".
    """
    if prompt_key:
        required = required | {
            prompt_key: 'name the prompt\'s column in data.prompt_key ("" if only the responses have it)'
        }
    inputs = INPUTS if prompt_key == "instruction" else ()
    optional = ["data_source", *COLUMNS, *inputs]
    rows = read_rows(files, required=required, optional=optional, max_rows=max_pairs)
    column = prompt_key or next(iter(nouns))
    reader = MessageReader(template_of(tokenizer), reads_weights=True)
    split = [_split(row, tuple(nouns), prompt_key, reader) for row in rows]
    tools = [tools_of(row) for row in rows]
    texts, prompt_ids = render([prompt for prompt, _ in split], tools, rows, reader, column=column)
    responses = []
    for number in range(len(nouns)):
        answers = [answers[number] for _, answers in split]
        targets = tokenize_targets([text if isinstance(text, str) else "" for text in answers], tokenizer)
        responses.append([_Response(ids, np.ones(len(ids), np.float32)) for ids in targets])
    chats = [i for i, (_, answers) in enumerate(split) if not isinstance(answers[0], str)]
    if chats:
        turns = AssistantTurns(reader, end_token_ids, "give the responses as texts")
        for i, text, prompt, parts in _conversations(chats, rows, split, tools, turns):
            texts[i], prompt_ids[i] = text, prompt
            for column_responses, part in zip(responses, parts, strict=True):
                column_responses[i] = part
        reader.finish(", ".join(map(str, files)))
    kept = within_limit(np.array([*map(len, prompt_ids)]), limit=max_prompt_tokens, overlong=overlong)
    for noun, found in zip(nouns.values(), responses, strict=True):
        kept &= within_limit(
            np.array([len(response.ids) for response in found]),
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
    loaded: list[tuple[FileRow, dict[str, Any], list[_Response]]] = []
    for index in np.flatnonzero(kept).tolist():
        asked = dict(
            index=index,
            place=rows[index].place,
            prompt_ids=prompt_ids[index][-max_prompt_tokens:],
            text=show(texts[index], tokenizer),
            data_source=data_source(rows[index]),
            source=rows[index].source,
        )
        cut = [found[index].cut(0, max_response_tokens) for found in responses]
        loaded.append((rows[index], asked, cut))
    return loaded


def _conversations(
    indices: list[int],
    rows: list[FileRow],
    split: "list[PromptAndResponses]",
    tools: list[list[dict]],
    turns: AssistantTurns,
) -> Iterator[tuple[int, str, np.ndarray, list[_Response]]]:
    """Yield for each row whose responses are messages: its index, rendered prompt, prompt ids and responses.

    The prompt ids are the tokens with which all conversations of the row begin, at most up to the first token
    with a loss.
    """
    texts, columns = [], []
    for number in range(len(split[indices[0]][1])):
        found = [
            turns.find([*split[i][0], *split[i][1][number]], tools[i], rows[i], first=len(split[i][0]))
            for i in indices
        ]
        turns.warn_of_open_turns(found)
        texts = [text[: spans[0][0]] for text, spans in found]
        columns.append(tokenize_chats(found, turns.tokenizer, [rows[i] for i in indices]))
    for i, text, *sides in zip(indices, texts, *columns, strict=True):
        start = min(int(mask.argmax()) for _, mask in sides)
        differs = sides[0][0][:start] != sides[-1][0][:start]
        start = int(differs.argmax()) if differs.any() else start
        parts = [_Response(*side).cut(start, int(np.flatnonzero(side[1])[-1]) + 1) for side in sides]
        yield i, text, sides[0][0][:start], parts


# ---- prompts and responses of a row ----

PromptAndResponses = tuple[Messages | str, list[Messages | str]]
"""The prompt and the responses of a row. If a response is a list of messages, the prompt is one, too."""


def _split(
    row: FileRow, columns: tuple[str, ...], prompt_column: str, reader: MessageReader
) -> PromptAndResponses:
    values = [reader.read(row, column) for column in columns]
    for value, column in zip(values, columns, strict=True):
        if isinstance(value, list) and value[-1]["role"] != "assistant":
            raise _not_a_text(row, column, value[-1])
    prompt = read_prompt(row, prompt_column, reader) if prompt_column else None
    sizes = [_num_repeated(value, values, prompt) for value in values]
    befores = [value[:size] if not isinstance(value, str) else [] for value, size in zip(values, sizes)]
    if befores[0] != befores[-1]:
        raise ValueError(
            f"{row.place}: the messages before the last one differ between column {columns[0]!r} and column "
            f"{columns[1]!r}; both must answer the same prompt."
        )
    prompt = _prompt(row, befores[0], prompt, column=prompt_column)
    if not isinstance(prompt, str) and not any(isinstance(value, str) for value in values):
        return prompt, [value[size:] for value, size in zip(values, sizes, strict=True)]
    parts = zip(values, sizes, columns, strict=True)
    return prompt, [_text(value, size, row, column=column) for value, size, column in parts]


def _num_repeated(value: Messages | str, values: list[Messages | str], prompt: Messages | str | None) -> int:
    """Return the number of messages that come before the response in `value`, which is one of the row's
    `values`."""
    if isinstance(value, str):
        return 0
    chats = [other for other in values if not isinstance(other, str)]
    if prompt is None and len(chats) == len(values) > 1:
        lengths = range(min(map(len, chats)))
        same = next((n for n in lengths if any(other[n] != value[n] for other in chats)), len(lengths) - 1)
        answers = (n for n in range(same, 0, -1) if all(other[n]["role"] == "assistant" for other in chats))
        return next(answers, len(value) - 1)
    if isinstance(prompt, list) and value[: len(prompt)] == prompt:
        return len(prompt)
    return 0 if value[0]["role"] == "assistant" else len(value) - 1


def _text(value: Messages | str, size: int, row: FileRow, *, column: str) -> str:
    """Return a response as text. size: number of messages before the response."""
    if isinstance(value, str):
        return value
    message = value[size]
    if len(value) > size + 1 or not isinstance(message.get("content"), str) or message.get("tool_calls"):
        raise _not_a_text(row, column, value[-1])
    if others := message.keys() - {"role", "content"}:
        raise ValueError(
            f"{row.place}: column {column!r} has {', '.join(sorted(others))} in a response that is read as a "
            "text, because the prompt or the other response is a text; write all as messages."
        )
    return message["content"]


def _not_a_text(row: FileRow, column: str, message: dict) -> ValueError:
    return ValueError(
        f"{row.place}: column {column!r} must end with a text message of the assistant, not "
        f"{describe(message)}."
    )


def _prompt(row: FileRow, before: Messages, prompt: Messages | str | None, *, column: str) -> Messages | str:
    """Return the prompt of a row.

    before: messages with which its responses begin. prompt: content of the prompt column, None if there is
        none.
    """
    if not before:
        if prompt is None:
            raise ValueError(
                f"{row.place}: there is no prompt: data.prompt_key is empty, and the responses are not "
                "conversations that begin with the prompt. Name the column with the prompt in "
                "data.prompt_key."
            )
        return prompt
    refuse_answer(before, row, column=f"{column or 'chosen'} (as the responses repeat it)")
    if isinstance(prompt, str):
        asked = [str(message.get("content")).strip() for message in before if message["role"] == "user"]
        agree = prompt.strip() in asked
    else:
        agree = prompt is None or prompt == before
    if not agree:
        raise ValueError(
            f"{row.place}: the messages before the response differ from the prompt in column {column!r}, "
            f'{describe(prompt)}. If the messages are right, set data.prompt_key="" to ignore the column.'
        )
    return before
