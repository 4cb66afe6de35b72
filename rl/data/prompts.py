"""Prompts: files with verl's columns -> chat template -> token ids.

Columns: `prompt` (list of {role, content}, or a string), and if present `data_source`, `reward_model` {style,
ground_truth} and `extra_info`; other columns are not read. Files are those of `rl.data.reading`.

`load_prompts` reads top to bottom as what happens: rows -> texts -> token ids -> length policy -> prompts. Whatever is
wrong with the data is a ValueError that names the file and the row.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rl.data.reading import Row, describe, first_line, read_rows

log = logging.getLogger(__name__)

Messages = list[dict[str, Any]]
"""A chat: {role, content} and whatever else the chat template knows (name, tool_calls, ...)."""


@dataclass(frozen=True, eq=False)  # eq would compare arrays, which has no single truth value
class Prompt:
    """One prompt, ready for the engine and for the reward function."""

    index: int
    """Row in the concatenation of the files, counted before any prompt was dropped."""
    token_ids: np.ndarray
    """np.int32 [P]: after the chat template with generation prompt, after truncation."""
    text: str
    """The rendered prompt before truncation; the reward function gets it as `prompt`."""
    data_source: str
    """Column `data_source`, or the name of the file without its ending."""
    ground_truth: Any
    """`reward_model.ground_truth`, or None."""
    extra_info: dict[str, Any]
    """Column `extra_info`, or {}."""
    response_ids: np.ndarray | None = None
    """np.int32 [R], sft only: the target without special tokens, then the end-of-sequence token."""
    messages: Messages | None = None
    """The chat before the template, without keys that are None; None where the prompt is a string."""
    source: int = 0
    """Index of its file in `files`."""


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face checkpoint directory; never asks the hub.

    Raises ValueError if `path` is no directory or holds no tokenizer.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(
            f"model.path {str(path)!r} is not a directory: download the checkpoint first "
            "(hf download NAME --local-dir DIR) and name its directory."
        )
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (
        Exception
    ) as error:  # whatever transformers stumbles over, the user needs to know in which directory
        found = ", ".join(sorted(entry.name for entry in path.iterdir())) or "nothing"
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"no usable tokenizer (tokenizer.json, tokenizer_config.json) in {path}, which has {found}: {reason}"
        ) from error


def load_prompts(
    files: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_key: str,
    max_prompt_tokens: int,
    overlong: str,
    response_key: str | None = None,
    max_prompts: int = 0,
) -> list[Prompt]:
    """Read `files` in order and tokenize them; the same list on every rank that reads the same files.

    prompt_key: column with messages, rendered with the tokenizer's chat template and generation prompt, or with
        strings, taken as they are; one that does not begin with the tokenizer's BOS gets its special tokens. Messages may
        be a conversation of several turns, as long as the last one is not the assistant's.
    overlong: "error", "drop" or "truncate_left", for prompts of more than `max_prompt_tokens` tokens.
    response_key: None for RL. For sft the column with the target; a dotted path reaches into one (`extra_info.answer`);
        "" stands for `reward_model.ground_truth`.
    max_prompts: read only the first so many rows, before overlong prompts are dropped. 0: all.

    Raises ValueError for a missing, unreadable or empty file, a missing column, a prompt or target that is not text, a
    tokenizer that cannot render messages, and overlong prompts according to `overlong`.
    """
    target_path = None if response_key is None else (response_key or "reward_model.ground_truth").split(".")
    rows = read_rows(
        files,
        required={prompt_key: "name the column with the prompt in data.prompt_key"},
        optional=["data_source", "reward_model", "extra_info", *(target_path or [])[:1]],
        max_rows=max_prompts,
    )
    messages = [to_messages(row.values[prompt_key], row, column=prompt_key) for row in rows]
    texts = [
        row.values[prompt_key] if chat is None else render(chat, tokenizer, row, column=prompt_key)
        for row, chat in zip(rows, messages, strict=True)
    ]
    templated = [chat is not None for chat in messages]
    token_ids = tokenize(texts, templated, tokenizer, rows, column=prompt_key)
    if target_path is None:
        response_ids = [None] * len(rows)
    else:
        response_ids = tokenize_targets([_target(row, target_path) for row in rows], tokenizer)
    lengths = np.array([len(ids) for ids in token_ids])
    kept = within_limit(lengths, limit=max_prompt_tokens, overlong=overlong)
    return [
        Prompt(
            index=index,
            token_ids=token_ids[index][-max_prompt_tokens:],
            text=texts[index],
            data_source=data_source(rows[index]),
            ground_truth=(rows[index].values.get("reward_model") or {}).get("ground_truth"),
            extra_info=rows[index].values.get("extra_info") or {},
            response_ids=response_ids[index],
            messages=messages[index],
            source=rows[index].source,
        )
        for index in np.flatnonzero(kept).tolist()
    ]


def data_source(row: Row) -> str:
    """Column `data_source` of a row, or the name of its file without the ending."""
    return str(row.values.get("data_source") or row.file_name)


# ---- messages and text ----


def to_messages(prompt: Any, row: Row, *, column: str) -> Messages | None:
    """The chat in a column, without keys that are None; None for a string.

    Raises ValueError for what is neither, and for a chat whose last message is the assistant's.
    """
    if isinstance(prompt, str):
        return None
    if not is_chat(prompt):
        raise ValueError(
            f"{row.place}: column {column!r} must be a string or a list of {{role, content}} messages, "
            f"it is {describe(prompt)}."
        )
    if prompt[-1]["role"] == "assistant":
        raise ValueError(
            f"{row.place}: column {column!r} ends with a message of the assistant, but a prompt ends with what is to be "
            "answered (user, tool or system): leave that message out, or put it into a column of its own, which sft "
            "names in data.response_key."
        )
    return without_nulls(prompt)


def is_chat(value: Any) -> bool:
    """A non-empty list of messages; one that calls tools needs no content."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(
            isinstance(message, dict)
            and message.get("role") is not None
            and (message.get("content") is not None or bool(message.get("tool_calls")))
            for message in value
        )
    )


