"""Batches of samples. Every rank that has the samples builds the same batch, without communication."""

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from rl.data.batch import Batch
from rl.data.held import HeldColumn, HeldRow, row_key
from rl.data.prompts import Prompt
from rl.rollout.samples import Sample, context_digest, segment_digest


class SamplesDiffer(RuntimeError):
    """Raised on every rank if a sample was lost, doubled or changed on its way into the batch."""


def batch_of(
    samples: Sequence[Sample],
    contexts: Sequence[np.ndarray],
    *,
    prompts: Sequence[Prompt] = (),
    samples_per_prompt: int | None = None,
    turns: bool = False,
) -> Batch:
    """Return the batch of finished samples, ordered by prompt, sample number and row.

    Raises SamplesDiffer if a sample is missing, doubled, or was changed after its generation.

    Args:
        contexts: token ids of each prompt, int32 [P_i].
        prompts: the prompts themselves; None: the batch has only their token ids.
        samples_per_prompt: number of samples that every prompt must have, including failed ones; None if
            samples may be missing. Failed samples are left out of the batch: for example, if one of 8 samples
            failed, the batch has 7 samples of the prompt.
        turns: whether samples may have several turns; then `turns` and `turn_rewards` are filled too.
    """
    samples = sorted(samples, key=lambda sample: (sample.prompt, sample.number, sample.row))
    _check_numbers(samples, len(contexts), samples_per_prompt)
    samples = [sample for sample in samples if sample.end != "failed"]
    turn_of = _joined([sample.turns for sample in samples], np.int32)
    owners = torch.tensor([(s.prompt, s.number) for s in samples], dtype=torch.int64).view(-1, 2)
    has_rows = any(sample.row for sample in samples)
    batch = Batch(
        prompt_ids=[contexts[s.prompt] if s.prompt_ids is None else s.prompt_ids for s in samples],
        response_ids=[sample.token_ids for sample in samples],
        groups=owners[:, 0].clone(),
        truncated=torch.tensor([sample.truncated for sample in samples], dtype=torch.bool),
        prompts=list(prompts),
        trajectories=owners.unique(dim=0, return_inverse=True)[1] if has_rows else None,
        mask=(turn_of > 0).float(),
        rollout_logprobs=_joined([sample.logprobs for sample in samples], np.float32),
        weight_versions=_joined([sample.weight_versions for sample in samples], np.int32),
        generated_by=torch.tensor([sample.rank for sample in samples], dtype=torch.int64),
        seeds=torch.tensor([first_seed(sample) for sample in samples], dtype=torch.int64),
        sampled_with=torch.tensor([_sampling_of(sample) for sample in samples], dtype=torch.int64),
    )
    if turns:
        batch.turns = turn_of
        batch.extra["turn_rewards"] = _joined([sample.rewards for sample in samples], np.float32)
    if any(sample.conversation is not None for sample in samples):
        batch.conversations = [sample.conversation or [] for sample in samples]
    outcomes = [sample.outcome or {} for sample in samples]
    batch.score_details = {
        name: torch.tensor([outcome.get(name, float("nan")) for outcome in outcomes], dtype=torch.float32)
        for name in sorted({name for outcome in outcomes for name in outcome})
    }
    batch.held = _held_columns(samples, batch.prompt_ids)
    _check_digests(batch, samples)
    return batch.delivered()


def first_seed(sample: Sample) -> int:
    """Return the seed of the first tokens that the policy sampled; -1 if unknown."""
    return next((segment.seed for segment in sample.segments if segment.is_sampled), -1)


def _sampling_of(sample: Sample) -> int:
    """Return the code of the parameters that sampled the tokens; of several, one that differs from the
    first."""
    codes = [segment.sampling for segment in sample.segments if segment.is_sampled]
    return next((code for code in codes if code != codes[0]), codes[0] if codes else -1)


def _joined(parts: list[np.ndarray], dtype: type) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False))


def _held_columns(samples: Sequence[Sample], prompt_ids: list[np.ndarray]) -> dict[str, HeldColumn]:
    """Return the held columns, with the rows that this rank has."""
    segments = [segment for sample in samples for segment in sample.segments]
    kinds = {name: values for segment in segments for name, values in segment.held.items()}
    holders = torch.tensor([sample.holder for sample in samples], dtype=torch.int64)
    columns = {}
    for name, values in kinds.items():
        lengths = torch.tensor([sample.held_length(name) for sample in samples])
        none = np.zeros((0, *values.shape[1:]), values.dtype)
        rows = {}
        for i, sample in enumerate(samples):
            row = sample.held(name) if lengths[i] else none
            if row is not None:
                key = sample.row_key
                rows[i] = HeldRow(row_key(prompt_ids[i], sample.token_ids) if key == -1 else key, row)
        columns[name] = HeldColumn(rows, holders, lengths, values.dtype, tuple(values.shape[1:]))
    return columns


def _check_numbers(samples: Sequence[Sample], num_prompts: int, samples_per_prompt: int | None) -> None:
    """Raise SamplesDiffer unless every sample was generated exactly once."""
    for one, other in itertools.pairwise(samples):
        if (one.prompt, one.number, one.row) == (other.prompt, other.number, other.row):
            raise SamplesDiffer(
                f"sample check: rank {other.rank} generated sample {other.number} of prompt {other.prompt} "
                f"of the call, which rank {one.rank} had generated too."
            )
    counts = Counter(sample.prompt for sample in samples if sample.row == 0)
    missing = [i for i in range(num_prompts) if counts[i] != samples_per_prompt]
    if samples_per_prompt is not None and missing:
        raise SamplesDiffer(
            f"sample check: prompt {missing[0]} of the call has {counts[missing[0]]} samples "
            f"instead of {samples_per_prompt}, and so have {len(missing) - 1} further prompts."
        )


def _check_digests(batch: Batch, samples: Sequence[Sample]) -> None:
    """Raise SamplesDiffer if a sample of the batch was changed after its generation."""
    assert batch.mask is not None
    flags = (batch.mask > 0).numpy()
    for i, (sample, first) in enumerate(zip(samples, batch.offsets.tolist())):
        what, start, context = "", 0, context_digest(batch.prompt_ids[i])
        for segment in sample.segments:
            stop = start + len(segment.token_ids)
            tokens = batch.response_ids[i][start:stop]
            if segment.digest not in (-1, segment_digest(tokens, flags[first + start : first + stop])):
                what = what or "other tokens or another mask"
            if segment.context_digest not in (-1, context):
                turn = f"other tokens before turn {segment.turn + 1}"
                what = what or (turn if start else "another prompt")
            context, start = context_digest(tokens, context), stop
        if sample.is_unfinished:
            what = what or "another end"
        if what:
            origin = "the engine" if sample.rank < 0 else f"rank {sample.rank}"
            raise SamplesDiffer(
                f"sample check: sample {sample.number} of prompt {sample.prompt} of the call has {what} in "
                f"the batch than {origin} generated."
            )
