"""Prompts: read parquet and JSONL files with verl's columns, apply the chat template, tokenize.

Columns: `prompt` (list of {role, content}, or a string), and if present `data_source`, `reward_model` {style,
ground_truth} and `extra_info`; other columns are not read. Every rank reads the files itself, in memory: a few thousand
prompts take seconds, and there is no cache on disk for thousands of ranks to lock and overwrite at once.

`load_prompts` reads top to bottom as what happens: rows -> texts -> token ids -> length policy -> prompts. Whatever is
wrong with the data is a ValueError that names the file and the row.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AutoTokenizer, PreTrainedTokenizerBase

log = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class _Row:
    """A row as it stands in a file, and where, for error messages."""

    values: dict[str, Any]
    path: Path
    number: int
    """From 1, in this file; the line number in a JSONL file."""

    @property
    def place(self) -> str:
        return f"{self.path}, row {self.number}"


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
    except Exception as error:  # whatever transformers stumbles over, the user needs to know in which directory
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
        strings, taken as they are; one that does not begin with the tokenizer's BOS gets its special tokens.
    overlong: "error", "drop" or "truncate_left", for prompts of more than `max_prompt_tokens` tokens.
    response_key: None for RL. For sft the column with the target; a dotted path reaches into one (`extra_info.answer`);
        "" stands for `reward_model.ground_truth`.
    max_prompts: read only the first so many rows, before overlong prompts are dropped. 0: all.

    Raises ValueError for a missing, unreadable or empty file, a missing column, a prompt or target that is not text, a
    tokenizer that cannot render messages, and overlong prompts according to `overlong`.
    """
    target_path = None if response_key is None else (response_key or "reward_model.ground_truth").split(".")
    columns = {prompt_key, "data_source", "reward_model", "extra_info", *(target_path or [])[:1]}
    rows = _read_rows([Path(file) for file in files], columns, prompt_key=prompt_key, max_rows=max_prompts)
    texts = [_render(row, tokenizer, prompt_key=prompt_key) for row in rows]
    token_ids = _tokenize(rows, texts, tokenizer, prompt_key=prompt_key)
    if target_path is None:
        response_ids = [None] * len(rows)
    else:
        response_ids = _tokenize_targets([_target(row, target_path) for row in rows], tokenizer)
    kept = _apply_limit(token_ids, max_prompt_tokens=max_prompt_tokens, overlong=overlong)
    return [
        Prompt(
            index=index,
            token_ids=token_ids[index][-max_prompt_tokens:],
            text=texts[index],
            data_source=str(rows[index].values.get("data_source") or rows[index].path.stem),
            ground_truth=(rows[index].values.get("reward_model") or {}).get("ground_truth"),
            extra_info=rows[index].values.get("extra_info") or {},
            response_ids=response_ids[index],
        )
        for index in kept
    ]


# ---- reading ----


def _read_rows(paths: list[Path], columns: set[str], *, prompt_key: str, max_rows: int) -> list[_Row]:
    """The first `max_rows` (0: all) rows of all files, with those of `columns` that a file has."""
    for path in paths:
        if not path.is_file():
            raise ValueError(f"data file {path} does not exist (working directory {Path.cwd()}).")
        if path.suffix not in (".parquet", ".jsonl"):
            raise ValueError(f"data file {path} ends in {path.suffix!r}: it must be .parquet or .jsonl.")
    rows: list[_Row] = []
    for path in paths:
        read = _read_parquet if path.suffix == ".parquet" else _read_jsonl
        num_before = len(rows)
        for number, values in read(path, columns, prompt_key=prompt_key):
            if max_rows and len(rows) == max_rows:
                return rows
            rows.append(_Row(values, path, number))
        if len(rows) == num_before:
            raise ValueError(f"data file {path} is empty: it has no rows.")
    if not rows:
        raise ValueError("no data files: data.train must name at least one .parquet or .jsonl file.")
    return rows


