"""The sides of a comparison: programs that compute in turn, so that both see the same load of the machine.

A side is a process (torchrun with its ranks, or a plain process) that calls `wait_for_turn` before each turn,
and appends a record to a file after each step, with the names of `metrics.jsonl`. The tool grants turns one
at a time. While one side computes, all others sleep.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.dev.bench_tables.report import ROOT
from tools.processes import kill_tree

TURNS = "LOCKSTEP_BENCH_TURNS"
"""Environment variable with the file that holds the number of granted turns. If absent, no side waits."""
STEPS_PER_TURN = "LOCKSTEP_BENCH_STEPS_PER_TURN"
CLOCK = "LOCKSTEP_BENCH_CLOCK"
"""Environment variable: with the value processor, processor seconds are counted, not elapsed ones."""
STEP = "training/global_step"
PEAK = "perf/peak_host_memory_gib"
POLL_S = 0.01


class BenchFailed(Exception):
    """Raised if a table cannot be measured; the message has the wrong argument or the end of a side's log."""


def clock() -> Callable[[], float]:
    """Return the function that counts seconds; with CLOCK=processor it counts this process's threads."""
    return time.process_time if os.environ.get(CLOCK) == "processor" else time.perf_counter


def wait_for_turn(turn: int) -> None:
    """Sleep until turn number `turn`, from 1 on, is granted. Return at once outside of a comparison."""
    path = os.environ.get(TURNS)
    while path and int(Path(path).read_text() or 0) < turn:
        time.sleep(POLL_S)


def torchrun(world_size: int) -> list[str]:
    """Return the start of a command line that runs a program on this many ranks."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(world_size),
    ]


class Side:
    """One side: its process and its records.

    Args:
        command: command line.
        directory: holds the side's log and its file of turns; created here.
        records: the file with a JSON object per step.
        steps_per_turn: steps that the side takes in one turn.
        environment: variables in addition to this process's own.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        directory: Path,
        records: Path,
        steps_per_turn: int = 1,
        environment: dict[str, str] | None = None,
    ):
        self.name, self.records, self._steps_per_turn = name, records, steps_per_turn
        directory.mkdir(parents=True)
        self._turns, self._log = directory / "turns", directory / "log"
        self._turns.write_text("0")
        self._granted = 0
        self.taken: list[dict[str, Any]] = []
        """All records so far."""
        self._offset = 0
        environ = os.environ | {"PYTHONPATH": str(ROOT), TURNS: str(self._turns)} | (environment or {})
        self.started = time.time()
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environ, stdout=log, stderr=log, start_new_session=True
            )

    def take_turn(self) -> list[dict[str, Any]]:
        """Grant a turn and return the records of its steps. Raises BenchFailed."""
        self._granted += 1
        grant(self._turns, self._granted)
        last = self._granted * self._steps_per_turn
        while not self._has_step(last):
            if self._process.poll() is not None and not self._has_step(last):
                end = end_of(self._log.read_text(errors="replace"))
                raise BenchFailed(f"{self.name} ended with {self._process.returncode}:\n{end}")
            time.sleep(POLL_S)
        return [record for record in self.taken if record[STEP] > last - self._steps_per_turn]

    def _has_step(self, step: int) -> bool:
        """Read the new lines; return whether the records have reached `step`."""
        if self.records.exists() and self.records.stat().st_size > self._offset:
            with open(self.records) as file:
                file.seek(self._offset)
                lines = file.read().split("\n")[:-1]
            self._offset += sum(len(line) + 1 for line in lines)  # the JSON is ASCII
            self.taken += map(json.loads, lines)
        return bool(self.taken) and self.taken[-1][STEP] >= step

    def stop(self) -> None:
        """Kill the side's processes; their results are not needed."""
        kill_tree(self._process)


def end_of(log: str) -> str:
    """Return the last 3,000 characters before torchrun's own report, which does not contain the cause."""
    return log.split("torch/distributed/run.py", 1)[0][-3000:]


def grant(path: Path, turn: int) -> None:
    """Write the number of granted turns by a rename, so that no process reads an empty file."""
    partial = path.with_name("turns.partial")
    partial.write_text(str(turn))
    os.replace(partial, path)


Turn = list[dict[str, Any]]
"""The records of one turn."""


def alternate(
    start: dict[str, Callable[[], Side]], rounds: int, *, warm_up: int = 1
) -> dict[str, list[Turn]]:
    """Start the sides, let them take turns, stop them, and return the turns of each side.

    The order of the sides is reversed after each round, so that a growing load favours no side.

    Args:
        rounds: counted rounds.
        warm_up: rounds that are not counted.
    """
    sides: dict[str, Side] = {}
    try:
        for name, make in start.items():
            sides[name] = make()
            for _ in range(warm_up):
                sides[name].take_turn()
        turns: dict[str, list[Turn]] = {name: [] for name in sides}
        for number in range(rounds):
            names = list(sides) if number % 2 == 0 else list(sides)[::-1]
            for name in names:
                turns[name].append(sides[name].take_turn())
        return turns
    finally:
        for side in sides.values():
            side.stop()
