"""A pool of worker processes: their start with limits, their replacement and their end."""

import math
import os
import pickle
import select
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Self, TypeVar

from rl.workers.process import WorkerProcess

START_ATTEMPTS = 3
"""Number of consecutive workers that may die before they are ready."""

W = TypeVar("W", bound=WorkerProcess)


class Pool(ABC, Generic[W]):
    """Worker processes, started when needed, with one poller. Not thread-safe."""

    module = ""
    """Module that a worker runs as its program."""
    worker_class: type[W]

    def __init__(
        self,
        plan: Any,
        options: dict[str, Any],
        *,
        workers: int,
        memory_mib: int,
        startup_s: float = 120.0,
        variables: Sequence[str] = (),
        interpreter: str = "",
    ):
        """Store the limits; relative paths in the plan are resolved against the present working directory.

        Args:
            plan: what the host loads, a picklable object.
            options: what the host reads.
            workers: maximum number of processes.
            memory_mib: address space of a worker and of each process that it starts; 0 for no limit.
            startup_s: limit of a worker's start, the imports included, in seconds.
            variables: names of environment variables that a worker inherits besides every worker's variables.
            interpreter: Python interpreter of the workers; "" for this process's.
        """
        self.max_workers = workers
        self.all: list[W] = []
        self.poller = select.poll()
        """A pool may register further descriptors, which then end a wait."""
        self.failed_starts = 0
        """Number of consecutive workers that died before they were ready; START_ATTEMPTS for no retry."""
        self.start_failure = self.start_details = ""
        """Reason of the last failed start in a sentence, and with its traceback."""
        # -P: the run directory may hold a random.py. The worker sets sys.path after its own imports.
        self._command = [interpreter or sys.executable, "-P", "-m", self.module]
        self._initialization = pickle.dumps((plan, None if interpreter else list(sys.path)))
        cpus = sorted(os.sched_getaffinity(0))  # an engine may pin this thread before the workers start
        self._options = {"memory_mib": memory_mib, "cpus": cpus, **options}
        self._limits: dict[str, Any] = {"cwd": os.getcwd(), "startup_s": startup_s, "variables": variables}
        self._by_fd: dict[int, W] = {}
        self._leaving: list[W] = []

    @abstractmethod
    def received(self, worker: W, message: dict[str, Any]) -> None:
        """Process a valid message of a worker that is ready. It may dismiss the worker."""

    @abstractmethod
    def gave_up(self, worker: W, reason: str) -> None:
        """Process the loss of a worker, which is dismissed already."""

    @abstractmethod
    def lateness(self, worker: W) -> str:
        """Return why the deadline of a worker that is ready has passed."""

    def heard(self, worker: W, num_messages: int) -> None:
        """Note that the messages of a worker that have come are processed."""

    def check(self) -> Any:
        """Return what `Host.load` returned in a worker; start the first one if there is none.

        Raises ValueError if the plan cannot be loaded.
        """
        while not any(worker.is_ready for worker in self.all):
            if self.failed_starts >= START_ATTEMPTS:
                raise ValueError(self.start_failure)
            if not self.all:
                self.start()
            self.await_events(math.inf if self.all else 0.0)
        return next(worker.ready for worker in self.all if worker.is_ready)

    def start(self) -> W | None:
        """Start a worker; return None, and note the failure, if that is impossible."""
        try:
            worker = self.worker_class(self._command, self._initialization, self._options, **self._limits)
        except OSError as error:  # out of processes, memory or files
            noun = self.worker_class.noun
            self._note_failed_start(f"a worker ({noun}) cannot be started: {error}", retry=True)
            return None
        self.all.append(worker)
        for fd in worker.fds:
            self._by_fd[fd] = worker
            self.poller.register(fd, select.POLLIN)
        return worker

    def dismiss(self, worker: W) -> None:
        """End a worker and every process that it started."""
        for fd in worker.fds:
            self._unregister(fd)
        self.all.remove(worker)
        self._leaving.append(worker)
        worker.shut_down()
        self.reap(wait=False)

    def reap(self, *, wait: bool) -> None:
        """Reap dismissed workers that have ended; `wait` until all have."""
        self._leaving = [w for w in self._leaving if not w.has_ended(wait=wait or w.was_killed)]

    def shutdown(self) -> None:
        """End the workers and every process that they started. New ones are started when needed."""
        for worker in list(self.all):
            self.dismiss(worker)
        self.reap(wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def await_events(self, limit_s: float = math.inf) -> None:
        """Wait for at most `limit_s` until a worker sends a message or is late, and process it."""
        for worker in self.all:
            if worker.is_disconnected:
                self._unregister(worker.fds[0])  # a closed socket would wake the poller all the time
            elif worker.needs_poll_update():
                self.poller.modify(worker.fds[0], select.POLLIN | (select.POLLOUT if worker.outgoing else 0))
        deadline = min((worker.deadline for worker in self.all), default=math.inf)
        wait_s = min(limit_s, max(deadline - time.monotonic(), 0.0))
        for fd, event in self.poller.poll(None if wait_s == math.inf else math.ceil(wait_s * 1000)):
            if (ready := self._by_fd.get(fd)) is not None:  # else it was just dismissed
                if event & select.POLLOUT:
                    ready.flush()
                self.read(ready)
        now = time.monotonic()
        for worker in [worker for worker in self.all if worker.deadline <= now]:
            if worker in self.all:  # a failed start may dismiss all workers that are starting
                self.read(worker)  # it may have answered while this process was suspended
            if worker in self.all and worker.deadline <= now:
                is_late = worker.is_ready and not worker.is_disconnected
                self._give_up(worker, self.lateness(worker) if is_late else worker.describe_timeout())

    def read(self, worker: W) -> None:
        """Process the messages that a worker has sent."""
        num_messages, is_started = 0, worker.is_ready
        for message in worker.receive():
            num_messages += 1
            if is_started:
                self.received(worker, message)
            elif "ready" in message:
                is_started, self.failed_starts = True, 0
            elif "unloadable" in message:
                self._note_failed_start(message["unloadable"], message["traceback"], retry=False)
                self.dismiss(worker)
                self.gave_up(worker, message["unloadable"])
            else:
                self.received(worker, message)
            if worker not in self.all:
                return
        self.heard(worker, num_messages)
        if worker.lost:
            self._give_up(worker, worker.lost)

    def _give_up(self, worker: W, reason: str) -> None:
        """Dismiss a worker that has ended, sent an invalid message or is late."""
        if not worker.is_ready:  # a late start is not repeated, because it takes minutes
            self._note_failed_start(reason, retry=bool(worker.lost))
        self.dismiss(worker)
        self.gave_up(worker, reason)

    def _note_failed_start(self, sentence: str, details: str = "", *, retry: bool) -> None:
        self.start_failure, self.start_details = sentence, details or sentence
        self.failed_starts = self.failed_starts + 1 if retry else START_ATTEMPTS

    def _unregister(self, fd: int) -> None:
        if self._by_fd.pop(fd, None) is not None:
            self.poller.unregister(fd)
