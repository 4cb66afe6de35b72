"""Samples in packed rows."""

import random

import numpy as np
import pytest
import torch

from rl.data.batch import Batch
from rl.training.micro_batch_plans import Cost, Workload, plan_micro_batches, plan_minibatch
from rl.training.packing import pack

CPU = torch.device("cpu")


# Packed rows ------------------------------------------------------------------------------------------------


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


def test_a_row_of_samples_by_hand():
    """Sequences lie shortest first, then padding; response tokens are predicted from the one before."""
    micro = pack(example_batch(), [2, 0, 1], multiple=4, device=CPU)
    assert micro.samples == [2, 0, 1]
    assert micro.tokens.tolist() == [[21, 31, 32, 33, 34, 35, 11, 12, 13, 14, 15, 0]]
    assert micro.position_ids.tolist() == [[0, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0]]
    assert micro.bounds.tolist() == [0, 12]
    assert (
        micro.attention.cu_seqlens_q.tolist() == micro.attention.cu_seqlens_kv.tolist() == [0, 1, 6, 11, 12]
    )
    assert micro.attention.max_seqlen_q == micro.attention.max_seqlen_kv == 5
    assert micro.predict_at.tolist() == [3, 4, 7, 8, 9]
    assert micro.targets.tolist() == [34, 35, 13, 14, 15]
    assert micro.lengths.tolist() == [2, 3, 0]
    assert micro.column_index.tolist() == [3, 4, 0, 1, 2]
    assert set(micro.columns) == {"mask", "advantages"}
    assert micro.column("advantages").tolist() == [103, 104, 100, 101, 102]
    assert micro.mask.tolist() == [1, 1, 1, 0, 1]
    # Megatron requires these types.
    for name in ("tokens", "position_ids", "predict_at", "targets", "column_index", "lengths"):
        assert getattr(micro, name).dtype == torch.int64
    for tensor in (micro.attention.cu_seqlens_q, micro.attention.cu_seqlens_kv, micro.bounds):
        assert tensor.dtype == torch.int32
    assert micro.column("advantages").dtype == torch.float32


def test_layouts_are_cached_without_columns():
    batch = example_batch()
    first = pack(batch, [2, 0], multiple=4, device=CPU)
    batch.advantages = -batch.advantages
    batch.extra["labels"] = torch.tensor([7.0, 8.0, 9.0])
    second = pack(batch, [2, 0], multiple=4, device=CPU)
    assert second.tokens is first.tokens
    assert second.column("advantages").tolist() == [-103, -104, -100, -101, -102]
    assert not first.sample_columns and second.column("labels").tolist() == [9, 7]
    assert pack(batch, [0, 2], multiple=4, device=CPU).targets.tolist() == [13, 14, 15, 34, 35]


@pytest.mark.parametrize(("multiple", "padding"), [(1, 0), (2, 0), (5, 0), (3, 2), (8, 6), (16, 6)])
def test_a_row_is_padded_to_the_multiple(multiple, padding):
    micro = pack(example_batch(), [0, 2], multiple=multiple, device=CPU)
    assert micro.tokens.shape == micro.position_ids.shape == (1, 10 + padding)
    assert micro.attention.cu_seqlens_q.tolist() == [0, 5, 10] + ([10 + padding] if padding else [])
    assert micro.tokens[0, 10:].tolist() == [0] * padding
    assert micro.position_ids[0, 10:].tolist() == list(range(padding))  # a sequence of its own


@pytest.mark.parametrize("multiple", [1, 4])
def test_an_empty_micro_batch_is_only_padding(multiple):
    micro = pack(example_batch(), [], multiple=multiple, device=CPU)
    assert micro.tokens.tolist() == [[0] * multiple]
    assert micro.position_ids.tolist() == [list(range(multiple))]
    assert micro.attention.cu_seqlens_q.tolist() == [0, multiple]
    for tensor in (
        micro.predict_at,
        micro.targets,
        micro.lengths,
        micro.column_index,
        micro.column("advantages"),
    ):
        assert tensor.shape == (0,)
    assert micro.predict_at.dtype == micro.targets.dtype == micro.lengths.dtype == torch.int64


