"""Calls the commands of a scheduler, with a time limit and with errors that name a remedy.

`run` calls a command of any scheduler; the other functions are for Slurm only.
"""

import os
import re
import shutil
import signal
import subprocess
import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

TIMEOUT_S = 60
OWN_VARIABLES = ("SLURM_", "SQUEUE_", "SINFO_", "SCANCEL_")
"""Beginnings of variables that are not passed on: a job that is submitted inside a job would inherit those of
the present one, and SQUEUE_STATES, for example, hides jobs."""
GIVEN = "LOCKSTEP_GIVEN"
"""Variable with the path of the environment that the present job was given, in the form of /proc/PID/environ.
sbatch passes this environment on, without what site.sh, stage.sh and job.sh set for this node."""
ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
"""Signals that would end a command between a submission and its note."""


class SlurmError(ValueError):
    """Raised when a command of the scheduler is missing, fails or does not answer."""


class NoAnswer(SlurmError):
    """Raised when a command does not answer. The scheduler may still carry it out."""


def available() -> bool:
    """Return whether this machine has Slurm's commands."""
    return shutil.which("squeue") is not None


def run(*command: str, given: str | None = None) -> str:
    """Return the output of a command. Raises SlurmError if it is missing, fails or does not answer.

    given: standard input of the command. Times that squeue prints are UTC.
    """
    environment = _environment(command[0])
    options: dict = dict(env=environment, input=given, capture_output=True, text=True, errors="replace")
    words = [shutil.which(command[0]) or command[0], *command[1:]]
    try:
        done = subprocess.run(words, timeout=TIMEOUT_S, **options)
    except FileNotFoundError:
        raise SlurmError(
            f"{command[0]} is not on this machine; submit from a login node of the cluster, or use --dry-run."
        ) from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{command[0]} did not answer within {TIMEOUT_S} s; is the scheduler up?") from None
    if done.returncode:
        reason = "; ".join((done.stderr.strip() or done.stdout.strip()).splitlines())
        raise SlurmError(f"{' '.join(command)} failed: {reason}")
    return done.stdout


def _environment(command: str) -> dict[str, str]:
    """Return the environment of a command. Local times would be ambiguous when summer time ends."""
    found = dict(os.environ)
    if command == "sbatch" and GIVEN in found:
        with suppress(OSError):  # a container may lack the file
            lines = os.fsdecode(Path(found[GIVEN]).read_bytes()).split("\0")
            found = dict(line.split("=", 1) for line in lines if "=" in line)
    kept = {k: v for k, v in found.items() if not k.startswith(OWN_VARIABLES) or k == "SLURM_CONF"}
    return kept | ({"TZ": "UTC"} if command == "squeue" else {})


def table(columns: str, *command: str) -> list[list[str]]:
    """Return rows of columns, for example of "%i %T" for squeue. Raises SlurmError.

    The names and reasons of jobs may have any characters, so the separators are new in each call.
    """
    mark, fields = uuid.uuid4().hex, columns.split()
    between, end = f"|{mark}|", f"|{mark}."
    *lines, rest = run(*command, "-o", between.join(fields) + end).split(f"{end}\n")
    rows = [line.split(between) for line in lines]
    for row in [*rows, [rest]] if rest.strip() else rows:
        if len(row) != len(fields) or "\n" in row[0]:
            raise SlurmError(
                f"{command[0]} printed {'|'.join(row)!r}, which has not {len(fields)} columns; call Slurm's "
                f"own {command[0]}, without a wrapper that prints more."
            )
    return rows


@contextmanager
def undisturbed() -> Iterator[None]:
    """Delay signals that would end this process, or its commands, until a job is submitted and noted.

    Commands inherit the mask of this thread. A signal that another thread takes, for example numpy's, is
    delayed in the main thread only, where Python can set handlers.
    """
    came: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with ExitStack() as stack:  # at its end: the handlers, then what came, which waits for the mask
        stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        stack.callback(lambda: list(map(signal.raise_signal, came)))
        for number in ENDING if threading.current_thread() is threading.main_thread() else ():
            handler = signal.getsignal(number)
            if handler not in (None, signal.SIG_IGN):  # None: Python cannot restore it
                stack.callback(signal.signal, number, handler)
                signal.signal(number, lambda number, _: came.append(number))
        yield


def submit(*words: str) -> str:
    """Submit a batch file with options of sbatch; return the job id. Raises SlurmError."""
    output = run("sbatch", "--parsable", *words)
    ids = re.findall(r"^(\d+)(?:;\S*)?\s*$", output, re.MULTILINE)
    if not ids:
        raise SlurmError(f"sbatch printed {output!r} in place of a job's id; squeue --me shows the job.")
    return ids[-1]


def states(jobs: Iterable[str]) -> dict[str, str]:
    """Return job -> state for those of the given jobs that are in the queue, for example 17 -> RUNNING.

    Task 3 of array 17 is written 17_3, in the argument and in the result. Returns {} on a machine without
    Slurm.
    """
    ids = {job for job in jobs if re.fullmatch(r"\d+(_\d+)?", job)}
    if not ids or not available():
        return {}
    # Ask for all jobs of the user: squeue fails if it is asked for a job that it no longer knows.
    found = re.findall(r"^(\S+) (\S+)$", run("squeue", "--me", "-h", "-r", "-o", "%i %T"), re.MULTILINE)
    return {job: state for job, state in found if job in ids}
