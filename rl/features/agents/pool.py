"""Runs environments in worker processes, so that no environment can block or end the training process.

    with EnvironmentPool(plan, workers=2, timeout_s=30, memory_mib=4096) as pool:
        pool.check()                           # ValueError if something cannot be loaded
        pool.open("a", row)                    # a Reply of kind "reset" follows
        for reply in pool.poll(timeout_s=1):   # replies as they come
            pool.call("a", ToolCalls((ToolCall("0", "search", {"query": "Ada"}),)))
        pool.close("a")

A session is the environment of one trajectory. It has one request at a time. A dead or silent worker is
killed, together with every process that it started. All sessions of this worker are then lost. The pool
reports the loss of a session in its reply to the present request of the session, or to the next one. If a
session was alone in its worker, it has failed. Otherwise any of the sessions may have ended the worker, so
the caller opens all of them again (`Reply.reopen`). For example, a worker held three sessions, of which one
was in a call and two were idle. The first is opened in a process of its own, because its call may have ended
the process. The idle sessions share a process again.

A call that exceeds its time limit fails only its own session. The worker then takes no further sessions, and
ends with its last session. There are never more workers than allowed, so a new session may wait for the end
of another session. The workers run as the same user as the training process. So the pool protects against
accidents, but not against attacks.
"""

import contextlib
import itertools
import logging
import math
import pickle
import select
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl.config.agent_plan import AgentPlan
from rl.features.agents.environment import Action, AgentRun, Failure, GameTurn, Reply, ToolCalls
from rl.features.agents.worker import MAX_LINE_BYTES
from rl.workers.pool import START_ATTEMPTS, Pool
from rl.workers.process import WorkerProcess

if TYPE_CHECKING:
    from rl.data.prompts import Prompt

log = logging.getLogger(__name__)

GRACE_S = 5.0
"""Seconds that are added to the time limit of a call. A worker without a sign of life for the sum is killed.
For example, with agents.timeout_s=30 a worker is killed after 35 silent seconds."""
CLOSING_S = 5.0
"""Seconds that `shutdown` gives environments to close."""


_logged: set[tuple[str, str]] = set()


def once(request: str, failure: str) -> str:
    """Return a failure in full if it is the first of its kind in this process, else its first line, or "" if
    that was returned before.

    Two failures are of one kind if the request and the exception are the same. A run may have thousands of
    failures with the same traceback.
    """
    first_line = failure.partition("\n")[0]
    kinds = {(request, first_line.partition(":")[0]), (request, first_line)}
    new = kinds - _logged
    _logged.update(kinds)
    return failure if len(new) == 2 else first_line if new else ""


def to_row(prompt: "Prompt") -> dict[str, Any]:
    """Return the row of a prompt in the form that environments receive."""
    from rl.data.prompts import AGENT_COLUMNS  # this imports transformers, which nothing else here needs

    return {
        "prompt": prompt.text,
        "messages": prompt.messages,
        "ground_truth": prompt.ground_truth,
        "data_source": prompt.data_source,
        "extra_info": prompt.extra_info,
        **{name: prompt.extra_info.get(name) for name in AGENT_COLUMNS},
        **({"images": [{"bytes": image.content} for image in prompt.images]} if prompt.images else {}),
    }


@dataclass(eq=False)
class _Session:
    name: str
    number: int
    row: dict[str, Any]
    is_alone: bool
    """Whether its worker must hold no other session."""
    worker: "EnvironmentWorker | None" = None
    """None while the session waits for a worker (`_waiting`), and after the worker was lost."""
    kind: str = "reset"
    num_requests: int = 1
    started: float | None = None
    """Monotonic time of the request in progress."""
    is_closed: bool = False
    is_kept: bool = False
    """Whether the session is kept for a later phase."""
    loss: dict[str, Any] | None = None
    """After the worker was lost: the fields of the reply to each further request."""


def _is_number(value: Any) -> bool:
    return type(value) is float and math.isfinite(value)


REPLY_FIELDS = {
    "messages": lambda v: isinstance(v, list) and all(isinstance(m, dict) and "role" in m for m in v),
    "tools": lambda v: isinstance(v, list) and all(isinstance(t, dict) for t in v),
    "drives": lambda v: v in ("tools", "step", "run"),
    "reward": _is_number,
    "done": lambda v: isinstance(v, bool),
    "values": lambda v: isinstance(v, dict) and all(map(_is_number, v.values())),
    "failure": lambda v: isinstance(v, str),
    "cause": lambda v: v in tuple(Failure),
    "digest": lambda v: type(v) is int,
    "task": lambda v: type(v) is int,
}
"""Field of a message that answers a request -> function that returns whether a value of this field is
valid."""


