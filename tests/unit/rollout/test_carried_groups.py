"""Groups that continue: the source ends at its quota, tokens are joined, a frontier survives a checkpoint."""

import json
from dataclasses import replace

import numpy as np
import pytest

from rl.checkpoint.arrays import array_shards, restore_arrays, without_arrays
from rl.checkpoint.shards import ShardReader, check_file, in_file_order, read_index, write_shards
from rl.checks.batches import CheckFailed
from rl.data.prompts import Prompt
from rl.features.carry_over.check import check_groups
from rl.features.carry_over.quota_schedule import Frontier, Quota, QuotaSchedule, extend, samples_of
from rl.rollout.batches import batch_of
from rl.rollout.events import Abort, Add, Done
from rl.rollout.queue import PastLengths, own_counter, static_queue
from rl.rollout.sampled_group import SampledGroup
from rl.rollout.samples import Completion, Sample, Segment, pack
from rl.rollout.sampling import Sampling, seed_of
from rl.rollout.single_turn import SingleTurn
from rl.rollout.source import SampleSource
from rl.runtime.plain_data import encode

SAMPLING = Sampling(2, 6)


def prompt(draw, *ids):
    return Prompt(10 * draw, np.array(ids, np.int32), "", "toy", None, {}, draw=draw)


def completion(*tokens, end="stop", version=9):
    ids = np.array(tokens, np.int32)
    return Completion(ids, -ids.astype(np.float32) / 3, end, np.full(len(ids), version, np.int32))


def sample(number, *tokens, **options):
    begun = completion(*tokens, **options)
    return Sample(0, number, (Segment.of(begun),), begun.end)


def groups():
    """A group with one unfinished sample of two tokens, and one that has not been started."""
    samples = sample(0, 4, 1), sample(1, 5, 6, end="abort", version=7)
    return [SampledGroup(prompt(3, 20), samples), SampledGroup.of(prompt(4, 30, 31), 2)]


def source_of(groups, num_groups=1, due=()):
    quota = Quota(num_groups, len(due), own_counter())
    queue = static_queue(len(groups), replica=0, num_replicas=1)
    schedule = QuotaSchedule(groups, set(due), SAMPLING, [50, 60], queue=queue, quota=quota)
    return SampleSource(schedule, SingleTurn(SAMPLING, capacity=4)), schedule


def test_a_sample_continues_until_the_quota_is_met():
    turns, schedule = source_of(groups())
    requests = [event.request for event in turns.next_events(0, 0)]
    assert [request.name for request in requests] == ["0.1", "1.0", "1.1"]
    assert [request.token_ids.tolist() for request in requests] == [[20, 5, 6], [30, 31], [30, 31]]
    assert [request.max_tokens for request in requests] == [4, 6, 6]
    assert [request.first_version for request in requests] == [7, None, None]
    assert requests[0].seed == seed_of(50, 1)
    turns.receive("1.0", completion(8, 1))
    assert turns.next_events(2, 1) == []
    turns.receive("0.1", completion(7, 1))
    assert turns.next_events(1, 2) == [Abort("1.1"), Done()]
    turns.receive("1.1", completion(9, end="abort"))
    first, second = extend(groups(), schedule.samples)
    assert not first.unfinished and second.unfinished == [1]
    assert first.samples[1].token_ids.tolist() == [5, 6, 7, 1] and first.oldest == 7
    assert first.samples[1].weight_versions.tolist() == [7, 7, 9, 9]
    batch = batch_of(samples_of([first]), [np.array([20], np.int32)], prompts=[first.prompt])
    assert batch.rollout_logprobs.tolist() == pytest.approx([-4 / 3, -1 / 3, -5 / 3, -2, -7 / 3, -1 / 3])
    assert batch.prompts[0].draw == 3 and batch.truncated.tolist() == [False, False]


def test_a_sample_aborted_before_its_first_token_starts_again():
    turns, _ = source_of([SampledGroup(prompt(3, 20), (sample(0, 4, 1), sample(1, end="abort")))])
    (request,) = (event.request for event in turns.next_events(0, 0))
    assert (request.token_ids.tolist(), request.max_tokens, request.first_version) == ([20], 6, None)


def test_groups_that_are_due_keep_the_engine_going():
    turns, schedule = source_of(groups(), due=[0])
    turns.next_events(0, 0)
    for name in ("1.0", "1.1"):
        turns.receive(name, completion(8, end="length"))
    assert turns.next_events(1, 1) == []  # one group is complete, but not the one that is due
    turns.receive("0.1", completion(1))
    assert turns.next_events(0, 2) == [Done()]


