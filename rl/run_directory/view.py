"""The view of a run on a terminal: its step, its phase, its last metrics, and curves of reward and length.

Rank 0 shows it during a phase (`rl.run_directory.progress`), and `lockstep watch` draws it from the
files of a run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import median

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

LEVELS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
"""Characters of a sparkline, from the lowest value to the highest."""
WIDTH = 24
"""Width of a bar and of a sparkline, in columns."""
CURVES = {"reward": "critic/score/mean", "length": "response_length/mean"}
"""Name and metric of each curve."""
LAST = {
    "tokens/s": "perf/throughput",
    "grad norm": "actor/grad_norm",
    "KL": "actor/ppo_kl",
    "entropy": "actor/entropy",
    "engine gap": "training/rollout_probs_diff_max",
}
"""Name and metric of each number of the last step."""


@dataclass
class Phase:
    """A phase in progress."""

    name: str
    seconds: float = 0.0
    """Time since it began."""
    done: int | None = None
    total: int | None = None
    """Number of units so far, and in all; None if unknown."""
    unit: str = ""
    timing: str = ""
    """Its seconds are logged as timing_s/<timing>. Empty: the last word of the name."""


@dataclass
class RunView:
    """The state of a run, as the view shows it."""

    name: str
    state: str = "running"
    step: int = 0
    max_steps: int = 0
    records: list[dict[str, float]] = field(default_factory=list)
    """Metrics of the last steps, at most WIDTH, oldest first."""
    phase: Phase | None = None
    note: str = ""
    """Reason of the end; or the rank for which the other ranks wait, and the time of this wait."""
    hosts: dict[int, str] = field(default_factory=dict)
    """Host of each rank, as far as known."""

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Add the metrics of a step, in place of records of this step and later ones (after a resume)."""
        self.records = [each for each in self.records if each["training/global_step"] < step][1 - WIDTH :]
        numbers = {name: value for name, value in metrics.items() if value is not None and isfinite(value)}
        self.records.append({**numbers, "training/global_step": step})
        self.step = step

    def usual(self, key: str) -> float | None:
        """Return the median of a metric over the last steps, None if no step has it."""
        values = [each[key] for each in self.records if key in each]
        return median(values) if values else None


def draw(view: RunView) -> Group:
    """Return the view as an object that rich prints."""
    table = Table.grid(padding=(0, 2))
    title = Text(view.name, style="bold")
    if view.state != "running":
        title.append(f"  {view.state}")
    table.add_row(title, _bar(view.step, view.max_steps), _run_text(view))
    if view.phase is not None:
        table.add_row(*_phase_row(view, view.phase))
    for name, metric in CURVES.items():
        if values := [each[metric] for each in view.records if metric in each]:
            table.add_row(name, sparkline(values), f"{values[-1]:.4g}")
    last = view.records[-1] if view.records else {}
    numbers = "  ".join(f"{name} {last[key]:.4g}" for name, key in LAST.items() if key in last)
    lines = numbers, _slowest_text(view, last), view.note
    return Group(table, *(Text(line, style="dim") for line in lines if line))


def _slowest_text(view: RunView, last: dict[str, float]) -> str:
    if "perf/slowest_rank" not in last:
        return ""
    rank, late = int(last["perf/slowest_rank"]), duration(last["perf/slowest_rank_late_s"])
    host = f" on {view.hosts[rank]}" if rank in view.hosts else ""
    return f"slowest in step {last['training/global_step']:g}: rank {rank}{host}, {late} after the first"


def sparkline(values: Sequence[float]) -> str:
    """Return one character per value. Its height shows where the value lies between minimum and maximum."""
    low, high = min(values), max(values)
    scale = (len(LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(LEVELS[round((value - low) * scale)] for value in values)


def _bar(done: float, total: float) -> ProgressBar:
    return ProgressBar(total=total or 1, completed=min(done, total or 1), width=WIDTH)


def _run_text(view: RunView) -> str:
    text = f"step {view.step}/{view.max_steps}"
    seconds = view.usual("timing_s/step")
    if seconds and view.state == "running" and view.step < view.max_steps:
        text += f", {seconds:.3g} s each, {duration(seconds * (view.max_steps - view.step))} left"
    return text


def _phase_row(view: RunView, phase: Phase) -> tuple[str, ProgressBar, str]:
    """Return name, bar and text of a phase: by its counts if they are known, else by its usual duration."""
    usual = view.usual(f"timing_s/{phase.timing or phase.name.split()[-1]}")
    if phase.done is not None and phase.total:
        text = f"{phase.done}/{phase.total} {phase.unit}"
        if phase.done and phase.seconds > 0:
            rate = phase.done / phase.seconds
            text += f", {rate:.3g}/s, {duration((phase.total - phase.done) / rate)} left"
        return phase.name, _bar(phase.done, phase.total), text
    text = duration(phase.seconds) + (f" of usually {duration(usual)}" if usual else "")
    return phase.name, _bar(phase.seconds if usual else 0.0, usual or 1.0), text


def duration(seconds: float) -> str:
    """Return 4.2 s, 3 min, or 2 h 5 min."""
    if seconds < 60:
        return f"{seconds:.2g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
