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
        unit=unit,
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
        filled = [name for name in SAMPLE_COLUMNS[not groups :] if getattr(batch, name) is not None]
        per_sample = {name: getattr(batch, name)[i].item() for name in filled}
        details = {name: column[i].item() for name, column in batch.score_details.items()}
        ids = batch.prompt_ids[i].tolist(), batch.response_ids[i].tolist()
        out.append((*ids, tokens, per_sample, details))
    return out


def same_types(found, batch):
    for field in fields(Batch):
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor):
            assert getattr(found, field.name).dtype == value.dtype, field.name
    assert all(ids.dtype == np.int32 for ids in found.prompt_ids + found.response_ids)


def test_columns_of_a_batch():
    batch = full_batch(0)
    tensors = {field.name for field in fields(Batch) if isinstance(getattr(batch, field.name), torch.Tensor)}
    assert tensors == set(TOKEN_COLUMNS) | set(SAMPLE_COLUMNS) and set(LOSS_COLUMNS) < set(TOKEN_COLUMNS)
    assert tuple(batch.loss_columns()) == LOSS_COLUMNS
    assert all(column is getattr(batch, name) for name, column in batch.loss_columns().items())
    batch.selected_tokens = batch.returns = None
    assert set(LOSS_COLUMNS) - set(batch.loss_columns()) == {"selected_tokens", "returns"}


def test_lengths_offsets_and_the_mask_by_default():
    responses = [np.zeros(n, np.int32) for n in (2, 0, 3)]
    batch = Batch([np.zeros(2, np.int32)] * 3, responses, torch.arange(3), torch.zeros(3, dtype=torch.bool))
    assert len(batch) == 3 and batch.prompt_lengths.tolist() == [2, 2, 2]
    assert (batch.lengths.tolist(), batch.offsets.tolist()) == ([2, 0, 3], [0, 2, 2, 5])
    assert batch.lengths.dtype == batch.offsets.dtype == torch.int64
    assert batch.mask.tolist() == [1.0] * 5 and batch.mask.dtype == torch.float32
    assert list(batch.loss_columns()) == ["mask"]


@pytest.mark.parametrize("seed", range(4))
def test_select_takes_the_samples_in_the_order_given(seed):
    batch, shuffled = full_batch(seed), np.random.default_rng(seed).permutation(10).tolist()
    before = samples_of(batch)
    for chosen in ([], [9, 0, 4], list(range(10)), [5], [2, 2, 7], shuffled):
        found = batch.select(chosen)
        assert samples_of(found) == [before[i] for i in chosen]
        assert len(found) == len(chosen) and found.mask.shape == (int(found.lengths.sum()),)
        same_types(found, batch)
    assert samples_of(batch) == before


def test_a_selection_keeps_empty_columns_and_shares_none():
    batch = full_batch(1, unit=2)
    batch.advantages = batch.labels = None
    found = batch.select([0, 1])
    assert found.advantages is None and found.labels is None and found.unit == 2
    batch = full_batch(2)
    found = batch.select(list(range(10)))
    for name in (*TOKEN_COLUMNS, *SAMPLE_COLUMNS):
        getattr(found, name).zero_()
    assert samples_of(batch) == samples_of(full_batch(2))


@pytest.mark.parametrize("kept", [[0], [1, 3], [3, 0, 2], [0, 1, 2, 3]])
def test_keep_groups_keeps_whole_groups_and_renumbers_them(kept):
    batch, starts = full_batch(sum(kept)), [0, 3, 4, 8, 10]
    found, samples = batch.keep_groups(kept), samples_of(batch, groups=False)
    chosen = [(new, i) for new, k in enumerate(kept) for i in range(starts[k], starts[k + 1])]
    assert samples_of(found, groups=False) == [samples[i] for _, i in chosen]
    assert found.groups.tolist() == [new for new, _ in chosen]
    same_types(found, batch)


def test_keep_groups_finds_samples_that_do_not_lie_together():
    batch = full_batch(0).select([0, 9, 1, 3, 8, 2])  # groups 0 3 0 1 3 0
    found = batch.keep_groups([3, 0])
    assert samples_of(found, groups=False) == [samples_of(batch, groups=False)[i] for i in (1, 4, 0, 2, 5)]
    assert found.groups.tolist() == [0, 0, 1, 1, 1]


def test_concatenate_keeps_order_columns_and_distinct_groups():
    batches = [full_batch(1), full_batch(2, sizes=(2,)), full_batch(3, sizes=(1, 5))]
    found = concatenate(batches)
    assert samples_of(found, groups=False) == [
        s for batch in batches for s in samples_of(batch, groups=False)
    ]
    assert found.groups.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 4, 4, 5, 6, 6, 6, 6, 6]
    same_types(found, batches[0])
    batch = full_batch(4, unit=2)
    for parts in ([batch], [batch.keep_groups(kept) for kept in ([0, 1], [2], [3])]):
        assert samples_of(concatenate(parts)) == samples_of(batch) and concatenate(parts).unit == 2


def test_concatenate_fills_missing_score_details_with_nan():
    first = full_batch(1, sizes=(2,), details=("failed", "acc"))
    second = full_batch(2, sizes=(3,), details=("failed", "format"))
    found, (one, two) = (
        concatenate([first, second]).score_details,
        (first.score_details, second.score_details),
    )
    assert sorted(found) == ["acc", "failed", "format"]
    assert torch.equal(found["failed"], torch.cat([one["failed"], two["failed"]]))
    assert torch.equal(found["acc"][:2], one["acc"]) and found["acc"][2:].isnan().all()
    assert found["format"][:2].isnan().all() and torch.equal(found["format"][2:], two["format"])
    assert all(column.shape == (5,) and column.dtype == torch.float32 for column in found.values())


