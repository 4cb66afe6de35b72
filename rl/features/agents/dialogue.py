"""Runs the dialogue between the policy and environments on a replica of the engine.

Each sample is a trajectory, and each turn of a trajectory is a request to the engine. Only the leader of the
replica has the environments. A trajectory begins with the reset of its environment. Then turns of the policy
and answers of the environment alternate. The trajectory ends with its score. The request of a turn is named
`prompt.number.turn`. For example, 3.1.0 is the first turn of trajectory 1 of prompt 3.

With `agents.order=arrival`, an answer is used before the next engine step that has a record
(`rl.rollout.events`). With `waves`, all live trajectories first end their turn and receive their answers. The
next turns then begin together, in the order of their names, so that the result does not depend on timing.

An agent that runs by itself (`run`) asks for its turns through the endpoint. Such an agent takes the place of
the environment: it receives the completion of a turn, and then either requests the next turn or ends.

A trajectory that did not finish may continue in a later call. It keeps its session (`session.Session`) if the
same replica continues it and the process of the environment still runs. Otherwise it is executed again from
its log (`rl.features.agents.trajectory`).
"""

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rl.config.schema import Config
from rl.features.agents.chat import TooLong
from rl.features.agents.environment import (
    OF_LIMITS,
    Action,
    AgentRun,
    Failure,
    FinalScore,
    GameTurn,
    Reply,
    ToolCalls,
)
from rl.features.agents.pool import once, to_row
from rl.features.agents.replica_environments import Environments
from rl.features.agents.session import Session, address_of, refuse_unoffered
from rl.features.agents.trajectory import Diverged, Trajectory, TrajectoryLimits, TrajectoryRow, log_of
from rl.rollout.events import Abort, Event
from rl.rollout.samples import Completion, Request, Sample
from rl.rollout.sampling import Sampling, seed_of
from rl.rollout.source import Dialogue, StartedSample

