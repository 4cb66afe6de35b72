"""The watchdog: a thread that writes heartbeats, applies time limits, and ends the process after a fault.

It also reports an error of the main thread. The first fault of a run is reported once, with the rank that
caused it (`rl.faults.fault_board`). Every rank then exits with code 1 within seconds, whatever collective its
main thread waits in. docs/faults.md lists the files that remain.
"""

import contextlib
import faulthandler
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Container
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from rl.config.functions import UsersError
from rl.config.limits import Memory, WatchdogConfig
from rl.faults.diagnosis import diagnose, last_heartbeat, lost_ranks, reports_loss_of_store, summarize
from rl.faults.fault_board import Disagreement, Fault, FaultBoard, may_be_secondary
from rl.faults.heartbeat import Heartbeat, HeartbeatReader, HeartbeatWriter
from rl.faults.lock import LockLost, RunLock, loss_of
from rl.faults.phase_tracker import PhaseEntry, PhaseTracker
from rl.faults.process import GIB, resident_bytes
from rl.run_directory.status import Status
from rl.runtime.device import Device
from rl.runtime.job_store import JobStore, StoreError, look_s
from rl.runtime.torchrun_summary import show_in_summary

if TYPE_CHECKING:  # a run that requires all replicas does not import it
    from rl.runtime.excluded_replicas import ExcludedReplicas

POLL_S = 0.5
"""Interval of the thread's checks, in seconds."""

ACK_S = 7.5
"""Maximum wait for the other ranks' stacks after an overrun, in seconds.

It exceeds `phase_tracker.BACKSTOP_S`. So it includes the time that the backstop needs to write the stacks of
a rank whose interpreter lock is held.
"""

DIAGNOSIS_S = 2.0
"""Seconds for the rank that found an overrun to read heartbeats and report the rank at fault."""

CAUSE_S = 4.0
"""Maximum time in seconds that a rank with a closed connection waits for another rank to report the cause."""

LINGER_S = 1.0
"""Delay of the exit of the other ranks, in seconds. Launchers report the rank that exits first, so the rank
at fault must be first."""

EXIT_S = 30.0
"""Maximum time for the main thread to exit after an error, in seconds. After it the watchdog ends the
process."""

REFUSED_EXIT = 2
"""Exit code of a run with invalid input, for example an unknown key."""

STACKS, ERRORS = "stacks", "errors"


