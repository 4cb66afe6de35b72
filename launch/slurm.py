"""Calls the commands of a scheduler, with a time limit and with errors that name a remedy.

`run` calls a command of any scheduler; the other functions are for Slurm only.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence

TIMEOUT_S = 60


class SlurmError(ValueError):
    """Raised when a command of the scheduler is missing, fails or does not answer."""


def available() -> bool:
    """Return whether this machine has Slurm's commands."""
    return shutil.which("squeue") is not None


def run(*command: str, given: str | None = None) -> str:
    """Return the output of a command. Raises SlurmError if it is missing, fails or does not answer.

    given: standard input of the command.
    """
    # If this runs inside a job, the new job would inherit the SLURM_* variables of the present job.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLURM_") or name == "SLURM_CONF"
    }
    try:
        done = subprocess.run(
            command, env=environment, input=given, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except FileNotFoundError:
        raise SlurmError(
            f"{command[0]} is not on this machine; submit from a login node of the cluster, or use --dry-run."
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} did not answer within {TIMEOUT_S} s; is the scheduler up?") from None
    if done.returncode:
        reason = "; ".join((done.stderr.strip() or done.stdout.strip()).splitlines())
        raise SlurmError(f"{' '.join(command)} failed: {reason}")
    return done.stdout


def submit(file: str, *, options: Sequence[str] = ()) -> str:
    """Submit a batch file; return the job id."""
    return run("sbatch", "--parsable", *options, file).strip().split(";")[0]


def states(jobs: Iterable[str]) -> dict[str, str]:
    """Return job -> state for those of the given jobs that are in the queue, for example 17 -> RUNNING.

    Task 3 of array 17 is written 17_3, in the argument and in the result. Returns {} on a machine without
    Slurm.
    """
    ids = {job for job in jobs if re.fullmatch(r"\d+(_\d+)?", job)}
    if not ids or not available():
        return {}
    # Ask for all jobs of the user: squeue fails if it is asked for a job that it no longer knows.
    found = dict(line.split() for line in run("squeue", "--me", "-h", "-r", "-o", "%i %T").splitlines())
    return {job: state for job, state in found.items() if job in ids}
