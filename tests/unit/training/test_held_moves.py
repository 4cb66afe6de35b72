"""Plans of rows that travel to the ranks that train on them, and held columns of batches."""

import numpy as np
import pytest
import torch

from rl.data.batch import Batch, concatenate
from rl.data.held import ColumnBytes, HeldColumn, HeldRow, row_key
from rl.rollout.samples import Completion, Sample, Segment
from rl.training.held_transfer import Move, plan_moves


def column(lengths, *, holders, rank=0) -> HeldColumn:
    values = [np.full((n, 3), i, np.uint8) for i, n in enumerate(lengths)]
    rows = {i: HeldRow(i, v) for i, v in enumerate(values) if holders[i] == rank}
    return HeldColumn(rows, torch.tensor(holders), torch.tensor(lengths), np.dtype(np.uint8), (3,))


def test_a_stage_receives_only_its_part_and_each_row_once():
    # tp 2, dp 2, pp 2: stage 0 has ranks 0 to 3; ranks 2 and 3 are dp rank 1.
    held = column([5, 7, 2], holders=[0, 6, 6])
    parts = [slice(0, 1), slice(1, 3)]
    moves, dp_ranks = plan_moves(held, [[[0], []], [[1], []]], parts.__getitem__, tp=2, pp=2)
    assert dp_ranks == {0: 0, 1: 1}
    assert moves == [
        *(Move(0, 0, target, parts[0], 5) for target in (0, 1)),
        *(Move(0, 0, target, parts[1], 10) for target in (4, 5)),
        *(Move(1, 6, target, parts[0], 7) for target in (2, 3)),
        *(Move(1, 6, target, parts[1], 14) for target in (6, 7)),
    ]
    held.moved |= dp_ranks
    last_only = [None, slice(None)].__getitem__
    moves, dp_ranks = plan_moves(held, [[[0], [2]], [[], [1]]], last_only, tp=2, pp=2)
    assert dp_ranks == {2: 0} and moves == [Move(2, 6, target, slice(None), 6) for target in (4, 5)]
    with pytest.raises(RuntimeError, match="sample 1 is at dp rank 1"):
        plan_moves(held, [[[1]], [[]]], last_only, tp=2, pp=2)


def test_held_columns_follow_the_samples_of_a_batch():
    def batch(first: int, holders):
        ids = [np.array([first + i], np.int32) for i in range(3)]
        held = {"routes": column([1, 2, 3], holders=holders)}
        return Batch(ids, ids, torch.arange(3), torch.zeros(3) > 0, held=held)

    both = concatenate([batch(0, [0, 1, 0]), batch(10, [1, 0, 0])])
    chosen = both.select([4, 0, 1]).held["routes"]
    assert chosen.holders.tolist() == [0, 0, 1] and chosen.num_bytes.tolist() == [6, 3, 6]
    assert {place: row.key for place, row in chosen.rows.items()} == {0: 1, 1: 0}
    groups = both.keep_groups([5, 0]).held["routes"]
    assert groups.lengths.tolist() == [3, 1] and set(groups.rows) == {0, 1}


def test_segments_join_their_values_without_repeated_context():
    ids = np.zeros(2, np.int32)

    def segment(before=(), **held):
        values = {name: np.array(own) for name, own in held.items()}
        return Segment.of(Completion(ids, np.zeros(2, np.float32), "stop", ids, values), before=before)

    # A context of one token, then 2 sampled, 2 given and 2 sampled ones: the routes of 2, then of 6 tokens.
    first = segment(routes=[1, 2], kept_counts=[7])
    given = Segment.given(ids, version=0, turn=0, source="tool")
    last = segment([first, given], routes=[9, 9, 3, 4, 5, 6], kept_counts=[8, 8])
    sample = Sample(0, 0, (first, given, last))
    assert sample.held("routes").tolist() == [1, 2, 3, 4, 5, 6]
    assert sample.held("kept_counts").tolist() == [7, 8, 8]


def test_the_key_of_a_row_depends_on_where_the_prompt_ends():
    a, b = np.array([1, 2], np.int32), np.array([3], np.int32)
    assert row_key(a, b) != row_key(b, a)


def test_other_bytes_than_planned_are_an_error():
    assert ColumnBytes(3, 3).checked("x") == ColumnBytes(3, 3)
    with pytest.raises(RuntimeError, match="of rank 2 brought 3 bytes to this rank, whose plan has 4"):
        ColumnBytes(3, 4).checked("the message of rank 2")
