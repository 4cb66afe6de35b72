"""Agents without a model: an engine with a function as its policy, and a pool of objects as environments.

Time is counted in engine steps. A running request samples one token per step. While nothing runs, a step is a
wait for an answer.
"""

import heapq
import itertools
from collections.abc import Callable

import numpy as np

from rl.features.agents.environment import AgentRun, FinalScore, GameTurn, Reply, ToolCalls
from rl.features.agents.trajectory import TrajectoryLimits
from rl.rollout.events import INTERVAL, Abort, Add, Done, Waiting
from rl.rollout.samples import Completion, Request
from rl.rollout.source import SampleSource

__all__ = ["TrajectoryLimits", "VirtualEngine", "VirtualPool", "prompts_of"]


class VirtualPool:
    """Has the interface of `EnvironmentPool`; replies come after `delay()` engine steps.

    Args:
        answer: (session, row, action or None for the reset) -> fields of the Reply.
    """

    def __init__(self, answer: Callable[..., dict], delay: Callable[[], float] = lambda: 0.0):
        self._answer, self._delay = answer, delay
        self.now = 0.0
        self.rows: dict[str, dict] = {}
        self._order = itertools.count()
        self._due: list[tuple[float, int, Reply]] = []
        self.closed: dict[str, None] = {}
        self.waiting: set[str] = set()

    def open(self, session: str, row: dict, *, alone: bool = False) -> None:
        assert session not in self.rows, session
        self.rows[session] = row
        self._reply(session, "reset", None)

    def call(self, session: str, action) -> None:
        kinds = {ToolCalls: "tools", GameTurn: "step", AgentRun: "run", FinalScore: "score"}
        self._reply(session, kinds[type(action)], action)

    def _reply(self, session: str, kind: str, action) -> None:
        reply = Reply(session, kind, **self._answer(session, self.rows[session], action))
        heapq.heappush(self._due, (self.now + self._delay(), next(self._order), reply))

    def keep(self, session: str, is_kept: bool = True) -> None:
        assert session in self.rows

    def close(self, session: str) -> None:
        del self.rows[session]
        self.closed[session] = None
        self._due = [item for item in self._due if item[2].session != session]
        heapq.heapify(self._due)

    def poll(self, timeout_s: float = 0.0) -> list[Reply]:
        if timeout_s and self._due and self._due[0][0] > self.now:
            self.now += 1  # the engine has nothing to do in this step
        replies = []
        while self._due and self._due[0][0] <= self.now:
            replies.append(heapq.heappop(self._due)[2])
        return replies


class VirtualEngine:
    """Runs a source as `RolloutEngine.run` does.

    Args:
        policy: request -> the token ids that it samples, before `max_tokens` is applied.
        capacity: maximum number of requests that sample in a step; others wait in order.
    """

    def __init__(self, pool: VirtualPool, policy: Callable[[Request], list[int]], *, capacity: int = 64):
        self.pool, self._policy, self._capacity = pool, policy, capacity
        self.requests: list[Request] = []
        self.num_busy_steps = 0

    def run(self, source: SampleSource) -> None:
        live: dict[str, tuple[list[int], int]] = {}
        step = last_record = 0
        has_finished = False
        while True:
            if not live or has_finished or step - last_record >= INTERVAL:
                last_record, has_finished = step, False
                for event in source.next_events(len(live), step):
                    match event:
                        case Add(request):
                            self.requests.append(request)
                            live[request.name] = (self._policy(request)[: request.max_tokens], 0)
                        case Abort(name):
                            tokens, done = live.pop(name)
                            source.receive(name, _completion(tokens[:done], "abort"))
                        case Waiting():
                            assert not live
                        case Done():
                            return
            if not live:
                continue
            step += 1
            self.num_busy_steps += 1
            self.pool.now += 1
            for name in list(live)[: self._capacity]:
                tokens, done = live[name]
                live[name] = (tokens, done + 1)
                if done + 1 == len(tokens):
                    del live[name]
                    has_finished = True
                    request = next(r for r in reversed(self.requests) if r.name == name)
                    end = "length" if len(tokens) == request.max_tokens else "stop"
                    source.receive(name, _completion(tokens, end))


def _completion(tokens: list[int], end: str) -> Completion:
    ids = np.array(tokens, np.int32)
    return Completion(ids, -ids.astype(np.float32) / 8, end, np.full(len(ids), 3, np.int32))


def prompts_of(texts: list[str], tokenizer) -> list:
    """Return prompts with these texts, without chat template."""
    from rl.data.prompts import Prompt

    ids = [np.array(tokenizer(text)["input_ids"], np.int32) for text in texts]
    return [Prompt(i, ids[i], text, "test", str(i), {}) for i, text in enumerate(texts)]
