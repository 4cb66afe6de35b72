"""Ending a program with everything that it started."""

import contextlib
import os
import signal
import subprocess

from rl.sandbox.leftovers import descendants


def kill_tree(process: subprocess.Popen) -> None:
    """Kill the process, which leads a process group, the group, and its descendants in other sessions.

    torchrun starts each rank in a session of its own, so that a signal to torchrun's group misses the ranks.
    """
    below = descendants(process.pid) if process.poll() is None else []
    for kill, pid in ((os.killpg, process.pid), *((os.kill, pid) for pid in below)):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    process.wait()
