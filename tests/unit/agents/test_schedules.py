"""Every schedule works with every dialogue: samples start within the capacity, end, and are counted."""

import numpy as np
import pytest

from rl.config.agents import Agents
from rl.config.schema import load_config
from rl.data.prompts import Prompt
from rl.features.agents.chat import Chat
from rl.features.agents.dialogue import Trajectories
from rl.features.agents.replica_environments import Environments
from rl.features.carry_over.quota_schedule import Quota, QuotaSchedule
from rl.features.roles.messages import Begin, Complete, NextBatch
from rl.features.roles.stream_schedule import StreamSchedule
from rl.rollout.events import Done
from rl.rollout.queue import own_counter, static_queue
from rl.rollout.queue_schedule import QueueSchedule
from rl.rollout.sampled_group import SampledGroup
from rl.rollout.samples import Completion
from rl.rollout.sampling import Sampling, seed_of
from rl.rollout.single_turn import SingleTurn
from rl.rollout.source import SampleSource
from tests.chat_templates import end_ids, tokenizer_of
from tests.virtual_engine import VirtualEngine, VirtualPool, prompts_of

SAMPLING = Sampling(2, 50)
SEEDS = [10, 11, 12]
QWEN = "qwen2.5"


def completion(*tokens, end="stop"):
    ids = np.array(tokens, np.int32)
    return Completion(ids, -ids.astype(np.float32), end, np.full(len(ids), 9, np.int32))


def queue():
    return static_queue(3, replica=0, num_replicas=1)


def test_groups_start_whole_within_the_capacity():
    prompts = [Prompt.of_tokens(np.array([p], np.int32)) for p in range(3)]
    schedule = QueueSchedule(prompts, SAMPLING, SEEDS, queue=queue())
    source = SampleSource(schedule, SingleTurn(SAMPLING, capacity=5))
    first = [event.request for event in source.next_events(0, 0)]
    assert [request.name for request in first] == ["0.0", "0.1", "1.0", "1.1"]
    assert [request.seed for request in first[:2]] == [seed_of(10, 0), seed_of(10, 1)]
    assert source.next_events(4, 1) == []
    source.receive("1.0", completion(4, end="length"))
    assert [event.request.name for event in source.next_events(3, 2)] == ["2.0", "2.1"]
    assert source.next_events(1, 3) == []
    (sample,) = schedule.samples
    assert (sample.prompt, sample.number, sample.truncated) == (1, 0, True)
    for name in list(source.running):
        source.receive(name, completion(4))
    assert source.next_events(0, 4) == [Done()]


class Messages:
    """The messages of a run with two batches, at once."""

    def __init__(self):
        self.left = [NextBatch(n + 1, n, n, n + 2, "") for n in range(2)] + [Complete()]

    def take(self, timeout_s):
        return (str(len(self.left)), self.left.pop(0)) if self.left else None


@pytest.mark.parametrize("agents", [False, True])
@pytest.mark.parametrize("kind", ["queue", "quota", "stream"])
def test_every_schedule_generates_with_every_dialogue(kind, agents):
    tokenizer, sent = tokenizer_of(QWEN), []
    prompts = prompts_of([f"question {n}" for n in range(3)], tokenizer)
    if kind == "queue":
        schedule = QueueSchedule(prompts, SAMPLING, SEEDS, queue=queue())
    elif kind == "quota":
        groups, quota = [SampledGroup.of(prompt, 2) for prompt in prompts], Quota(3, 0, own_counter())
        schedule = QuotaSchedule(groups, set(), SAMPLING, SEEDS, queue=queue(), quota=quota)
    else:
        options = ["data.prompts_per_step=1", "rollout.samples_per_prompt=2", "roles.lag=1"]
        schedule = StreamSchedule(
            load_config(None, options),
            Begin({}, 0, frozenset()),
            draw=lambda number: [prompts[0]] * number,
            queue=static_queue(1 << 62, replica=0, num_replicas=1),
            messages=Messages(),
            send=lambda group, prompt, samples: sent.extend(samples),
        )
    messages = [{"role": "user", "content": "a question"}]
    pool = VirtualPool(
        lambda session, row, action: {"messages": messages, "values": {"score": 1.0}}, lambda: 1.0
    )
    dialogue = SingleTurn(SAMPLING, capacity=4)
    if agents:
        environments = Environments(
            Agents(), pool, Chat(tokenizer, end_token_ids=end_ids(QWEN)), lambda: None
        )
        dialogue = Trajectories(environments, SAMPLING, capacity=4, max_context=1000)
    turn = tokenizer("move<|im_end|>")["input_ids"]
    VirtualEngine(pool, lambda request: turn).run(SampleSource(schedule, dialogue))
    samples = sent if kind == "stream" else schedule.samples
    assert len(samples) == 6 and not any(sample.is_unfinished for sample in samples)
    assert {sample.outcome is not None for sample in samples} == {agents}
