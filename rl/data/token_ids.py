"""Comparison of the token ids of a model's files, its tokenizer, the config and the data with its embedding.

An id without a row in the embedding would cause an index error on the GPU, or in vLLM, in the middle of a
run.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rl.models.json_files import read_object


def check_model_ids(path: str, num_tokens: int) -> None:
    """Raise ValueError if a special token in the JSON of a model directory has no row in the embedding.

    num_tokens: number of rows.
    """
    for file in (Path(path, "config.json"), Path(path, "generation_config.json")):
        found = read_object(file) if file.exists() else {}
        for key, value in (found | found.get("text_config", {})).items():
            ids = value if isinstance(value, list) else [value]
            if (
                key.endswith("_token_id")
                and max((id for id in ids if id is not None), default=0) >= num_tokens
            ):
                raise ValueError(f"{file}: {key}={value} {_lacks_a_row(num_tokens)}; correct it.")


def check_tokenizer(
    path: str, tokenizer: PreTrainedTokenizerBase, num_tokens: int, *, unread: Sequence[str] = ()
) -> None:
    """Raise ValueError if a tokenizer is empty, or has a token without a row in the embedding.

    unread: tokens that the published tokenizer has although its model has no rows for them.
    """
    vocabulary, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    if len(vocabulary) <= len(added):
        raise ValueError(
            f"{path} holds no vocabulary, only {len(added)} added tokens; copy the tokenizer's files "
            "(tokenizer.json, or vocab.json with merges.txt) from the published checkpoint."
        )
    for token, id in vocabulary.items():
        if not 0 <= id < num_tokens and token not in unread:
            quoted = json.dumps(token)[1:-1]
            files = [file for file in sorted(Path(path).glob("*token*.json")) if quoted in file.read_text()]
            where = files[-1] if files else f"the tokenizer of {path}"
            raise ValueError(
                f"{where} has the token {token!r} with id {id}, which {_lacks_a_row(num_tokens)}; remove the "
                "token, or enlarge the embedding and lm_head (resize_token_embeddings of transformers)."
            )


def check_rows(key: str, rows: Iterable[Any], tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> None:
    """Raise ValueError if the data have a token without a row in the embedding.

    key: config key of the rows. Only the `unread` tokens of `check_tokenizer` lack a row.
    """
    if max(tokenizer.get_vocab().values()) < num_tokens:
        return
    for row in rows:
        for name, ids in vars(row).items():
            if (
                name.endswith("_ids")
                and ids is not None
                and len(ids)
                and (most := int(ids.max())) >= num_tokens
            ):
                token = tokenizer.convert_ids_to_tokens(most)
                raise ValueError(
                    f"row {row.index} of {key} has the token {token!r} with id {most}, which "
                    f"{_lacks_a_row(num_tokens)}; remove this text from the row."
                )


def check_stops(ids: Sequence[int], num_tokens: int) -> None:
    """Raise ValueError if `rollout.stop_token_ids` has a token without a row in the embedding."""
    if max(ids, default=0) >= num_tokens:
        raise ValueError(f"rollout.stop_token_ids={list(ids)} {_lacks_a_row(num_tokens)}; correct it.")


def _lacks_a_row(num_tokens: int) -> str:
    return f"is not below vocab_size={num_tokens}, the number of rows of the embedding"