class Watchdog:
    """The watchdog of one rank, which runs from construction to `close`.

    Args:
        config, memory: sections of the configuration.
        run_dir: an existing directory, shared by all ranks.
        store: store of the default process group.
        lock: lock of run_dir, on rank 0; released when this process ends.
        status: status of this start, which receives the cause of the run's end.
    """

    def __init__(
        self,
        config: WatchdogConfig,
        memory: Memory,
        *,
        run_dir: str,
        device: Device,
        store: JobStore,
        lock: RunLock | None,
        status: Status,
    ):
        self.config, self.memory, self.device = config, memory, device
        self.lock, self.status = lock, status
        self.locks_of_points: list[RunLock] = []
        """Locks of the directories of a sweep's points, released with `lock`."""
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._run_dir, self._host = run_dir, platform.node()
        for name in (STACKS, ERRORS):
            Path(run_dir, name).mkdir(exist_ok=True)
        self._native = Path(run_dir, STACKS, f"native_rank_{self.rank}.txt")
        self._native.unlink(missing_ok=True)  # a run that was taken over may have it open
        self._native_file = self._native.open("w")
        self.tracker = PhaseTracker(config.limits, self._native_file)
        self._writer = HeartbeatWriter(run_dir, self.rank, self.tracker)
        self._reader = HeartbeatReader(run_dir, self.world_size)
        self._board = FaultBoard(store)
        self.excluded: ExcludedReplicas | None = None
        """Replicas that are left out of the run; None if all must live."""
        self._excluded_ranks: set[int] = set()
        self._stop = threading.Event()
        self._failing = threading.Event()
        self._once = threading.Lock()
        self._reported = self._acknowledged = False
        self._next_look = 0.0
        self._writer.write()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and unlock the run directory. Every rank calls it at the end of the run."""
        self._stop.set()
        self._thread.join()
        self.tracker.close()
        self._unlock()
        self._native_file.close()
        if not self.status.is_taken_over() and not self._native.stat().st_size:
            self._native.unlink()

    def _unlock(self) -> None:
        for lock in (*self.locks_of_points, *([] if self.lock is None else [self.lock])):
            lock.release()

    def _exit(self, code: int = 1) -> NoReturn:
        """End the process from the thread, whatever the main thread waits for."""
        self._unlock()
        os._exit(code)

    # The thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            next_heartbeat = next_search = 0.0
            first_verdict = time.monotonic() + self.config.lost_s
            while not self._stop.wait(POLL_S):
                now = time.monotonic()
                searches = now >= next_search
                if (now >= next_heartbeat or searches) and self.status.is_taken_over():
                    self._end_for(self._board.post(Fault("error", self.rank, self._loss)))
                if now >= next_heartbeat:
                    self._write_heartbeat()
                    next_heartbeat = now + self.config.beat_s
                self._check()
                if searches:
                    self._find_lost_ranks(decides=now >= first_verdict)
                    next_search = now + self.config.lost_s / 4
        except StoreError as error:
            self._end_without_store(error)
        except Exception as error:
            # The run must end: without this thread it would have no limits, and a hang would go unnoticed.
            message = f"the watchdog of rank {self.rank} ({self._host}) failed: {error!r}"
            self._report(message)
            self.status.fail(message)
            self._exit()

    @property
    def _loss(self) -> str:
        return loss_of(Path(self._run_dir))

    def _write_heartbeat(self) -> None:
        if self.status.is_taken_over():  # the files belong to another run
            return
        try:
            self._writer.write()
        except OSError as error:  # a full disk must not end a run that does not need it
            self._warn(f"rank {self.rank} cannot write its heartbeat: {error}")

    def _check(self) -> None:
        fault, now = None, time.monotonic()
        if now >= self._next_look:
            self._next_look = now + look_s(self.world_size)
            if self.excluded is not None:
                self._excluded_ranks = self.excluded.excluded_ranks()
            fault = self._board.first()
        if fault is not None:
            self._end_for(fault)
        elif self.rank in self._excluded_ranks:
            self._report(f"rank {self.rank} ({self._host}) ends, because the run goes on without its replica")
            self._exit()
        elif (entry := self.tracker.current).seconds > entry.limit_s:
            self._end_for_overrun(entry)
        elif self.memory.host_limit_gib and resident_bytes() > self.memory.host_limit_gib * GIB:
            self._end_for_memory()

    def _find_lost_ranks(self, *, decides: bool) -> None:
        """Read all heartbeats, and end the run if a rank is lost. Ages count from the first reading.

        Rank 0 watches all other ranks, and they watch rank 0.
        """
        heartbeats = self._heartbeats(None if self.rank == 0 else (0,))
        if not decides or not (lost := lost_ranks(heartbeats, self.config.lost_s)):
            return
        message = _lost_message(lost, heartbeats)
        if self.excluded is not None and (replicas := self.excluded.exclude(lost)):
            names = ", ".join(map(str, replicas))
            self._warn(
                f"{message} The run goes on without replica {names} until its next start; "
                f"roles.min_replicas={self.excluded.minimum}"
            )
            return
        self._end_for(self._board.post(Fault("lost", self.rank, message)))

    def _end_for(self, fault: Fault) -> None:
        """End this process because of the first fault of the run."""
        if self._failing.is_set():
            # The main thread reports an error of its own and is about to exit.
            self._stop.wait(EXIT_S)
        elif fault.kind == "overrun":
            self._dump_stacks()
            self._acknowledge()
            self._wait_until(self._board.is_reported, ACK_S + DIAGNOSIS_S)
            self.status.fail(fault.message)
        elif fault.kind == "refused":
            self._end_refused(fault)
            self._exit(REFUSED_EXIT)
        else:
            if self.rank in (0, fault.rank):  # the run's log is rank 0's
                self._report(fault.message)
            if fault.rank == self.rank:
                self.status.fail(fault.message)
            self._acknowledge()
            self._wait_until(self._all_acknowledged, ACK_S)
            # The rank that found the fault may have ended before it wrote this.
            self.status.fail(fault.message)
            if fault.rank != self.rank:
                time.sleep(LINGER_S)  # a fixed delay, so that the rank at fault exits first
        self._exit()

    def _end_for_overrun(self, entry: PhaseEntry) -> None:
        self._dump_stacks()
        limit = f"watchdog.limits.{entry.phase}={entry.limit_s:g} s"
        fault = Fault("overrun", self.rank, f"{entry.label} took longer than {limit}")
        # All ranks may find it at once, and must not all read all heartbeats.
        if self._board.claim():
            self._heartbeats()
        else:
            self._wait_until(lambda: self._board.first() is not None, ACK_S)
        first = self._board.post(fault)
        if first != fault:
            return self._end_for(first)
        self._wait_until(lambda: self._board.num_acknowledged() >= self._num_present - 1, ACK_S)
        self._write_heartbeat()
        heartbeats = self._heartbeats()
        silent_s = ACK_S / 2  # ranks have written a heartbeat since the overrun, if they are able to
        summary = summarize(heartbeats, diagnose(heartbeats, silent_s), silent_s)
        message = f"{fault.message}: {summary}; stacks in {Path(self._run_dir, STACKS)}"
        self._report(message)
        self.status.fail(message)
        self._board.mark_reported()
        time.sleep(LINGER_S)  # a fixed delay: this process may hold the store, which other ranks still read
        self._exit()

    def _end_for_memory(self) -> None:
        used = resident_bytes() / GIB
        message = (
            f"rank {self.rank} ({self._host}) holds {used:.2f} GiB of host memory, more than "
            f"memory.host_limit_gib={self.memory.host_limit_gib:g}, in {self.tracker.current.label}; raise "
            "it if the host has more, or reduce refit.buffer_mib, rollout.cpu_kv_cache_mib or the data"
        )
        self._dump_stacks()
        self._end_for(self._board.post(Fault("memory", self.rank, message)))

    def _end_without_store(self, error: Exception) -> None:
        """End this process because the store's process ended. Does nothing at the end of a run."""
        if self._failing.is_set() or self._stop.wait(CAUSE_S):
            return
        heartbeats = self._heartbeats()
        lost = lost_ranks(heartbeats, self.config.lost_s)  # a frozen node does not answer questions either
        message = (
            "the job's store, a process beside rank 0, was killed from outside (out of memory, node failure, "
            f"a signal), or the network failed: {_first_line(error)}"
        )
        if self.status.is_taken_over():
            message = self._loss
        elif lost:
            message = _lost_message(lost, heartbeats)
        if reports_loss_of_store(self.rank, heartbeats):
            self._report(message)
        self.status.fail(message)
        time.sleep(CAUSE_S)  # a fixed delay: a rank that notices later would report this one as lost
        self._exit()

    def _dump_stacks(self) -> None:
        """Write the Python stacks of all threads and the last collectives into files of this rank."""
        self.tracker.close()  # the interpreter lock is free, so the backstop is not needed
        if self.status.is_taken_over():
            return
        try:
            self._write_stacks(self.tracker.current)
        except OSError as error:
            self._warn(f"rank {self.rank} cannot write its stacks: {error}")
        self._write_heartbeat()

    def _write_stacks(self, entry: PhaseEntry) -> None:
        name = f"step_{entry.step}_rank_{self.rank}"
        with Path(self._run_dir, STACKS, f"{name}.txt").open("w") as file:
            file.write(f"rank {self.rank}: {entry.label} for {entry.seconds:.0f} s{_at()}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        dump = "_dump_nccl_trace_json" if self.device.is_cuda else "_dump_fr_trace_json"
        record = getattr(c10d, dump)()  # by name, because torch's stubs lack both
        Path(self._run_dir, STACKS, f"{name}_collectives.json").write_bytes(record)

    # Errors of the main thread --------------------------------------------------------------------------

    def refuse(self, message: str) -> int:
        """Report invalid input to both roles and return the exit code, with which the caller then exits.

        The other role may be in any phase, so it is ended by its watchdogs.
        """
        self._failing.set()
        self.tracker.close()
        with contextlib.suppress(StoreError):  # another rank has refused, and held the store
            self._end_refused(self._board.post(Fault("refused", self.rank, message)))
        return REFUSED_EXIT

    def _end_refused(self, fault: Fault) -> None:
        if self.rank == 0:
            self._report(fault.message)
            self.status.refuse(fault.message)
        self._acknowledge()
        self._wait_until(self._all_acknowledged, ACK_S)
        self._unlock()

    def fail(self, error: BaseException) -> int:
        """Report an error of the main thread and wait until all ranks know it; return the exit code, with
        which the caller then exits.

        If the fault of another rank was first, the error is only written to the file of this rank.
        """
        self._failing.set()
        self.tracker.close()  # the main thread is running, and exits by itself
        if self.status.is_taken_over():  # and other errors are its consequences
            error = LockLost(self._loss)
        label, rank = self.tracker.current.label, f"rank {self.rank} ({self._host})"
        if isinstance(error, LockLost):
            return self._try_to_share(error, "", str(error))
        file = Path(self._run_dir, ERRORS, f"rank_{self.rank}.txt")
        trace = "".join(traceback.format_exception(error))
        try:
            file.write_text(f"{rank} in {label}{_at()}\n{trace}")
            where = f"see {file}"
        except OSError as full:  # a full disk may be what the error is about
            where = f"its traceback cannot be written: {full}"
        self._write_heartbeat()
        failed = "all ranks stopped" if isinstance(error, Disagreement) else f"{rank} failed"
        reason = _first_line(error).removesuffix(".")
        return self._try_to_share(error, trace, f"{failed} in {label}: {reason}; {where}")

    def _try_to_share(self, error: BaseException, trace: str, message: str) -> int:
        try:
            return self._share(error, trace, message)
        except StoreError as no_store:
            self._failing.clear()
            self._end_without_store(no_store)
        return 1

    def _share(self, error: BaseException, trace: str, message: str) -> int:
        """Post the error unless another fault is first; report the first fault; wait for all ranks.

        Returns the exit code.
        """
        first, is_own = None, False
        if may_be_secondary(error):
            self._wait_until(lambda: self._board.first() is not None, CAUSE_S)
            first = self._board.first()
        if first is None:
            own = Fault("error", self.rank, message)
            if may_be_secondary(error) and (lost := self._wait_for_lost_ranks()):
                if self.excluded is not None and self.excluded.are_one_replica(self.rank, lost):
                    return 1  # rank 0 decides whether the run continues without this replica
                own = Fault(
                    "lost", self.rank, f"{_lost_message(lost, self._heartbeats())} Found by {message}"
                )
            first = self._board.post(own)
            is_own = first == own
        if first.kind == "refused":
            self._end_refused(first)
            return REFUSED_EXIT
        if is_own and first.kind == "error" and not isinstance(error, UsersError):
            print(trace, end="", file=sys.stderr)
        if is_own or (self.rank == 0 and first.rank != 0):  # the run's log is rank 0's
            self._report(first.message)
        if is_own:
            self.status.fail(first.message)
        self._acknowledge()
        if first.kind == "overrun":
            self._wait_until(self._board.is_reported, ACK_S + DIAGNOSIS_S)
        else:
            self._wait_until(self._all_acknowledged, ACK_S)
        self.status.fail(first.message)  # the rank that found the fault may have ended before it wrote this
        self._unlock()
        if first.rank != self.rank:
            time.sleep(LINGER_S)  # a fixed delay, so that the rank at fault exits first
        return 1

    def _wait_for_lost_ranks(self) -> list[int]:
        """Wait for a lost rank or a fault; return ranks that ended or, on other hosts, are silent."""
        silent_s = 3 * self.config.beat_s + 2

        def lost() -> list[int]:
            return lost_ranks(self._heartbeats(), silent_s)

        self._wait_until(lambda: bool(lost() or self._board.first()), silent_s + 1)
        return lost()

    # Helpers --------------------------------------------------------------------------------------------

    def _heartbeats(self, ranks: Container[int] | None = None) -> list[Heartbeat | None]:
        """Return the heartbeats by rank. ranks: ranks to read; None: all."""
        found = enumerate(self._reader.read(ranks))
        return [None if rank in self._excluded_ranks else beat for rank, beat in found]

    def _report(self, message: str) -> None:
        """Print the cause on stderr, once, although the thread and the main thread may both call this."""
        with self._once:
            if not self._reported:
                self._reported = True
                show_in_summary(f"error: {message}")
                print(f"error: {message}", file=sys.stderr, flush=True)

    def _warn(self, text: str) -> None:
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def _acknowledge(self) -> None:
        with self._once:
            if not self._acknowledged:
                self._acknowledged = True
                self._board.acknowledge()

    def _all_acknowledged(self) -> bool:
        return self._board.num_acknowledged() >= self._num_present

    @property
    def _num_present(self) -> int:
        return self.world_size - len(self._excluded_ranks)

    def _wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until the condition holds, the time is over, or the store's process has ended."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(StoreError):
            while not condition() and time.monotonic() < deadline:
                time.sleep(0.05)


def _at() -> str:
    """Return the end of a report's first line: ' at 2026-11-23T04:43:12+00:00'."""
    return f" at {datetime.now(UTC).isoformat(timespec='seconds')}"


def _lost_message(ranks: list[int], heartbeats: list[Heartbeat | None]) -> str:
    last = [last_heartbeat(beat) for rank in ranks if (beat := heartbeats[rank])]
    cause = "killed from outside (out of memory, node failure, a signal), or it crashed."
    return f"lost {'; '.join(last[:4])}: {cause}"


def _first_line(error: BaseException) -> str:
    """Return the error's type and the first line of its message."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
