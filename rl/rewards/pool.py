"""Scores samples in worker processes, so that no reward function can hang, fill or end the training process.

    with ScoringPool(plan, failure_score=0.0, workers=default_workers(8), timeout_s=10, memory_mib=4096) as pool:
        pool.check()                     # ValueError if the functions cannot be loaded
        scores = pool.score(samples)     # list[Score], in order

Samples go out in chunks, results come back one by one, which gives every call a limit of its own and tells which call a worker
died in. A worker that is late, dead or talks rubbish is killed with all that it started (see worker.py), its sample gets the
failure score, and a new worker takes over the rest of the chunk.

What this does not do: the workers run as the same user in the same file system. It holds off accidents, not attacks; programs
that a model wrote belong into a sandbox.
"""

import contextlib
import json
import logging
import math
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.rewards.mixture import Plan
from rl.rewards.score import Score
from rl.rewards.worker import KILLING_S, MARK, MAX_LINE_BYTES, SWEEP, kill_marked, too_slow

log = logging.getLogger(__name__)

CHUNK_SAMPLES = 64
"""Most samples sent at a time, and so most calls of an async function that one worker has open."""
ASYNC_GRACE_S = 2.0
"""How much later than its own time-out an async call is taken to have blocked the event loop."""
ENDED_WITHIN_S = 2.0
"""How long after the scorer's end of the socket was closed its supervisor is given to say why."""
START_ATTEMPTS = 3
"""Workers that may die one after the other before they are ready."""
SWEEP_EVERY_S = 1.0
"""Between the looks for stray processes of a busy worker; each reads all of /proc."""

_said: set[str] = set()
"""Failures that this process has logged: a function that fails in every step need not say why in every step."""


def default_workers(local_world_size: int) -> int:
    """Workers of one rank: its share of the cores that this process may use, at least 1.

    Ask before an engine pins the main thread to a core.
    """
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)


