"""GRPO as a side of a comparison: it waits for its turn before a step and logs each phase's peak memory.

An algorithm file outside of `rl.algorithms`, selected by `algorithm=tools/bench_tables/grpo_in_turns.py`. The
wait is timing_s/turn, which is part of timing_s/step. LOCKSTEP_BENCH_STEPS_PER_TURN is the number of steps in
a turn, 1 by default.
"""

import os
import re
from contextlib import contextmanager
from pathlib import Path

import torch

from rl.algorithms import grpo
from tools.bench_tables.sides import STEPS_PER_TURN, wait_for_turn

NEEDS = ("samples", "reward", "groups")
DEFAULTS = {"objective.advantage": "grpo", "objective.loss": "ppo"}


def collect(phases):
    number, steps = phases.step.number - 1, int(os.environ.get(STEPS_PER_TURN, 1))
    with phases.timed("turn"):
        if number % steps == 0:
            wait_for_turn(1 + number // steps)
    measure_memory(phases.step)
    return grpo.collect(phases)


def learn(phases, batch):
    grpo.learn(phases, batch)


def measure_memory(step) -> None:
    """Make every phase of the run log its peak memory on rank 0, in GiB."""
    if "phase" in vars(step):  # done in an earlier step
        return
    run_phase = step.phase

    @contextmanager
    def phase(name, **options):
        if step.device.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the current size
        with run_phase(name, **options):
            yield
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        peaks = {"host": int(found[1]) / 2**20}
        if step.device.is_cuda:
            peaks["device"] = torch.cuda.max_memory_allocated() / 2**30
        for kind, gib in peaks.items():
            key = f"memory_gib/{kind}/{name}"
            step.metrics[key] = max(gib, step.metrics.get(key, 0.0))

    step.phase = phase
