from dataclasses import fields

import numpy as np
import pytest
import torch

from rl.data.batch import LOSS_COLUMNS, TOKEN_COLUMNS, Batch, concatenate, pair_up
from rl.phases.batch_metrics import balance_metrics, length_metrics, sample_means

SAMPLE_COLUMNS = ("groups", "truncated", "baselines", "labels", "scores", "rewards")
NAN = float("nan")


def full_batch(seed, sizes=(3, 1, 4, 2), details=("acc", "failed", "format"), unit=1):
    """Ragged, with empty responses; every column filled, and each value of a column another one."""
    rng = np.random.default_rng(seed)
    count = sum(sizes)
    lengths = rng.integers(1, 9, count)
    lengths[rng.random(count) < 0.2] = 0

    def ids(length):
        return rng.integers(0, 1000, length).astype(np.int32)

    def column(length):
        return torch.from_numpy(rng.random(length)).float()

    total = int(lengths.sum())
    batch = Batch(
        prompt_ids=[ids(n) for n in rng.integers(1, 6, count)],
        response_ids=[ids(n) for n in lengths],
        groups=torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
        truncated=torch.from_numpy(rng.random(count) < 0.5),
        labels=column(count),
        scores=column(count),
        rewards=column(count),
        samples_per_unit=unit,
        baselines=column(count),
        cursor={"epoch": 1},
        score_details={name: column(count) for name in details},
        **{name: column(total) for name in TOKEN_COLUMNS},
    )
    assert all(getattr(batch, field.name) is not None for field in fields(Batch))
    return batch


def samples_of(batch, *, groups=True):
    """Everything that belongs to each sample, as plain data."""
    ends, out = np.cumsum(batch.lengths.tolist()), []
    columns = {name: column for name in TOKEN_COLUMNS if (column := getattr(batch, name)) is not None}
    for i, (end, length) in enumerate(zip(ends, batch.lengths.tolist())):
        tokens = {name: column[end - length : end].tolist() for name, column in columns.items()}
        per_sample = {
            name: getattr(batch, name)[i].item()
            for name in SAMPLE_COLUMNS
            if getattr(batch, name) is not None
        }
        if not groups:
            del per_sample["groups"]
        details = {name: column[i].item() for name, column in batch.score_details.items()}
        out.append(
            (batch.prompt_ids[i].tolist(), batch.response_ids[i].tolist(), tokens, per_sample, details)
        )
    return out


def same_types(found, batch):
    for field in fields(Batch):
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor):
            assert getattr(found, field.name).dtype == value.dtype, field.name
    assert all(ids.dtype == np.int32 for ids in found.prompt_ids + found.response_ids)


def test_every_tensor_of_a_batch_is_a_token_column_or_a_sample_column():
    batch = full_batch(0)
    tensors = {field.name for field in fields(Batch) if isinstance(getattr(batch, field.name), torch.Tensor)}
    assert tensors == set(TOKEN_COLUMNS) | set(SAMPLE_COLUMNS)
    assert set(LOSS_COLUMNS) < set(TOKEN_COLUMNS)


def test_lengths_offsets_and_the_mask_by_default():
    responses = [np.zeros(n, np.int32) for n in (2, 0, 3)]
    batch = Batch([np.zeros(2, np.int32)] * 3, responses, torch.arange(3), torch.zeros(3, dtype=torch.bool))
    assert len(batch) == 3
    assert (batch.lengths.tolist(), batch.prompt_lengths.tolist(), batch.offsets.tolist()) == (
        [2, 0, 3],
        [2, 2, 2],
        [0, 2, 2, 5],
    )
    assert batch.lengths.dtype == batch.offsets.dtype == torch.int64
    assert batch.mask.tolist() == [1.0] * 5 and batch.mask.dtype == torch.float32
    assert list(batch.loss_columns()) == ["mask"]


