"""Writes and submits batch files for the schedulers of `launch submit` and `sweep`: Slurm, PBS Pro, LSF and
Flux.

A batch file for PBS, LSF or Flux holds the options and the command line of the run. It sources
slurm/train.pbs, train.lsf or train.flux, which stop the run before the time limit and make the scheduler run
it again. Each function below names the manual that it follows. Only the Slurm files have been run by a real
scheduler.
"""

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch import batch_file, slurm
from launch.batch_file import ROOT, Resources, absolute
from launch.points import tasks_text
from rl.config.durations import seconds_of
from rl.config.options import ConfigError

CORES_PER_GPU = 8
"""Number of cores per rank on a GPU node if cpus_per_task is not given, as in slurm/train.pbs."""


class Slurm:
    """Slurm. Its batch files source slurm/job.sh. The methods do the same as those of `Other`."""

    suffix = ".sbatch"
    render = staticmethod(batch_file.render)

    @staticmethod
    def render_sweep(resources: Resources, *, tasks: Sequence[int], at_a_time: int, **facts: Any) -> str:
        limit = f"%{at_a_time}" if at_a_time else ""
        return batch_file.render_sweep(resources, array=tasks_text(tasks) + limit, **facts)

    @staticmethod
    def submit(file: Path, **_: object) -> str:
        return slurm.submit(str(file))

    @staticmethod
    def command(file: Path, **_: object) -> str:
        return f"sbatch {shlex.quote(str(file))}"


@dataclass(frozen=True)
class Other:
    """A scheduler other than Slurm, for example PBS Pro. Its batch files source slurm/nodes.sh."""

    suffix: str
    """Suffix of batch files, for example .pbs."""
    directive: str
    """Start of a line with options, for example #PBS."""
    options: Callable[[Resources, str, Path], list[str]]
    """Function (resources, job name, directory of logs) -> options of the job."""
    directory: str
    """Environment variable with the directory in which a job starts."""
    index: str
    """Bash expression for the number of the task in an array. Empty if the scheduler has no arrays."""
    commands: Callable[[Path, str, Sequence[int], int], list[list[str]]]
    """Function (batch file, job name, tasks, at_a_time) -> commands that submit the file. If tasks are given,
    the commands submit these tasks, of which at most at_a_time run at once (0: no limit). If the last word of
    a command is '<', the batch file is its standard input."""

    def render(
        self,
        resources: Resources,
        *,
        name: str,
        logs: Path,
        configs: Sequence[str],
        overrides: Sequence[str],
        command: str,
    ) -> str:
        """Return the batch file of one run. `launch.batch_file.render` explains the arguments."""
        run = batch_file.one_per_line("set --", [*absolute(configs), *overrides])
        return self._file(resources, name, logs, command, run)

    def render_sweep(
        self,
        resources: Resources,
        *,
        name: str,
        logs: Path,
        configs: Sequence[str],
        points: Path,
        command: str,
        tasks: Sequence[int],
        at_a_time: int,
    ) -> str:
        """Return the batch file of a sweep's tasks. points: directory with one file of overrides per task."""
        if at_a_time and not self.index:
            raise ConfigError(
                f"at_a_time={at_a_time} limits an array, which Flux does not have; leave it out."
            )
        task = "${POINT:-" + self.index + "}" if self.index else '"${POINT:?}"'
        body = f"""
# Overrides of this task, one per line. POINT is set if one task is submitted again, outside of an array.
export POINT={task}
export JOB_NAME={_plain(name)}-$POINT
mapfile -t overrides <{shlex.quote(str(points))}/"$POINT"
set -- {shlex.join(absolute(configs))} "${{overrides[@]}}" """
        return self._file(resources, name, logs, command, body.strip("\n "))

    def submit(self, file: Path, *, name: str, tasks: Sequence[int] = (), at_a_time: int = 0) -> str:
        """Submit a batch file; return the id of its first job."""
        outputs = []
        for words in self.commands(file, _plain(name), tasks, at_a_time):
            given = file.read_text() if words[-1] == "<" else None
            outputs.append(slurm.run(*(words[:-1] if given else words), given=given))
        found = re.search(r"<(\d+)>", outputs[0])  # bsub: Job <17> is submitted to queue <normal>.
        return found[1] if found else outputs[0].strip()

    def command(self, file: Path, *, name: str = "", tasks: Sequence[int] = (), at_a_time: int = 0) -> str:
        """Return the command lines that `submit` runs."""
        lines = map(shlex.join, self.commands(file, _plain(name), tasks, at_a_time))
        return "; ".join(re.sub("'<'$", lambda _: f"<{shlex.quote(str(file))}", line) for line in lines)

    def _file(self, resources: Resources, name: str, logs: Path, command: str, run: str) -> str:
        if resources.qos:
            raise ConfigError(f"qos={resources.qos} is an option of Slurm; give queue or class as partition.")
        here = {self.directory: str(Path.cwd())}  # wherever the file is submitted
        sets = here | {"LOCKSTEP_ROOT": str(ROOT), "LOCKSTEP_LOGS": str(logs)}
        sets |= {"RANKS": str(resources.ranks_per_node)} if resources.ranks_per_node else {}
        sets |= {} if resources.requeue else {"NO_REQUEUE": "1"}
        lines = [
            "#!/usr/bin/env bash",
            f"# Written by: {command}",
            f"# To change it, edit the file and submit it: {self.command(Path('FILE'))}. slurm/nodes.sh",
            "# defines what a job does, slurm/site.sh has the settings of a site.",
            "#",
            *(f"{self.directive} {option}" for option in self.options(resources, _plain(name), logs)),
            *(f"{self.directive} {option}" for option in resources.sbatch),
            "export " + " ".join(f"{key}={shlex.quote(value)}" for key, value in sets.items()),
            run,
            f'source "$LOCKSTEP_ROOT/slurm/train{self.suffix}"',
        ]
        return "\n".join(lines) + "\n"


