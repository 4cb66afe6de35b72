"""Samples are made of segments; the source of single turns draws, asks and keeps the completions."""

from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest

from rl.data.held import Absent
from rl.rollout.batches import SamplesDiffer, batch_of
from rl.rollout.samples import Completion, Sample, Segment, context_digest, pack, unpack
from rl.rollout.sampling import Sampling
from rl.runtime.plain_data import decode, encode

SAMPLING = Sampling(2, 5)


def completion(*tokens, end="stop", version=9):
    ids = np.array(tokens, np.int32)
    return Completion(ids, -ids.astype(np.float32), end, np.full(len(ids), version, np.int32))


def test_a_sample_joins_sampled_and_given_segments():
    given = Segment.given(np.array([7, 8], np.int32), version=3, turn=1, source="tool")
    sample = Sample(0, 0, (Segment.of(completion(4, 5)), given))
    assert sample.token_ids.tolist() == [4, 5, 7, 8] and sample.logprobs.tolist() == [-4, -5, 0, 0]
    assert sample.turns.tolist() == [1, 1, 0, 0] and sample.weight_versions.tolist() == [9, 9, 3, 3]
    empty = Sample(0, 0, ())
    columns = (empty.token_ids, empty.logprobs, empty.turns, empty.weight_versions)
    assert [(len(c), c.dtype.kind) for c in columns] == [(0, "i"), (0, "f"), (0, "i"), (0, "i")]


def plain(value):
    """Return a sample as nested plain data with the dtypes of its arrays, for comparisons."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return (value.dtype, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value


def of_context(sample, number, token_ids):
    """Return the sample with a segment that the engine sampled after these tokens."""
    segments = list(sample.segments)
    segments[number] = replace(segments[number], context_digest=context_digest(token_ids))
    return replace(sample, segments=tuple(segments))


def samples_of_all_kinds():
    """Rows of a trajectory with rewards and a context of its own, and unfinished, empty and held samples."""
    turn = replace(Segment.of(completion(4, 5), 1), reward=0.1)
    given = Segment.given(np.array([7, 8, 9], np.int32), version=3, turn=1, source="environment")
    routes = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    row = dict(
        outcome={"score": 0.5, "failed": float("nan")}, conversation=[{"role": "user", "content": "a"}]
    )
    return [
        Sample(1, 0, (replace(turn, context_digest=context_digest([9])), given, turn), "length", **row),
        Sample(1, 0, (turn,), row=1, prompt_ids=np.array([1, 2], np.int32), **row),
        Sample(0, 3, (Segment.of(replace(completion(6, end="abort"), held={"routes": routes})),), "abort"),
        Sample(0, 4, (), prompt_ids=np.zeros(0, np.int32), outcome={}),
    ]


@pytest.mark.parametrize("number", [0, 1, 4])
def test_packed_samples_are_whole(number):
    samples = samples_of_all_kinds()[:number]
    found = unpack(decode(encode(pack(samples))))
    assert repr(plain(found)) == repr(plain(samples))  # repr, because NaN differs from itself


def test_samples_without_held_values_know_their_sizes():
    samples = samples_of_all_kinds()
    found = unpack(decode(encode(pack(samples, held=False, conversations=False))), rank=3)
    assert [s.rank for s in found] == [3] * 4 and not any(s.conversation for s in found)
    assert found[2].held("routes") is None and found[2].held_length("routes") == 3
    assert found[2].segments[0].held["routes"] == Absent(np.dtype(np.uint8), (3, 2, 2))
    assert [s.held_length("routes") for s in found] == [0, 0, 3, 0]


def test_a_batch_has_the_columns_of_its_samples():
    first, second, _, empty = samples_of_all_kinds()
    samples = [second, empty, first]
    batch = batch_of(samples, [np.array([n], np.int32) for n in (8, 9)], turns=True)
    assert [ids.tolist() for ids in batch.response_ids] == [[], [4, 5, 7, 8, 9, 4, 5], [4, 5]]
    assert [ids.tolist() for ids in batch.prompt_ids] == [[], [9], [1, 2]]
    assert batch.turns.tolist() == [2, 2, -2, -2, -2, 2, 2, 2, 2]
    assert batch.mask.tolist() == [1, 1, 0, 0, 0, 1, 1, 1, 1]
    assert batch.weight_versions.tolist() == [9, 9, 3, 3, 3, 9, 9, 9, 9]
    assert batch.groups.tolist() == [0, 1, 1] and batch.trajectories.tolist() == [0, 1, 1]
    assert batch.truncated.tolist() == [False, True, False]
    assert batch.score_details["score"].isnan().tolist() == [True, False, False]


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda s: replace(s, segments=(replace(s.segments[0], digest=7),)), "other tokens or another mask"),
        (
            lambda s: replace(s, segments=(replace(s.segments[0], source="tool"),)),
            "another mask in the batch",
        ),
        (lambda s: of_context(s, 0, [3]), "has another prompt in the batch than rank 2"),
        (lambda s: of_context(s, 2, [8, 5, 7, 7]), "other tokens before turn 2 in the batch than rank 2"),
        (lambda s: replace(s, end="abort"), "another end"),
        (
            lambda s: replace(s, number=0),
            "rank 2 generated sample 0 of prompt 0 of the call, which rank 1 had",
        ),
        (lambda s: replace(s, number=2, row=1), "has 1 samples instead of 2"),
    ],
)
def test_a_sample_that_was_changed_is_refused(change, text):
    given = Segment.given(np.array([7], np.int32), version=3, turn=1, source="tool")
    one, other = (
        Sample(0, n, (Segment.of(completion(4 + n)), given, Segment.of(completion(6), 1)), rank=n + 1)
        for n in (0, 1)
    )
    one, other = (of_context(of_context(s, 0, [8]), 2, [8, 4 + s.number, 7]) for s in (one, other))
    contexts = [np.array([8], np.int32)]
    batch_of([one, other], contexts, samples_per_prompt=2)
    with pytest.raises(SamplesDiffer, match=text):
        batch_of([one, change(other)], contexts, samples_per_prompt=2)
