"""The Slurm commands that launching needs, each with a time limit and an error that says what to do."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence

TIMEOUT_S = 60


class SlurmError(ValueError):
    """A Slurm command is missing or refused what it was asked."""


def available() -> bool:
    """Whether this machine can ask a Slurm cluster."""
    return shutil.which("squeue") is not None


def run(*command: str) -> str:
    """The output of a Slurm command. SlurmError if it is missing, fails or does not answer."""
    # Variables of a job that this shell is in would become those of the new one.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLURM_") or name == "SLURM_CONF"
    }
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    except FileNotFoundError:
        raise SlurmError(
            f"{command[0]} is not on this machine; submit from a login node of a Slurm cluster, or use --dry-run."
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} did not answer within {TIMEOUT_S} s; is slurmctld up?") from None
    if done.returncode:
        raise SlurmError(f"{' '.join(command)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def submit(file: str, *, options: Sequence[str] = ()) -> str:
    """Submit a batch file; returns the job id."""
    return run("sbatch", "--parsable", *options, file).strip().split(";")[0]


def states(jobs: Iterable[str]) -> dict[str, str]:
    """Slurm's state of those of the jobs that are in the queue, e.g. 17 -> RUNNING. A task of an array is 17_3, in the argument
    as in the answer. Empty where there is no Slurm."""
    wanted = {job for job in jobs if re.fullmatch(r"\d+(_\d+)?", job)}
    if not wanted or not available():
        return {}
    # All of the user's: squeue fails as a whole when it is asked for one job that it has forgotten.
    found = dict(line.split() for line in run("squeue", "--me", "-h", "-r", "-o", "%i %T").splitlines())
    return {job: state for job, state in found.items() if job in wanted}
