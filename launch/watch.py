"""`lockstep watch RUN`: show a live view of a run in progress, read from its files.

The command works on any machine that sees the run directory, also over a slow shared file system. It reads
only the new lines of metrics.jsonl and, every 15 s, the heartbeats of all ranks. It ends when the run ends.
Without a terminal, or with --once, it prints the present state and ends.
"""

import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from launch.runs import read_runs
from rl.config.command_line import make_parser
from rl.config.options import ConfigError
from rl.run_directory.metric_log import STEP, parse_record
from rl.run_directory.status import read_object, refuse_missing
from rl.run_directory.view import WIDTH, Phase, RunView, draw, duration

HEARTBEATS_S = 15.0
"""Seconds between two readings of the heartbeats of all ranks."""
TIMINGS = {
    "generate": "gen",
    "wait_samples": "gen",
    "score": "reward",
    "log_probs": "old_log_prob",
    "update": "update_actor",
    "refit": "update_weights",
    "wait_weights": "update_weights",
    "save": "save_checkpoint",
}
"""Phase -> NAME of the metric timing_s/NAME that measures this phase in most cases."""


def main(argv: list[str]) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory")
    parser.add_argument(
        "--interval", metavar="S", type=float, default=2.0, help="seconds between readings (2)"
    )
    parser.add_argument("--once", action="store_true", help="print the present state and end")
    arguments = parser.parse_args(argv)
    refuse_missing(arguments.run)
    if not (arguments.run / "status.json").is_file():
        raise ConfigError(
            f"{arguments.run} has no status.json; name the directory of a run that has started "
            "(lockstep status lists them)."
        )
    if arguments.interval <= 0:
        raise ConfigError(f"--interval={arguments.interval} must be positive.")
    console, files = Console(), RunFiles(arguments.run)
    if arguments.once or not console.is_terminal:
        console.print(draw(files.read()))
        return 0
    with Live(console=console, auto_refresh=False) as live:
        while True:
            view = files.read()
            live.update(draw(view), refresh=True)
            if view.state != "running":
                return 0
            time.sleep(arguments.interval)


class RunFiles:
    """The files of a run, read as they change."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._view = RunView(directory.name)
        self._end = 0
        """Bytes of metrics.jsonl read so far."""
        self._file: int | None = None
        """Inode of metrics.jsonl when it was last read. A run that resumes may replace the file."""
        self._heartbeats: list[dict | None] = []
        self._read_at = float("-inf")

    def read(self) -> RunView:
        """Return the present view of the run."""
        view = self._view
        self._read_metrics()
        [run] = read_runs([self.directory])
        view.state, view.step, view.max_steps = run.state, run.step or 0, run.max_steps or 0
        view.phase, view.note = None, run.reason
        if run.state == "running":
            self._read_heartbeats()
        return view

    def _read_metrics(self) -> None:
        path = self.directory / "metrics.jsonl"
        if not path.is_file():
            return
        found = path.stat()
        if found.st_ino != self._file or found.st_size < self._end:
            self._file, self._end, self._view.records = found.st_ino, 0, []
        with path.open("rb") as file:
            file.seek(self._end)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]  # the last line may be incomplete
        self._end += len(whole)
        for line in whole.splitlines()[-WIDTH:]:
            if (record := parse_record(line)) is not None:
                self._view.record(int(record[STEP]), record)

    def _read_heartbeats(self) -> None:
        # `phase_s` was counted by the rank itself, because the clock of its host may differ from this clock.
        directory, now = self.directory / "heartbeat", time.monotonic()
        first = _read(directory / "rank_0.json")
        if first is None:
            return
        phase = first["phase"]
        self._view.phase = Phase(phase, first["phase_s"], timing=TIMINGS.get(phase, phase))
        if now - self._read_at >= HEARTBEATS_S:
            self._read_at = now
            self._heartbeats = [_read(path) for path in sorted(directory.glob("rank_*.json"))]
        self._view.hosts = {each["rank"]: each["host"] for each in self._heartbeats if each is not None}
        working = [each for each in self._heartbeats if each is not None and not each["waits"]]
        if working:
            slow = max(working, key=lambda each: each["phase_s"])
            self._view.note = (
                f"slowest now: rank {slow['rank']} on {slow['host']}, in {slow['phase']} "
                f"for {duration(slow['phase_s'])}"
            )


def _read(path: Path) -> dict | None:
    """Return the content of a heartbeat file; None if the file is missing or lacks a field."""
    record = read_object(path)
    return record if {"phase", "phase_s", "waits", "rank", "host"} <= record.keys() else None
