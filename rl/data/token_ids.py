"""Checks that every token id in a model's files, its tokenizer, the config and the data is in the embedding.

An id without a row in the embedding would cause an index error in the middle of a run, on the GPU or in vLLM.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rl.models.json_files import read_object


def check_model_ids(path: str, num_tokens: int) -> None:
    """Raise ValueError if a special token in the JSON files of a model directory has no row in the embedding.

    num_tokens: number of rows of the embedding.
    """
    for file in (Path(path, "config.json"), Path(path, "generation_config.json")):
        found = read_object(file) if file.exists() else {}
        for key, value in (found | found.get("text_config", {})).items():
            if key.endswith("_token_id"):
                ids = value if isinstance(value, list) else [value]
                _check(ids, f"{file}: {key}={value}", num_tokens, "correct it")


def check_stops(ids: Sequence[int], num_tokens: int) -> None:
    """Raise ValueError if an id of `rollout.stop_token_ids` has no row in the embedding."""
    _check(ids, f"rollout.stop_token_ids={list(ids)}", num_tokens, "correct it")


def check_tokenizer(
    path: str, tokenizer: PreTrainedTokenizerBase, num_tokens: int, *, unread: Sequence[str] = ()
) -> None:
    """Raise ValueError if a tokenizer has no vocabulary, or a token without a row in the embedding.

    unread: tokens that are allowed to have no row, because the published tokenizer has them although its
        model has no rows for them.
    """
    vocabulary, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    if len(vocabulary) <= len(added):
        raise ValueError(
            f"{path} holds no vocabulary, only {len(added)} added tokens; copy the tokenizer's files "
            "(tokenizer.json, or vocab.json with merges.txt) from the published checkpoint."
        )
    remedy = (
        "remove the token, or enlarge the embedding and lm_head (resize_token_embeddings of transformers)"
    )
    for token, id in vocabulary.items():
        if id >= num_tokens and token not in unread:
            quoted = json.dumps(token)[1:-1]
            files = [file for file in sorted(Path(path).glob("*token*.json")) if quoted in file.read_text()]
            where = files[-1] if files else f"{path}/tokenizer_config.json names a class of transformers that"
            _check([id], f"{where} has the token {token!r} with id {id}, which", num_tokens, remedy)


def check_rows(key: str, rows: Iterable[Any], tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> None:
    """Raise ValueError if the data have a token without a row in the embedding.

    After `check_tokenizer`, only its `unread` tokens can lack a row. key: config key of the rows.
    """
    if max(tokenizer.get_vocab().values()) < num_tokens:
        return
    for row in rows:
        for name, ids in vars(row).items():
            if name.endswith("_ids") and ids is not None and len(ids):
                token = tokenizer.convert_ids_to_tokens(int(ids.max()))
                owner = f"row {row.index} of {key} has the token {token!r} with id {ids.max()}, which"
                _check([ids.max()], owner, num_tokens, "remove this text from the row")


def _check(ids: Iterable[int | None], owner: str, num_tokens: int, remedy: str) -> None:
    """Raise ValueError if an id has no row in the embedding. owner: the subject of the error message."""
    if any(id is not None and id >= num_tokens for id in ids):
        raise ValueError(
            f"{owner} is not below vocab_size={num_tokens}, the number of rows of the embedding; {remedy}."
        )