def test_a_source_without_work_is_done():
    turns, schedule = source_of([], num_groups=1)
    assert turns.next_events(0, 0) == [Done()]
    turns, schedule = source_of(groups(), num_groups=3)
    assert [type(event) for event in turns.next_events(0, 0)] == [Add] * 3
    for name in ("0.1", "1.0", "1.1"):
        turns.receive(name, completion(1))
    assert turns.next_events(0, 1) == [Done()]


def test_a_sample_that_was_begun_again_keeps_no_held_values():
    def row(version, counts, **options):
        begun = replace(completion(5, 6, version=version, **options), held={"kept_counts": np.array(counts)})
        return Sample(0, 0, (Segment.of(begun),), begun.end)

    group = SampledGroup(prompt(3, 20), (row(7, [1, 2], end="abort"),))
    for version, expected in ((7, [1, 2]), (9, [3, 4])):
        [extended] = extend([group], [row(version, [3, 4])])
        assert extended.samples[0].held("kept_counts").tolist() == expected


@pytest.mark.parametrize("number", [0, 2])
def test_a_frontier_is_exact_after_a_checkpoint(tmp_path, number):
    frontier = Frontier(tuple(groups()[:number]), num_drawn=5)
    saved = {"carry_over": frontier.state_dict(samples_of(frontier.groups), held=True)}
    written = write_shards(tmp_path / "file", in_file_order(array_shards(saved)))
    check_file(tmp_path / "file", written, contents=True)
    state = json.loads(json.dumps(without_arrays(saved)))
    restore_arrays(state, ShardReader(tmp_path, read_index(tmp_path, ["file"])))
    state = state["carry_over"]
    prompts = {group.prompt.index: group.prompt for group in frontier.groups}
    again = Frontier.from_state(state, lambda index, draw: prompts[index])
    assert again.num_drawn == 5 and [group.prompt.index for group in again.groups] == [30, 40][:number]
    assert encode(pack(samples_of(again.groups))) == encode(pack(samples_of(frontier.groups)))
    assert [group.holder for group in again.groups] == [group.holder for group in frontier.groups]


def test_samples_are_those_of_a_shorter_limit():
    samples = sample(0, 4, 1), sample(1, 5, 6, end="abort", version=7), sample(2, 7, 8, 1, end="abort")
    ended = SampledGroup(prompt(3, 20), samples).within(2).samples
    assert [sample.end for sample in ended] == ["stop", "length", "length"]
    for before, after in zip(samples, ended):
        assert after.token_ids.tolist() == before.token_ids[:2].tolist()
        assert len(after.logprobs) == len(after.weight_versions) == 2


def test_longest_first_is_stable_and_expects_the_mean():
    lengths = PastLengths()
    assert lengths.longest_first([7, 8, 9]) == [0, 1, 2]
    lengths.note([7, 8], [0, 0, 1, 1], [1, 3, 9, 11])
    assert lengths.means == {7: 2, 8: 10}
    assert lengths.longest_first([5, 7, 6, 8]) == [3, 0, 2, 1]


def test_lost_doubled_younger_and_early_groups_are_found():
    ended = [
        SampledGroup(prompt(n, 20), (sample(0, 4, 1, version=n), sample(1, 5, version=n))) for n in range(4)
    ]
    begun = groups()[1]  # draw 4
    everything, rest = [*ended, begun], [*ended[2:], begun]
    right = dict(num_drawn=5, taken=ended[:2], carried=rest, dropped=[], due=[], version=3, max_staleness=3)
    check_groups(everything, **right)
    early = r"but its oldest token has the staleness 1 in the next step, and rollout.max_staleness=3"
    for message, change in (
        ("number 2 is 1 times .* and 0 times", dict(carried=rest[1:])),
        ("number 1 is 1 times .* and 2 times", dict(dropped=ended[1:2])),
        ("of 4 drawn prompts, number 4", dict(num_drawn=4)),
        ("group 3 of version 3 is trained before the complete group 1 of version 1",
         dict(taken=[ended[0], ended[3]], carried=[ended[1], ended[2], begun])),
        (f"group 3 was dropped, {early}", dict(dropped=ended[3:], carried=[ended[2], begun])),
        (f"group 3 was completed at once, {early}", dict(due=ended[3:])),
        ("group 2 was carried, .* the staleness 2 in .*max_staleness=1", dict(max_staleness=1)),
    ):  # fmt: skip
        with pytest.raises(CheckFailed, match=message):
            check_groups(everything, **(right | change))
