"""Slurm sends a signal to every process of a step: that must not change what a response is worth."""

import os
import signal
import threading
import time

import pytest

from rl.rewards.pool.worker import all_processes, below
from rl.sandbox.sandbox import Limits, protections, run_program


@pytest.mark.skipif(not protections().files, reason="this machine confines nothing")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2], ids=lambda number: number.name)
def test_a_confined_program_and_its_watcher_outlive_it(number):
    sent = []

    def send():
        while len(found := below(os.getpid(), all_processes())) < 2:  # the watcher, and what it watches
            time.sleep(0.01)
        for pid in found:
            os.kill(pid, number)
            sent.append(pid)

    thread = threading.Thread(target=send)
    thread.start()
    outcome = run_program("import time\ntime.sleep(1)\nprint('done')", limits=Limits(wall_s=30))
    thread.join()
    assert outcome.ok and outcome.stdout == "done\n" and len(sent) >= 2, outcome