class ScoringPool:
    """Worker processes that call a plan's reward functions. For one thread; starts nothing before the first call."""

    def __init__(
        self,
        plan: Plan,
        *,
        failure_score: float,
        workers: int,
        timeout_s: float,
        memory_mib: int,
        startup_s: float = 120.0,
    ):
        """`timeout_s` limits each call of a sample, `startup_s` the import of the functions, which does not count as a call.
        `memory_mib` limits the address space of a worker and of each process it starts; 0 is no limit. Relative paths in the
        plan are looked up from the present working directory. Raises ValueError for numbers out of range.
        """
        if workers < 1:
            raise ValueError(f"a scoring pool has at least 1 worker, not {workers}; default_workers says how many suit the host.")
        if not 0 < timeout_s < math.inf or not 0 < startup_s < math.inf:
            raise ValueError(f"timeout_s={timeout_s} and startup_s={startup_s} must be finite and greater than 0 seconds.")
        if memory_mib < 0:
            raise ValueError(f"memory_mib is {memory_mib}, but must be 0 (no limit) or more.")
        self._failure_score, self._num_workers = float(failure_score), workers
        self._timeout_s, self._startup_s = timeout_s, startup_s
        # Workers are started by the thread that scores, which an engine may have pinned to one core by then.
        cpus = sorted(os.sched_getaffinity(0))
        self._options = {"memory_mib": memory_mib, "timeout_s": timeout_s, "cpus": cpus}
        self._cwd = os.getcwd()
        self._greeting = pickle.dumps((plan, list(sys.path)))
        self._poller = select.poll()
        self._by_fd: dict[int, _Worker] = {}
        self._workers: list[_Worker] = []
        self._leaving: list[_Worker] = []

    def score(self, samples: Sequence[Mapping[str, Any]]) -> list[Score]:
        """One Score for each sample, in order; `values` has `score`, `failed` and what else the function returned.

        A sample whose call raises, takes longer than the limit, ends its process or returns no finite score gets
        {"score": failure_score, "failed": 1.0}. The first failure is logged as a warning, with their number; the same failure
        once per process. Raises nothing that comes from a reward function.

        Async calls that a blocked or dead worker had open are made again, fewer at a time, until the guilty one is alone.
        """
        batch = _Batch(len(samples))
        try:
            for worker in list(self._workers):
                self._attend(worker, batch)  # who has died while idle must not cost a sample
            while batch.unfinished:
                self._start_workers(batch)
                for worker in self._workers:
                    if worker.is_free and batch.has_work:
                        worker.assign(batch.take(self._num_workers, worker.is_async), samples, self._timeout_s)
                self._await_events(batch)
        except BaseException:
            self.close()  # what the workers still have would be taken for answers of the next call
            raise
        for worker in self._workers:
            worker.ask_to_sweep()
        self._bury(wait=False)
        return self._to_scores(batch)

    def check(self) -> None:
        """Raise ValueError if the reward functions cannot be loaded in a worker. Starts the first worker."""
        batch = _Batch(0)
        while not any(worker.is_ready for worker in self._workers):
            if not self._workers:
                self._start_worker(batch)
            self._await_events(batch)
            if batch.failed_starts >= START_ATTEMPTS:
                raise ValueError(batch.start_failure)

    def close(self) -> None:
        """End the workers and all that they started. A later `score` starts new ones."""
        for worker in list(self._workers):
            self._dismiss(worker)
        self._bury(wait=True)

    def __enter__(self) -> "ScoringPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Workers ----------------------------------------------------------------------------------------------------------

    def _start_workers(self, batch: "_Batch") -> None:
        """As many as the work that nobody has can use. Where none will start and none is left, that work fails."""
        while len(self._workers) < min(self._num_workers, batch.unfinished) and batch.has_work:
            if batch.failed_starts >= START_ATTEMPTS:
                break
            self._start_worker(batch)
        if batch.failed_starts >= START_ATTEMPTS and not any(worker.is_ready for worker in self._workers):
            batch.fail_rest()
            for worker in list(self._workers):
                self._dismiss(worker)

    def _start_worker(self, batch: "_Batch") -> None:
        try:
            worker = _Worker(self._greeting, self._options, self._cwd, self._startup_s)
        except OSError as error:  # no more processes, memory or files
            return batch.note_failed_start(f"a scoring worker cannot be started: {error}")
        self._workers.append(worker)
        for fd in worker.fds:
            self._by_fd[fd] = worker
            self._poller.register(fd, select.POLLIN)

    def _dismiss(self, worker: "_Worker") -> None:
        for fd in worker.fds:
            self._forget(fd)
        self._workers.remove(worker)
        self._leaving.append(worker)
        worker.leave()

    def _forget(self, fd: int) -> None:
        if self._by_fd.pop(fd, None) is not None:
            self._poller.unregister(fd)

    def _bury(self, *, wait: bool) -> None:
        """Reap the workers that have left."""
        self._leaving = [worker for worker in self._leaving if not worker.is_gone(wait=wait or worker.was_killed)]

    def _await_events(self, batch: "_Batch") -> None:
        """Until a worker says something or is late, and what follows from it."""
        for worker in self._workers:
            if worker.hung_up:
                self._forget(worker.fds[0])  # its end would wake us all the time
            elif worker.wants_pollout():
                self._poller.modify(worker.fds[0], select.POLLIN | (select.POLLOUT if worker.outgoing else 0))
        wait_s = min(worker.deadline for worker in self._workers) - time.monotonic() if self._workers else 0.0
        wait_ms = None if wait_s == math.inf else math.ceil(max(wait_s, 0.0) * 1000)
        events = self._poller.poll(wait_ms)
        for fd, event in events:
            if (worker := self._by_fd.get(fd)) is not None:  # else it was dismissed a moment ago
                if event & select.POLLOUT:
                    worker.flush()
                self._attend(worker, batch)
        now = time.monotonic()
        for worker in [worker for worker in self._workers if worker.deadline <= now]:
            if worker in self._workers:  # a failed start dismisses all that are starting
                self._attend(worker, batch)  # it may have answered while this process was held up
            if worker in self._workers and worker.deadline <= now:
                self._replace(worker, batch, worker.lateness(self._timeout_s))

    def _attend(self, worker: "_Worker", batch: "_Batch") -> None:
        """Take what it has to say."""
        for message in worker.receive():
            if "i" in message:
                self._take_answer(worker, batch, message)
            elif "ready" in message:
                batch.failed_starts = 0
            elif "unloadable" in message:
                batch.note_failed_start(message["unloadable"], message["traceback"], again=False)
                return self._dismiss(worker)
            if worker not in self._workers:
                return
        if worker.lost:
            self._replace(worker, batch, worker.lost)

    def _take_answer(self, worker: "_Worker", batch: "_Batch", message: dict[str, Any]) -> None:
        """A message about a sample, which `receive` has found to be in order."""
        if message.get("waiting"):
            worker.awaited.add(message["i"])
        else:
            del worker.chunk[message["i"]]
            outcome = message["error"] if "error" in message else Score(message["values"], message["prediction"])
            batch.settle(message["i"], outcome)
        worker.set_deadline(self._timeout_s)
        if message.get("last"):
            batch.give_back(list(worker.chunk))
            worker.chunk.clear()
            self._dismiss(worker)
        elif not worker.chunk and time.monotonic() - worker.swept_at > SWEEP_EVERY_S:
            worker.ask_to_sweep()

    def _replace(self, worker: "_Worker", batch: "_Batch", reason: str) -> None:
        """Dismiss a worker that is late, dead or talks rubbish; fail the sample it was at, give back the others."""
        self._dismiss(worker)
        self._bury(wait=False)
        if not worker.is_ready:
            return batch.note_failed_start(reason, again=bool(worker.lost))  # not if it was late: that takes minutes
        left = list(worker.chunk)
        # Calls are made in order, and the event loop runs after the last of them.
        at = next((i for i in left if i not in worker.awaited), left[0] if len(left) == 1 else None)
        if at is not None and worker.was_killed and at not in batch.tried_again:
            batch.tried_again.add(at)  # by a call before it, or from outside; a call that does it will do it again
            batch.give_back(left)
        elif at is not None:
            batch.settle(at, reason)
            batch.give_back([i for i in left if i != at])
        else:  # any of the open calls; so half of them at a time
            batch.give_back(left[len(left) // 2 :])
            batch.give_back(left[: len(left) // 2])

    def _to_scores(self, batch: "_Batch") -> list[Score]:
        failures = [outcome for outcome in batch.outcomes if isinstance(outcome, str)]
        if failures:
            first = failures[0]
            details = "the first failure:\n" + first if first not in _said else "the first failure was logged before"
            _said.add(first)
            log.warning(
                "the reward function failed on %d of %d samples, which get the score %g; %s",
                len(failures),
                len(batch.outcomes),
                self._failure_score,
                details,
            )
        return [
            Score({"score": self._failure_score, "failed": 1.0})
            if isinstance(outcome, str)
            else Score({**outcome.values, "failed": 0.0}, outcome.prediction)
            for outcome in batch.outcomes
        ]


class _Batch:
    """The samples of one call of `score`, by index: what is to do, and what came of it."""

    def __init__(self, num_samples: int):
        self.outcomes: list[Score | str | None] = [None] * num_samples
        """A score, or why there is none."""
        self.unfinished = num_samples
        self.failed_starts = 0
        """Workers that have died, one after the other, before they were ready; START_ATTEMPTS if it is no use to try again."""
        self.start_failure = ""
        """Why the last of them did, in a sentence."""
        self._start_details = ""
        self.tried_again: set[int] = set()
        """Samples that a worker had when it was killed, not necessarily by their call."""
        self._next = 0
        self._given_back: deque[list[int]] = deque()

    @property
    def has_work(self) -> bool:
        return self._next < len(self.outcomes) or bool(self._given_back)

    def take(self, num_workers: int, is_async: bool) -> list[int]:
        """The next chunk. Small towards the end, so that no worker sits on slow samples while others are idle (guided
        self-scheduling, Polychronopoulos and Kuck 1987); of async calls as many at a time as there may be."""
        if self._given_back:
            return self._given_back.popleft()
        share = math.ceil((len(self.outcomes) - self._next) / (num_workers * (1 if is_async else 4)))
        start, self._next = self._next, min(self._next + min(share, CHUNK_SAMPLES), len(self.outcomes))
        return list(range(start, self._next))

    def give_back(self, indices: list[int]) -> None:
        if indices:
            self._given_back.appendleft(indices)

    def settle(self, index: int, outcome: Score | str) -> None:
        self.outcomes[index] = outcome
        self.unfinished -= 1

    def note_failed_start(self, sentence: str, details: str = "", *, again: bool = True) -> None:
        self.start_failure, self._start_details = sentence, details or sentence
        self.failed_starts = self.failed_starts + 1 if again else START_ATTEMPTS

    def fail_rest(self) -> None:
        """All that no worker has, because no worker starts."""
        while self.has_work:
            for index in self.take(1, is_async=True):
                self.settle(index, self._start_details)


class _Worker:
    """The pool's end of a worker process."""

    def __init__(self, greeting: bytes, options: Mapping[str, Any], cwd: str, startup_s: float):
        """Raises OSError if the process cannot be started."""
        self._work, work_end = socket.socketpair()
        self._life, life_end = socket.socketpair()
        self._mark = uuid.uuid4().hex
        options = {**options, "work": work_end.fileno(), "life": life_end.fileno(), "parent": os.getpid()}
        try:
            self._process = subprocess.Popen(
                # -P: the directory of the run may hold a random.py. The path of this process is set once ours are imported.
                [sys.executable, "-P", "-m", "rl.rewards.worker", json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(work_end.fileno(), life_end.fileno()),
                start_new_session=True,  # no signals of the terminal, none that the launcher sends to our group
                cwd=cwd,
                env=_environment(self._mark),
            )
        except OSError:
            self._work.close()
            self._life.close()
            raise
        finally:
            work_end.close()
            life_end.close()
        for ours in (self._work, self._life):
            ours.setblocking(False)
        self.fds = (self._work.fileno(), self._life.fileno())
        self.outgoing = memoryview(greeting)
        self._polls_out = False
        self._incoming, self._news = bytearray(), bytearray()
        self.chunk: dict[int, None] = {}
        """Indices of the samples it has not answered, in order."""
        self.awaited: set[int] = set()
        """Those of them that are called and awaited."""
        self.is_ready, self.is_async = False, False
        self.lost: str | None = None
        """Why it is of no use any more."""
        self.was_killed = False
        """Its supervisor is gone without a word: killed, which a call does not do by accident."""
        self.hung_up = False
        """The scorer's end is closed; why, its supervisor will say."""
        self._sweeping = False
        self.swept_at = self._left_at = time.monotonic()
        self.deadline = time.monotonic() + startup_s
        self._startup_s = startup_s
        self.flush()

    @property
    def is_free(self) -> bool:
        return self.is_ready and not self.chunk and not self._sweeping and not self.hung_up

    def assign(self, indices: list[int], samples: Sequence[Mapping[str, Any]], timeout_s: float) -> None:
        self.chunk, self.awaited = dict.fromkeys(indices), set()
        self.outgoing = memoryview(pickle.dumps([(i, dict(samples[i])) for i in indices]))
        self.set_deadline(timeout_s)
        self.flush()

    def set_deadline(self, timeout_s: float) -> None:
        """Of the next answer."""
        if not self.chunk:
            self.deadline = math.inf
        elif len(self.awaited) < len(self.chunk):
            self.deadline = time.monotonic() + timeout_s
        else:
            self.deadline = time.monotonic() + timeout_s + ASYNC_GRACE_S

    def lateness(self, timeout_s: float) -> str:
        """What it means that the deadline is over."""
        if self.hung_up:
            return "the call closed the connection of its process"
        if not self.is_ready:
            return f"a scoring worker was not ready within {self._startup_s:g} s: the import of the reward function takes longer"
        return too_slow(timeout_s) + ", and its process was killed"

    def ask_to_sweep(self) -> None:
        """Have the strays killed that finished calls have left; it is not free until that is done."""
        if self.is_ready and not self._sweeping:
            self._sweeping, self.deadline = True, time.monotonic() + KILLING_S
            with contextlib.suppress(OSError):  # its end is in the news
                self._life.send(SWEEP)

    def flush(self) -> None:
        """Send as much as there is room for."""
        try:
            while self.outgoing:
                self.outgoing = self.outgoing[self._work.send(self.outgoing) :]
        except BlockingIOError:
            pass
        except OSError:
            self.outgoing = memoryview(b"")  # its end is in the news

    def wants_pollout(self) -> bool:
        """Whether waiting for room to send must be turned on or off."""
        changed = self._polls_out != bool(self.outgoing)
        self._polls_out = bool(self.outgoing)
        return changed

    def receive(self) -> Iterator[dict[str, Any]]:
        """The messages from the scorer up to the first that is not valid. Sets `lost` after them at that or at the worker's end.

        What a message says must be noted before the next is taken: it decides what is valid then.
        """
        # The supervisor's news first: what the scorer has answered before its end is then there to be read.
        self.was_killed = _read(self._life, self._news)
        ended = "the scoring worker was killed" if self.was_killed else None
        for line in _lines(self._news):
            message = json.loads(line)
            if "swept" in message:
                self._sweeping, self.swept_at, self.deadline = False, time.monotonic(), math.inf
            else:
                ended, self.was_killed = f"the call ended its process: {message['ended']}", False
        closed = _read(self._work, self._incoming, to_the_end=ended is not None)
        for line in _lines(self._incoming):
            message = self._validated(line)
            if message is None:
                self.lost = f"the scoring process wrote something that is no answer: {line[:80]!r}"
                return
            yield message
        if len(self._incoming) > MAX_LINE_BYTES:
            self.lost = "the scoring process wrote something that is no answer, and does not end"
        elif ended is not None:
            self.lost = ended
        elif closed and not self.hung_up:
            self.hung_up, self.deadline = True, min(self.deadline, time.monotonic() + ENDED_WITHIN_S)

    def _validated(self, line: bytes) -> dict[str, Any] | None:
        """A message of the scorer; None if it is none, for what runs there can write anything."""
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(message, dict):
            return None
        if not self.is_ready:
            if isinstance(message.get("ready"), bool):
                self.is_ready, self.is_async, self.deadline = True, message["ready"], math.inf
                return message
            return message if all(isinstance(message.get(key), str) for key in ("unloadable", "traceback")) else None
        index = message.get("i")
        if type(index) is not int or index not in self.chunk:
            return None
        if isinstance(message.get("error"), str):
            return message
        if message.get("waiting") is True:
            return message if index not in self.awaited else None
        values, prediction = message.get("values"), message.get("prediction")
        if not isinstance(values, dict) or "score" not in values or not (prediction is None or isinstance(prediction, str)):
            return None
        finite = all(type(value) is float and math.isfinite(value) for value in values.values())
        return message if finite and all(map(str.isprintable, values)) else None

    def leave(self) -> None:
        """Have it kill all it started and end. Not `close` alone: a fork of this process may hold a copy of the socket."""
        self._left_at = time.monotonic()
        self._process.send_signal(signal.SIGCONT)  # it may have been stopped from below
        for ours in (self._life, self._work):
            with contextlib.suppress(OSError):  # the other end is gone
                ours.shutdown(socket.SHUT_RDWR)
            ours.close()

    def is_gone(self, *, wait: bool) -> bool:
        """Whether it has ended; waits for it if asked to. Kills what is left when it did not clear up after itself."""
        patience = self._left_at + KILLING_S + 5.0 - time.monotonic()
        if wait and patience > 0:
            try:
                self._process.wait(patience)
            except subprocess.TimeoutExpired:
                patience = 0.0
        if self._process.poll() is None:
            if patience > 0:
                return False
            self._process.kill()
            self._process.wait()
        if self._process.returncode != 0:
            kill_marked(self._mark)
        return True


def _environment(mark: str) -> dict[str, str]:
    """Of a worker: it finds this package, is known by its mark, and is one core's worth of a process. OpenBLAS reserves
    address space for each of its threads, and would hit the limit on a host with many cores."""
    root = str(Path(__file__).resolve().parents[2])
    python_path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
    return {**os.environ, **threads, "PYTHONPATH": python_path, MARK: mark}


def _read(source: socket.socket, into: bytearray, *, to_the_end: bool = False) -> bool:
    """Append what is there, 256 KiB of it unless all is wanted; whether the other end is closed."""
    while True:
        try:
            data = source.recv(1 << 18)
        except BlockingIOError:
            return False
        except OSError:
            return True
        if not data:
            return True
        into += data
        if not to_the_end or len(into) > 2 * MAX_LINE_BYTES:
            return False


def _lines(buffer: bytearray) -> list[bytes]:
    """Take the complete lines out of the buffer."""
    end = buffer.rfind(b"\n") + 1
    lines = bytes(buffer[:end]).split(b"\n")[:-1]
    del buffer[:end]
    return lines
