"""The files of event logs, and their replay with an engine of the test."""

from dataclasses import replace

import numpy as np
import pytest

from rl.features.agents.stored_log import Replay, VersionRecorder, load, store
from rl.rollout.events import Abort, Add, Done, Weights
from rl.rollout.samples import Completion, Request
from rl.rollout.sampling import Sampling
from rl.run_directory.event_files import DIRECTORY, remove_after

SAMPLING = Sampling(1, 9, stop=("x",))


def request(turn: int, *ids: int) -> Request:
    return Request(f"0.0.{turn}", np.array(ids, np.int32), 5 + turn, 9)


def completion(end: str, *ids: int) -> Completion:
    ids = np.array(ids, np.int32)
    return Completion(ids, -ids.astype(np.float32) / 8, end, np.zeros(len(ids), np.int32))


@pytest.fixture
def log(tmp_path):
    """Two turns, the second one aborted."""
    records = [
        (0, [Add(request(0, 1, 2))]),
        (3, [Add(request(1, 1, 2, 3, 4, 7))]),
        (11, [Abort("0.0.1")]),
        (11, [Done()]),
    ]
    completions = {"0.0.0": completion("stop", 3, 4), "0.0.1": completion("abort", 8, 9)}
    path = tmp_path / DIRECTORY / "step_1" / "train.events"
    store(path, SAMPLING, records, completions, True)
    return load(path)


def test_a_stored_log_is_what_was_decided_and_sampled(log):
    assert log.sampling == SAMPLING
    assert [step for step, _ in log.records] == [0, 3, 11, 11]
    second = log.records[1][1][0].request
    assert second.token_ids.tolist() == [1, 2, 3, 4, 7] and (second.seed, second.max_tokens) == (6, 9)
    assert [c.end for c in log.completions.values()] == ["stop", "abort"]
    assert log.completions["0.0.1"].logprobs.tolist() == [-1.0, -1.125]
    assert log.is_async


def test_a_replay_names_the_completions_that_differ(log):
    source = Replay(log)
    source.next_events(0, 0)
    source.receive("0.0.0", log.completions["0.0.0"])
    assert source.next_events(1, 2) == []
    source.next_events(0, 3)
    assert source.next_events(1, 11) == [Abort("0.0.1")]
    changed = log.completions["0.0.1"].logprobs + np.float32(1e-7)
    source.receive("0.0.1", replace(log.completions["0.0.1"], logprobs=changed))
    assert source.next_events(0, 11) == [Done()]
    assert source.different == ["0.0.1"] and source.num_tokens == 4


def test_a_replay_ends_where_it_cannot_follow_the_log(log):
    source = Replay(log)
    source.next_events(0, 0)
    assert source.next_events(0, 2) == [Done(aborted=True)]  # it finished early
    source = Replay(log)
    for step in (0, 3):
        source.next_events(0, step)
    source.receive("0.0.1", log.completions["0.0.1"])
    assert source.next_events(0, 11) == [Done(aborted=True)]  # nothing is left to abort


def test_logs_of_later_steps_are_removed_at_a_resume(tmp_path):
    for step in (1, 2, 10):
        (tmp_path / DIRECTORY / f"step_{step}").mkdir(parents=True)
    remove_after(str(tmp_path), 2)
    assert sorted(path.name for path in (tmp_path / DIRECTORY).iterdir()) == ["step_1", "step_2"]


def test_each_version_of_a_stream_has_its_own_log(tmp_path):
    """The first request has one token of version 0 and two of version 1; the second waits until version 1.
    The fourth is finished by the step that was in flight when version 1 came."""
    events = {
        0: [Add(request(0, 1, 2)), Add(request(1, 5)), Add(request(3, 4))],
        1: [Weights(1), Add(request(2, 6))],
        9: [Weights(1)],  # the weights that it has
    }

    class Stream:
        def next_events(self, num_live, step):
            return events.get(step, [])

        def receive(self, name, completion):
            pass

    recorder = VersionRecorder(Stream(), 0, SAMPLING, lambda version: tmp_path / f"{version}.events", True)
    for step in (0, 1, 8):
        recorder.next_events(0, step)
    for turn, versions in ((3, (0, 0)), (0, (0, 1, 1)), (1, (1,)), (2, (1, 1))):
        found = completion("stop", *range(7, 7 + len(versions)))
        recorder.receive(f"0.0.{turn}", replace(found, weight_versions=np.array(versions, np.int32)))
    recorder.next_events(0, 9)
    recorder.finish()
    old, new = (load(tmp_path / f"{version}.events") for version in (0, 1))
    assert [step for step, _ in old.records] == [0, 1]
    assert old.records[1][1] == [Abort("0.0.0"), Abort("0.0.1"), Abort("0.0.3"), Done()]
    assert [old.completions[f"0.0.{turn}"].token_ids.tolist() for turn in (0, 1, 3)] == [[7], [], [7, 8]]
    [(step, added)] = new.records
    assert step == 0 and [event.request.token_ids.tolist() for event in added] == [[1, 2, 7], [5], [6]]
    assert (added[0].request.max_tokens, added[0].request.num_begun) == (8, 1)
    assert [own.token_ids.tolist() for own in new.completions.values()] == [[8, 9], [7], [7, 8]]