class EnvironmentWorker(WorkerProcess):
    """The pool's connection to a worker process."""

    noun = "environments"
    max_line_bytes = MAX_LINE_BYTES

    ready_type = list  # the tools of each environment

    def __init__(self, *arguments: Any, silence_s: float, **options: Any):
        """Start the process (see `WorkerProcess`). Raises OSError if the start fails."""
        self.sessions: dict[int, _Session] = {}
        """Number -> session, for all sessions that the worker has not closed yet."""
        self.must_retire = False
        self._silence_s = silence_s
        self._held: list[bytes] = []
        super().__init__(*arguments, **options)

    def may_take(self, session: _Session) -> bool:
        """Return whether the worker may hold a session beside its present sessions."""
        if self.must_retire:
            return False
        held = self.sessions.values()
        return not held if session.is_alone else not any(one.is_alone for one in held)

    @property
    def num_open(self) -> int:
        return sum(not session.is_closed for session in self.sessions.values())

    def request(self, session: _Session, request: str, argument: Any) -> None:
        """Send a request.

        While the worker sweeps (ends the processes that closed sessions left), the request is queued, because
        the sweep would kill a daemon that the request starts.
        """
        name = f"{session.name} {session.num_requests}"
        self._held.append(pickle.dumps((session.number, request, name, argument)))
        self.send_held()

    def send_held(self) -> None:
        """Send the queued requests, unless the worker is sweeping."""
        while self._held and not self.sweeping:
            self.send(self._held.pop(0))
            self.renew_deadline()

    def renew_deadline(self) -> None:
        """Set the time by which the worker must give the next sign of life. Called after a message or a
        request."""
        if self.is_ready and not self.sweeping and not self.is_disconnected:
            is_busy = any(s.started or s.is_closed for s in self.sessions.values())
            self.deadline = time.monotonic() + self._silence_s if is_busy else math.inf

    def is_valid(self, message: dict[str, Any]) -> bool:
        """Return whether a message is a sign of life or a valid answer to a request."""
        if not isinstance(message.get("retire", False), bool):
            return False
        if message.get("alive") is True:
            return True
        number = message.get("closed", message.get("n"))
        session = self.sessions.get(number) if type(number) is int else None
        if session is None:
            return False
        if "closed" in message:
            return session.is_closed and isinstance(message.get("error"), str)
        valid = all(check(message[key]) for key, check in REPLY_FIELDS.items() if key in message)
        return valid and session.started is not None