if TYPE_CHECKING:  # a web server, which only agents that run by themselves need
    from rl.features.agents.endpoint import EndpointReply, EndpointRequest

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Maximum number of trajectories that a group may begin per sample. For example, a group of 8 samples may
begin 24 trajectories, because failed ones are replaced. If all 24 are used up, the group stays smaller."""

SESSIONS_PER_REQUEST = 4
"""Maximum number of open trajectories per concurrent request of the engine. It is more than one, because some
trajectories run while others wait for their environments. It is limited, because each open trajectory holds a
cached prefix."""

WAIT_S = 1.0
"""Maximum wait for an answer, in seconds. After this time the leader sends a message to the other ranks of
the replica again."""


def trajectories(
    config: Config,
    environments: Environments,
    sampling: Sampling,
    *,
    capacity: int,
    keeps_failed: bool = False,
) -> "Trajectories":
    """Return the dialogue of one call of the engine. The arguments are the same as for `Trajectories`."""
    max_context = config.data.max_prompt_tokens + sampling.max_tokens
    return Trajectories(
        environments, sampling, capacity=capacity, max_context=max_context, keeps_failed=keeps_failed
    )


class Trajectories(Dialogue):
    """Generates the trajectories of samples.

    A failed trajectory may be replaced by a further trajectory of its group. Trajectory j of a group is
    sampled with the seed of sample j.

    Args:
        sampling: sampling parameters. A prompt has `samples_per_prompt` trajectories, each with at most
            `max_tokens` response tokens.
        capacity: maximum number of concurrent requests.
        max_context: maximum number of tokens of prompt and response together.
        keeps_failed: if true, a failed trajectory becomes a sample with `failed` 1, and `agents.on_failure`
            is ignored.
    """

    def __init__(
        self,
        environments: Environments,
        sampling: Sampling,
        *,
        capacity: int,
        max_context: int,
        keeps_failed: bool = False,
    ):
        super().__init__()
        self._environments = environments
        self._config = config = environments.config
        self._pool, self._chat = environments.pool, environments.chat
        self._capacity, self._keeps_failed = capacity, keeps_failed
        self._limits = TrajectoryLimits(
            config.max_turns, config.max_tokens_per_turn, sampling.max_tokens, max_context
        )
        self._in_waves = config.order == "waves"
        self._aborts: list[Event] = []
        self._sessions: dict[str, Session] = {}
        """The open sessions, by address."""
        self._requests: dict[str, Session] = {}
        """Sessions by the names of their requests in the engine."""
        self._replies: list[Reply] = []
        """Answers that have arrived and wait to be taken."""
        self._wave: list[tuple[StartedSample, list[Sample]]] = []
        """Trajectories that have ended in the present wave."""
        self._unanswered: set[str] = set()
        """Addresses of the sessions that wait for an answer of their environment."""
        self._resetting: set[str] = set()
        """Addresses of the sessions that wait for the reset of their environment."""
        self._ready: dict[str, Request] = {}
        """Address of a session -> its request that waits to be given to the engine."""
        self.first_failure = ""
        """Reason of the first failed trajectory, as one sentence."""
        size = sampling.samples_per_prompt
        self._next_number: defaultdict[int, int] = defaultdict(lambda: size)
        """Group -> number of the next trajectory that replaces a failed one."""
        self._most_numbers = size * (1 if config.on_failure == "shrink" else ATTEMPTS)
        self._running_since = (0, 0)
        """(number of requests that ran after the last record, engine step of this record)."""

    def close(self) -> None:
        """Close the environments of all trajectories that have not ended."""
        for session in list(self._sessions.values()):
            self._close(session)

    # The methods that the source of samples calls ---------------------------------------------------------

    @property
    def num_open(self) -> int:
        return len(self._sessions)

    def has_room(self, num_live: int, together: int) -> bool:
        if self._is_held(num_live):
            return False
        num_requests = num_live + len(self._ready) + len(self._resetting) + together
        num_sessions = len(self._sessions) + together
        has_room = num_requests <= self._capacity and num_sessions <= SESSIONS_PER_REQUEST * self._capacity
        return has_room or not self._sessions

    def start(self, start: StartedSample) -> None:
        self._next_number[start.group] = max(self._next_number[start.group], start.next_number)
        kept = self._environments.take(address_of(start))
        if kept is None:
            self._open(start, log=log_of(start.so_far, start.prompt.token_ids))
        else:
            self._resume(kept, start)

    def advance(self, num_live: int, step: int) -> list[Event]:
        live, last = self._running_since
        steps = max(step - last, 0)  # another run of the engine begins with step 0
        self.counts["live_steps"] += min(live, self._capacity) * steps
        self.counts["steps"] += steps
        self._running_since = num_live, step
        self._take_replies()
        if not self._is_held(num_live):
            self.ended += self._wave
            self._wave = []
        aborts, self._aborts = self._aborts, []
        return aborts

    def wait(self, num_live: int) -> bool:
        if not self._awaited or num_live or (self._ready and not self._in_waves):
            return False
        started = time.monotonic()
        self._replies += self._pool.poll(WAIT_S)
        self.counts["environments_waited"] += round(1e6 * (time.monotonic() - started))
        return True

    def requests(self, num_live: int) -> list[Request]:
        if self._is_held(num_live):
            return []
        requests = []
        sessions = (self._sessions[address] for address in self._ready)
        for session in sorted(sessions, key=lambda session: (session.start.group, session.start.number)):
            requests.append(request := self._ready.pop(session.address))
            session.running = request.name
            self._requests[request.name] = session
        self._running_since = num_live + len(requests), self._running_since[1]
        return requests

    def _is_held(self, num_live: int) -> bool:
        """Return whether the present wave has not ended. The next turns wait until it has."""
        return self._in_waves and bool(num_live or self._awaited)

    @property
    def _awaited(self) -> set[str]:
        """Return the sessions that must answer before the next wave begins.

        If some requests are ready, sessions that still wait for a worker process are left out.
        """
        return self._unanswered - self._pool.waiting if self._ready else self._unanswered

    def receive(self, name: str, completion: Completion) -> None:
        session = self._requests.pop(name)
        if session.running != name:  # its agent has ended
            return
        session.running = ""
        if session.inbox and not session.inbox[0].is_learned:
            if completion.end != "abort":
                asked, number = session.inbox[0], session.trajectory.num_asides
                turn = self._chat.parse(completion.token_ids, asked.tools, number)
                self._answer(session, self._context_of(asked), completion, turn.message)
            return
        session.trajectory.take(completion)
        if completion.end != "abort":
            self._act(session)

    def suspend(self) -> None:
        self.ended += self._wave
        self._wave = []
        for session in list(self._sessions.values()):
            prompt_ids = session.start.prompt.token_ids
            rows = session.trajectory.samples(None, prompt_ids, is_unfinished=True)
            self.ended.append((session.start, rows))
            self._forget(session)
            self._environments.keep(session)

    # Trajectories -----------------------------------------------------------------------------------------

    def _open(
        self,
        start: StartedSample,
        *,
        log: Sequence[TrajectoryRow] = (),
        execution: int = 0,
        is_repeated: bool = False,
        alone: bool = False,
    ) -> None:
        """Open a trajectory. The arguments are the same as for `Trajectory`, `Session` and the pool's
        `open`."""
        seed = seed_of(start.seed, start.number)
        names = start.group, start.number
        trajectory = Trajectory(*names, seed=seed, limits=self._limits, log=log, execution=execution)
        sight = self._environments.sight_of(start.prompt)
        session = Session(start, trajectory, sight, is_repeated=is_repeated)
        self.counts["executed_again"] += bool(log)
        self._add(session)
        self._resetting.add(session.address)
        self._unanswered.add(session.address)
        self._pool.open(session.address, to_row(start.prompt) | {"seed": start.seed}, alone=alone)

    def _add(self, session: Session) -> None:
        self._sessions[session.address] = session
        session.asked = time.monotonic()

    def _resume(self, session: Session, start: StartedSample) -> None:
        """Continue a trajectory of an earlier call."""
        trajectory = session.trajectory
        session.start, trajectory.prompt, trajectory.execution = start, start.group, 0
        self._add(session)
        if session.inbox and not (session.is_asked and session.inbox[0].is_learned):
            self._serve(session)
        elif session.is_asked:
            request = trajectory.request(session.inbox[0].max_tokens or 0 if session.inbox else 0)
            assert request is not None, "an unfinished turn has room"
            self._request(session, request)
        else:
            self._unanswered.add(session.address)
            if not trajectory.rows and not session.is_driving:
                self._resetting.add(session.address)
        if session.reply is not None:
            self._replies.append(session.reply)
            session.reply = None

    def _restart(self, session: Session, why: object) -> None:
        """Begin a trajectory again from its prompt, because an answer of its environment differs from the
        log."""
        self.counts["diverged"] += 1
        log.warning(
            "trajectory %s starts again from its prompt, because its environment differs: %s",
            session.name,
            why,
        )
        self._close(session)
        self._open(session.start, execution=session.trajectory.execution + 1)

    def _further(self, start: StartedSample) -> StartedSample:
        """Return a further sample of a group, which replaces a sample whose environment failed."""
        number = self._next_number[start.group]
        self._next_number[start.group] += 1
        return replace(start, number=number, so_far=())

    def _call(self, session: Session, action: Action) -> None:
        self._unanswered.add(session.address)
        session.asked = time.monotonic()
        session.num_requests += 1
        self._pool.call(session.address, action)

    def _score(self, session: Session) -> None:
        """Ask the environment for the score, after the last turn. Raises Diverged if the log has more
        turns."""
        if session.trajectory.is_logged:
            raise Diverged(f"it ended the trajectory after turn {session.trajectory.num_turns}")
        self._call(session, FinalScore(session.messages))

    def _take_replies(self) -> None:
        """Take the environments' answers that have arrived."""
        replies = [*self._replies, *self._pool.poll()]
        self._replies = []
        endpoint = self._environments.endpoint
        while endpoint is not None and not endpoint.requests.empty():
            request = endpoint.requests.get_nowait()
            kept = self._environments.kept.get(request.session)
            asking = self._sessions.get(request.session, kept)
            # A request that is done already was refused. It may belong to a trajectory of an earlier call
            # that had the same name.
            if asking is not None and not request.reply.done():
                asking.inbox.append(request)
                if len(asking.inbox) == 1 and asking is not kept:
                    self._serve(asking)
        for reply in replies:
            if (session := self._sessions.get(reply.session)) is not None:
                try:
                    self._take_reply(session, reply)
                except Diverged as error:
                    self._restart(session, error)
            elif (kept := self._environments.kept.get(reply.session)) is not None:
                # If the session is in neither place, it failed in a request to the endpoint.
                kept.reply = reply
        self._fail_silent_agents()

    def _take_reply(self, session: Session, reply: Reply) -> None:
        self._unanswered.discard(session.address)
        self._resetting.discard(session.address)
        self.counts["environments"] += round(1e6 * (time.monotonic() - session.asked))
        session.check_answer(reply)
        if reply.kind == "run" and session.is_spent:  # the agent's exception follows from the refused turn
            self._end_agent(session, replace(reply, values=reply.values or {"score": 0.0}))
        elif reply.failure:
            self._fail(session, reply)
        elif reply.kind == "reset":
            self._begin(session, reply)
        elif reply.kind == "score":
            self._finish(session, reply.values or session.values)
        elif reply.kind == "run":
            self._end_agent(session, reply)
        else:
            if reply.reward is not None:
                session.trajectory.reward_turn(reply.reward)
            if not session.trajectory.is_logged:
                self.counts["tool_errors"] += int(reply.values.get("errors", 0))
            self._continue(session, reply)

    def _fail_silent_agents(self) -> None:
        """Fail each agent that has neither asked for a turn nor returned within agents.timeout_s.

        The pool limits the time of all other calls.
        """
        limit_s = self._config.timeout_s
        before = time.monotonic() - limit_s
        for address in sorted(self._unanswered):
            session = self._sessions[address]
            if session.is_driving and session.asked < before:
                why = f"the agent asked for no turn for agents.timeout_s={limit_s:g}"
                self._fail(session, Reply(address, "run", failure=why, cause=Failure.TIME))

    def _begin(self, session: Session, reply: Reply) -> None:
        """Ask for the first turn, after the reset."""
        session.tools, session.drives = reply.tools, reply.drives
        try:
            session.messages = self._chat.normal(session.sight.take(reply.messages))
            refuse_unoffered(session.start.prompt, session)
        except ValueError as error:
            self._fail(session, replace(reply, failure=str(error), cause=Failure.PROMPT))
            return
        if session.drives == "run" and not session.sight.suits_agents:
            why = "an agent that calls the engine itself cannot read images; leave out data.image_key"
            self._fail(session, replace(reply, failure=why))
            return
        if session.drives == "run":
            endpoint, session.is_driving = self._environments.start_endpoint(), True
            self._call(session, AgentRun(endpoint.base_url, endpoint.open(session.address)))
            return
        if self._config.structured_tool_calls and session.tools:
            try:
                session.grammar = self._chat.grammar(session.tools)
            except ValueError as error:  # a schema that is known only at run time
                self._fail(session, replace(reply, failure=str(error)))
                return
        if self._begin_row(session, reply):
            if session.trajectory.room > 0:
                self._ask(session)
                return
            length, limit = len(session.trajectory.token_ids), self._limits.context_tokens
            why = f"a prompt of {length} tokens leaves no room in the {limit} of the engine"
            self._fail(session, replace(reply, failure=why, cause=Failure.PROMPT))

    def _begin_row(self, session: Session, reply: Reply) -> bool:
        """Begin a row with the whole conversation, or fail the trajectory if the template rejects it."""
        try:
            limit = self._limits.context_tokens
            self._chat.refuse_lost(session.messages, session.tools)
            token_ids = self._chat.open(session.messages, session.tools, limit)
            session.trajectory.begin_row(session.sight.begin(token_ids))
            session.context = list(session.messages)
        except ValueError as error:
            self._fail(session, replace(reply, failure=str(error), cause=Failure.PROMPT))
            return False
        return True

    def _continue(self, session: Session, reply: Reply) -> None:
        """Ask for the next turn, after an environment's answer, or for the score if the trajectory has
        ended."""
        trajectory, before = session.trajectory, list(session.messages)
        try:
            messages = session.sight.take(reply.messages)
        except ValueError as error:
            self._fail(session, replace(reply, failure=str(error)))
            return
        session.messages += messages
        if reply.done or trajectory.num_turns >= self._limits.turns:
            self._score(session)
            return
        assert trajectory.turn is not None
        context, turn = trajectory.turn
        given = self._chat.extend(context, turn.token_ids, before, messages, session.tools)
        try:
            given = given if given is None else session.sight.expand(given, len(trajectory.token_ids))
        except ValueError as error:
            self._fail(session, replace(reply, failure=str(error)))
            return
        if given is None:
            self.counts["rewrites"] += not trajectory.is_logged
            if self._config.on_rewrite == "refuse":
                self._refuse_rewrite(session, reply.kind)
            elif self._begin_row(session, reply):
                self._ask(session)
        elif trajectory.give(given, "tool" if reply.kind == "tools" else "user"):
            session.context = list(session.messages)
            self._ask(session)
        else:
            self._score(session)

    def _refuse_rewrite(self, session: Session, kind: str) -> None:
        """Fail a trajectory because its next turn would change earlier tokens. Its environment still runs."""
        why = (
            f"the conversation after turn {session.trajectory.num_turns} changes earlier tokens, which "
            "agents.on_rewrite=refuse does not allow; use agents.on_rewrite=new_row"
        )
        self._fail(session, Reply(session.address, kind, failure=why, cause=Failure.REWRITE))

    def _ask(self, session: Session) -> None:
        """Take the next turn from the log, or request it from the engine.

        If no tokens are left for a turn, ask the environment for the score.
        """
        if session.trajectory.replay_turn():
            if not session.sight.agrees(session.trajectory.rows[-1].segments):
                raise Diverged("it returned other images")
            self._act(session)
        elif (request := session.trajectory.request()) is not None:
            self._request(session, request)
        else:
            self._score(session)

    def _request(self, session: Session, request: Request) -> None:
        session.is_asked = True
        self._ready[session.address] = replace(request, grammar=session.grammar, images=session.sight.placed)

    def _act(self, session: Session) -> None:
        """Give a turn to the environment."""
        trajectory, is_new = session.trajectory, session.is_asked
        session.is_asked = False
        assert trajectory.turn is not None
        context, completion = trajectory.turn
        turn = self._chat.parse(completion.token_ids, session.tools, trajectory.num_turns)
        session.messages.append(turn.message)
        if session.drives == "run":
            self._answer(session, context, completion, turn.message)
        elif session.drives == "step":
            self._call(session, GameTurn(turn.text))
        elif turn.tool_calls:
            self.counts["tool_calls"] += len(turn.tool_calls) * is_new
            self._call(session, ToolCalls(turn.tool_calls))
        else:
            self._score(session)

    def _finish(self, session: Session, values: dict[str, float]) -> None:
        self._close(session)
        if not values and session.trajectory.rewards:
            values = {"score": sum(session.trajectory.rewards)}
        self.counts["succeeded"] += 1
        session.check_outcome(values)
        self._end(session, values)

    def _end(self, session: Session, values: dict[str, float]) -> None:
        """Turn a closed trajectory into samples and report them."""
        trajectory = session.trajectory
        session.check_context(self._chat)
        samples = trajectory.samples(values or None, session.start.prompt.token_ids)
        rows = [replace(sample, conversation=session.messages) for sample in samples]
        self._note_ended(session.start, rows)
        self.counts["trajectories"] += 1
        self.counts["turns"] += trajectory.num_turns
        self.counts["rows"] += len(samples)

    def _note_ended(self, start: StartedSample, rows: list[Sample]) -> None:
        """Report the end of a trajectory.

        With waves, the end is reported only when the wave ends, because schedules of samples react to it.
        """
        (self._wave if self._in_waves else self.ended).append((start, rows))

    def _fail(self, session: Session, reply: Reply) -> None:
        """Count a failed trajectory. Then score it, replace it by a further trajectory, or leave it out."""
        start, group = session.start, session.start.group
        if why := once(reply.kind, reply.failure):
            log.warning("environment of %s failed in %s: %s", session.name, reply.kind, why)
        self.first_failure = self.first_failure or reply.failure.partition("\n")[0]
        self._close(session)
        if reply.reopen:
            self.counts["reopened"] += 1
            # The process ended twice while the session was idle: one of its own threads may have ended it.
            alone = reply.reopen == "alone" or session.is_repeated
            rows, execution = session.trajectory.log, session.trajectory.execution + 1
            self._open(start, log=rows, execution=execution, is_repeated=True, alone=alone)
            return
        self.counts[f"failures/{reply.cause}"] += 1
        if self._keeps_failed or self._learns_from(session, reply):
            self._end(session, {"score": 0.0, "failed": 1.0})
        elif self._next_number[group] < self._most_numbers:
            self._open(self._further(start))
        else:
            self.counts["dropped"] += 1
            self._note_ended(start, [])

    def _learns_from(self, session: Session, reply: Reply) -> bool:
        """Return whether the policy learns from a failed trajectory, because its own actions exceeded a
        limit.

        For example, the policy called a tool with a program that never ends.
        """
        has_acted = session.trajectory.num_turns > 0
        return self._config.on_failure == "zero" and reply.cause in OF_LIMITS and has_acted

    def _close(self, session: Session) -> None:
        self._stop_agent(session)
        self._forget(session)
        self._pool.close(session.address)

    def _forget(self, session: Session) -> None:
        del self._sessions[session.address]
        self._ready.pop(session.address, None)
        for pending in (self._unanswered, self._resetting):
            pending.discard(session.address)

    # Agents that run by themselves ------------------------------------------------------------------------

    def _serve(self, session: Session) -> None:
        """Make the engine's request for the turn that an agent asks for, or refuse the turn."""
        from rl.features.agents.endpoint import RefusedRequest

        asked, trajectory = session.inbox[0], session.trajectory
        session.is_asked, request, why = False, None, "no tokens of rollout.max_response_tokens are left"
        is_spent = True
        is_bound = self._config.structured_tool_calls and asked.tools
        try:
            session.grammar = self._chat.grammar(asked.tools) if is_bound else None
            if asked.messages is None and asked.token_ids is None:
                why = "the conversation is longer than any context"
            elif not asked.is_learned:
                request = trajectory.aside(self._context_of(asked), asked.max_tokens or 0)
            elif trajectory.num_turns >= self._limits.turns:
                why = f"agents.max_turns={self._limits.turns} are used up"
            elif not self._follow(session, asked):
                return self._refuse_rewrite(session, "run")
            elif not trajectory.is_cut:
                if trajectory.replay_turn():
                    return self._act(session)
                request = trajectory.request(asked.max_tokens or 0)
        except Diverged as error:
            return self._restart(session, error)
        except TooLong as error:
            why = str(error)
        except ValueError as error:  # invalid messages of the agent, or an invalid schema of a tool
            why, is_spent = str(error), False
        if request is None:
            session.is_spent |= is_spent
            self._reply(session, error=RefusedRequest(why, is_spent))
            return
        self._unanswered.discard(session.address)
        self._request(session, request)

    def _follow(self, session: Session, asked: "EndpointRequest") -> bool:
        """Append the tokens that an agent adds to its conversation, or begin a new row if they do not
        continue it.

        Returns False if a new row is not allowed (agents.on_rewrite=refuse).
        """
        trajectory, (given, source) = session.trajectory, session.continuation(asked, self._chat)
        if given is not None:
            if trajectory.give(given, source):
                session.context = list(session.messages)
            return True
        if trajectory.rows:
            self.counts["rewrites"] += not trajectory.is_logged
            if self._config.on_rewrite == "refuse":
                return False
        trajectory.begin_row(self._context_of(asked))
        session.context = list(session.messages)
        return True

    def _context_of(self, asked: "EndpointRequest") -> np.ndarray:
        """Return all token ids of the context that an agent's request gives, int32 [C]."""
        if asked.token_ids is not None:
            return asked.token_ids
        if asked.messages:
            self._chat.refuse_lost(asked.messages, asked.tools)
        return self._chat.open(asked.messages or [], asked.tools, self._limits.context_tokens)

    def _answer(self, session: Session, context: np.ndarray, completion: Completion, message: dict) -> None:
        """Send a turn to the agent that asked for it."""
        from rl.features.agents.endpoint import EndpointReply

        turn = completion.token_ids, completion.logprobs, completion.end
        self._reply(session, EndpointReply(context, *turn, message))

    def _reply(
        self, session: Session, reply: "EndpointReply | None" = None, error: Exception | None = None
    ) -> None:
        """Answer the request that is being served, and serve the next one."""
        self._unanswered.add(session.address)
        future, session.asked = session.inbox.popleft().reply, time.monotonic()
        with suppress(InvalidStateError):  # the agent has closed the connection
            if error is not None:
                future.set_exception(error)
            elif reply is not None:
                future.set_result(reply)
        if session.inbox:
            self._serve(session)

    def _end_agent(self, session: Session, reply: Reply) -> None:
        """Ask for the score, after an agent has returned."""
        self._stop_agent(session)
        if session.trajectory.num_turns:
            session.values = reply.values
            self._score(session)
        else:
            why = "the agent asked for no turn"
            self._fail(session, Reply(session.address, "run", failure=why, cause=Failure.IDLE))

    def _stop_agent(self, session: Session) -> None:
        """End the unanswered requests of a session."""
        self._ready.pop(session.address, None)
        if session.running:
            self._aborts.append(Abort(session.running))
            session.running = ""
        self._environments.stop_agent(session)

    def describe_wait(self) -> str:
        """Describe the sessions that are waited for: '12 live, oldest 43 s, 3.1' (trajectory 1 of prompt
        3)."""
        oldest = min((self._sessions[address] for address in self._unanswered), key=lambda one: one.asked)
        seconds = time.monotonic() - oldest.asked
        return f"{len(self._unanswered)} live, oldest {seconds:.0f} s, {oldest.name}"
