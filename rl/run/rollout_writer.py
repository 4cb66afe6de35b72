"""Writes batches as rollout files (`rl.run_directory.rollout_files`), for example for run.mode=train_only."""

import copy
import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rl.config.schema import Config
from rl.data.batch import COLUMNS, Batch
from rl.data.prompts import Prompt
from rl.data.special_tokens import decode_responses
from rl.rollout.samples import SOURCES
from rl.run_directory.rollout_files import SAMPLED_GROUPS, VALIDATIONS, RolloutLog

STORED = {name: column for name, column in COLUMNS.items() if column.stored}
"""Columns of the batch that are stored."""
FILE_COLUMNS = {
    "step": "int32",
    "prompt_index": "int64",
    "sample": "int32",
    "row": "int32",
    "data_source": "string",
    "prompt": "string",
    "response": "string",
    "messages": "messages",
    "ground_truth": "string",
    "ground_truth_is_json": "bool",
    "extra_info": "string",
    "score_details": "string",
    "prompt_messages": "string",
    "prompt_tools": "string",
    "feedback": "string",
    "length": "int32",
    "prompt_ids": "int32s",
    "response_ids": "int32s",
    **{
        column.stored_as or name: column.stored + "s" * column.is_per_token for name, column in STORED.items()
    },
}
"""Type of each column of a file, as in `rl.run_directory.rollout_files.schema`."""
OF_IMAGES = {"images": "binarys"}
"""Further columns of a run with images."""


