"""Signals that Slurm sends to every process of a step do not change the outcome of a program."""

import os
import signal
import threading
import time

import pytest

from rl.sandbox.sandbox import ProgramLimits, protections, run_program
from rl.workers.supervisor import all_processes, descendants


@pytest.mark.skipif(not protections().files, reason="this machine confines nothing")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2], ids=lambda number: number.name)
def test_a_program_and_its_watcher_survive_the_signal(number):
    sent = []
    others = set(descendants(os.getpid(), all_processes()))  # such as the fork server of these tests

    def send():
        # The watcher and the program.
        while len(found := set(descendants(os.getpid(), all_processes())) - others) < 2:
            time.sleep(0.01)
        for pid in found:
            os.kill(pid, number)
            sent.append(pid)

    thread = threading.Thread(target=send)
    thread.start()
    outcome = run_program("import time\ntime.sleep(1)\nprint('done')", limits=ProgramLimits(wall_s=30))
    thread.join()
    assert outcome.ok and outcome.stdout == "done\n" and len(sent) >= 2, outcome
