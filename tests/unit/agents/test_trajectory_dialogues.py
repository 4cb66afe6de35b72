"""The source of trajectories, with a policy and environments of the test (tests/virtual_engine.py)."""

import functools
import json
import queue
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from rl.config.agents import Agents
from rl.data.chat_template import TOOL
from rl.features.agents.chat import Chat
from rl.features.agents.dialogue import ATTEMPTS, Trajectories
from rl.features.agents.endpoint import EndpointRequest, RefusedRequest
from rl.features.agents.environment import AgentRun, Failure, FinalScore, GameTurn, ToolCalls
from rl.features.agents.replica_environments import Environments
from rl.features.agents.trajectory_dialogues import warn_of_failures
from rl.rollout.queue import static_queue
from rl.rollout.queue_schedule import QueueSchedule
from rl.rollout.sampling import Sampling, seed_of
from rl.rollout.source import SampleSource
from tests.chat_templates import end_ids, tokenizer_of
from tests.virtual_engine import VirtualEngine, VirtualPool, prompts_of

SAMPLING = Sampling(2, 200)
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"key": "a"}}\n</tool_call><|im_end|>'
TWO_CALLS = CALL.replace("<|im_end|>", "\n") + CALL


@functools.cache
def chat_of(family: str, on_rewrite: str) -> Chat:
    return Chat(tokenizer_of(family), end_token_ids=end_ids(family), on_rewrite=on_rewrite)


