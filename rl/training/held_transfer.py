"""Transfer of the rows of held columns (`rl.data.held`) from the ranks that generated them to training ranks.

The plan of the moves is plain data that every rank computes identically from the micro-batch plan. All passes
of a step use the same micro-batch plan, so each row is sent once. A `Need` says which part of a row a
pipeline stage needs. For example, a stage needs the replayed experts of its own layers only.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from rl.data.batch import Batch
from rl.data.held import KEY, ColumnBytes, HeldColumn, row_key
from rl.models.placement import training_ranks
from rl.runtime.collectives import exchange_bytes
from rl.training.grid import Grid
from rl.training.micro_batch_plans import MicroBatchPlan

Index = slice | Sequence[int]
Need = Callable[[int], Index | None]
"""pipeline stage -> the indices that the stage's ranks need of the first dimension of each token's value.
slice(None): the whole value; None: nothing."""


class Move(NamedTuple):
    """Transfer of one row, or a part of it, to one rank."""

    sample: int
    source: int
    target: int
    part: Index
    num_bytes: int
    """Size of the values, without the key."""


def plan_moves(
    column: HeldColumn, plan: MicroBatchPlan, need: Need, *, tp: int, pp: int, cp: int = 1
) -> tuple[list[Move], dict[int, int]]:
    """Return the moves of the plan's rows, and the data parallel rank of each sample that is moved.

    A row that an earlier plan moved is left out of both. Raises RuntimeError if an earlier plan gave a sample
    to another data parallel rank.
    """
    dp, holders, sizes = len(plan), column.holders.tolist(), column.num_bytes.tolist()
    moves, dp_ranks = [], {}
    ranks = training_ranks(pp * dp * cp * tp, tp=tp, pp=pp).reshape(pp, dp, cp * tp)
    parts = [(stage, part) for stage in range(pp) if (part := need(stage)) is not None]
    for dp_rank, micro_batches in enumerate(plan):
        for sample in (i for micro in micro_batches for i in micro):
            if (before := column.moved.get(sample, dp_rank)) != dp_rank:
                raise RuntimeError(f"sample {sample} is at dp rank {before}, and a plan has it at {dp_rank}")
            if sample in column.moved:
                continue
            dp_ranks[sample] = dp_rank
            for stage, part in parts:
                size = sizes[sample]
                if column.shape:
                    size = size // column.shape[0] * _count(part, column.shape[0])
                targets = ranks[stage, dp_rank].tolist()
                moves += [Move(sample, holders[sample], target, part, size) for target in targets]
    return moves, dp_ranks


def fetch(
    batch: Batch, plan: MicroBatchPlan, needs: dict[str, Need], grid: Grid, device: torch.device
) -> ColumnBytes:
    """Fill `HeldColumn.local` for the plan's samples. Collective over the world.

    Raises RuntimeError on a rank that receives the row of another sample, or other bytes than planned.
    """
    total, rank, world = ColumnBytes(), dist.get_rank(), dist.get_world_size()
    for name, need in needs.items():
        column = batch.held[name]
        moves, dp_ranks = plan_moves(column, plan, need, tp=grid.tp, pp=grid.pp, cp=grid.cp)
        column.moved |= dp_ranks
        sizes = np.zeros((world, world), np.int64)  # from, to
        outgoing, incoming = defaultdict[int, list[Move]](list), defaultdict[int, list[Move]](list)
        for move in moves:
            sizes[move.source, move.target] += KEY.itemsize + move.num_bytes
            if move.source == rank:
                outgoing[move.target].append(move)
            if move.target == rank:
                incoming[move.source].append(move)
        messages = {target: _message(column, own) for target, own in outgoing.items()}
        found = {rank: messages.pop(rank, b"")}
        np.fill_diagonal(sizes, 0)
        if sizes.any():
            found |= exchange_bytes(messages, sizes, device)
        total.planned += int(sizes[:, rank].sum())
        total.received += sum(len(content) for source, content in found.items() if source != rank)
        for source, content in found.items():
            _unpack(batch, name, incoming[source], content)
    return total.checked("a mini-batch")


def _message(column: HeldColumn, moves: Sequence[Move]) -> bytes:
    """Return the keys and values of rows that this rank holds, one row after the other."""
    parts = []
    for sample, *_, part, _ in moves:
        key, values = column.rows[sample]
        parts += [KEY.type(key).tobytes(), (values[:, part] if column.shape else values).tobytes()]
    return b"".join(parts)


def _unpack(batch: Batch, name: str, moves: Sequence[Move], content: bytes) -> None:
    """Fill `HeldColumn.local` from the message of one rank."""
    column, first = batch.held[name], 0
    for sample, source, target, part, num_bytes in moves:
        [key] = np.frombuffer(content, KEY, 1, first)
        if key != row_key(batch.prompt_ids[sample], batch.response_ids[sample]):
            raise RuntimeError(
                f"held column {name}: the row of sample {sample} that rank {target} has from rank {source} "
                "is that of another sample."
            )
        count = num_bytes // column.dtype.itemsize
        flat = np.frombuffer(content, column.dtype, count, first + KEY.itemsize)
        width = (_count(part, column.shape[0]), *column.shape[1:]) if column.shape else ()
        column.local[sample] = flat.reshape(int(column.lengths[sample]), *width)
        first += KEY.itemsize + num_bytes


def _count(part: Index, size: int) -> int:
    """Return the number of elements of a part of `size`."""
    return len(range(*part.indices(size))) if isinstance(part, slice) else len(part)
