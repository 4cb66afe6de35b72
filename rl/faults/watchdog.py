"""The watch over this rank: a thread that writes heartbeats, holds phases to their limits, and ends the process when a rank has
failed; and the way in which the main flow reports an error.

Ends are agreed through `rl.faults.fault_board`: the first fault is said once, with the rank that is its cause, and every rank leaves
with exit code 1 within seconds, whatever collective its main flow waits in. `docs/faults.md` lists what a run then leaves behind.
"""

import contextlib
import faulthandler
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from rl.config.limits import Memory, Watchdog
from rl.faults import diagnosis
from rl.faults.fault_board import Disagreement, Fault, FaultBoard, is_echo
from rl.faults.heartbeat import Heart, read_beats
from rl.faults.lock import RunLock
from rl.faults.phase_tracker import Place, Whereabouts
from rl.faults.process import GIB, resident_bytes
from rl.run_directory.status import Status
from rl.runtime.device import Device

POLL_S = 0.5
"""Between two looks of the thread."""

ACK_S = 7.5
"""So long the rank that found an overrun waits for the other ranks' stacks: above `place.BACKSTOP_S`, so that those of a rank
whose interpreter lock is held are there too."""

VERDICT_S = 2.0
"""Time in which the rank that found an overrun reads heartbeats and reports the guilty rank, in seconds."""

CAUSE_S = 4.0
"""So long a rank that met a closed connection waits for the rank which is the cause to say so itself."""

LINGER_S = 1.0
"""So much later than the culprit the other ranks end: launchers report the rank that ended first."""

LEAVING_S = 30.0
"""So long the main flow may take to leave after an error; then the thread ends the process."""

STACKS, ERRORS = "stacks", "errors"