def test_token_columns_are_those_that_losses_read_and_are_filled():
    batch = full_batch(0)
    assert tuple(batch.loss_columns()) == LOSS_COLUMNS
    assert all(column is getattr(batch, name) for name, column in batch.loss_columns().items())
    batch.selected_tokens = batch.returns = None
    assert set(LOSS_COLUMNS) - set(batch.loss_columns()) == {"selected_tokens", "returns"}


# select -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_select_takes_all_that_belongs_to_the_samples_in_the_order_given(seed):
    batch = full_batch(seed)
    before = samples_of(batch)
    for chosen in (
        [],
        [9, 0, 4],
        list(range(10)),
        [5],
        [2, 2, 7],
        np.random.default_rng(seed).permutation(10).tolist(),
    ):
        found = batch.select(chosen)
        assert samples_of(found) == [before[i] for i in chosen]
        assert len(found) == len(chosen) and found.mask.shape == (int(found.lengths.sum()),)
        same_types(found, batch)
    assert samples_of(batch) == before


def test_select_keeps_empty_columns_empty():
    batch = full_batch(1, unit=2)
    batch.advantages = batch.labels = None
    found = batch.select([0, 1])
    assert found.advantages is None and found.labels is None and found.samples_per_unit == 2


def test_a_selection_shares_no_column_with_its_batch():
    batch = full_batch(2)
    found = batch.select(list(range(10)))
    for name in (*TOKEN_COLUMNS, *SAMPLE_COLUMNS):
        getattr(found, name).zero_()
    assert samples_of(batch) == samples_of(full_batch(2))


# keep_groups ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kept", [[0], [1, 3], [3, 0, 2], [0, 1, 2, 3]])
def test_keep_groups_keeps_whole_groups_and_numbers_them_in_the_order_given(seed, kept):
    batch, sizes = full_batch(seed), [3, 1, 4, 2]
    found = batch.keep_groups(kept)
    samples = samples_of(batch, groups=False)
    starts = np.cumsum([0, *sizes])
    assert samples_of(found, groups=False) == [
        samples[i] for k in kept for i in range(starts[k], starts[k + 1])
    ]
    assert found.groups.tolist() == [new for new, k in enumerate(kept) for _ in range(sizes[k])]
    same_types(found, batch)


def test_keep_groups_finds_samples_of_a_group_that_do_not_lie_together():
    batch = full_batch(0).select([0, 9, 1, 3, 8, 2])  # groups 0 3 0 1 3 0
    found = batch.keep_groups([3, 0])
    assert samples_of(found, groups=False) == [samples_of(batch, groups=False)[i] for i in (1, 4, 0, 2, 5)]
    assert found.groups.tolist() == [0, 0, 1, 1, 1]


# concatenate ------------------------------------------------------------------------------------------------


def test_concatenate_keeps_order_and_all_columns_and_numbers_groups_on():
    batches = [full_batch(1), full_batch(2, sizes=(2,)), full_batch(3, sizes=(1, 5))]
    found = concatenate(batches)
    assert samples_of(found, groups=False) == [
        sample for batch in batches for sample in samples_of(batch, groups=False)
    ]
    assert found.groups.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 4, 4, 5, 6, 6, 6, 6, 6]
    same_types(found, batches[0])


def test_concatenate_of_one_batch_is_that_batch():
    batch = full_batch(4, unit=2)
    found = concatenate([batch])
    assert samples_of(found) == samples_of(batch) and found.samples_per_unit == 2


def test_concatenate_undoes_a_split():
    batch = full_batch(5)
    found = concatenate([batch.keep_groups([0, 1]), batch.keep_groups([2]), batch.keep_groups([3])])
    assert samples_of(found) == samples_of(batch)


