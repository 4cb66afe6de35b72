"""Samples are made of segments; the source of single turns draws, asks and keeps the completions."""

import numpy as np

from rl.rollout.events import Done
from rl.rollout.queue import StaticQueue
from rl.rollout.sampling import Sampling, seed_of
from rl.rollout.single_turns import SingleTurns
from rl.rollout.turns import Completion, Sample, Segment

SAMPLING = Sampling(
    samples_per_prompt=2, temperature=1, top_p=1, top_k=0, min_p=0, max_tokens=5, stop=(), stop_token_ids=()
)


def completion(*tokens, end="stop", version=9):
    ids = np.array(tokens, np.int32)
    return Completion(ids, -ids.astype(np.float32), end, np.full(len(ids), version, np.int32))


def test_a_sample_joins_sampled_and_given_segments():
    given = Segment.given(np.array([7, 8], np.int32), version=3, turn=1, source="tool")
    sample = Sample(0, 0, (Segment.of(completion(4, 5)), given), truncated=False)
    assert sample.token_ids.tolist() == [4, 5, 7, 8] and sample.logprobs.tolist() == [-4, -5, 0, 0]
    assert sample.mask.tolist() == [1, 1, 0, 0] and sample.weight_versions.tolist() == [9, 9, 3, 3]
    empty = Sample(0, 0, (), truncated=False)
    columns = (empty.token_ids, empty.logprobs, empty.mask, empty.weight_versions)
    assert [(len(c), c.dtype.kind) for c in columns] == [(0, "i"), (0, "f"), (0, "i"), (0, "i")]


def test_single_turns_draw_groups_within_capacity():
    prompts = [np.array([p], np.int32) for p in range(3)]
    queue = StaticQueue(3, replica=0, num_replicas=1)
    turns = SingleTurns(prompts, SAMPLING, [10, 11, 12], queue=queue, capacity=5)
    first = [event.request for event in turns.next_events(0, 0)]
    assert [request.name for request in first] == ["0.0", "0.1", "1.0", "1.1"]
    assert [request.seed for request in first[:2]] == [seed_of(10, 0), seed_of(10, 1)]
    assert turns.next_events(4, 1) == []
    turns.receive("1.0", completion(4, end="length"))
    assert [event.request.name for event in turns.next_events(3, 2)] == ["2.0", "2.1"]
    assert turns.next_events(1, 3) == [] and turns.next_events(0, 4) == [Done()]
    (sample,) = turns.samples
    assert (sample.prompt, sample.number, sample.truncated) == (1, 0, True)