class Watch:
    """Started before the models are built; `close` at the end of the run, `fail` for an error of the main flow.

    Args:
        watchdog, memory: sections of the configuration.
        run_dir: exists, and is shared by all ranks.
        store: that of the default process group.
        lock: of run_dir, on rank 0; released when this process ends.
        status: of this start, in which the cause of the run's end is written.
    """

    def __init__(
        self,
        watchdog: Watchdog,
        memory: Memory,
        *,
        run_dir: str,
        device: Device,
        store: dist.Store,
        lock: RunLock | None,
        status: Status,
    ):
        self.status = status
        self.config, self.memory, self.run_dir, self.device, self.lock = (
            watchdog,
            memory,
            run_dir,
            device,
            lock,
        )
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        for name in (STACKS, ERRORS):
            Path(run_dir, name).mkdir(exist_ok=True)
        self._native = Path(run_dir, STACKS, f"native_rank_{self.rank}.txt")
        self._native_file = self._native.open("w")
        self.where = Whereabouts(watchdog.limits, self._native_file)
        self._heart = Heart(run_dir, self.rank, self.where)
        self._board = FaultBoard(store)
        self._stop = threading.Event()
        self._failing = threading.Event()
        self._speaking = threading.Lock()
        self._said = self._acknowledged = False
        self._heart.beat()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and unlock the run directory. Every rank is about to leave."""
        self._stop.set()
        self._thread.join()
        self.where.close()
        self._unlock()
        self._native_file.close()
        if not self._native.stat().st_size:
            self._native.unlink()

    def _unlock(self) -> None:
        if self.lock is not None:
            self.lock.release()

    def _exit(self) -> NoReturn:
        """End the process from the thread, whatever the main flow waits for."""
        self._unlock()
        os._exit(1)

    # The thread -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            next_beat, next_round = 0.0, time.monotonic() + self.config.lost_s
            while not self._stop.wait(POLL_S):
                now = time.monotonic()
                if now >= next_beat:
                    self._beat()
                    next_beat = now + self.config.beat_s
                self._look()
                if self.rank == 0 and now >= next_round:
                    self._look_for_lost_ranks()
                    next_round = now + self.config.lost_s / 4
        except dist.DistError as error:
            self._end_without_store(error)
        except Exception as error:
            # A thread that dies leaves a run unwatched: it would find its first hang too late.
            said = f"the watchdog of rank {self.rank} ({platform.node()}) failed: {error!r}"
            print(f"error: {said}", file=sys.stderr, flush=True)
            self.status.fail(said)
            self._exit()

    def _beat(self) -> None:
        try:
            self._heart.beat()
        except OSError as error:  # a full disk must not end a run that does not need it
            print(
                f"warning: rank {self.rank} cannot write its heartbeat: {error}", file=sys.stderr, flush=True
            )

    def _look(self) -> None:
        fault = self._board.first()
        if fault is not None:
            self._follow(fault)
        elif (place := self.where.place).seconds > place.limit_s:
            self._end_for_overrun(place)
        elif self.memory.host_limit_gib and resident_bytes() > self.memory.host_limit_gib * GIB:
            self._end_for_memory()

    def _look_for_lost_ranks(self) -> None:
        beats = read_beats(self.run_dir, self.world_size)
        if lost := diagnosis.lost_ranks(beats, time.time(), self.config.lost_s):
            fault = Fault("lost", self.rank, self._lost(lost, beats))
            self._follow(self._board.claim(fault))

    def _follow(self, fault: Fault) -> None:
        """End this process for a fault on the board."""
        if self._failing.is_set():
            # The main flow has an error of its own and is on its way out; not for ever, though.
            self._stop.wait(LEAVING_S)
        elif fault.kind == "overrun":
            self._dump_stacks()
            self._acknowledge()
            self._wait_until(self._board.is_closed, ACK_S + VERDICT_S)
            self.status.fail(fault.said)
        else:
            self._say_elsewhere(fault)
            if fault.rank == self.rank:
                self.status.fail(fault.said)
            self._acknowledge()
            self._wait_until(self._all_know, ACK_S)
            self.status.fail(fault.said)  # the rank that found the fault may have ended before it wrote this
            if fault.rank != self.rank:
                time.sleep(LINGER_S)  # not to wait for anything: to be later than the culprit
        self._exit()

    def _end_for_overrun(self, place: Place) -> None:
        self._dump_stacks()
        fault = Fault(
            "overrun",
            self.rank,
            f"{place.words} took longer than watchdog.limits.{place.phase}={place.limit_s:g} s",
        )
        first = self._board.claim(fault)
        if first != fault:
            return self._follow(first)
        self._wait_until(lambda: self._board.acknowledged() >= self.world_size - 1, ACK_S)
        self._beat()
        beats, now = read_beats(self.run_dir, self.world_size), time.time()
        silent_s = ACK_S + 2  # who can has written one since this overrun was found
        verdict = diagnosis.judge(beats, now, silent_s)
        summary = diagnosis.summary(beats, verdict, now, silent_s)
        said = f"{fault.said}: {summary}; stacks in {self._path(STACKS)}"
        self._say(said)
        self.status.fail(said)
        self._board.close_case()
        time.sleep(
            LINGER_S
        )  # not to wait for anything: the store may end with this process, and others still ask it
        self._exit()

    def _end_for_memory(self) -> None:
        used, beat = resident_bytes() / GIB, self._heart.now()
        said = (
            f"rank {self.rank} ({beat.process.host}) holds {used:.2f} GiB of host memory, more than memory.host_limit_gib="
            f"{self.memory.host_limit_gib:g}, in {beat.place}; raise it if the host has more, or keep less there "
            "(refit.buffer_mib, rollout.cpu_kv_cache_mib, data)"
        )
        self._dump_stacks()
        self._follow(self._board.claim(Fault("memory", self.rank, said)))

    def _end_without_store(self, error: Exception) -> None:
        """The process that holds the store has gone: rank 0, or torchrun's agent. At the end of a run that is as it should be."""
        if self._failing.is_set() or self._stop.wait(CAUSE_S):
            return
        beats = read_beats(self.run_dir, self.world_size)
        lost = [rank for rank, beat in enumerate(beats) if beat is not None and beat.process.is_gone()]
        gone = f"the store that ranks meet in has gone, with rank 0 or torchrun's agent: {_line(error)}"
        said = self._lost(lost, beats) if lost else gone
        if self.rank == min(set(range(self.world_size)) - set(lost)):
            self._say(said)
        self.status.fail(said)
        self._exit()

    def _dump_stacks(self) -> None:
        """The Python stacks of all threads into a file of this rank, and its last collectives into another."""
        self.where.close()  # this thread runs, so the one that needs no interpreter lock must not end the process meanwhile
        try:
            self._write_stacks(self.where.place)
        except OSError as error:
            print(f"warning: rank {self.rank} cannot write its stacks: {error}", file=sys.stderr, flush=True)
        self._beat()

    def _write_stacks(self, place: Place) -> None:
        name = f"step_{place.step}_rank_{self.rank}"
        with Path(self._path(STACKS), f"{name}.txt").open("w") as file:
            file.write(f"rank {self.rank}: {place.words} for {place.seconds:.0f} s\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        record = c10d._dump_nccl_trace_json() if self.device.is_cuda else c10d._dump_fr_trace_json()
        Path(self._path(STACKS), f"{name}_collectives.json").write_bytes(record)

    # Errors of the main flow ------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Report an error that ends this rank, and wait until every rank knows of it. If another rank's fault was first, this
        one is only written down. The caller then leaves with exit code 1."""
        self._failing.set()
        self.where.close()  # the main flow is here now, and ends by itself
        place, who = self.where.place, f"rank {self.rank} ({platform.node()})"
        file = Path(self._path(ERRORS), f"rank_{self.rank}.txt")
        trace = "".join(traceback.format_exception(error))
        try:
            file.write_text(f"{who} in {place.words}\n{trace}")
            where = f"see {file}"
        except OSError as full:  # which may be what the error is about
            where = f"its traceback cannot be written: {full}"
        self._beat()
        failed = "all ranks stopped" if isinstance(error, Disagreement) else f"{who} failed"
        try:
            self._report(error, trace, f"{failed} in {place.words}: {_line(error)}; {where}")
        except dist.DistError as gone:
            self._failing.clear()
            self._end_without_store(gone)

    def _report(self, error: BaseException, trace: str, line: str) -> None:
        first = self._wait_for_cause() if is_echo(error) else None
        if first is None:
            mine = Fault("error", self.rank, line)
            if is_echo(error) and (lost := self._wait_for_lost_ranks()):
                mine = Fault(
                    "lost",
                    self.rank,
                    f"{self._lost(lost, read_beats(self.run_dir, self.world_size))} Found by {line}",
                )
            first = self._board.claim(mine)
            if first == mine and mine.kind == "error":
                print(trace, end="", file=sys.stderr)
            if first == mine:
                self._say(mine.said)
                self.status.fail(mine.said)
        if first.rank != self.rank:
            self._say_elsewhere(first)
        self._acknowledge()
        if first.kind == "overrun":
            self._wait_until(self._board.is_closed, ACK_S + VERDICT_S)
        else:
            self._wait_until(self._all_know, ACK_S)
        self.status.fail(first.said)  # the rank that found the fault may have ended before it wrote this
        self._unlock()
        if first.rank != self.rank:
            time.sleep(LINGER_S)  # not to wait for anything: to be later than the culprit

    def _wait_for_cause(self) -> Fault | None:
        """The first fault, if there is one within CAUSE_S."""
        self._wait_until(lambda: self._board.first() is not None, CAUSE_S)
        return self._board.first()

    def _wait_for_lost_ranks(self) -> list[int]:
        """Ranks whose process has ended or, on other hosts, whose heartbeat stays away."""
        silent_s = 3 * self.config.beat_s + 2

        def lost() -> list[int]:
            return diagnosis.lost_ranks(read_beats(self.run_dir, self.world_size), time.time(), silent_s)

        self._wait_until(lambda: bool(lost() or self._board.first()), silent_s)
        return lost()

    # Words ------------------------------------------------------------------------------------------------------------

    def _lost(self, ranks: list[int], beats: list) -> str:
        now = time.time()
        last = [
            f"rank {r} ({b.process.host}), last heartbeat {now - b.time:.0f} s ago in {b.place}"
            for r in ranks
            if (b := beats[r])
        ]
        return f"lost {'; '.join(last[:4])}: killed from outside (out of memory, node failure, a signal), or it crashed."

    def _say(self, text: str) -> None:
        """On stderr, once: the thread and the main flow may both come to it."""
        with self._speaking:
            if not self._said:
                self._said = True
                print(f"error: {text}", file=sys.stderr, flush=True)

    def _say_elsewhere(self, fault: Fault) -> None:
        """The log of a run is rank 0's, and where ranks have logs of their own the culprit's may be hard to find."""
        if self.rank == 0 or fault.rank == self.rank:
            self._say(fault.said)

    def _path(self, name: str) -> str:
        return str(Path(self.run_dir, name))

    # Waiting ----------------------------------------------------------------------------------------------------------

    def _all_know(self) -> bool:
        return self._board.acknowledged() >= self.world_size

    def _acknowledge(self) -> None:
        with self._speaking:
            if not self._acknowledged:
                self._acknowledged = True
                self._board.acknowledge()

    def _wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Until the condition holds, for at most so long, or until the store has gone: then nobody is left to wait for."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(dist.DistError):
            while not condition() and time.monotonic() < deadline:
                time.sleep(0.05)


def _line(error: BaseException) -> str:
    """Type and first line of its message."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
