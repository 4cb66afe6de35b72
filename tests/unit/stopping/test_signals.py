import subprocess
import sys

from rl.run_directory.status import read_object

PROGRAM = """
import ctypes, os, signal, sys
from rl.run_directory.status import Status
from rl.stopping.signals import note_sigterm

status = Status(sys.argv[1], max_steps=9, leads=True, start="a")
status.write(step=3)
note_sigterm(lambda: status.interrupt("SIGTERM"))
for _ in range(200):  # SIGTERM reaches some children before they run any Python
    if (child := os.fork()) == 0:
        signal.pause()
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
print("ready", flush=True)
while True:
    ctypes.CDLL(None).usleep(100_000)
"""


def test_a_killed_run_does_not_stay_running(tmp_path, monkeypatch):
    """A child that SIGTERM ends is no end of the run."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    program = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout.readline() == "ready\n"
        assert read_object(tmp_path / "status.json")["state"] == "running"
        run.terminate()
        assert run.wait(60) == 143
    found = read_object(tmp_path / "status.json")
    assert (found["state"], found["reason"], found["step"]) == ("stopped", "SIGTERM", 3)