def without_nulls(messages: Messages) -> Messages:
    """Parquet gives all structs of a column the same keys and fills up with None; templates ask which keys there are."""
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def render(messages: Messages, tokenizer: PreTrainedTokenizerBase, row: Row, *, column: str) -> str:
    """The chat in the tokenizer's template, with the generation prompt.

    Raises ValueError if there is no template or it rejects the messages.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{row.place}: column {column!r} holds messages, but the tokenizer of {tokenizer.name_or_path} has "
            "no chat template: use an instruct model, or prepare prompts as strings."
        )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError as error:
        raise ValueError(
            f"{row.place}: the chat template of {tokenizer.name_or_path} rejects the messages of column "
            f"{column!r}: {first_line(error)}"
        ) from error


# ---- tokens ----


def tokenize(
    texts: Sequence[str],
    templated: Sequence[bool],
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    *,
    column: str,
) -> list[np.ndarray]:
    """Token ids of all prompts, np.int32 [P] each.

    A chat template writes its special tokens itself, and so may a string; other strings get the tokenizer's. Raises
    ValueError for a prompt without tokens.
    """
    bare = [
        not from_template and not (tokenizer.bos_token and text.startswith(tokenizer.bos_token))
        for text, from_template in zip(texts, templated, strict=True)
    ]
    token_ids: list[np.ndarray] = [np.empty(0, dtype=np.int32)] * len(texts)
    for add_special_tokens in (False, True):
        indices = [i for i in range(len(texts)) if bare[i] == add_special_tokens]
        encoded = _encode([texts[i] for i in indices], tokenizer, add_special_tokens=add_special_tokens)
        for i, ids in zip(indices, encoded, strict=True):
            if len(ids) == 0:
                raise ValueError(
                    f"{rows[i].place}: the prompt in column {column!r} is empty: it has no tokens."
                )
            token_ids[i] = ids
    return token_ids


def tokenize_targets(targets: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    """np.int32 [R] for each target: its tokens, then the end-of-sequence token."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path} has no eos_token, which sft puts after each response."
        )
    eos = np.array([tokenizer.eos_token_id], dtype=np.int32)
    return [np.concatenate([ids, eos]) for ids in _encode(targets, tokenizer, add_special_tokens=False)]


def _encode(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool
) -> list[np.ndarray]:
    """Token ids of each text, np.int32, in one call of the tokenizer; neither truncated nor padded."""
    if not texts:
        return []
    encoded = tokenizer(
        list(texts),
        add_special_tokens=add_special_tokens,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    return [np.array(ids, dtype=np.int32) for ids in encoded["input_ids"]]


def _target(row: Row, path: list[str]) -> str:
    """The sft target of a row: the string or number at `path`, such as ["reward_model", "ground_truth"]."""
    value: Any = row.values
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(
            f"{row.place}: {'.'.join(path)} must be the text to learn, it is {describe(value)}: "
            "name the column with the target in data.response_key."
        )
    return value


# ---- length ----


def within_limit(
    lengths: np.ndarray,
    *,
    limit: int,
    overlong: str,
    noun: str = "prompts",
    limit_key: str = "data.max_prompt_tokens",
    kept_part: str = "last",
) -> np.ndarray:
    """Which sequences to keep, bool [N], of those with `lengths` int [N]. For truncate_left all: the caller cuts.

    noun, limit_key, kept_part: for messages, what the sequences are, the config key of `limit`, and which of their tokens
    the caller keeps.

    Raises ValueError for a limit < 1, an unknown `overlong`, and if it is "error" or would drop everything.
    """
    if limit < 1:
        raise ValueError(f"{limit_key} is {limit}: it must be at least 1.")
    if overlong not in ("error", "drop", "truncate_left"):
        raise ValueError(f"data.overlong_prompts is {overlong!r}: choose error, drop or truncate_left.")
    fits = lengths <= limit
    if fits.all():
        return fits
    summary = (
        f"{(~fits).sum()} of {len(lengths)} {noun} have more than {limit_key} = {limit} tokens, "
        f"the longest {lengths.max()}"
    )
    if overlong == "error":
        raise ValueError(
            f"{summary}: raise the limit, or set data.overlong_prompts to drop (leave them out) or truncate_left (keep "
            f"their {kept_part} tokens) in place of error."
        )
    if overlong == "drop" and not fits.any():
        raise ValueError(
            f"{summary}: data.overlong_prompts = drop would leave nothing. Raise the limit, or "
            "choose truncate_left or error."
        )
    log.info("%s; data.overlong_prompts = %s", summary, overlong)
    return fits if overlong == "drop" else np.ones_like(fits)
