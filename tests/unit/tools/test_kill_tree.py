"""tools/processes.py: a program is ended with what it started."""

import subprocess
import sys
import time

from tools.processes import kill_tree

PROGRAM = """
import subprocess, sys
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(sleep, start_new_session=True).pid, flush=True)
subprocess.Popen(sleep).wait()
"""


def test_a_descendant_in_a_session_of_its_own_is_killed():
    command = [sys.executable, "-c", PROGRAM]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    rank = int(process.stdout.readline())
    kill_tree(process)
    assert process.returncode == -9
    deadline = time.monotonic() + 30
    while _runs(rank):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    kill_tree(process)  # of a process that has ended: nothing happens


def _runs(pid: int) -> bool:
    """Return whether the process runs; a zombie of a killed one does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
