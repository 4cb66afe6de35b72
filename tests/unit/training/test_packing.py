import random

import numpy as np
import pytest
import torch

from rl.data.batch import Batch
from rl.training.packing import MicroBatch, pack, plan_micro_batches

CPU = torch.device("cpu")


# The plan -------------------------------------------------------------------------------------------------------------


def trials(count=300):
    """Random arguments of plan_micro_batches, from all alike to a few samples much longer than a micro-batch."""
    rng = random.Random(11)
    for _ in range(count):
        max_tokens = rng.randint(1, 200)
        longest = rng.choice((1, max_tokens // 3 + 1, max_tokens, 3 * max_tokens))
        lengths = [rng.randint(1, longest) for _ in range(rng.randint(1, 60))]
        indices = rng.sample(range(len(lengths)), rng.randint(1, len(lengths)))
        yield lengths, indices, rng.randint(1, 9), max_tokens


def plan(lengths, indices, dp, max_tokens):
    return plan_micro_batches(lengths, indices=indices, dp=dp, max_tokens=max_tokens)


def test_every_sample_is_in_exactly_one_micro_batch_and_no_other_sample_is():
    for arguments in trials():
        _, indices, dp, _ = arguments
        ranks = plan(*arguments)
        assert len(ranks) == dp
        assert sorted(i for rank in ranks for micro in rank for i in micro) == sorted(indices), arguments


def test_no_micro_batch_exceeds_max_tokens_unless_it_is_a_single_sample():
    singles = 0
    for arguments in trials():
        lengths, _, _, max_tokens = arguments
        for micro in (micro for rank in plan(*arguments) for micro in rank):
            tokens = sum(lengths[i] for i in micro)
            assert tokens <= max_tokens or len(micro) == 1, arguments
            singles += tokens > max_tokens
    assert singles > 100  # the exception is exercised


def test_every_rank_has_the_same_number_of_micro_batches():
    for arguments in trials():
        assert len({len(rank) for rank in plan(*arguments)}) == 1, arguments


def test_loads_of_ranks_differ_by_at_most_one_sample():
    for arguments in trials():
        lengths, indices, _, _ = arguments
        loads = [sum(lengths[i] for micro in rank for i in micro) for rank in plan(*arguments)]
        assert max(loads) <= min(loads) + max(lengths[i] for i in indices), arguments


def test_there_are_no_more_micro_batches_than_first_fit_can_need():
    """All but one bin of first-fit are more than half full."""
    for arguments in trials():
        lengths, _, _, max_tokens = arguments
        ranks = plan(*arguments)
        load = max(sum(lengths[i] for micro in rank for i in micro) for rank in ranks)
        assert len(ranks[0]) < 2 * load / max_tokens + 1, arguments


def test_the_plan_depends_on_the_set_of_indices_and_not_on_their_order():
    rng = random.Random(5)
    for lengths, indices, dp, max_tokens in trials(50):
        again = rng.sample(indices, len(indices))
        assert plan(lengths, indices, dp, max_tokens) == plan(list(lengths), again, dp, max_tokens)


def test_lengths_of_other_samples_do_not_matter():
    for lengths, indices, dp, max_tokens in trials(50):
        others = [n if i in indices else n + 17 for i, n in enumerate(lengths)]
        assert plan(lengths, indices, dp, max_tokens) == plan(others, indices, dp, max_tokens)


def test_samples_of_a_micro_batch_are_in_ascending_order():
    for arguments in trials(50):
        assert all(micro == sorted(micro) for rank in plan(*arguments) for micro in rank)


def test_a_rank_with_a_long_sample_takes_fewer_others():
    assert plan([12, 4, 3, 5], [0, 1, 2, 3], 2, 100) == [[[0]], [[1, 2, 3]]]


def test_more_ranks_than_samples_leaves_ranks_with_an_empty_micro_batch():
    assert plan([5, 9], [0, 1], 4, 10) == [[[1]], [[0]], [[]], [[]]]


def test_equal_samples_are_dealt_out_evenly():
    ranks = plan([10] * 8, list(range(8)), 2, 20)
    assert [[len(micro) for micro in rank] for rank in ranks] == [[2, 2], [2, 2]]


def test_micro_batches_of_a_rank_are_about_equally_long_rather_than_full_and_a_rest():
    [rank] = plan([4] * 6, list(range(6)), 1, 20)  # first-fit alone: 20 and 4 tokens
    assert [len(micro) for micro in rank] == [3, 3]


def test_where_an_even_split_would_overfill_a_micro_batch_first_fit_decides():
    lengths = [3, 3, 2, 2, 2]  # evenly: 3 + 2 + 2 and 3 + 2, more than 6; first-fit: 3 + 3 and 2 + 2 + 2
    [rank] = plan(lengths, list(range(5)), 1, 6)
    assert rank == [[0, 1], [2, 3, 4]]


# Packed rows ----------------------------------------------------------------------------------------------------------


def example_batch():
    """Three samples; token column `t` counts 100, 101, ... over all response tokens."""

    def ids(*values):
        return np.array(values, np.int32)

    batch = Batch(
        prompt_ids=[ids(11, 12), ids(21), ids(31, 32, 33)],
        response_ids=[ids(13, 14, 15), ids(), ids(34, 35)],
        groups=torch.tensor([0, 1, 2]),
        truncated=torch.zeros(3, dtype=torch.bool),
    )
    batch.mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])
    batch.advantages = torch.tensor([100.0, 101.0, 102.0, 103.0, 104.0])
    return batch