class EnvironmentPool(Pool[EnvironmentWorker]):
    """Worker processes that hold environments, started when needed. Only `wake` is thread-safe."""

    module = "rl.features.agents.worker"
    worker_class = EnvironmentWorker

    def __init__(self, plan: AgentPlan, *, timeout_s: float, max_output_chars: int = 8192, **limits: Any):
        """Store the limits (see `Pool`).

        Args:
            timeout_s: time limit of each call of an environment or tool, in seconds.
            max_output_chars: maximum characters of a tool's output or a step's text; the rest is cut off.
        """
        super().__init__(plan, {"timeout_s": timeout_s, "max_output_chars": max_output_chars}, **limits)
        self._silence_s = self._limits["silence_s"] = timeout_s + GRACE_S
        self._wakeups, self._wakeup_end = socket.socketpair()
        self._wakeups.setblocking(False)
        self._wakeup_end.setblocking(False)
        self.poller.register(self._wakeups, select.POLLIN)
        self._numbers = itertools.count()
        self._sessions: dict[str, _Session] = {}
        self._waiting: list[_Session] = []
        self._replies: list[Reply] = []

    @property
    def waiting(self) -> set[str]:
        """Sessions that no worker can take yet. They are opened when other sessions end."""
        return {session.name for session in self._waiting}

    def open(self, session: str, row: Mapping[str, Any], *, alone: bool = False) -> None:
        """Construct and reset the environment of a new session.

        row: a row in the form of `to_row`. alone: whether the process of the session must hold no other
        session.
        """
        assert session not in self._sessions, session
        opened = self._sessions[session] = _Session(session, next(self._numbers), dict(row), alone)
        opened.started = time.monotonic()
        self._waiting.append(opened)
        self._place()

    def call(self, session: str, action: Action) -> None:
        """Send an action to a session whose last request is answered."""
        called = self._sessions[session]
        assert called.started is None, f"{session} has not answered {called.kind}"
        kinds = {ToolCalls: "tools", GameTurn: "step", AgentRun: "run"}
        called.kind = kinds.get(type(action), "score")
        called.num_requests += 1
        self._request(called, "act", action)

    def close(self, session: str) -> None:
        """End a session, and its call if one is in progress. No reply follows."""
        closed = self._sessions.pop(session)
        closed.is_closed = True
        self._waiting = [waiting for waiting in self._waiting if waiting is not closed]
        self._replies = [reply for reply in self._replies if reply.session != session]
        if closed.worker is not None:
            closed.worker.request(closed, "close", None)
        if not self._sessions:
            self.failed_starts = 0  # the next phase may try again

    def keep(self, session: str, is_kept: bool = True) -> None:
        """Note whether a session is kept for a later phase. Its process may end before (`Reply.reopen`)."""
        kept = self._sessions[session]
        kept.is_kept = is_kept
        if kept.worker is not None:
            kept.worker.must_retire |= kept.is_alone  # others may need its place
            self._retire(kept.worker)

    def poll(self, timeout_s: float = 0.0) -> list[Reply]:
        """Return the replies that have arrived.

        If there is none, wait for the first reply, until `wake` is called or `timeout_s` has passed.
        """
        deadline = time.monotonic() + timeout_s
        is_woken = False
        while not is_woken:
            left_s = 0.0 if self._replies else max(deadline - time.monotonic(), 0.0)
            self.await_events(left_s)
            self._place()
            try:
                is_woken = bool(self._wakeups.recv(4096))
            except BlockingIOError:
                is_woken = bool(self._replies) or time.monotonic() >= deadline
        replies, self._replies = self._replies, []
        return replies

    def wake(self) -> None:
        """Make a `poll` in progress, or the next one, return. May be called from any thread."""
        with contextlib.suppress(BlockingIOError):  # the socket is full of wake-ups
            self._wakeup_end.send(b"w")

    def shutdown(self) -> None:
        """Close all sessions; end the workers and every process they started."""
        for session in list(self._sessions):
            self.close(session)
        deadline = time.monotonic() + CLOSING_S
        while any(w.sessions and w.is_ready for w in self.all) and time.monotonic() < deadline:
            self.await_events(0.1)
        super().shutdown()

    # ---- workers ----

    def _request(self, session: _Session, request: str, argument: Any) -> None:
        session.started = time.monotonic()
        if session.worker is None:
            assert session.loss is not None
            self._answer(session, **session.loss)
        else:
            session.worker.request(session, request, argument)

    def _answer(self, session: _Session, **fields: Any) -> None:
        session.started = None
        if not session.is_closed:
            self._replies.append(Reply(session.name, session.kind, **fields))

    def _place(self) -> None:
        """Open the waiting sessions that a worker can take; sessions that must be alone choose first."""
        waiting, self._waiting = sorted(self._waiting, key=lambda session: not session.is_alone), []
        for session in waiting:
            kinds = [left.is_alone for left in self._waiting]
            worker = None if session.is_alone in kinds else self._choose_worker(session, any(kinds))
            if worker is not None:
                session.worker = worker
                worker.sessions[session.number] = session
                worker.request(session, "open", session.row)
            elif self.all:
                self._waiting.append(session)
            else:
                session.loss = {"failure": self.start_failure, "cause": Failure.START}
                self._answer(session, **session.loss)

    def _choose_worker(self, session: _Session, is_scarce: bool) -> EnvironmentWorker | None:
        """Return the worker with the fewest sessions, or a new worker if all are in use.

        Returns None if no worker can take the session yet.
        is_scarce: whether another session waits for a worker of its own. In this case an empty worker is left
            to the other session.
        """
        usable = [worker for worker in self.all if worker.may_take(session)]
        if is_scarce:
            usable = [worker for worker in usable if worker.sessions]
        elif all(worker.num_open for worker in usable) and len(self.all) < self.max_workers:
            if self.failed_starts < START_ATTEMPTS:
                usable += filter(None, [self.start()])
        return min(usable, key=lambda worker: worker.num_open, default=None)

    def received(self, worker: EnvironmentWorker, message: dict[str, Any]) -> None:
        worker.must_retire |= message.get("retire", False)
        if "n" in message:
            fields = {key: message[key] for key in REPLY_FIELDS if key in message}
            session = worker.sessions[message["n"]]
            if fields.get("cause") == Failure.MEMORY and worker.num_open > 1:
                fields["reopen"] = "alone"  # others may have filled the memory
            self._answer(session, **fields)
        elif "closed" in message:
            del worker.sessions[message["closed"]]
            if message["error"] and (why := once("close", message["error"])):
                log.warning("an environment could not be closed: %s", why)
            if not worker.sessions and not worker.must_retire:
                worker.request_sweep()
        self._retire(worker)

    def _retire(self, worker: EnvironmentWorker) -> None:
        """End a worker that takes no further session, once all its sessions wait for a later phase."""
        if worker.must_retire and all(session.is_kept for session in worker.sessions.values()):
            self.dismiss(worker)
            for session in worker.sessions.values():
                fields = {"failure": "its process took no further session", "cause": Failure.LOST}
                self._lose(session, **fields, reopen="alone" if session.is_alone else "shared")

    def heard(self, worker: EnvironmentWorker, num_messages: int) -> None:
        worker.send_held()
        if num_messages:
            worker.renew_deadline()

    def lateness(self, worker: EnvironmentWorker) -> str:
        return f"a worker for environments was silent for {self._silence_s:g} s and was killed"

    def gave_up(self, worker: EnvironmentWorker, reason: str) -> None:
        """Report the loss of a worker to its sessions."""
        cause = Failure.START
        if worker.is_ready:
            cause = Failure.LOST if worker.lost or worker.is_disconnected else Failure.TIME
        may_reopen = cause is not Failure.START and len(worker.sessions) > 1
        for session in worker.sessions.values():
            reopen = "shared" if session.started is None else "alone"
            self._lose(session, failure=reason, cause=cause, reopen=reopen if may_reopen else "")

    def _lose(self, session: _Session, **loss: Any) -> None:
        """Report to a session that its worker is lost.

        The report is the reply to the request in progress, or to the next request if none is in progress.
        """
        session.worker, session.loss = None, loss
        if session.started is not None:
            self._answer(session, **loss)
