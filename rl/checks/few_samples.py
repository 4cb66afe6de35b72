"""Selects a few samples of a step for checks that need their own forward passes."""

import math
from collections.abc import Callable
from itertools import zip_longest

import torch
from torch import Tensor

from rl.data.batch import Batch
from rl.training.micro_batch_plans import MicroBatchPlan


def first_samples(plan: MicroBatchPlan, size: Callable[[int], int], *, enough: float) -> list[list[int]]:
    """Return the first samples of each data parallel rank, so many that their sizes add up to `enough`.

    The ranks take turns. For example, with two ranks, sizes of 30 and `enough=64`, three samples are
    selected: two of rank 0 and one of rank 1. If all samples together are too few, all are returned.

    size: function from a sample to its size. Samples of size 0 are left out.
    """
    few: list[list[int]] = [[] for _ in plan]
    total = 0
    for samples in zip_longest(*([i for micro in micros for i in micro] for micros in plan)):
        for rank, sample in enumerate(samples):
            if sample is not None and total < enough and (own := size(sample)):
                few[rank].append(sample)
                total += own
    return few


def only(plan: MicroBatchPlan, few: list[list[int]], *, multiple: int) -> MicroBatchPlan:
    """Return the first micro-batches of a plan, with only the samples in `few`.

    multiple: number whose multiple the number of micro-batches must be (`Grid.micro_batch_multiple`).
    """
    chosen = {sample for samples in few for sample in samples}
    kept = [[[i for i in micro if i in chosen] for micro in micros] for micros in plan]
    used = max((n for micros in kept for n, micro in enumerate(micros, 1) if micro), default=0)
    number = max(1, math.ceil(used / multiple)) * multiple
    return [micros[:number] for micros in kept]


def first_alone(plan: MicroBatchPlan, *, multiple: int) -> MicroBatchPlan:
    """Return a plan with sample 0 alone, on the first data parallel rank. plan: any plan of this model.

    multiple: see `only`.
    """
    return [[[0] if rank == 0 else [], *([[]] * (multiple - 1))] for rank in range(len(plan))]


def tokens_of(plan: MicroBatchPlan, batch: Batch) -> Tensor:
    """Return the indices of all response tokens of a plan, int64 [n]."""
    return batch.tokens_of(sorted(i for micros in plan for micro in micros for i in micro))


def shortened(batch: Batch, samples: list[int], limit: int) -> Batch:
    """Return samples with the last `limit` tokens of their prompts and the first ones of their responses."""
    masks = [batch.mask[batch.offsets[i] : batch.offsets[i + 1]][:limit] for i in samples]
    return Batch(
        prompt_ids=[batch.prompt_ids[i][-limit:] for i in samples],
        response_ids=[batch.response_ids[i][:limit] for i in samples],
        groups=batch.groups[samples].unique(return_inverse=True)[1],
        truncated=batch.truncated[samples],
        mask=torch.cat(masks) if masks else batch.mask[:0],
    )
