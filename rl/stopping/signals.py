"""The signals that ask for a stop. Called first of all, before any thread exists: see `rl.stopping.requests`."""

import os
import signal

_terminate = False


def expect_signals() -> None:
    """From now on SIGUSR2 waits to be looked at, in this process and in all that it starts; in a Slurm job SIGTERM too, but in
    this process only. Elsewhere SIGTERM ends the process as ever: it is how torchrun and mpirun end the ranks of a failed job."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    if "SLURM_JOB_ID" in os.environ:
        # Not blocked: a child that its parent ends by SIGTERM must die of it.
        signal.signal(signal.SIGTERM, _note)


def _note(number, frame) -> None:
    global _terminate
    _terminate = True


def end_on_closed_pipe() -> None:
    """Let a reader that leaves, as in `... --help | head`, end this process silently, as is usual on Unix.

    For commands that only print. Python would raise BrokenPipeError from the print or the flush at the exit.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def asked_by_signal() -> signal.Signals | None:
    """The signal that has asked this process to stop, if one has."""
    if _terminate:
        return signal.SIGTERM
    return signal.SIGUSR2 if signal.SIGUSR2 in signal.sigpending() else None