def _read_parquet(path: Path, columns: set[str], *, prompt_key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (row number from 1, values) of a parquet file."""
    try:
        # By batches: a nested column of more than 2 GiB cannot be read at once. Not pq.read_table: it would take a
        # directory called a=b for a partition and add a column.
        with pq.ParquetFile(path) as file:
            found = file.schema_arrow.names
            _require_column(prompt_key, found, f"data file {path}")
            number = 0
            for batch in file.iter_batches(columns=[name for name in found if name in columns]):
                for values in batch.to_pylist():
                    number += 1
                    yield number, values
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"data file {path} cannot be read as parquet: {_first_line(error)}") from error


def _read_jsonl(path: Path, columns: set[str], *, prompt_key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, values) of a JSONL file; empty lines are passed over.

    Line by line with `json`, not with Arrow's reader, which makes timestamps of strings that look like one and
    wants the same type in every row.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"data file {path} cannot be read as JSONL: {_first_line(error)}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, row {number}: not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path}, row {number}: must be a JSON object, it is {_describe(values)}.")
        _require_column(prompt_key, list(values), f"{path}, row {number}")
        yield number, {name: value for name, value in values.items() if name in columns}


def _require_column(prompt_key: str, found: list[str], place: str) -> None:
    if prompt_key not in found:
        raise ValueError(
            f"{place}: there is no column {prompt_key!r}, only {', '.join(found) or 'none at all'}: "
            "name the column with the prompt in data.prompt_key."
        )


# ---- text and tokens ----


def _render(row: _Row, tokenizer: PreTrainedTokenizerBase, *, prompt_key: str) -> str:
    """The prompt of a row as one string: the string itself, or the messages in the chat template."""
    prompt = row.values[prompt_key]
    if isinstance(prompt, str):
        return prompt
    if not _is_messages(prompt):
        raise ValueError(
            f"{row.place}: column {prompt_key!r} must be a string or a list of {{role, content}} messages, "
            f"it is {_describe(prompt)}."
        )
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{row.place}: column {prompt_key!r} holds messages, but the tokenizer of {tokenizer.name_or_path} has "
            "no chat template: use an instruct model, or prepare prompts as strings."
        )
    # Parquet gives all structs of a column the same keys and fills up with None; templates ask which keys there are.
    messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError as error:
        raise ValueError(
            f"{row.place}: the chat template of {tokenizer.name_or_path} rejects the messages of column "
            f"{prompt_key!r}: {_first_line(error)}"
        ) from error


def _is_messages(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and len(prompt) > 0
        and all(
            isinstance(message, dict) and message.get("role") is not None and message.get("content") is not None
            for message in prompt
        )
    )


def _tokenize(
    rows: list[_Row], texts: list[str], tokenizer: PreTrainedTokenizerBase, *, prompt_key: str
) -> list[np.ndarray]:
    """Token ids of all prompts, np.int32 [P] each.

    A chat template writes its special tokens itself, and so may a string; other strings get the tokenizer's.
    """
    bare = [
        isinstance(row.values[prompt_key], str) and not (tokenizer.bos_token and text.startswith(tokenizer.bos_token))
        for row, text in zip(rows, texts, strict=True)
    ]
    token_ids: list[np.ndarray] = [np.empty(0, dtype=np.int32)] * len(rows)
    for add_special_tokens in (False, True):
        indices = [i for i in range(len(rows)) if bare[i] == add_special_tokens]
        encoded = _encode([texts[i] for i in indices], tokenizer, add_special_tokens=add_special_tokens)
        for i, ids in zip(indices, encoded, strict=True):
            if len(ids) == 0:
                raise ValueError(f"{rows[i].place}: the prompt in column {prompt_key!r} is empty: it has no tokens.")
            token_ids[i] = ids
    return token_ids


def _encode(texts: list[str], tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool) -> list[np.ndarray]:
    """Token ids of each text, np.int32, in one call of the tokenizer; neither truncated nor padded."""
    if not texts:
        return []
    encoded = tokenizer(
        texts,
        add_special_tokens=add_special_tokens,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    return [np.array(ids, dtype=np.int32) for ids in encoded["input_ids"]]


def _target(row: _Row, path: list[str]) -> str:
    """The sft target of a row: the string or number at `path`, such as ["reward_model", "ground_truth"]."""
    value: Any = row.values
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(
            f"{row.place}: {'.'.join(path)} must be the text to learn, it is {_describe(value)}: "
            "name the column with the target in data.response_key."
        )
    return value


def _tokenize_targets(targets: list[str], tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    """np.int32 [R] for each target: its tokens, then the end-of-sequence token."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path} has no eos_token, which sft puts after each response."
        )
    eos = np.array([tokenizer.eos_token_id], dtype=np.int32)
    return [np.concatenate([ids, eos]) for ids in _encode(targets, tokenizer, add_special_tokens=False)]


# ---- length ----


def _apply_limit(token_ids: list[np.ndarray], *, max_prompt_tokens: int, overlong: str) -> list[int]:
    """Indices of the prompts to keep. For truncate_left that is all of them: the caller cuts."""
    if max_prompt_tokens < 1:
        raise ValueError(f"data.max_prompt_tokens is {max_prompt_tokens}: it must be at least 1.")
    if overlong not in ("error", "drop", "truncate_left"):
        raise ValueError(f"data.overlong_prompts is {overlong!r}: choose error, drop or truncate_left.")
    lengths = np.array([len(ids) for ids in token_ids])
    num_overlong = int((lengths > max_prompt_tokens).sum())
    if num_overlong == 0:
        return list(range(len(token_ids)))
    summary = (
        f"{num_overlong} of {len(lengths)} prompts have more than data.max_prompt_tokens = {max_prompt_tokens} tokens, "
        f"the longest {lengths.max()}"
    )
    if overlong == "error":
        raise ValueError(
            f"{summary}: raise the limit, or set data.overlong_prompts to drop (leave them out) or truncate_left (keep "
            "their last tokens) in place of error."
        )
    if overlong == "drop" and num_overlong == len(lengths):
        raise ValueError(
            f"{summary}: data.overlong_prompts = drop would leave nothing. Raise the limit, or "
            "choose truncate_left or error."
        )
    log.info("%s; data.overlong_prompts = %s", summary, overlong)
    if overlong == "truncate_left":
        return list(range(len(token_ids)))
    return np.flatnonzero(lengths <= max_prompt_tokens).tolist()


# ---- error messages ----


def _describe(value: Any) -> str:
    """A value in an error message: its type and the beginning of what it holds."""
    if value is None:
        return "missing"
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:57] + '...'}"


def _first_line(error: Exception) -> str:
    """An error's own message, without the lines of detail that libraries append."""
    return str(error).strip().split("\n")[0] or type(error).__name__
