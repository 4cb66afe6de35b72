"""Trajectories that continue in a later call: with their environment, and executed again from their log."""

import heapq
import queue
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rl.config.agents import Agents
from rl.features.agents.chat import Chat
from rl.features.agents.dialogue import Trajectories
from rl.features.agents.endpoint import EndpointRequest
from rl.features.agents.environment import FinalScore, GameTurn, Reply
from rl.features.agents.replica_environments import Environments
from rl.features.carry_over.quota_schedule import Quota, QuotaSchedule, extend, samples_of
from rl.rollout.queue import own_counter, static_queue
from rl.rollout.queue_schedule import QueueSchedule
from rl.rollout.sampled_group import SampledGroup
from rl.rollout.samples import pack, unpack
from rl.rollout.sampling import Sampling, seed_of
from rl.rollout.source import SampleSource
from tests.chat_templates import end_ids, tokenizer_of
from tests.virtual_engine import VirtualEngine, VirtualPool, prompts_of

FAMILY = "qwen2.5"
SAMPLING = Sampling(2, 200)
NUM_PROMPTS = 4


class Games:
    """A replica with games of up to four turns. Each answer depends on everything said before."""

    def __init__(self, *, delay=0.0, seed=7, on_rewrite="refuse", family=FAMILY, drives="step", **agents):
        self.tokenizer, self.drives = tokenizer_of(family), drives
        chance = random.Random(seed)
        self.pool = VirtualPool(self.answer, lambda: chance.expovariate(1 / delay) if delay else 0.0)
        chat = Chat(self.tokenizer, end_token_ids=end_ids(family), on_rewrite=on_rewrite)
        no_endpoint = lambda: pytest.fail("no agent runs by itself")  # noqa: E731
        config = Agents(on_rewrite=on_rewrite, max_turns=4, **agents)
        self.environments = Environments(config, self.pool, chat, no_endpoint)
        self.said: dict[str, list[str]] = {}
        self.answer_to = lambda said: f"{len(said)}:{sum(map(len, said)) % 7}"
        self.num_calls, self.lost = 0, set()
        prompts = prompts_of([f"question {n}" for n in range(NUM_PROMPTS)], self.tokenizer)
        prompts = [replace(prompt, draw=place) for place, prompt in enumerate(prompts)]
        self.groups = [SampledGroup.of(prompt, 2) for prompt in prompts]

    def policy(self, request):
        own = random.Random(request.seed)
        text = "<think>\nwhy\n</think>\n\n" * own.randrange(2) + "x" * own.randrange(1, 30) + "<|im_end|>"
        return self.tokenizer(text)["input_ids"][request.num_begun :]

    def answer(self, session, row, action) -> dict:
        self.num_calls += 1
        if session in self.lost:
            self.lost.remove(session)
            return {"failure": "its process ended", "reopen": "shared"}
        if action is None:
            self.said[session] = []
            return {
                "messages": [{"role": "user", "content": f"game {row['seed'] % 9}"}],
                "drives": self.drives,
            }
        said = self.said[session]
        if isinstance(action, FinalScore):
            return {"values": {"score": float(len(said))}}
        assert isinstance(action, GameTurn)
        said.append(action.text)
        text = self.answer_to(said)
        return {"messages": [{"role": "user", "content": text}], "reward": len(text) / 4 + len(said)}

    def continue_until(self, is_met, note_complete=lambda *, is_due: None):
        """Continue the groups until `is_met` returns true; return the counts of the dialogue."""
        work = [group for group in self.groups if group.unfinished]
        schedule = QuotaSchedule(
            work,
            set(),
            SAMPLING,
            [seed_of(5, group.prompt.draw) for group in work],
            queue=static_queue(len(work), replica=0, num_replicas=1),
            quota=SimpleNamespace(is_met=is_met, note_complete=note_complete),
        )
        dialogue = Trajectories(self.environments, SAMPLING, capacity=4, max_context=1000)
        source = SampleSource(schedule, dialogue)
        VirtualEngine(self.pool, self.policy).run(source)
        source.suspend()
        ended = [group for group in self.groups if not group.unfinished]
        moved = unpack(pack(schedule.samples), rank=0)
        self.groups = sorted([*ended, *extend(work, moved)], key=lambda group: group.prompt.draw)
        return dialogue.counts

    def result(self):
        """Return what is learned from, of every row."""
        return [
            (s.prompt, s.number, s.row, s.end, s.token_ids.tolist(), s.turns.tolist(), s.rewards.tolist())
            + (s.outcome, None if s.prompt_ids is None else s.prompt_ids.tolist())
            for s in samples_of(self.groups)
        ]


