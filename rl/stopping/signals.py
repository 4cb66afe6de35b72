"""Signals that request a stop: SIGUSR2, and SIGTERM in a Slurm job.

They are only recorded here. Between two steps the ranks agree on the stop (`rl.stopping.requests`), and
`rl.run.loop` saves a checkpoint and exits with code 75. Elsewhere SIGTERM ends the process (`note_sigterm`).
"""

import os
import signal
import threading
from collections.abc import Callable

_terminate = False


def expect_signals() -> None:
    """Block SIGUSR2 in this process and its children; in a Slurm job, record SIGTERM in this process only.

    Call it before any thread starts. Outside of Slurm SIGTERM ends the process, as torchrun and mpirun expect
    when they end the ranks of a failed job.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    if "SLURM_JOB_ID" in os.environ:
        # Handled, not blocked: children would inherit the block and survive their parent's SIGTERM.
        signal.signal(signal.SIGTERM, _record_sigterm)


def _record_sigterm(number: int, frame: object) -> None:
    global _terminate
    _terminate = True


def note_sigterm(note: Callable[[], None]) -> None:
    """Outside of Slurm, call `note` when SIGTERM arrives, and then end the process with code 143.

    A thread does this; Python's handler wakes it by a pipe. The main thread may be in a kernel or a
    collective for minutes, and launchers soon send SIGKILL.
    """
    if "SLURM_JOB_ID" in os.environ:
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def wait() -> None:
        while os.read(reader, 1) != bytes([signal.SIGTERM]):
            pass
        try:
            note()
        finally:
            os._exit(128 + signal.SIGTERM)

    masks = threading.local()

    def hold() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def forget() -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        release()

    threading.Thread(target=wait, name="sigterm", daemon=True).start()
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # A child shares the pipe: a SIGTERM that it handled before `forget` would end this process.
    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=forget)


def end_on_closed_pipe() -> None:
    """End this process silently when the reader of its output exits, as in `... --help | head`.

    For commands that only print. Otherwise Python raises BrokenPipeError from the print or the flush at exit.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def requested_signal() -> signal.Signals | None:
    """Return the signal that requested a stop of this process, if there was one."""
    if _terminate:
        return signal.SIGTERM
    return signal.SIGUSR2 if signal.SIGUSR2 in signal.sigpending() else None