def test_pair_up_interleaves_chosen_and_rejected():
    sides = chosen, rejected = full_batch(1, sizes=(1,) * 10), full_batch(2)
    chosen.mask, rejected.mask = (sign * torch.arange(len(s.mask)).float() for s, sign in zip(sides, (1, -1)))
    pairs = pair_up(chosen=chosen, rejected=rejected)
    assert pairs.unit == 2 and len(pairs) == 20
    # The rejected responses are the policy's own, several to a prompt: their groups remain together.
    assert pairs.groups.tolist() == [0] * 6 + [1] * 2 + [2] * 8 + [3] * 4
    samples = [samples_of(batch) for batch in sides]
    for i, (prompt, response, tokens, per_sample, details) in enumerate(samples_of(pairs)):
        whole = samples[i % 2][i // 2]
        assert (prompt, response) == whole[:2]
        assert tokens == {"mask": whole[2]["mask"]} and per_sample["truncated"] == whole[3]["truncated"]
        assert set(per_sample) == {"groups", "truncated"} and not details
    with pytest.raises(AssertionError, match="10 and 2 responses"):
        pair_up(chosen=full_batch(1), rejected=full_batch(2, sizes=(2,)))


def test_pairs_stay_pairs_when_selected_kept_and_concatenated():
    pairs = pair_up(chosen=full_batch(1), rejected=full_batch(2))
    kept, samples = pairs.keep_groups([3, 1]), samples_of(pairs, groups=False)
    assert kept.unit == 2 and samples_of(kept, groups=False) == [samples[i] for i in (16, 17, 18, 19, 6, 7)]
    both = concatenate([kept, pairs])
    assert both.unit == 2 and samples_of(both, groups=False) == samples_of(kept, groups=False) + samples
    assert both.groups.tolist() == [0] * 4 + [1] * 2 + [2] * 6 + [3] * 2 + [4] * 8 + [5] * 4


OUTCOMES = [  # scores, accuracies, failures, outcomes
    ([0.1, 0.9, 0.5], [1.0, 0.0, 0.25], [0.0, 0.0, 0.0], [1.0, 0.0, 0.25]),
    ([0.5, 0.75, -2.0], [NAN, 1.0, NAN], [0.0, 0.0, 0.0], [0.5, 1.0, -2.0]),
    ([0.5, 0.75], None, [0.0, 0.0], [0.5, 0.75]),
    ([-5.0, 0.5, 3.0], [NAN, NAN, NAN], [1.0, 0.0, 1.0], [0.0, 0.5, 0.0]),
    ([-5.0, 0.5], None, [1.0, 0.0], [0.0, 0.5]),
]


@pytest.mark.parametrize("scores, acc, failed, expected", OUTCOMES)
def test_outcomes_are_accuracies_or_scores_and_0_if_failed(scores, acc, failed, expected):
    batch = full_batch(0, sizes=(len(scores),))
    batch.scores = torch.tensor(scores)
    batch.score_details = {"failed": torch.tensor(failed)} | ({"acc": torch.tensor(acc)} if acc else {})
    assert batch.outcomes.tolist() == expected and batch.outcomes.dtype == torch.float32
    assert torch.equal(batch.scores, torch.tensor(scores))
    batch.scores = None
    with pytest.raises(AssertionError, match="not been scored"):
        batch.outcomes  # noqa: B018


def test_a_selection_has_its_own_fingerprint():
    batch = full_batch(0)
    before, everything = batch.fingerprint, list(range(len(batch)))
    assert batch.select(everything).fingerprint == before == batch.fingerprint
    others = [batch.select(chosen).fingerprint for chosen in (everything[::-1], everything[:-1])]
    assert len({before, *others}) == 3


def test_lengths_with_and_without_aborted_responses():
    def metrics_of(responses, prompts, truncated):
        ids = [[np.zeros(n, np.int32) for n in lengths] for lengths in (prompts, responses)]
        batch = Batch(*ids, groups=torch.arange(len(responses)), truncated=torch.tensor(truncated))
        return length_metrics(batch, max_prompt_tokens=5)

    found = metrics_of([4, 0, 2, 0], [5, 3, 5, 2], [True, False, False, False])
    expected = {"response/aborted_ratio": 0.5}
    for name, values in {
        "response_length": (1.5, 4, 0, 0.25),
        "response_length_non_aborted": (3, 4, 2, 0.5),
        "prompt_length": (3.75, 5, 2, 0.5),
    }.items():
        expected |= {f"{name}/{at}": value for at, value in zip("mean max min clip_ratio".split(), values)}
    assert found == pytest.approx(expected)
    metrics = metrics_of([0, 0], [1, 2], [False, False])
    assert metrics["response/aborted_ratio"] == 1 and not any("non_aborted" in name for name in metrics)


def test_balance_of_tokens_over_the_ranks_by_hand():
    found = balance_metrics([10, 20, 30, 1, 2, 3], [[2], [0, 1, 3, 4, 5]])
    values = {"min": 6, "max": 60, "minmax_diff": 54, "balanced_min": 30, "balanced_max": 36, "mean": 33}
    assert found == {f"global_seqlen/{name}": value for name, value in values.items()}
    # Five samples on two ranks: two and three.
    assert balance_metrics([1, 2, 4, 8, 16], [[4], [0, 1, 2, 3]])["global_seqlen/max"] == 28


def test_sample_means_leave_out_samples_without_a_counted_token():
    values, mask = torch.tensor([1.0, 3.0, NAN, NAN, 5.0]), torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0])
    means = sample_means(values, mask, torch.tensor([2, 0, 2, 1]))
    assert means.tolist() == [2.0, 5.0] and means.dtype == torch.float64