class RolloutWriter:
    """Stores the batch of each step. For rank 0 only; not collective.

    Args:
        tokenizer: the policy's. The writing thread uses a copy, because encoding and decoding at the same
            time raises an error in the tokenizers library.
        kept: ids of the special tokens that are not removed from the text of a response.
        fence: as in `RolloutLog`.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        kept: Collection[int] = (),
        *,
        fence: Callable[[], None] = lambda: None,
    ):
        self._kind, self._tokenizer, self._kept = config.logging.rollouts, tokenizer, kept
        options: dict = dict(kind=self._kind, token_texts=self._token_texts, fence=fence)
        self._more = OF_IMAGES if config.data.image_key else {}
        self._log = RolloutLog(config.run.dir, FILE_COLUMNS | self._more, **options)

    def write(self, step: int, collected: Batch, learned: Batch) -> None:
        """Store the batch of a step. collected: a shallow copy of it from before `learn`."""
        groups = collected.groups.unique().tolist()
        if self._kind == "sample" and len(groups) > SAMPLED_GROUPS:
            groups = [groups[i * len(groups) // SAMPLED_GROUPS] for i in range(SAMPLED_GROUPS)]
        samples = torch.isin(collected.groups, torch.tensor(groups)).nonzero().squeeze(1).tolist()
        arrays = stored_arrays(collected, learned)
        self._log.write(step, partial(self._columns, step, collected, samples, arrays))

    def write_validation(
        self, step: int, name: str, batch: Batch, answers: Sequence[str | None] | None
    ) -> None:
        """Store all samples of a validation, without numbers per token. name: a key of VALIDATIONS.

        answers: the answer that the reward function found in each sample, for `score_details`.
        """
        arrays = {
            key: values for key, values in stored_arrays(batch, batch).items() if not STORED[key].is_per_token
        }
        self._log.write(step, partial(self._with_answers, step, batch, arrays, answers), VALIDATIONS[name])

    def _with_answers(
        self, step: int, batch: Batch, arrays: dict[str, Any], answers: Sequence[str | None] | None
    ) -> dict[str, list[Any]]:
        found = self._columns(step, batch, list(range(len(batch))), arrays)
        if answers is not None:
            details = zip(found["score_details"], answers, strict=True)
            found["score_details"] = [_json(json.loads(text) | {"pred": answer}) for text, answer in details]
        return found

    def _columns(
        self, step: int, batch: Batch, samples: list[int], arrays: dict[str, Any]
    ) -> dict[str, list[Any]]:
        found = columns_of(step, batch, samples, arrays, self._decode)
        return found | ({"images": images_of(batch, samples)} if self._more else {})

    def flush(self) -> None:
        self._log.flush()

    def close(self) -> None:
        self._log.close()

    def _token_texts(self) -> list[str]:
        """Return the text of every token id, decoded after another token.

        Decoded alone, a token would lose its leading space with some tokenizers.
        """
        self._tokenizer = copy.deepcopy(self._tokenizer)
        first = self._tokenizer.encode("a", add_special_tokens=False)[:1]
        pairs = [[*first, i] for i in range(len(self._tokenizer))]
        start = len(self._tokenizer.decode(first, clean_up_tokenization_spaces=False))
        texts = self._tokenizer.batch_decode(pairs, clean_up_tokenization_spaces=False)
        return [text[start:] for text in texts]

    def _decode(self, ids: Sequence[np.ndarray], special: bool) -> list[str]:
        if not special:
            return decode_responses(ids, self._tokenizer, self._kept)
        # Some tokenizers return one text for an empty list.
        arrays: list[Any] = list(ids)  # the library accepts arrays, but its annotations do not declare them
        return self._tokenizer.batch_decode(arrays, skip_special_tokens=False) if ids else []


def stored_arrays(collected: Batch, learned: Batch) -> dict[str, np.ndarray]:
    """Return those of the STORED columns that are filled.

    The arrays share the memory of the batches. This is safe because no later phase writes to that memory.
    """
    before, after = collected.columns(), learned.columns()
    sources = ((name, after if column.learned else before) for name, column in STORED.items())
    return {name: source[name].numpy() for name, source in sources if name in source}


def columns_of(
    step: int,
    batch: Batch,
    samples: list[int],
    arrays: dict[str, np.ndarray],
    decode: Callable[[Sequence[np.ndarray], bool], list[str]],
) -> dict[str, list[Any]]:
    """Return the given samples of the batch as values by column of the file.

    arrays: result of `stored_arrays`. decode: returns the texts of token ids, with or without special tokens.
    """
    offsets, groups = batch.offsets.tolist(), batch.groups.tolist()
    trajectories = range(len(batch)) if batch.trajectories is None else batch.trajectories.tolist()
    places = _places(list(zip(groups, trajectories)))
    prompt_ids = [batch.prompt_ids[i] for i in samples]
    if batch.prompts:
        prompts = [batch.prompts[groups[i]] for i in samples]
    else:  # the groups of pairs are not prompts
        texts = decode(prompt_ids, True)
        prompts = [Prompt(-1, ids, text, "", None, {}) for ids, text in zip(prompt_ids, texts)]
    spans = [slice(offsets[i], offsets[i + 1]) for i in samples]
    truths = [prompt.ground_truth for prompt in prompts]
    are_json = [truth is not None and not isinstance(truth, str) for truth in truths]
    columns: dict[str, list[Any]] = {
        "step": [step] * len(samples),
        "prompt_index": [prompt.index for prompt in prompts],
        "sample": [places[i][0] for i in samples],
        "row": [places[i][1] for i in samples],
        "data_source": [prompt.data_source for prompt in prompts],
        "prompt": [prompt.text for prompt in prompts],
        "response": decode([batch.last_turn(i) for i in samples], False),
        "ground_truth": [_json(truth) if is_json else truth for truth, is_json in zip(truths, are_json)],
        "ground_truth_is_json": are_json,
        "extra_info": [_json(prompt.extra_info) for prompt in prompts],
        "length": [len(batch.response_ids[i]) for i in samples],
        "prompt_ids": prompt_ids,
        "response_ids": [batch.response_ids[i] for i in samples],
    }
    for name, values in arrays.items():
        column = STORED[name]
        values = values.astype(column.stored, copy=False)
        parts = [values[span] for span in spans] if column.is_per_token else values[samples].tolist()
        columns[column.stored_as or name] = parts
    details = {name: values.numpy()[samples].tolist() for name, values in batch.score_details.items()}
    columns["score_details"] = [
        _json({name: values[k] for name, values in details.items() if values[k] == values[k]})
        for k in range(len(samples))
    ]
    none = [None] * len(samples)
    chats = [prompt.messages for prompt in prompts]
    columns["prompt_messages"] = [None if chat is None else _json(chat) for chat in chats]
    columns["prompt_tools"] = [_json(prompt.tools) if prompt.tools else None for prompt in prompts]
    if batch.feedback is not None:
        columns["feedback"] = [batch.feedback[i] for i in samples]
    columns["messages"] = none if batch.turns is None else [_messages(batch, i, decode) for i in samples]
    return {name: columns.get(name, none) for name in FILE_COLUMNS}


def images_of(batch: Batch, samples: list[int]) -> list[list[bytes] | None]:
    """Return for each sample the image files of its prompt, if it is the prompt's first sample; else None."""
    groups = batch.groups[samples].tolist()
    firsts = {group: place for place, group in reversed(list(enumerate(groups)))}
    return [
        [image.content for image in batch.prompts[group].images] if firsts[group] == place else None
        for place, group in enumerate(groups)
    ]


def _places(owners: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (number of the trajectory within its group, number of the row within its trajectory)."""
    sizes: Counter = Counter()
    numbers: dict[tuple[int, int], int] = {}
    rows: Counter = Counter()
    places = []
    for group, trajectory in owners:
        if (group, trajectory) not in numbers:
            numbers[group, trajectory] = sizes[group]
            sizes[group] += 1
        places.append((numbers[group, trajectory], rows[group, trajectory]))
        rows[group, trajectory] += 1
    return places


def _messages(batch: Batch, sample: int, decode: Callable) -> list[dict[str, str]]:
    """Return the texts of a trajectory by role, with all tokens between them."""
    assert batch.turns is not None
    turns = batch.turns[batch.offsets[sample] : batch.offsets[sample + 1]].numpy()
    parts = np.split(batch.response_ids[sample], np.flatnonzero(np.diff(turns)) + 1)
    starts = np.cumsum([0, *map(len, parts[:-1])])
    roles = ["assistant" if turns[start] > 0 else SOURCES[-turns[start]] for start in starts if len(turns)]
    texts = decode([batch.prompt_ids[sample], *parts], True)
    return [{"role": role, "content": text} for role, text in zip(["prompt", *roles], texts)]


def _json(value: Any) -> str:
    def plain(other: Any) -> Any:
        return other.tolist() if isinstance(other, np.ndarray | np.generic) else str(other)

    return json.dumps(value, ensure_ascii=False, default=plain)