class World:
    """One run of a source: tools that look a key up, or a game, by `drives`."""

    def __init__(
        self,
        turns,
        *,
        drives="tools",
        family="qwen2.5",
        agents=None,
        sampling=SAMPLING,
        num_prompts=1,
        delay=lambda: 0.0,
        fails=lambda session, action: False,
        capacity=64,
        max_context=1000,
        endpoint=None,
        keeps_failed=False,
    ):
        self.tokenizer = tokenizer_of(family)
        agents = agents or Agents()
        self.turns, self.drives, self.fails = turns, drives, fails
        self.prompts = prompts_of(["a question"] * num_prompts, self.tokenizer)
        self.pool = VirtualPool(self.answer, delay)
        self.engine = VirtualEngine(self.pool, self.policy, capacity=capacity)
        environments = Environments(
            agents,
            self.pool,
            chat_of(family, agents.on_rewrite),
            lambda: endpoint or pytest.fail("no agent runs by itself"),
        )
        limits = dict(capacity=capacity, max_context=max_context)
        self.dialogue = Trajectories(environments, sampling, **limits, keeps_failed=keeps_failed)
        queue = static_queue(num_prompts, replica=0, num_replicas=1)
        seeds = [seed_of(7, i) for i in range(num_prompts)]
        schedule = QueueSchedule(self.prompts, sampling, seeds, queue=queue)
        self.engine.run(SampleSource(schedule, self.dialogue))
        self.dialogue.close()
        samples = (sample for sample in schedule.samples if sample.end != "failed")
        self.samples = sorted(samples, key=lambda s: (s.prompt, s.number, s.row))

    def policy(self, request):
        turn = int(request.name.rpartition(".")[2])
        text = self.turns(request) if callable(self.turns) else self.turns[min(turn, len(self.turns) - 1)]
        return self.tokenizer(text)["input_ids"]

    def answer(self, session, row, action) -> dict:
        if self.fails(session, action):
            return {"failure": "the server is gone"}
        if isinstance(action, ToolCalls):
            replies = [
                {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": "1234567"}
                for call in action.calls
            ]
            return {"messages": replies}
        if isinstance(action, GameTurn):
            return {"messages": [{"role": "user", "content": "more"}], "reward": 0.5}
        if isinstance(action, FinalScore):
            return {"values": {"score": float(len(action.messages))}} if self.drives == "tools" else {}
        messages = [{"role": "user", "content": "a question"}]
        tools = [TOOL] if self.drives == "tools" else []
        return {"messages": messages, "tools": tools, "drives": self.drives}

    def text(self, sample) -> str:
        return self.tokenizer.decode(np.concatenate([sample.prompt_ids, sample.token_ids]))


def test_the_tokens_of_a_trajectory_are_those_of_its_requests():
    world = World([CALL, TWO_CALLS, "It is 42.<|im_end|>"])
    assert len(world.samples) == 2
    for sample in world.samples:
        requests = [r for r in world.engine.requests if r.name.startswith(f"0.{sample.number}.")]
        ids = np.concatenate([sample.prompt_ids, sample.token_ids])
        for turn, request in enumerate(requests):
            assert np.array_equal(ids[: len(request.token_ids)], request.token_ids)
            sampled = world.policy(request)
            start = len(request.token_ids)
            assert ids[start : start + len(sampled)].tolist() == sampled
            own = sample.turns[start - len(sample.prompt_ids) :][: len(sampled)]
            assert (own == turn + 1).all() and (sample.turns > 0).sum() > len(sampled)
        assert [s.source for s in sample.segments] == ["policy", "tool", "policy", "tool", "policy"]
        assert not sample.truncated and sample.outcome == {"score": 7.0}  # user, 3 turns, 3 replies
        assert len(requests) == 3 and len({r.seed for r in world.engine.requests}) == 6
    assert world.dialogue.counts["tool_calls"] == 6 and set(world.pool.closed) == {"0.0", "0.1"}


def test_one_turn_has_the_seed_of_a_response_without_environment():
    world = World(["It is 42.<|im_end|>"])
    assert [r.seed for r in world.engine.requests] == [seed_of(seed_of(7, 0), n) for n in range(2)]


def test_rewards_of_a_game_are_those_of_its_turns_and_sum_up():
    world = World(["move<|im_end|>"], drives="step", agents=Agents(max_turns=3))
    for sample in world.samples:
        ends = [i for i, r in enumerate(sample.rewards) if r]
        assert [sample.turns[i] for i in ends] == [1, 2, 3] and sample.outcome == {"score": 1.5}
        assert sample.segments[-1].is_sampled


@pytest.mark.parametrize("room", range(1, 60, 6))
def test_turns_are_clamped_to_what_is_left(room):
    agents = Agents(max_tokens_per_turn=9)
    world = World(
        [CALL.replace("<|im_end|>", " x" * 40)], agents=agents, sampling=replace(SAMPLING, max_tokens=room)
    )
    for sample in world.samples:
        lengths = [len(s.token_ids) for s in sample.segments if s.is_sampled]
        assert len(sample.token_ids) <= room and max(lengths) == min(9, room)
        assert sample.truncated and sample.segments[-1].is_sampled


def test_a_context_that_is_full_ends_the_trajectory():
    prompt = len(World(["x<|im_end|>"]).samples[0].prompt_ids)
    full = World([CALL], max_context=prompt + len(tokenizer_of("qwen2.5")(CALL)["input_ids"]) + 3)
    assert all(len(s.segments) == 1 and s.truncated for s in full.samples)
    none = World([CALL], max_context=prompt)
    assert none.samples == [] and none.dialogue.counts["failures/prompt"] == 2 * ATTEMPTS


class Slow(World):
    """The calls of one trajectory exceed the time limit."""

    def answer(self, session, row, action):
        if session == "0.1" and isinstance(action, ToolCalls):
            return {"failure": "too slow", "cause": Failure.TIME}
        return super().answer(session, row, action)


def test_an_action_that_exceeds_a_limit_has_score_0():
    world = Slow([CALL, "It is 42.<|im_end|>"], agents=Agents(on_failure="zero"))
    assert [sample.number for sample in world.samples] == [0, 1]
    assert world.dialogue.counts["failures/time"] == 1
    assert world.samples[1].outcome == {"score": 0.0, "failed": 1.0}
    assert [segment.source for segment in world.samples[1].segments] == ["policy"]


def test_a_failed_trajectory_of_validation_is_a_sample():
    """A trajectory without a turn is a sample, too."""
    world = World(
        [CALL, "It is 42.<|im_end|>"],
        fails=lambda session, action: action is None if session == "0.0" else isinstance(action, FinalScore),
        keeps_failed=True,
    )
    assert [sample.outcome for sample in world.samples] == [{"score": 0.0, "failed": 1.0}] * 2
    assert [len(sample.segments) for sample in world.samples] == [0, 3]
    assert world.dialogue.counts["trajectories"] == 2 and world.dialogue.counts["failures/error"] == 2


@pytest.mark.parametrize("on_failure", ["refill", "shrink"])
def test_a_failed_trajectory_leaves_its_group(on_failure):
    world = World(
        [CALL, "It is 42.<|im_end|>"],
        agents=Agents(on_failure=on_failure),
        fails=lambda session, action: session == "0.1" and isinstance(action, ToolCalls),
    )
    numbers = [sample.number for sample in world.samples]
    assert numbers == ([0, 2] if on_failure == "refill" else [0])
    assert world.dialogue.counts["failures/error"] == 1
    assert world.dialogue.counts["dropped"] == (on_failure == "shrink")


def test_an_environment_that_always_fails_is_tried_a_few_times():
    world = World(["x<|im_end|>"], fails=lambda session, action: True)
    assert world.samples == [] and world.dialogue.counts["failures/error"] == 2 * ATTEMPTS
    assert world.dialogue.counts["dropped"] == 2


def test_a_schema_without_grammar_fails_its_trajectory(caplog):
    """`{"type": "strng"}` is found by xgrammar, which would raise within the engine and end the run."""

    class WithBadTool(World):
        def answer(self, session, row, action):
            found = super().answer(session, row, action)
            if session == "0.1" and "tools" in found:
                parameters = {"type": "object", "properties": {"key": {"type": "strng"}}}
                found["tools"] = [TOOL, {**TOOL, "function": {"name": "find", "parameters": parameters}}]
            return found

    world = WithBadTool(
        ["It is 42.<|im_end|>"],
        family="qwen3",
        agents=Agents(structured_tool_calls=True, on_failure="shrink"),
    )
    assert [sample.number for sample in world.samples] == [0]
    assert world.dialogue.counts["failures/error"] == 1
    assert "rejects the schema of find: " in caplog.text and '"strng"' in caplog.text


def test_waves_do_not_depend_on_the_order_of_the_answers():
    def run(seed):
        chance = random.Random(seed)

        def turns(request):
            own = random.Random(request.seed)
            return "x" * own.randrange(1, 20) + (CALL if own.random() < 0.7 else "<|im_end|>")

        world = World(
            turns,
            agents=Agents(order="waves"),
            num_prompts=9,
            delay=lambda: chance.lognormvariate(1, 1.5),
            capacity=6,
        )
        return [(r.name, r.token_ids.tolist()) for r in world.engine.requests]

    first, second = run(1), run(2)
    assert first == second and len(first) > 20


def test_a_rewritten_conversation_continues_in_a_new_row():
    # Qwen3's template drops the thinking of earlier turns when a user speaks.
    world = World(
        ["<think>\nreason\n</think>\n\nmove<|im_end|>"],
        drives="step",
        family="qwen3",
        agents=Agents(on_rewrite="new_row", max_turns=3),
    )
    rows = [s for s in world.samples if s.number == 0]
    assert [row.row for row in rows] == [0, 1, 2] and world.dialogue.counts["rewrites"] == 4
    assert "reason" not in world.tokenizer.decode(rows[1].prompt_ids)
    assert all((row.turns > 0).all() for row in rows)
    assert json.dumps([row.outcome for row in rows]) == json.dumps([{"score": 1.5}] * 3)


def test_a_rewrite_that_is_refused_fails_the_trajectory():
    """Otherwise it would be scored as if the game had ended after its first turn."""
    world = World(
        ["<think>\nreason\n</think>\n\nmove<|im_end|>"],
        drives="step",
        family="qwen3",
        agents=Agents(max_turns=3, on_failure="shrink"),
    )
    assert world.samples == [] and world.dialogue.counts["failures/rewrite"] == 2


def test_the_engine_is_kept_busy_while_environments_answer():
    def run(delay):
        def turns(request):
            own = random.Random(request.seed)
            return " x" * own.randrange(10, 30) + (CALL if own.random() < 0.75 else "<|im_end|>")

        sampling = replace(SAMPLING, samples_per_prompt=4, max_tokens=800)
        world = World(turns, num_prompts=80, delay=delay, capacity=32, sampling=sampling)
        return world.pool.now, sum(int((s.turns > 0).sum()) for s in world.samples)

    chance = random.Random(5)
    sigma = 1.0
    mean = np.log(10) - sigma**2 / 2
    steps, tokens = run(lambda: 0.0)
    delayed_steps, delayed_tokens = run(lambda: chance.lognormvariate(mean, sigma))
    assert tokens == delayed_tokens
    assert steps / delayed_steps >= 0.85, (steps, delayed_steps)


class InsistentAgent:
    """An endpoint for one agent that asks for turns until one is refused."""

    base_url = ""

    def __init__(self):
        self.requests = queue.SimpleQueue()
        self.refusals = []

    def open(self, session):
        self.ask(session, [{"role": "user", "content": "a question"}])

    def ask(self, session, messages):
        def go_on(reply):
            if error := reply.exception():
                self.refusals.append(str(error))
            else:
                more = {"role": "user", "content": "more"}
                self.ask(session, [*messages, reply.result().message, more])

        request = EndpointRequest(session, messages, None)
        request.reply.add_done_callback(go_on)
        self.requests.put(request)

    def close(self, session):
        pass


THREE_TURNS = Agents(max_turns=3, on_failure="shrink")


def world_of(agent, *, agents=THREE_TURNS, delay=lambda: 50.0, **options):
    """Return the world of one trajectory with an agent that runs by itself."""
    options |= dict(agents=agents, delay=delay, sampling=replace(SAMPLING, samples_per_prompt=1))
    return World(["move<|im_end|>"], drives="run", endpoint=agent, **options)


def test_an_agent_that_fails_because_its_turns_are_used_up_has_score_0():
    agent = InsistentAgent()
    world = world_of(agent, fails=lambda session, action: isinstance(action, AgentRun))
    assert agent.refusals == ["agents.max_turns=3 are used up"]
    (sample,) = world.samples
    assert sample.outcome == {"score": 0.0} and world.dialogue.counts["turns"] == 3
    assert world.dialogue.counts["dropped"] == 0


def test_a_conversation_longer_than_any_context_has_score_0():
    agent = InsistentAgent()
    agent.ask, ask = (
        lambda session, messages: ask(session, messages if len(messages) < 3 else None),
        agent.ask,
    )
    world = world_of(agent, fails=lambda session, action: isinstance(action, AgentRun))
    assert agent.refusals == ["the conversation is longer than any context"]
    (sample,) = world.samples
    assert sample.outcome == {"score": 0.0} and world.dialogue.counts["turns"] == 1


class SilentAgent(InsistentAgent):
    def open(self, session):
        pass


def test_an_agent_that_hangs_fails():
    delays = iter([0.0])  # of the reset; the agent never returns
    limited = Agents(timeout_s=1e-9, on_failure="shrink")
    world = world_of(SilentAgent(), agents=limited, delay=lambda: next(delays, 1e9))
    assert world.samples == [] and world.dialogue.counts["failures/time"] == 1
    assert world.dialogue.counts["dropped"] == 1 and set(world.pool.closed) == {"0.0"}


class Forgetful(InsistentAgent):
    """An agent that begins another conversation, and goes on if it is refused."""

    def ask(self, session, messages):
        super().ask(session, messages if len(messages) == 1 else [{"role": "user", "content": "another"}])


def test_a_rewrite_of_an_agent_that_is_refused_fails_it():
    agent = Forgetful()
    world = world_of(agent)
    assert world.samples == [] and world.dialogue.counts["failures/rewrite"] == 1
    assert len(world.engine.requests) == 1


def test_a_request_of_an_ended_trajectory_is_not_served():
    agent = InsistentAgent()
    stale = EndpointRequest("0.0", [{"role": "user", "content": "another question"}], None)
    stale.reply.set_exception(RefusedRequest("the trajectory has ended"))
    agent.requests.put(stale)
    world = world_of(agent)
    assert len(world.engine.requests) == 3
    assert "another" not in world.text(world.samples[0])


class Rejected(World):
    def answer(self, session, row, action):
        return {**super().answer(session, row, action), "messages": [{"role": "tool", "content": "x"}]}


def test_messages_that_the_template_rejects_are_a_failure():
    world = Rejected(["x</s>"], family="mistral")
    assert world.samples == [] and world.dialogue.counts["failures/prompt"] == 2 * ATTEMPTS


def test_a_reset_beyond_the_limit_is_not_tokenized(monkeypatch):
    """Tokenizing a very large text would block the replica."""
    longest = 0

    def encode(self, text, **options):
        nonlocal longest
        longest = max(longest, len(text))
        return real(self, text, **options)

    class Large(World):
        def answer(self, session, row, action):
            return {"messages": [{"role": "user", "content": "question " * 100_000}], "drives": "step"}

    real = Chat._encode
    monkeypatch.setattr(Chat, "_encode", encode)
    world = Large(["move<|im_end|>"], agents=Agents(on_failure="shrink"))
    assert longest < 100_000 and world.dialogue.counts["failures/prompt"] == 2


def test_failed_trajectories_above_5_percent_are_a_warning():
    assert warn_of_failures(Counter({"succeeded": 95, "failures/time": 5}), counts_as_wrong=True) == ""
    counts = Counter({"succeeded": 94, "failures/time": 2, "failures/error": 4})
    warning = warn_of_failures(counts, counts_as_wrong=True)
    assert "6 of 100 trajectories (6%) failed (error 4, time 2) and count as wrong" in warning
