"""The samples of a check that passes over a few samples of a step, in proportion to the step."""

import math
from collections.abc import Callable
from itertools import zip_longest

from torch import Tensor

from rl.data.batch import Batch
from rl.training.micro_batch_plans import MicroBatchPlan


def first_samples(plan: MicroBatchPlan, size: Callable[[int], int], *, enough: float) -> list[list[int]]:
    """Return the first samples of each data parallel rank whose sizes add up to `enough`; all if too few.

    The ranks take turns. For example, on two ranks sizes of 30 and `enough=64` give three samples: two of
    rank 0, one of rank 1.
    size: sample -> its size; samples of size 0 are left out.
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
    """Return the first micro-batches of a plan without the samples that are not among `few`.

    multiple: of the micro-batches of a pass (`Grid.micro_batch_multiple`).
    """
    chosen = {sample for samples in few for sample in samples}
    kept = [[[i for i in micro if i in chosen] for micro in micros] for micros in plan]
    used = max((n for micros in kept for n, micro in enumerate(micros, 1) if micro), default=0)
    number = max(1, math.ceil(used / multiple)) * multiple
    return [micros[:number] for micros in kept]


def tokens_of(plan: MicroBatchPlan, batch: Batch) -> Tensor:
    """Return the indices of all response tokens of a plan, int64 [n]."""
    return batch.tokens_of(sorted(i for micros in plan for micro in micros for i in micro))
