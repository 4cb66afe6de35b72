"""Selects a few samples of a step for checks that need their own forward passes."""

import math
import random
from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from rl.checks.transformers_pass import LENGTHS, random_batch
from rl.data.batch import Batch
from rl.training.engine import TrainingEngine
from rl.training.micro_batch_plans import MicroBatchPlan, plan_minibatch, samples_of


def first_samples(plan: MicroBatchPlan, size: Callable[[int], int], *, enough: float) -> list[list[int]]:
    """Return the first samples of each data parallel rank, in turns, until their sizes add up to `enough`.

    size: size of a sample; samples of size 0 are left out.
    """
    few: list[list[int]] = [[] for _ in plan]
    total = 0
    for samples in zip_longest(*([i for micro in micros for i in micro] for micros in plan)):
        for rank, sample in enumerate(samples):
            if sample is not None and total < enough and (own := size(sample)):
                few[rank].append(sample)
                total += own
    return few


def some(samples: Sequence[int], most: int, seed: int) -> list[int]:
    """Return up to `most` random samples: with a regular distance all might be the first of their groups."""
    return random.Random(seed).sample(samples, min(most, len(samples)))


def only(plan: MicroBatchPlan, few: list[list[int]], *, multiple: int) -> MicroBatchPlan:
    """Return the first micro-batches of a plan, with only the samples in `few`. multiple: of the grid."""
    chosen = {sample for samples in few for sample in samples}
    kept = [[[i for i in micro if i in chosen] for micro in micros] for micros in plan]
    used = max((n for micros in kept for n, micro in enumerate(micros, 1) if micro), default=0)
    number = max(1, math.ceil(used / multiple)) * multiple
    return [micros[:number] for micros in kept]


def tokens_of(plan: MicroBatchPlan, batch: Batch) -> Tensor:
    """Return the indices of all response tokens of a plan, int64 [n]."""
    return batch.tokens_of(samples_of(plan))


def compared_tokens(plan: MicroBatchPlan, batch: Batch, counted: Tensor) -> Tensor:
    """Return which tokens of a plan are compared, bool [T]. counted: bool [T], the compared tokens of all."""
    found = torch.zeros_like(counted)
    found[tokens_of(plan, batch)] = True
    return found & counted


def output_alone(model: TrainingEngine, one: Batch, plan: MicroBatchPlan, output: str) -> Tensor:
    """Return an output of a batch of one sample, by the first data parallel rank, float32 [T]. Collective.

    plan: any plan of this model.
    """
    empty: list[list[int]] = [[]] * (model.grid.micro_batch_multiple - 1)
    rows = [[[0] if rank == 0 else [], *empty] for rank in range(len(plan))]
    (found,) = model.forward(one, [rows], (output,))
    return found


def random_output(model: TrainingEngine, output: str, number: int = len(LENGTHS)) -> Tensor:
    """Return an output for the first samples of `random_batch`, float32 [T]. Collective over the world."""
    batch, grid = random_batch(model.weight_map.hf["vocab_size"], LENGTHS[:number]), model.grid
    samples, multiple = list(range(number)), grid.micro_batch_multiple
    plan = plan_minibatch(batch, samples, dp=grid.dp, max_tokens=4096, multiple=multiple)
    (found,) = model.forward(batch, [plan], (output,))
    return found


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
