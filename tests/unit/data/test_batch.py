"""Batches: select, keep_groups, concatenate, pair_up, mismatch and outcomes, and the metrics of a batch."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from rl.data.batch import COLUMNS, LOSS_COLUMNS, Batch, concatenate, mismatch, pair_up
from rl.data.columns import EXTRA
from rl.phases.batch_metrics import balance_metrics, imbalance_metrics, length_metrics, sample_means

TOKEN_COLUMNS = [name for name, column in COLUMNS.items() if column.is_per_token]
SAMPLE_COLUMNS = [name for name, column in COLUMNS.items() if not column.is_per_token]
NAN = float("nan")


def full_batch(seed, sizes=(3, 1, 4, 2), details=("acc", "failed", "format"), unit=1):
    """Return a ragged batch with empty responses; every column is filled with distinct values."""
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
        trajectories=torch.arange(count),
        prompts=[f"prompt {seed} {group}" for group in range(len(sizes))],
        truncated=torch.from_numpy(rng.random(count) < 0.5),
        scores=column(count),
        rewards=column(count),
        samples_per_unit=unit,
        deferred_at=3,
        generated_by=torch.from_numpy(rng.integers(4, size=count)),
        seeds=torch.from_numpy(rng.integers(2**62, size=count)),
        sampled_with=torch.from_numpy(rng.integers(2**32, size=count)),
        digests=torch.from_numpy(rng.integers(2**32, size=count)),
        score_digests=torch.from_numpy(rng.integers(2**32, size=count)),
        feedback=[f"wrong {seed} {i}" for i in range(count)],
        conversations=[[{"role": "user", "content": f"{seed} {i}"}] for i in range(count)],
        score_details={name: column(count) for name in details},
        extra={name: column(total if EXTRA[name].is_per_token else count) for name in EXTRA},
        **{name: column(total) for name in TOKEN_COLUMNS if name not in EXTRA},
    )
    assert all(getattr(batch, field.name) is not None for field in fields(Batch))
    return batch


def samples_of(batch, *, groups=True):
    """Return everything that belongs to each sample, as plain data."""
    ends, out = np.cumsum(batch.lengths.tolist()), []
    columns = batch.columns()
    for i, (end, length) in enumerate(zip(ends, batch.lengths.tolist())):
        tokens = {
            name: columns[name][end - length : end].tolist() for name in TOKEN_COLUMNS if name in columns
        }
        numbered = () if groups else ("groups", "trajectories")
        names = [name for name in SAMPLE_COLUMNS if name in columns and name not in numbered]
        details = {name: column[i].item() for name, column in batch.score_details.items()}
        per_sample = {name: columns[name][i].item() for name in names}
        ids = (batch.prompt_ids[i].tolist(), batch.response_ids[i].tolist())
        lists = [own and own[i] for own in (batch.conversations, batch.feedback)]
        out.append((*ids, tokens, per_sample, details, lists))
    return out


def same_types(found, batch):
    for name, value in batch.columns().items():
        assert found.column(name).dtype == value.dtype, name
    assert all(ids.dtype == np.int32 for ids in found.prompt_ids + found.response_ids)


def test_every_tensor_is_a_declared_column():
    batch = full_batch(0)
    own = {name for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    assert own | set(EXTRA) == set(COLUMNS) == set(batch.columns()) and not own & set(EXTRA)
    assert set(LOSS_COLUMNS) < set(TOKEN_COLUMNS)


def test_lengths_offsets_and_the_mask_by_default():
    responses = [np.zeros(n, np.int32) for n in (2, 0, 3)]
    batch = Batch([np.zeros(2, np.int32)] * 3, responses, torch.arange(3), torch.zeros(3, dtype=torch.bool))
    assert len(batch) == 3 and batch.prompt_lengths.tolist() == [2, 2, 2]
    assert batch.lengths.tolist() == [2, 0, 3] and batch.offsets.tolist() == [0, 2, 2, 5]
    assert batch.lengths.dtype == batch.offsets.dtype == torch.int64
    assert batch.mask.tolist() == [1.0] * 5 and batch.mask.dtype == torch.float32
    assert list(batch.loss_columns()) == ["mask"]


def test_loss_columns_are_those_that_are_filled():
    batch = full_batch(0)
    assert tuple(batch.loss_columns()) == LOSS_COLUMNS and list(batch.loss_sample_columns()) == ["labels"]
    assert all(column is batch.column(name) for name, column in batch.loss_columns().items())
    copy = replace(batch)
    for name in ("selected_tokens", "returns", "labels"):
        del batch.extra[name]
    assert set(LOSS_COLUMNS) - set(batch.loss_columns()) == {"selected_tokens", "returns"}
    assert set(batch.select([0, 1]).extra) == set(copy.extra) - {"selected_tokens", "returns", "labels"}
    with pytest.raises(ValueError, match="the batch has no returns; its columns are groups, truncated"):
        batch.column("returns")


@pytest.mark.parametrize("chosen", [[], [5], [9, 0, 4], [2, 2, 7], [3, 8, 0, 5, 9, 1, 7, 2, 6, 4]])
def test_select_takes_all_columns_in_the_order_given(chosen):
    for seed in range(4):
        batch = full_batch(seed)
        before = samples_of(batch)
        found = batch.select(chosen)
        assert samples_of(found) == [before[i] for i in chosen] and samples_of(batch) == before
        assert len(found) == len(chosen) and found.mask.shape == (int(found.lengths.sum()),)
        same_types(found, batch)


def test_a_selection_shares_no_column_with_its_batch():
    batch = full_batch(2)
    found = batch.select(list(range(10)))
    for name in (*TOKEN_COLUMNS, *SAMPLE_COLUMNS):
        found.column(name).zero_()
    assert samples_of(batch) == samples_of(full_batch(2))


def test_a_selection_has_its_own_fingerprint():
    batch = full_batch(0)
    before, every = batch.fingerprint, list(range(10))
    assert batch.select(every).fingerprint == before == batch.fingerprint
    others = {batch.select(every[::-1]).fingerprint, batch.select(every[:-1]).fingerprint}
    assert len(others | {before}) == 3


@pytest.mark.parametrize("kept", [[0], [1, 3], [3, 0, 2], [0, 1, 2, 3]])
def test_keep_groups_numbers_groups_in_the_order_given(kept):
    members = ([0, 1, 2], [3], [4, 5, 6, 7], [8, 9])
    for seed in range(4):
        batch = full_batch(seed)
        found, samples = batch.keep_groups(kept), samples_of(batch, groups=False)
        assert samples_of(found, groups=False) == [samples[i] for group in kept for i in members[group]]
        assert found.groups.tolist() == [new for new, group in enumerate(kept) for _ in members[group]]
        same_types(found, batch)


def test_keep_groups_finds_scattered_samples():
    batch = full_batch(0).select([0, 9, 1, 3, 8, 2])  # groups 0 3 0 1 3 0
    found, samples = batch.keep_groups([3, 0]), samples_of(batch, groups=False)
    assert samples_of(found, groups=False) == [samples[i] for i in (1, 4, 0, 2, 5)]
    assert found.groups.tolist() == [0, 0, 1, 1, 1]


def test_concatenate_keeps_the_order_and_renumbers_groups():
    batches = [full_batch(1), full_batch(2, sizes=(2,)), full_batch(3, sizes=(1, 5))]
    found = concatenate(batches)
    assert samples_of(found, groups=False) == sum((samples_of(batch, groups=False) for batch in batches), [])
    assert found.groups.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 4, 4, 5, 6, 6, 6, 6, 6]
    same_types(found, batches[0])


def test_concatenate_undoes_a_split():
    batch = full_batch(5, unit=2)
    for parts in ([[0, 1, 2, 3]], [[0, 1], [2], [3]]):
        found = concatenate([batch.keep_groups(part) for part in parts])
        assert samples_of(found) == samples_of(batch) and found.samples_per_unit == 2


def test_concatenate_has_nan_for_missing_details():
    first = full_batch(1, sizes=(2,), details=("failed", "acc"))
    second = full_batch(2, sizes=(3,), details=("failed", "format"))
    found = concatenate([first, second]).score_details
    assert sorted(found) == ["acc", "failed", "format"]
    for name, column in found.items():
        lacking = (torch.full((len(batch),), NAN) for batch in (first, second))
        parts = [batch.score_details.get(name, nan) for batch, nan in zip((first, second), lacking)]
        torch.testing.assert_close(column, torch.cat(parts), rtol=0, atol=0, equal_nan=True)


def test_pair_up_interleaves_chosen_and_rejected():
    chosen, rejected = full_batch(1, sizes=(1,) * 10), full_batch(2)
    chosen.mask = torch.arange(len(chosen.mask)).float()
    rejected.mask = -1 - torch.arange(len(rejected.mask)).float()
    pairs = pair_up(chosen=chosen, rejected=rejected)
    assert pairs.samples_per_unit == 2 and len(pairs) == 20
    # The policy's own responses, several to a prompt: a mini-batch of prompts takes all pairs of each.
    assert pairs.groups.tolist() == [0] * 6 + [1] * 2 + [2] * 8 + [3] * 4
    sides = [samples_of(batch) for batch in (chosen, rejected)]
    for i, (prompt, response, tokens, per_sample, details, _) in enumerate(samples_of(pairs)):
        whole = sides[i % 2][i // 2]
        assert (prompt, response) == whole[:2] and not details
        assert tokens == {"mask": whole[2]["mask"]} and per_sample["truncated"] == whole[3]["truncated"]
        assert per_sample["digests"] == whole[3]["digests"]
        assert set(per_sample) == {"groups", "truncated", "digests"}


def test_mismatch_gives_each_prompt_the_previous_response():
    batch = full_batch(3)
    others = mismatch(batch, [[0, 1, 2, 3], [4], [5, 6, 7, 8, 9]])
    expected = [3, 0, 1, 2, 4, 9, 5, 6, 7, 8]
    for i, other in enumerate(expected):
        assert others.prompt_ids[i] is batch.prompt_ids[i]
        assert others.response_ids[i] is batch.response_ids[other]
    assert torch.equal(others.mask, batch.mask[batch.tokens_of(expected)])
    assert torch.equal(others.groups, batch.groups) and others.old_logprobs is None and not others.extra


def test_kto_does_not_mismatch_responses_to_the_same_prompt():
    # Rows that come from pairs: two responses to each prompt, one after the other.
    batch = replace(full_batch(3), prompt_ids=[np.array([i // 2], np.int32) for i in range(10)])
    others = mismatch(batch, [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9]])
    for i, other in enumerate([3, 3, 1, 1, 5, 4, 9, 9, 7, 7]):
        assert others.response_ids[i] is batch.response_ids[other], i


def test_pairs_stay_pairs():
    pairs = pair_up(chosen=full_batch(1), rejected=full_batch(2))
    kept, samples = pairs.keep_groups([3, 1]), samples_of(pairs, groups=False)
    assert samples_of(kept, groups=False) == [samples[i] for i in (16, 17, 18, 19, 6, 7)]
    both = concatenate([kept, pairs])
    assert kept.samples_per_unit == both.samples_per_unit == 2
    assert samples_of(both, groups=False) == samples_of(kept, groups=False) + samples
    assert both.groups.tolist() == [0] * 4 + [1] * 2 + [2] * 6 + [3] * 2 + [4] * 8 + [5] * 4


@pytest.mark.parametrize(
    "scores, acc, failed, outcomes",
    [
        ([0.1, 0.9, 0.5], [1.0, 0.0, 0.25], [0.0, 0.0, 0.0], [1.0, 0.0, 0.25]),
        ([0.5, 0.75, -2.0], [NAN, 1.0, NAN], [0.0, 0.0, 0.0], [0.5, 1.0, -2.0]),
        ([0.5, 0.75], None, [0.0, 0.0], [0.5, 0.75]),
        ([-5.0, 0.5, 3.0], [NAN, NAN, NAN], [1.0, 0.0, 1.0], [0.0, 0.5, 0.0]),
        ([-5.0, 0.5], None, [1.0, 0.0], [0.0, 0.5]),
    ],
)
def test_outcomes_are_acc_else_the_score_and_0_if_failed(scores, acc, failed, outcomes):
    batch = full_batch(0, sizes=(len(scores),))
    batch.scores, details = torch.tensor(scores), {"failed": failed} | ({"acc": acc} if acc else {})
    batch.score_details = {name: torch.tensor(column) for name, column in details.items()}
    assert batch.outcomes.tolist() == outcomes and batch.outcomes.dtype == torch.float32
    assert batch.scores.tolist() == torch.tensor(scores).tolist()


# Metrics of a batch -----------------------------------------------------------------------------------------


def lengths_of(responses, prompts, truncated):
    batch = Batch(
        prompt_ids=[np.zeros(n, np.int32) for n in prompts],
        response_ids=[np.zeros(n, np.int32) for n in responses],
        groups=torch.arange(len(responses)),
        truncated=torch.tensor(truncated),
    )
    return length_metrics(batch, max_prompt_tokens=5)


def test_lengths_with_and_without_aborted_responses():
    found = lengths_of([4, 0, 2, 0], [5, 3, 5, 2], [True, False, False, False])
    expected = {
        "response_length": (1.5, 4, 0, 0.25),
        "response_length_non_aborted": (3, 4, 2, 0.5),
        "prompt_length": (3.75, 5, 2, 0.5),
    }
    kinds = ("mean", "max", "min", "clip_ratio")
    assert found.pop("response/aborted_ratio") == 0.5
    assert found == {
        f"{name}/{kind}": value for name, values in expected.items() for kind, value in zip(kinds, values)
    }


def test_a_batch_of_aborted_responses():
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


def test_imbalance_is_the_time_in_which_ranks_wait():
    # Two mini-batches of two ranks: the busiest cost 7 and 4, the means 5.5 and 3.
    found = imbalance_metrics([[[4, 3], [4, 0]], [[1, 1], [3, 1]]])
    assert found["training/imbalance"] == pytest.approx(11 / 8.5 - 1)
    assert found["training/micro_batch_imbalance"] == pytest.approx((4 * 4 + 4 * 3) / 17 - 1)
    assert (found["training/micro_batches"], found["training/empty_micro_batches"]) == (4, 1)