def test_samples_lie_end_to_end_in_the_order_given_with_padding_behind():
    micro = pack(example_batch(), [2, 0, 1], multiple=4, device=CPU)
    assert micro.samples == [2, 0, 1]
    assert micro.tokens.tolist() == [[31, 32, 33, 34, 35, 11, 12, 13, 14, 15, 21, 0]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 0]]
    assert micro.cu_seqlens.tolist() == [0, 5, 10, 11, 12]
    assert micro.max_seqlen == 5


def test_each_response_token_is_predicted_from_the_position_before_it():
    micro = pack(example_batch(), [2, 0, 1], multiple=4, device=CPU)
    assert micro.predict_at.tolist() == [2, 3, 6, 7, 8]
    assert micro.targets.tolist() == [34, 35, 13, 14, 15]
    assert micro.tokens[0, micro.predict_at + 1].tolist() == micro.targets.tolist()
    assert micro.lengths.tolist() == [2, 3, 0]


def test_columns_follow_their_tokens():
    micro = pack(example_batch(), [2, 0, 1], multiple=4, device=CPU)
    assert micro.column_index.tolist() == [3, 4, 0, 1, 2]
    assert set(micro.columns) == {"mask", "advantages"}
    assert micro.advantages.tolist() == [103, 104, 100, 101, 102]
    assert micro.mask.tolist() == [1, 1, 1, 0, 1]


def test_types_are_those_that_megatron_takes():
    micro = pack(example_batch(), [0, 2], multiple=8, device=CPU)
    for tensor in (
        micro.tokens,
        micro.position_ids,
        micro.predict_at,
        micro.targets,
        micro.column_index,
        micro.lengths,
    ):
        assert tensor.dtype == torch.int64
    assert micro.cu_seqlens.dtype == torch.int32
    assert type(micro.max_seqlen) is int
    assert micro.advantages.dtype == torch.float32


@pytest.mark.parametrize(("multiple", "padding"), [(1, 0), (2, 0), (5, 0), (3, 2), (8, 6), (16, 6)])
def test_a_row_is_padded_to_the_multiple_and_no_further(multiple, padding):
    micro = pack(example_batch(), [0, 2], multiple=multiple, device=CPU)
    assert micro.tokens.shape == micro.position_ids.shape == (1, 10 + padding)
    assert micro.cu_seqlens.tolist() == [0, 5, 10] + ([10 + padding] if padding else [])
    assert micro.tokens[0, 10:].tolist() == [0] * padding
    assert micro.position_ids[0, 10:].tolist() == list(range(padding))  # a sequence of its own
    assert micro.max_seqlen == max(5, padding)


@pytest.mark.parametrize("multiple", [1, 4])
def test_an_empty_micro_batch_is_only_padding_and_predicts_nothing(multiple):
    micro = pack(example_batch(), [], multiple=multiple, device=CPU)
    assert micro.tokens.tolist() == [[0] * multiple]
    assert micro.position_ids.tolist() == [list(range(multiple))]
    assert micro.cu_seqlens.tolist() == [0, multiple]
    assert micro.max_seqlen == multiple
    for tensor in (micro.predict_at, micro.targets, micro.lengths, micro.column_index, micro.advantages):
        assert tensor.shape == (0,)
    assert micro.predict_at.dtype == micro.targets.dtype == micro.lengths.dtype == torch.int64


def test_a_sample_with_an_empty_response_takes_room_and_predicts_nothing():
    micro = pack(example_batch(), [1], multiple=1, device=CPU)
    assert micro.tokens.tolist() == [[21]]
    assert micro.cu_seqlens.tolist() == [0, 1]
    assert micro.lengths.tolist() == [0]
    assert micro.predict_at.shape == micro.targets.shape == micro.advantages.shape == (0,)


def test_every_response_token_of_a_planned_batch_is_packed_once():
    rng = np.random.default_rng(3)
    count = 25
    responses = [rng.integers(1, 99, rng.integers(0, 20)).astype(np.int32) for _ in range(count)]
    batch = Batch(
        prompt_ids=[rng.integers(1, 99, rng.integers(1, 9)).astype(np.int32) for _ in range(count)],
        response_ids=responses,
        groups=torch.arange(count),
        truncated=torch.zeros(count, dtype=torch.bool),
    )
    lengths = (batch.prompt_lengths + batch.lengths).tolist()
    found = torch.full((int(batch.lengths.sum()),), -1)
    for rank in plan(lengths, list(range(count)), 3, 40):
        for samples in rank:
            micro = pack(batch, samples, multiple=4, device=CPU)
            assert (found[micro.column_index] == -1).all()
            found[micro.column_index] = micro.tokens[0, micro.predict_at + 1]
    assert found.tolist() == np.concatenate(responses).tolist()


# Attributes -----------------------------------------------------------------------------------------------------------


def test_a_column_that_is_not_filled_is_named_with_those_that_are():
    micro = pack(example_batch(), [0], multiple=1, device=CPU)
    with pytest.raises(
        AttributeError, match="this micro-batch has no ref_logprobs; its columns are mask, advantages"
    ):
        micro.ref_logprobs  # noqa: B018
    assert not hasattr(micro, "old_logprobs")


def test_a_micro_batch_without_columns_says_so():
    nothing = torch.zeros(0, dtype=torch.int64)
    micro = MicroBatch([], nothing, nothing, nothing, 0, nothing, nothing, nothing, nothing)
    with pytest.raises(AttributeError, match="has no mask; its columns are none"):
        micro.mask  # noqa: B018


def test_results_of_the_forward_pass_are_none_before_it():
    micro = pack(example_batch(), [0], multiple=1, device=CPU)
    assert micro.logprobs is None and micro.entropy is None
