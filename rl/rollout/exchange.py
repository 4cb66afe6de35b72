"""Exchange of samples. Every rank receives all samples, a few bytes per token."""

import itertools
import math
import zlib
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from rl.data.batch import Batch
from rl.data.held import HeldColumn, Row, row_key
from rl.rollout.turns import Sample, context_digest
from rl.runtime.collectives import gather_objects, sum_over_world
from rl.runtime.device import Device

_HEADER = ("prompt", "number", "row", "length", "prompt_length", "truncated", "digest", "context_digest")


class SamplesDiffer(RuntimeError):
    """Raised on every rank if a sample was lost, doubled or changed on its way to the other ranks."""


def exchange(
    prompts: list[np.ndarray],
    own: list[Sample],
    samples_per_prompt: int | None,
    device: Device,
    *,
    turns: bool = False,
    held: tuple[str, ...] = (),
    conversations: bool = False,
) -> Batch:
    """Return the batch of all samples, ordered by prompt, sample number and row. Collective over the world.

    The numbers of samples are exchanged first, then their lengths, which determine the positions in the token
    columns. Each position is written by one rank and is 0 on the others, so the sum over ranks is exact.

    Args:
        prompts: token ids of each prompt, int32 [P_i].
        own: the samples of this rank; no other rank has them.
        samples_per_prompt: number that every prompt must have; None if samples may be missing.
        turns: whether samples may have several turns; then `turns` and `turn_rewards` are filled too.
        held: names of the held columns. Their rows stay where they are; all ranks learn who has them.
        conversations: whether the conversations of trajectories are exchanged, too.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    counts = torch.zeros(2, world, dtype=torch.int64)  # samples, and how many of them have an outcome
    counts[:, rank] = torch.tensor([len(own), sum(sample.outcome is not None for sample in own)])
    num_own, num_outcomes = sum_over_world(counts, device.torch)
    first = int(num_own[:rank].sum())
    header = torch.zeros(len(_HEADER), int(num_own.sum()), dtype=torch.int64)
    for place, sample in enumerate(own, first):
        context = -1 if sample.prompt_ids is None else len(sample.prompt_ids)
        values = (sample.prompt, sample.number, sample.row, len(sample.token_ids), context, sample.truncated)
        sampled = [np.full(len(segment.token_ids), segment.is_sampled) for segment in sample.segments]
        digest = _digest(sample.token_ids, np.concatenate(sampled) if sampled else [])
        header[:, place] = torch.tensor((*values, digest, sample.context_digest))
    header = sum_over_world(header, device.torch)
    order = torch.from_numpy(np.lexsort(header[:3].flip(0).numpy()))
    place_of = order.argsort()[first : first + len(own)].tolist()
    prompt, number, row, lengths, contexts, truncated, digests, context_digests = header[:, order]
    ranks = torch.repeat_interleave(torch.arange(world), num_own)[order]
    _check_numbers(prompt, number, row, ranks, len(prompts), samples_per_prompt)

    columns, numbers = _write_columns(own, place_of, lengths, rewards=turns)
    token_ids, turn_of, weight_versions = sum_over_world(columns, device.torch)
    logprobs, *rewards = sum_over_world(numbers, device.torch)
    batch = Batch(
        prompt_ids=[prompts[i] for i in prompt],
        # np.split returns one part for no samples, if environments failed for all.
        response_ids=np.split(token_ids.clone().numpy(), lengths.cumsum(0)[:-1].numpy())[: len(lengths)],
        groups=prompt.clone(),
        truncated=truncated > 0,
        mask=(turn_of > 0).float(),
        rollout_logprobs=logprobs.clone(),
        weight_versions=weight_versions.clone(),
    )
    if turns:
        batch.turns, batch.turn_rewards = turn_of.clone(), rewards[0].clone()
    if (contexts >= 0).any():
        batch.prompt_ids = _exchange_contexts(batch.prompt_ids, own, place_of, contexts, device)
    if (row > 0).any():
        batch.trajectories = torch.stack([prompt, number]).unique(dim=1, return_inverse=True)[1]
    _check_digests(batch, digests, context_digests, number, ranks)
    if held and len(batch):
        batch.held = _locate(batch, own, place_of, ranks, held, device)
    if conversations:
        everyone = gather_objects({place: each.conversation or [] for place, each in zip(place_of, own)})
        found = {place: messages for part in everyone for place, messages in part.items()}
        batch.conversations = [found[place] for place in range(len(batch))]
    if num_outcomes.any():
        batch.score_details = _exchange_outcomes(own, place_of, len(batch), device)
    return batch


def _digest(token_ids: np.ndarray, is_sampled: Sequence[bool] | np.ndarray) -> int:
    """Return a 32-bit hash of a response and of which tokens the policy sampled."""
    flags = np.asarray(is_sampled, np.uint8)
    return zlib.crc32(flags, zlib.crc32(np.ascontiguousarray(token_ids, np.int32)))


def _check_numbers(prompt, number, row, ranks, num_prompts: int, samples_per_prompt: int | None) -> None:
    """Raise SamplesDiffer unless every sample was generated exactly once."""
    samples = torch.stack([prompt, number, row]).T.tolist()
    if twice := [k for k in range(1, len(samples)) if samples[k] == samples[k - 1]]:
        raise SamplesDiffer(
            f"sample check: rank {int(ranks[twice[0]])} generated sample {samples[twice[0]][1]} of prompt "
            f"{samples[twice[0]][0]} of the call, which rank {int(ranks[twice[0] - 1])} had generated too."
        )
    if samples_per_prompt is not None:
        counts = torch.bincount(prompt[row == 0], minlength=num_prompts)
        if missing := (counts != samples_per_prompt).nonzero().squeeze(1).tolist():
            raise SamplesDiffer(
                f"sample check: prompt {missing[0]} of the call has {int(counts[missing[0]])} samples "
                f"instead of {samples_per_prompt}, and so have {len(missing) - 1} further prompts."
            )


def _check_digests(batch: Batch, digests, context_digests, number, ranks) -> None:
    """Raise SamplesDiffer if a sample of the batch differs from that of the rank that generated it."""
    assert batch.mask is not None
    flags = (batch.mask > 0).numpy()
    for i, (start, end) in enumerate(itertools.pairwise(batch.offsets.tolist())):
        what = ""
        if _digest(batch.response_ids[i], flags[start:end]) != digests[i]:
            what = "other tokens or another mask"
        elif context_digests[i] >= 0 and context_digest(batch.prompt_ids[i]) != context_digests[i]:
            what = "another prompt"
        if what:
            raise SamplesDiffer(
                f"sample check: sample {int(number[i])} of prompt {int(batch.groups[i])} of the call has "
                f"{what} in the batch than rank {int(ranks[i])} generated."
            )


def _write_columns(own: list[Sample], places: list[int], lengths: torch.Tensor, *, rewards: bool):
    """Return this rank's part of (token ids, turns, weight versions), int32 [3, T], and of the log-probs and,
    if `rewards`, the rewards of turns, float32 [1 or 2, T]."""
    ends = lengths.cumsum(0)
    columns = torch.zeros(3, int(lengths.sum()), dtype=torch.int32)
    numbers = torch.zeros(1 + rewards, columns.shape[1])
    for place, sample in zip(places, own):
        span = slice(int(ends[place] - lengths[place]), int(ends[place]))
        values = np.stack([sample.token_ids, sample.turns, sample.weight_versions])
        columns[:, span] = torch.from_numpy(values)
        numbers[0, span] = torch.from_numpy(sample.logprobs)
        if rewards:
            numbers[1, span] = torch.from_numpy(sample.rewards)
    return columns, numbers


def _exchange_contexts(
    prompt_ids: list[np.ndarray], own: list[Sample], places: list[int], contexts: torch.Tensor, device: Device
) -> list[np.ndarray]:
    """Return the context of each sample: its own, or that of its prompt. Collective over the world."""
    lengths = contexts.clamp(min=0)
    ends = lengths.cumsum(0)
    token_ids = torch.zeros(int(lengths.sum()), dtype=torch.int32)
    for place, sample in zip(places, own):
        if sample.prompt_ids is not None:
            span = slice(int(ends[place] - lengths[place]), int(ends[place]))
            token_ids[span] = torch.from_numpy(sample.prompt_ids)
    parts = np.split(sum_over_world(token_ids, device.torch).numpy(), ends[:-1].numpy())
    return [part if own_length >= 0 else ids for part, own_length, ids in zip(parts, contexts, prompt_ids)]


def _locate(
    batch: Batch,
    own: list[Sample],
    places: list[int],
    holders: torch.Tensor,
    names: tuple[str, ...],
    device: Device,
) -> dict[str, HeldColumn]:
    """Return the held columns, with this rank's rows. Collective over the world. holders: int64 [N]."""
    lengths = torch.zeros(len(names), len(batch), dtype=torch.int64)
    rows: dict[str, dict[int, Row]] = {name: {} for name in names}
    for place, sample in zip(places, own):
        if not sample.segments:  # a trajectory whose environment failed before its first turn
            continue
        key = row_key(batch.prompt_ids[place], sample.token_ids)
        for k, name in enumerate(names):
            rows[name][place] = row = Row(key, sample.held(name))
            lengths[k, place] = len(row.values)
    lengths = sum_over_world(lengths, device.torch)
    kinds = {
        name: (row.values.dtype.str, row.values.shape[1:]) for name in names for row in rows[name].values()
    }
    everyone = {
        name: (np.dtype(dtype), shape)
        for found in gather_objects(kinds)
        for name, (dtype, shape) in found.items()
    }
    found = ((name, size) for name, size in zip(names, lengths) if name in everyone)
    return {name: HeldColumn(rows[name], holders, size, *everyone[name]) for name, size in found}


def _exchange_outcomes(
    own: list[Sample], places: list[int], total: int, device: Device
) -> dict[str, torch.Tensor]:
    """Return the outcomes as columns float32 [total], NaN where a sample lacks a number.

    Collective over the world.
    """
    everyone = gather_objects(sorted({name for sample in own for name in sample.outcome or {}}))
    names = sorted({name for names in everyone for name in names})
    table = torch.zeros(len(names), total, dtype=torch.float64)
    for place, sample in zip(places, own):
        values = [(sample.outcome or {}).get(name, math.nan) for name in names]
        table[:, place] = torch.tensor(values, dtype=torch.float64)
    return dict(zip(names, sum_over_world(table, device.torch).float()))