def never():
    return False


def after(records):
    """Return a condition that is met after so many records of the log."""
    left = iter(range(records))
    return lambda: next(left, None) is None


def straight(**options):
    games = Games(**options)
    games.continue_until(never)
    return games


@pytest.mark.parametrize("options", [{}, {"family": "qwen3", "on_rewrite": "new_row"}, {"order": "waves"}])
@pytest.mark.parametrize("is_kept", [True, False])
def test_carried_trajectories_are_the_uninterrupted_ones(is_kept, options):
    whole, num_cut = straight(**options), 0
    for records in (1, 4, 9):
        games, counts = Games(**options, delay=3.0), []
        for condition in (after(records), after(records), after(records + 2), never):
            counts.append(games.continue_until(condition))
            if not is_kept:
                games.environments.keep_only(())
        assert games.result() == whole.result()
        assert not games.environments.kept and not games.pool.rows
        if is_kept:
            assert games.num_calls == whole.num_calls and not any(c["executed_again"] for c in counts)
        num_cut += sum(s.end == "abort" for row in samples_of(games.groups) for s in row.segments)
    assert num_cut > 0  # turns were aborted
    assert is_kept or sum(c["executed_again"] for c in counts)


def test_a_different_answer_begins_the_trajectory_again(caplog):
    games = Games()
    games.continue_until(after(9))
    begun = [s for s in samples_of(games.groups) if s.is_unfinished and (s.turns <= 0).any()]
    games.environments.keep_only(())
    games.answer_to = lambda said: f"other {len(said)}"
    counts = games.continue_until(never)
    assert counts["diverged"] == len(begun) > 0 and "starts again from its prompt" in caplog.text
    texts = [games.tokenizer.decode(sample.token_ids) for sample in samples_of(games.groups)]
    again = {(sample.prompt, sample.number) for sample in begun}
    for sample, text in zip(samples_of(games.groups), texts):
        if (sample.prompt, sample.number) in again:
            assert "other 1" in text and "1:" not in text
    assert len(texts) == 2 * NUM_PROMPTS


def test_another_dialogue_leaves_kept_sessions_alone():
    """A validation between two steps polls the same pool, and its trajectories have the same numbers."""
    whole, games = straight(), Games(delay=2.0)
    games.continue_until(after(9))
    assert games.environments.kept
    own = Trajectories(games.environments, SAMPLING, capacity=4, max_context=1000, keeps_failed=True)
    prompts = prompts_of(["question"] * 3, games.tokenizer)
    queue = static_queue(3, replica=0, num_replicas=1)
    schedule = QueueSchedule(prompts, SAMPLING, [1, 2, 3], queue=queue)
    VirtualEngine(games.pool, games.policy).run(SampleSource(schedule, own))
    own.close()
    assert len(schedule.samples) == 6
    games.continue_until(never)
    assert games.result() == whole.result()


def test_a_lost_process_is_replaced_by_the_log():
    whole, games = straight(), Games()
    games.continue_until(after(9))
    games.lost = set(games.environments.kept)
    num_lost = len(games.lost)
    counts = games.continue_until(never)
    assert counts["reopened"] == counts["executed_again"] == num_lost > 0
    assert games.result() == whole.result()