def groups_batch():
    """Return a batch. Samples 0 to 2 have one prompt and group, and one of them has an empty response. Sample
    3 has the same prompt in another group. Sample 4 has another prompt in the group of sample 3."""

    def ids(*values):
        return np.array(values, np.int32)

    return Batch(
        prompt_ids=[ids(11, 12), ids(11, 12), ids(11, 12), ids(11, 12), ids(51)],
        response_ids=[ids(13, 14, 15), ids(), ids(23), ids(33), ids(43, 44)],
        groups=torch.tensor([0, 0, 0, 1, 1]),
        truncated=torch.zeros(5, dtype=torch.bool),
    )


def test_samples_of_a_group_share_an_equal_prompt():
    micro = pack(groups_batch(), [0, 1, 2, 3, 4], multiple=1, device=CPU, share=True)
    assert micro.tokens.tolist() == [[11, 12, 33, 51, 43, 44, 11, 12, 23, 13, 14, 15]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 0, 1, 2, 2, 3, 4]]
    # Both responses of the group are predicted from the same token of the prompt.
    assert micro.predict_at.tolist() == [7, 9, 10, 7, 1, 3, 4]
    assert micro.targets.tolist() == [13, 14, 15, 23, 33, 43, 44]
    assert micro.lengths.tolist() == [3, 0, 1, 1, 2]
    attention = micro.attention
    assert attention.cu_seqlens_q.tolist() == [0, 3, 6, 8, 9, 12]
    assert attention.cu_seqlens_kv.tolist() == [0, 3, 6, 8, 11, 16]
    assert attention.kv_index.tolist() == [*range(8), 6, 7, 8, 6, 7, 9, 10, 11]
    assert (attention.max_seqlen_q, attention.max_seqlen_kv) == (3, 5)


def test_nothing_changes_without_an_equal_prompt():
    batch = groups_batch()
    for samples in ([0, 3], [3, 4], [2], [0, 3, 2]):
        plain = pack(batch, samples, multiple=1, device=CPU)
        shared = pack(batch, samples, multiple=1, device=CPU, share=True)
        assert shared.tokens.tolist() == plain.tokens.tolist()
        assert shared.attention.runs == plain.attention.runs
        assert shared.attention.kv_index is None and not shared.attention.prefixes


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
    found = torch.full((int(batch.lengths.sum()),), -1)
    for rank in plan_minibatch(batch, list(range(count)), dp=3, max_tokens=40):
        for samples in rank:
            micro = pack(batch, samples, multiple=4, device=CPU)
            assert (found[micro.column_index] == -1).all()
            found[micro.column_index] = micro.targets
            assert micro.targets.equal(micro.tokens[0, micro.predict_at + 1])
    assert found.tolist() == np.concatenate(responses).tolist()


# Attributes -------------------------------------------------------------------------------------------------


def test_an_absent_column_is_named_with_present_ones():
    micro = pack(example_batch(), [0], multiple=1, device=CPU)
    with pytest.raises(ValueError, match="no ref_logprobs; its columns are mask, advantages"):
        micro.column("ref_logprobs")


# Plans and rows ---------------------------------------------------------------------------------------------


def batch_of_contexts(rng: random.Random) -> Batch:
    """Samples with their group's prompt, or with another one."""
    prompts = [np.full(rng.randint(1, 30), k, np.int32) for k in range(6)]
    groups = [group for group in range(rng.randint(1, 4)) for _ in range(rng.randint(1, 8))]
    own = rng.choice([0.0, 0.5, 1.0])
    # Equal arrays of other objects: rows that were stored and read again.
    contexts = [prompts[rng.randrange(6) if rng.random() < own else group].copy() for group in groups]
    return Batch(
        prompt_ids=contexts,
        response_ids=[np.zeros(rng.randint(0, 20), np.int32) for _ in groups],
        groups=torch.tensor(groups),
        truncated=torch.zeros(len(groups), dtype=torch.bool),
    )


@pytest.mark.parametrize("shared", [True, False])
def test_a_row_has_the_tokens_that_the_plan_counts(shared):
    rng, full = random.Random(1), 0
    for _ in range(200):
        batch, limit = batch_of_contexts(rng), rng.randint(1, 120)
        work = Workload.of_batch(batch, cost=Cost(), shared_prefix=shared)
        plan = plan_micro_batches(work, indices=range(len(batch)), dp=rng.randint(1, 3), max_tokens=limit)
        for micro in (micro for rank in plan for micro in rank if micro):
            tokens = pack(batch, micro, multiple=1, device=CPU, share=shared).tokens.numel()
            assert tokens == work.tokens(micro) == work.cost(micro)
            assert tokens <= limit or len(micro) == 1
            full += len(micro) > 1
    assert full > 100
