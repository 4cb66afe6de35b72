"""Micro-batches of units: samples that belong together, such as the two responses of a pair."""

import random

import numpy as np
import pytest
import torch

from rl.data.batch import Batch
from rl.training.packing import pack, plan_micro_batches


def trials(unit, count=300):
    """Random arguments, from units much shorter than a micro-batch to some much longer; the mini-batch is a part of the batch."""
    rng = random.Random(f"units of {unit}")
    for _ in range(count):
        max_tokens = rng.randint(1, 200)
        longest = rng.choice((1, max_tokens // 5 + 1, max_tokens, 3 * max_tokens))
        num_units = rng.randint(1, 30)
        lengths = [rng.randint(0 if rng.random() < 0.1 else 1, longest) for _ in range(num_units * unit)]
        drawn = rng.sample(range(num_units), rng.randint(1, num_units))
        indices = [i for k in drawn for i in range(k * unit, (k + 1) * unit)]
        yield lengths, indices, rng.randint(1, 9), max_tokens


def plan(lengths, indices, dp, max_tokens, unit):
    return plan_micro_batches(lengths, indices=indices, dp=dp, max_tokens=max_tokens, unit=unit)


def micro_batches(ranks):
    return [micro for rank in ranks for micro in rank]


both = pytest.mark.parametrize("unit", [2, 3])


@both
def test_every_unit_is_whole_and_in_order_in_exactly_one_micro_batch(unit):
    for arguments in trials(unit):
        _, indices, dp, _ = arguments
        ranks, found = plan(*arguments, unit), []
        assert len(ranks) == dp
        for micro in micro_batches(ranks):
            assert len(micro) % unit == 0, arguments
            for start in range(0, len(micro), unit):
                first = micro[start]
                assert first % unit == 0 and micro[start : start + unit] == list(
                    range(first, first + unit)
                ), arguments
                found.append(first)
        assert sorted(found) == sorted(indices[::unit]), arguments


@both
def test_no_micro_batch_exceeds_max_tokens_unless_it_is_a_single_unit(unit):
    singles = several = 0
    for arguments in trials(unit):
        lengths, _, _, max_tokens = arguments
        for micro in micro_batches(plan(*arguments, unit)):
            tokens = sum(lengths[i] for i in micro)
            assert tokens <= max_tokens or len(micro) == unit, arguments
            singles += tokens > max_tokens
            several += len(micro) > unit
    assert singles > 100 and several > 100  # both sides are exercised


@both
def test_every_rank_has_the_same_number_of_micro_batches(unit):
    padded = 0
    for arguments in trials(unit):
        ranks = plan(*arguments, unit)
        assert len({len(rank) for rank in ranks}) == 1, arguments
        padded += any(not micro for micro in micro_batches(ranks))
    assert padded > 20


@both
def test_loads_of_ranks_differ_by_at_most_one_unit(unit):
    for arguments in trials(unit):
        lengths, indices, _, _ = arguments
        loads = [sum(lengths[i] for micro in rank for i in micro) for rank in plan(*arguments, unit)]
        assert max(loads) <= min(loads) + max(sum(lengths[i : i + unit]) for i in indices[::unit]), arguments


@both
def test_the_plan_depends_on_the_set_of_indices_and_not_on_their_order(unit):
    rng = random.Random(5)
    for lengths, indices, dp, max_tokens in trials(unit, 50):
        again = rng.sample(indices, len(indices))
        assert plan(lengths, indices, dp, max_tokens, unit) == plan(lengths, again, dp, max_tokens, unit)


def test_it_is_the_plan_of_single_samples_as_long_as_the_pairs():
    for lengths, indices, dp, max_tokens in trials(2, 50):
        sums = [a + b for a, b in zip(lengths[::2], lengths[1::2])]
        singles = plan(sums, [i // 2 for i in indices[::2]], dp, max_tokens, 1)
        pairs = [[[i for k in micro for i in (2 * k, 2 * k + 1)] for micro in rank] for rank in singles]
        assert plan(lengths, indices, dp, max_tokens, 2) == pairs


def test_hand_numbers():
    # Pairs of 8, 9, 2 and 3 tokens; two of at most 11 go to each rank.
    assert plan([7, 1, 4, 5, 1, 1, 3, 0], list(range(8)), 2, 11, 2) == [[[2, 3, 4, 5]], [[0, 1, 6, 7]]]
    # One rank without the pair of 2: that of 9 alone, then those of 8 and 3.
    assert plan([7, 1, 4, 5, 1, 1, 3, 0], [2, 3, 0, 1, 6, 7], 1, 11, 2) == [[[2, 3], [0, 1, 6, 7]]]


def test_more_ranks_than_pairs_leaves_ranks_with_an_empty_micro_batch():
    assert plan([5, 9, 1, 1], [0, 1, 2, 3], 3, 10, 2) == [[[0, 1]], [[2, 3]], [[]]]


@pytest.mark.parametrize("indices", [[0, 1, 2], [1, 2], [0, 2, 3]])
def test_part_of_a_pair_is_refused(indices):
    with pytest.raises(AssertionError, match="whole units"):
        plan([5] * 6, indices, 1, 100, 2)


def test_packed_rows_hold_chosen_and_rejected_responses_in_turn():
    rng = np.random.default_rng(4)
    lengths = rng.integers(0, 12, 20)
    batch = Batch(
        prompt_ids=[np.full(1 + i // 2 % 3, 90 + i // 2, np.int32) for i in range(20)],
        response_ids=[np.full(n, i, np.int32) for i, n in enumerate(lengths)],
        groups=torch.arange(10).repeat_interleave(2),
        truncated=torch.zeros(20, dtype=torch.bool),
        unit=2,
    )
    totals = (batch.prompt_lengths + batch.lengths).tolist()
    ranks = plan(totals, list(range(20)), 2, 40, batch.unit)
    assert len(ranks[0]) > 1
    for samples in micro_batches(ranks):
        micro = pack(batch, samples, multiple=4, device=torch.device("cpu"))
        assert micro.lengths.tolist() == [lengths[i] for i in samples]
        assert [i // 2 for i in micro.samples[::2]] == [i // 2 for i in micro.samples[1::2]]
        assert micro.targets.tolist() == [i for i in samples for _ in range(lengths[i])]
