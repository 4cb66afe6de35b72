"""Writes batch files in the form of the files in slurm/.

A batch file is plain bash that sources slurm/job.sh. You can edit it and submit it again.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rl.config.durations import seconds_of
from rl.config.options import ConfigError

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Resources:
    """Resources that a job requests from its scheduler."""

    scheduler: Literal["slurm", "pbs", "lsf", "flux"] = "slurm"
    """Scheduler of the batch file."""

    nodes: int = 1
    """Number of nodes."""
    gpus_per_node: int = 8
    """Number of GPUs per node, one rank each. 0: CPU nodes."""
    ranks_per_node: int = 0
    """Number of ranks per CPU node. Leave it at 0 for GPU nodes."""
    cpus_per_task: int = 0
    """Number of cores per rank. 0: the site's default."""
    time: str = "1-00:00:00"
    """Time limit in Slurm's format."""
    mem: str = ""
    """Memory per node. Empty: all memory of a GPU node, or the site's default on CPU nodes."""
    account: str = ""
    """Account. Empty: the site's default. The same holds for partition and qos."""
    partition: str = ""
    """Partition."""
    qos: str = ""
    """Quality of service."""
    signal_lead_s: int = 600
    """Seconds before the time limit at which Slurm signals all ranks to stop and save. The other schedulers
    send no such signal: there a run stops by itself before a step that would not end in time."""
    requeue: bool = True
    """Whether the job may be requeued to continue."""
    sbatch: list[str] = field(default_factory=list)
    """Further options for sbatch (for example --constraint=h100), qsub, bsub or flux batch."""

    def check(self) -> None:
        """Raise ConfigError for invalid values."""
        if self.nodes < 1:
            raise ConfigError(f"nodes={self.nodes} must be at least 1.")
        if min(self.gpus_per_node, self.ranks_per_node, self.cpus_per_task, self.signal_lead_s) < 0:
            raise ConfigError(
                "gpus_per_node, ranks_per_node, cpus_per_task and signal_lead_s must be 0 or more."
            )
        if not self.gpus_per_node and not self.ranks_per_node:
            raise ConfigError(
                "gpus_per_node=0 needs ranks_per_node of at least 1; set e.g. ranks_per_node=2."
            )
        if self.gpus_per_node and self.ranks_per_node:
            raise ConfigError(
                f"ranks_per_node={self.ranks_per_node} is for CPU nodes, because a node has a rank per GPU; "
                "leave it out, or set gpus_per_node=0."
            )
        try:
            longest = seconds_of(self.time)
        except ValueError as error:
            raise ConfigError(f"time: {error}") from error
        if self.signal_lead_s >= longest:
            raise ConfigError(
                f"signal_lead_s={self.signal_lead_s} (--signal-lead) is not below time={self.time}: Slurm "
                "would ask the job to stop before it starts; use a shorter lead, e.g. "
                f"{longest // 4:.0f}, or a longer time."
            )
        for option in self.sbatch:
            if not option.startswith("-"):
                raise ConfigError(
                    f"'{option}' is not an option of sbatch; write it as one word, e.g. --constraint=h100."
                )

    @property
    def world_size(self) -> int:
        return self.nodes * (self.gpus_per_node or self.ranks_per_node)

    @property
    def gpu_hours(self) -> float:
        """Maximum number of GPU-hours of the allocation."""
        return self.nodes * self.gpus_per_node * seconds_of(self.time) / 3600


def render(
    resources: Resources,
    *,
    name: str,
    logs: Path,
    configs: Sequence[str],
    overrides: Sequence[str],
    command: str,
) -> str:
    """Return the batch file of one run.

    logs: directory for the logs of the job and of the ranks. configs: YAML files of the run.
    command: command that writes the file; the file names it in a comment.
    """
    header = _header(resources, name=name, output=f"{_pattern(logs)}/%x-%j.out", command=command)
    return (
        "\n".join([header, _source(logs), "", one_per_line("train", [*absolute(configs), *overrides])]) + "\n"
    )


def render_sweep(
    resources: Resources,
    *,
    name: str,
    logs: Path,
    configs: Sequence[str],
    points: Path,
    command: str,
    array: str,
) -> str:
    """Return the batch file of a job array.

    points: directory with one file per task; the file has one override per line.
    array: sbatch's --array, e.g. 0-5%2.
    """
    header = _header(
        resources, name=name, output=f"{_pattern(logs)}/%x-%A_%a.out", command=command, array=array
    )
    body = f"""
# Overrides of this task, one per line. Its run is identified by run.name there, not by the task's number.
points={shlex.quote(str(points))}
mapfile -t overrides <"$points/$SLURM_ARRAY_TASK_ID"
say "point $SLURM_ARRAY_TASK_ID: ${{overrides[*]}}"
train {shlex.join(absolute(configs))} "${{overrides[@]}}" """
    return "\n".join([header, _source(logs), body.strip("\n ")]) + "\n"


def _header(resources: Resources, *, name: str, output: str, command: str, array: str = "") -> str:
    lines = {"job-name": name, "nodes": resources.nodes}
    if array:
        lines["array"] = array
    if resources.gpus_per_node:
        lines |= {"gpus-per-node": resources.gpus_per_node, "exclusive": None, "mem": resources.mem or "0"}
    else:
        lines |= {"ntasks-per-node": resources.ranks_per_node}
        lines |= {"mem": resources.mem} if resources.mem else {}
    if resources.cpus_per_task:
        lines["cpus-per-task"] = resources.cpus_per_task
    lines |= {"time": resources.time, "signal": f"USR2@{resources.signal_lead_s}"}
    for key in ("account", "partition", "qos"):
        if value := getattr(resources, key):
            lines[key] = value
    lines["chdir"] = Path.cwd()
    lines |= {"requeue" if resources.requeue else "no-requeue": None, "open-mode": "append", "output": output}
    options = [
        f"--{key}" if value is None else f"--{key}={shlex.quote(str(value))}" for key, value in lines.items()
    ]
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# Written by: {command}",
            "# To change it, edit the file and submit it: sbatch FILE. slurm/job.sh defines what a job does,",
            "# slurm/site.sh has the settings of a site.",
            "#",
            *(f"#SBATCH {option}" for option in [*options, *resources.sbatch]),
        ]
    )


def _pattern(directory: Path) -> str:
    """Return a directory, escaped for use in a file name pattern of Slurm.

    Raises ConfigError if the directory has a backslash.
    """
    if "\\" in str(directory):
        raise ConfigError(
            f"{directory} has a backslash, and Slurm then replaces no %j in the names of logs; rename it."
        )
    return str(directory).replace("%", "%%")


def _source(logs: Path) -> str:
    paths = f"LOCKSTEP_ROOT={shlex.quote(str(ROOT))} LOCKSTEP_LOGS={shlex.quote(str(logs))}"
    return f'export {paths}\nsource "$LOCKSTEP_ROOT/slurm/job.sh"'


def absolute(configs: Sequence[str]) -> list[str]:
    """Return the paths from the root, because a job may start in another directory."""
    return [str(Path(config).absolute()) for config in configs]


def one_per_line(command: str, words: Sequence[str]) -> str:
    """Return a call of a shell command, with one argument per line if it exceeds 120 characters."""
    first, *others = map(shlex.quote, words)
    line = " ".join([command, first, *others])
    return line if len(line) <= 120 else f"{command} {first}" + "".join(f" \\\n    {word}" for word in others)