def test_waves_end_a_call_at_the_same_tokens_whatever_the_delays():
    def frontiers(seed):
        games, found = Games(order="waves", delay=4.0, seed=seed), []
        for number in (1, 1, 2):
            quota = Quota(number, 0, own_counter())
            games.continue_until(quota.is_met, quota.note_complete)
            found.append([list(map(str, row)) for row in games.result()])
        return found

    first, second = frontiers(1), frontiers(2)
    assert first == second and sum("abort" in row for row in first[0]) > 0


class Asking:
    """An endpoint for agents that play the game by themselves, one turn more than the prompt's number."""

    base_url = ""

    def __init__(self, pool):
        self.requests, self._pool, self._threads = queue.SimpleQueue(), pool, {}
        self.answer_to = lambda number: f"more {number}"

    def open(self, session):
        self._ask(session, [{"role": "user", "content": "a question"}], 1)

    def close(self, session):
        pass

    def _ask(self, session, messages, number):
        def go_on(reply):
            more = {"role": "user", "content": self.answer_to(number)}
            if number < 3:
                self._ask(session, [*messages, reply.result().message, more], number + 1)
            else:
                self._pool.returned(session)

        request = EndpointRequest(session, messages, None)
        request.reply.add_done_callback(go_on)
        self.requests.put(request)


class AgentPool(VirtualPool):
    """A pool of agents that return when they say so."""

    def returned(self, session, delay=0):
        heapq.heappush(self._due, (self.now + delay, next(self._order), Reply(session, "run", done=True)))

    def _reply(self, session, kind, action):
        if kind != "run":
            super()._reply(session, kind, action)


@pytest.mark.parametrize("is_kept, is_same", [(True, True), (False, True), (False, False)])
def test_an_agent_that_runs_by_itself_is_answered_from_the_log(is_kept, is_same):
    def make():
        games = Games(drives="run", on_failure="shrink")
        games.environments.pool = games.pool = AgentPool(games.answer)
        endpoint = Asking(games.pool)
        games.environments.make_endpoint = lambda: endpoint
        return games, endpoint

    whole, _ = make()
    whole.continue_until(never)
    games, endpoint = make()
    games.continue_until(after(9))
    begun = sum(bool(s.segments) and s.is_unfinished for s in samples_of(games.groups))
    if not is_kept:
        games.environments.keep_only(())
    if not is_same:
        endpoint.answer_to = lambda number: f"other {number}"
    counts = games.continue_until(never)
    assert begun > 0 and counts["executed_again"] == (0 if is_kept else begun)
    assert (games.result() == whole.result()) == is_same
    assert all(row[3] == "stop" and max(row[5]) == 3 for row in games.result())
    assert (counts["diverged"] > 0) == (not is_same)


class LateAgents(Asking):
    """Agents with a second request between two calls. It is refused, and the agents return later."""

    def __init__(self, pool):
        super().__init__(pool)
        self.sessions = []

    def _ask(self, session, messages, number):
        if number == 1:
            super()._ask(session, messages, number)
        else:
            self.sessions.append(session)

    def ask_again(self):
        for session in self.sessions:
            request = EndpointRequest(session, None, None)  # longer than any context
            self.requests.put(request)
            request.reply.add_done_callback(lambda _, of=session: self._pool.returned(of, delay=3))


def test_an_agent_that_is_refused_a_turn_after_a_pause_is_awaited():
    games = Games(drives="run", on_failure="shrink")
    games.environments.pool = games.pool = AgentPool(games.answer)
    agents = LateAgents(games.pool)
    games.environments.make_endpoint = lambda: agents
    num_samples = sum(len(group.samples) for group in games.groups)
    games.continue_until(lambda: len(agents.sessions) == num_samples)
    agents.ask_again()
    games.continue_until(never)
    assert all(row[3] == "stop" and max(row[5]) == 1 for row in games.result())