def _plain(name: str) -> str:
    """Return a job name in which characters with a meaning in options, such as a blank or [, become '-'."""
    return re.sub(r"[^\w.+=-]", "-", name)


def _clock(time: str, *, with_seconds: bool) -> str:
    """Return a time in Slurm's format, converted to hours:minutes or hours:minutes:seconds."""
    minutes, rest = divmod(seconds_of(time), 60)
    return f"{minutes // 60:02}:{minutes % 60:02}" + (f":{rest:02}" if with_seconds else "")


def _pbs(resources: Resources, name: str, logs: Path) -> list[str]:
    """Return the options of qsub. Manual: PBS Pro 2022.1 User's Guide, qsub(1B)."""
    ranks = resources.gpus_per_node or resources.ranks_per_node
    cores = ranks * (resources.cpus_per_task or (CORES_PER_GPU if resources.gpus_per_node else 1))
    chunk = f"{resources.nodes}:ncpus={cores}:mpiprocs=1"
    chunk += f":ngpus={resources.gpus_per_node}" if resources.gpus_per_node else ""
    chunk += f":mem={resources.mem}" if resources.mem else ""
    place = "scatter:excl" if resources.gpus_per_node else "scatter"
    out = [f"-N {name}", f"-l select={chunk}", f"-l place={place}"]
    out += [
        f"-l walltime={_clock(resources.time, with_seconds=True)}",
        "-j oe",
        f"-o {shlex.quote(f'{logs}/')}",
    ]
    return [*out, f"-r {'y' if resources.requeue else 'n'}", *_account(resources, "-A", "-q")]


def _lsf(resources: Resources, name: str, logs: Path) -> list[str]:
    """Return the options of bsub, which takes times without seconds. Manual: LSF 10.1 Command Reference,
    bsub."""
    out = [f"-J {name}", f"-n {resources.nodes}", "-R span[ptile=1]"]
    if resources.gpus_per_node:
        out += [f"-gpu num={resources.gpus_per_node}:mode=shared:j_exclusive=yes", "-x"]
    out += [f"-R rusage[mem={resources.mem}]"] if resources.mem else []
    out += [f"-W {_clock(resources.time, with_seconds=False)}", f"-o {shlex.quote(f'{logs}/{name}-%J.out')}"]
    return [*out, *(["-r", "-Q 75"] if resources.requeue else ["-rn"]), *_account(resources, "-P", "-q")]


def _flux(resources: Resources, name: str, logs: Path) -> list[str]:
    """Return the options of flux batch, whose jobs get all memory of a node. Manual: flux-core,
    flux-batch(1)."""
    if resources.mem:
        raise ConfigError(
            f"mem={resources.mem}: Flux gives a job whole nodes with their memory; leave it out."
        )
    out = [f"--job-name={name}", f"--nodes={resources.nodes}", "--exclusive"]
    out += [
        f"--time-limit={seconds_of(resources.time)}s",
        f"--output={shlex.quote(str(logs))}/{{{{name}}}}-{{{{id}}}}.out",
    ]
    return [*out, *_account(resources, "--bank=", "--queue=")]


def _account(resources: Resources, account: str, queue: str) -> list[str]:
    found = ((account, resources.account), (queue, resources.partition))
    return [f"{key}{value}" if key.endswith("=") else f"{key} {value}" for key, value in found if value]


def _limit(at_a_time: int) -> str:
    return f"%{at_a_time}" if at_a_time else ""


def _qsub(file: Path, name: str, tasks: Sequence[int], at_a_time: int) -> list[list[str]]:
    """Return the qsub commands.

    qsub -J takes only one range X-Y:Z. Each range of tasks therefore becomes an array of its own, and a
    single task becomes a plain job with POINT set.
    """
    out = []
    for part in tasks_text(tasks).split(",") if tasks else [""]:
        array = ["-J", part + _limit(at_a_time)] if "-" in part else ["-v", f"POINT={part}"] if part else []
        out.append(["qsub", *array, str(file)])
    return out


def _bsub(file: Path, name: str, tasks: Sequence[int], at_a_time: int) -> list[list[str]]:
    """Return the bsub command. The elements of an LSF array count from 1, so 1 is added to each task."""
    array = tasks_text([task + 1 for task in tasks])
    return [["bsub", *(["-J", f"{name}[{array}]{_limit(at_a_time)}"] if tasks else []), "<"]]


def _flux_batch(file: Path, name: str, tasks: Sequence[int], at_a_time: int) -> list[list[str]]:
    """Return the flux commands: one job for each task, because Flux has no arrays of batch jobs."""
    command = ["flux", "batch"]
    each = [[*command, f"--job-name={name}-{task}", f"--env=POINT={task}", str(file)] for task in tasks]
    return each or [[*command, str(file)]]


SCHEDULERS: dict[str, Slurm | Other] = {
    "slurm": Slurm(),
    "pbs": Other(".pbs", "#PBS", _pbs, "PBS_O_WORKDIR", "$PBS_ARRAY_INDEX", _qsub),
    "lsf": Other(".lsf", "#BSUB", _lsf, "LS_SUBCWD", "$((LSB_JOBINDEX - 1))", _bsub),
    "flux": Other(".flux", "#flux:", _flux, "LOCKSTEP_START", "", _flux_batch),
}
