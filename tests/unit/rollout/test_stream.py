"""The order of groups that generators begin, and the moments when they take weights."""

import numpy as np
import pytest

from rl.config.schema import load_config
from rl.data.prompts import Prompt
from rl.features.roles.messages import Begin, Complete, NextBatch
from rl.features.roles.stream_schedule import StreamSchedule
from rl.rollout.events import Add, Done, Waiting, Weights
from rl.rollout.queue import static_queue
from rl.rollout.samples import Completion
from rl.rollout.sampling import train_sampling
from rl.rollout.single_turn import SingleTurn
from rl.rollout.source import SampleSource


class Messages:
    """Messages that have arrived."""

    def __init__(self, *messages):
        self.left = list(messages)

    def take(self, timeout_s):
        return (str(len(self.left)), self.left.pop(0)) if self.left else None


class Replica:
    """The first of two replicas, with batches of two prompts with two samples each."""

    def __init__(self, *messages, granularity="batch", lag=1, capacity=4, finished=(), deterministic=True):
        options = ["data.prompts_per_step=2", "rollout.samples_per_prompt=2", "roles.refit_after_steps=10"]
        options += [f"roles.lag={lag}", f"roles.granularity={granularity}"]
        options += [f"rollout.deterministic={str(deterministic).lower()}"]
        self.sent, self.messages = [], Messages(*messages)
        config = load_config(None, options)
        self.stream = StreamSchedule(
            config,
            Begin({}, 0, frozenset(finished)),
            draw=lambda number: [Prompt.of_tokens(np.arange(3, dtype=np.int32))] * number,
            queue=static_queue(1 << 62, replica=0, num_replicas=2),
            messages=self.messages,
            send=lambda group, prompt, samples: self.sent.append(group),
        )
        dialogue = SingleTurn(train_sampling(config), capacity=capacity)
        self.source = SampleSource(self.stream, dialogue)
        self.live = []

    def step(self, number: int) -> list:
        """Names and versions of the events before an engine step."""
        found = []
        for event in self.source.next_events(len(self.live), number):
            match event:
                case Add(request):
                    self.live.append(request.name)
                    found.append(request.name)
                case Weights(version):
                    found.append(version)
                case Done():
                    found.append("done")
                case Waiting():
                    found.append("waits")
        return found

    def finish(self, count: int) -> None:
        """Complete that many live samples, the oldest first."""
        for _ in range(count):
            empty = np.zeros(1, np.int32)
            completion = Completion(empty, empty.astype(np.float32), "stop", empty)
            self.source.receive(self.live.pop(0), completion)


def ask(batch: int, lag: int = 1) -> NextBatch:
    return NextBatch(batch + 1, batch, batch, batch + lag + 1, f"train.{batch + 1}")


def test_batches_take_weights_when_nothing_runs():
    replica = Replica(ask(0), ask(1), Complete())
    assert replica.step(0) == [0, "0.0", "0.1", "2.0", "2.1"]  # batches 0 and 1 by version 0
    replica.finish(3)
    assert replica.step(5) == [] and replica.sent == [0]
    replica.finish(1)
    assert replica.step(6) == [1, "4.0", "4.1"] and replica.sent == [0, 2]
    replica.finish(1)
    assert replica.step(7) == []
    replica.finish(1)
    assert replica.step(8) == ["done"]


def test_groups_take_weights_after_a_fixed_number_of_steps():
    replica = Replica(ask(0), ask(1), granularity="group")
    assert replica.step(0) == [0, "0.0", "0.1", "2.0", "2.1"]
    replica.finish(2)
    assert replica.step(5) == [] and replica.step(14) == []  # batch 0 of this replica ended at step 5
    assert replica.step(16) == [1, "4.0", "4.1"]


def test_the_engine_waits_for_weights_that_are_due():
    replica = Replica(ask(0), granularity="group")
    replica.step(0)
    replica.finish(2)
    assert replica.step(5) == []
    assert replica.step(15) == ["waits"] == replica.step(15)
    replica.messages.left.append(ask(1))
    assert replica.step(15) == [1, "4.0", "4.1"]


def test_samples_begin_one_by_one_and_skip_what_exists():
    replica = Replica(ask(0), granularity="sample", capacity=3, finished={2}, deterministic=False)
    assert replica.step(0) == [0, "0.0", "0.1"]  # group 2 exists, group 4 may not begin
    replica = Replica(ask(0), ask(1), granularity="sample", capacity=3, deterministic=False)
    assert replica.step(0) == [0, "0.0", "0.1", "2.0"]
    assert replica.step(1) == [1]
    replica.finish(1)
    assert replica.step(2) == ["2.1"]


def test_weights_are_taken_before_the_next_message_is_awaited():
    replica = Replica(ask(0), ask(1), granularity="group", finished=range(0, 8, 2))
    assert [replica.step(number) for number in range(2)] == [[0], [1]]


@pytest.mark.parametrize("granularity", ["batch", "group"])
def test_lag_0_begins_one_batch(granularity):
    assert Replica(ask(0, 0), lag=0, granularity=granularity).step(0) == [0, "0.0", "0.1"]