def test_concatenate_has_nan_where_a_batch_lacks_a_number_of_the_score():
    first, second = (
        full_batch(1, sizes=(2,), details=("failed", "acc")),
        full_batch(2, sizes=(3,), details=("failed", "format")),
    )
    found = concatenate([first, second]).score_details
    assert sorted(found) == ["acc", "failed", "format"]
    assert torch.equal(
        found["failed"], torch.cat([first.score_details["failed"], second.score_details["failed"]])
    )
    assert torch.equal(found["acc"][:2], first.score_details["acc"]) and found["acc"][2:].isnan().all()
    assert found["format"][:2].isnan().all() and torch.equal(
        found["format"][2:], second.score_details["format"]
    )
    assert all(column.shape == (5,) and column.dtype == torch.float32 for column in found.values())


# pair_up ----------------------------------------------------------------------------------------------------


def test_pair_up_interleaves_chosen_and_rejected_in_units_of_two():
    chosen, rejected = full_batch(1, sizes=(1,) * 10), full_batch(2)
    pairs = pair_up(chosen=chosen, rejected=rejected)
    assert pairs.samples_per_unit == 2 and len(pairs) == 20
    # The rejected ones are the policy's own, several to a prompt: a mini-batch of prompts takes all pairs of
    # each.
    assert pairs.groups.tolist() == [0] * 6 + [1] * 2 + [2] * 8 + [3] * 4
    sides = [samples_of(batch) for batch in (chosen, rejected)]
    for i, (prompt, response, tokens, per_sample, details) in enumerate(samples_of(pairs)):
        whole = sides[i % 2][i // 2]
        assert (prompt, response) == whole[:2]
        assert tokens == {"mask": whole[2]["mask"]} and per_sample["truncated"] == whole[3]["truncated"]
        assert set(per_sample) == {"groups", "truncated"} and not details


def test_pair_up_keeps_the_mask_of_each_response():
    chosen, rejected = full_batch(3), full_batch(4)
    chosen.mask, rejected.mask = (
        torch.arange(len(chosen.mask)).float(),
        -torch.arange(len(rejected.mask)).float(),
    )
    pairs = pair_up(chosen=chosen, rejected=rejected)
    for i in range(20):
        side = (chosen, rejected)[i % 2]
        here, there = (
            slice(*pairs.offsets[i : i + 2].tolist()),
            slice(*side.offsets[i // 2 : i // 2 + 2].tolist()),
        )
        assert torch.equal(pairs.mask[here], side.mask[there])


def test_pairs_stay_pairs_when_selected_kept_and_concatenated():
    pairs = pair_up(chosen=full_batch(1), rejected=full_batch(2))
    kept, samples = pairs.keep_groups([3, 1]), samples_of(pairs, groups=False)
    assert kept.samples_per_unit == 2 and samples_of(kept, groups=False) == [
        samples[i] for i in (16, 17, 18, 19, 6, 7)
    ]
    both = concatenate([kept, pairs])
    assert (
        both.samples_per_unit == 2
        and samples_of(both, groups=False) == samples_of(kept, groups=False) + samples
    )
    assert both.groups.tolist() == [0] * 4 + [1] * 2 + [2] * 6 + [3] * 2 + [4] * 8 + [5] * 4


def test_pair_up_of_unequal_numbers_is_refused():
    with pytest.raises(AssertionError, match="10 and 2 responses"):
        pair_up(chosen=full_batch(1), rejected=full_batch(2, sizes=(2,)))


# outcomes ---------------------------------------------------------------------------------------------------


def scored(scores, **details):
    batch = full_batch(0, sizes=(len(scores),))
    batch.scores = torch.tensor(scores)
    batch.score_details = {name: torch.tensor(column) for name, column in details.items()}
    return batch.outcomes


def test_outcomes_are_the_accuracy_where_there_is_one():
    outcomes = scored([0.1, 0.9, 0.5], acc=[1.0, 0.0, 0.25], failed=[0.0, 0.0, 0.0])
    assert outcomes.tolist() == [1.0, 0.0, 0.25] and outcomes.dtype == torch.float32


def test_outcomes_fall_back_to_the_score_sample_by_sample():
    assert scored([0.5, 0.75, -2.0], acc=[NAN, 1.0, NAN], failed=[0.0, 0.0, 0.0]).tolist() == [0.5, 1.0, -2.0]
    assert scored([0.5, 0.75], failed=[0.0, 0.0]).tolist() == [0.5, 0.75]


def test_the_outcome_of_a_failed_sample_is_0_whatever_a_failure_scores():
    assert scored([-5.0, 0.5, 3.0], acc=[NAN, NAN, NAN], failed=[1.0, 0.0, 1.0]).tolist() == [0.0, 0.5, 0.0]
    assert scored([-5.0, 0.5], failed=[1.0, 0.0]).tolist() == [0.0, 0.5]


def test_outcomes_leave_the_scores_alone_and_want_them_there():
    batch = full_batch(0)
    batch.score_details["failed"] = torch.ones(10)
    before = batch.scores.clone()
    assert batch.score_details.pop("acc") is not None and not batch.outcomes.any()
    assert torch.equal(batch.scores, before)
    batch.scores = None
    with pytest.raises(AssertionError, match="not been scored"):
        batch.outcomes  # noqa: B018


def test_a_selection_has_a_fingerprint_of_its_own_also_if_that_of_its_batch_was_asked_for():
    batch = full_batch(0)
    before = batch.fingerprint
    everything = list(range(len(batch)))
    assert batch.select(everything).fingerprint == before == batch.fingerprint
    assert (
        len({before, batch.select(everything[::-1]).fingerprint, batch.select(everything[:-1]).fingerprint})
        == 3
    )


# Metrics of a batch -----------------------------------------------------------------------------------------


def lengths_of(responses, prompts, truncated):
    batch = Batch(
        prompt_ids=[np.zeros(n, np.int32) for n in prompts],
        response_ids=[np.zeros(n, np.int32) for n in responses],
        groups=torch.arange(len(responses)),
        truncated=torch.tensor(truncated),
    )
    return length_metrics(batch, max_prompt_tokens=5)


def test_lengths_of_prompts_and_responses_with_and_without_aborted_ones():
    assert lengths_of([4, 0, 2, 0], [5, 3, 5, 2], [True, False, False, False]) == pytest.approx(
        {
            "response_length/mean": 1.5,
            "response_length/max": 4,
            "response_length/min": 0,
            "response_length/clip_ratio": 0.25,
            "response_length_non_aborted/mean": 3,
            "response_length_non_aborted/max": 4,
            "response_length_non_aborted/min": 2,
            "response_length_non_aborted/clip_ratio": 0.5,
            "response/aborted_ratio": 0.5,
            "prompt_length/mean": 3.75,
            "prompt_length/max": 5,
            "prompt_length/min": 2,
            "prompt_length/clip_ratio": 0.5,
        }
    )


def test_a_batch_of_aborted_responses_has_no_lengths_of_others():
    metrics = lengths_of([0, 0], [1, 2], [False, False])
    assert metrics["response/aborted_ratio"] == 1 and not any("non_aborted" in name for name in metrics)


def test_balance_of_tokens_over_the_ranks_by_hand():
    found = balance_metrics([10, 20, 30, 1, 2, 3], [[2], [0, 1, 3, 4, 5]])
    assert found == {
        "global_seqlen/min": 6,
        "global_seqlen/max": 60,
        "global_seqlen/minmax_diff": 54,
        "global_seqlen/balanced_min": 30,
        "global_seqlen/balanced_max": 36,
        "global_seqlen/mean": 33,
    }
    # Five samples on two ranks: two and three.
    assert balance_metrics([1, 2, 4, 8, 16], [[4], [0, 1, 2, 3]])["global_seqlen/max"] == 28


def test_sample_means_leave_out_samples_without_a_counted_token():
    values, mask = torch.tensor([1.0, 3.0, NAN, NAN, 5.0]), torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0])
    means = sample_means(values, mask, torch.tensor([2, 0, 2, 1]))
    assert means.tolist() == [2.0, 5.0] and means.dtype == torch.float64
