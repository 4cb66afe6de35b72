"""GRPO as a side of a comparison: it waits for its turn before the first step of each turn.

An algorithm file outside of `rl.algorithms`, selected by its path. The wait is timing_s/turn, which
is part of timing_s/step. All timing_s/* count by `sides.clock`. The metric PEAK is the maximum resident
memory of a rank so far, in GiB.
"""

import os
import resource
from types import SimpleNamespace

import torch
import torch.distributed as dist

from rl.algorithms import grpo
from rl.data.batch import Batch
from rl.phases import step_record
from rl.phases.phases import Phases
from tools.dev.bench_tables.sides import PEAK, STEPS_PER_TURN, clock, wait_for_turn

step_record.time = SimpleNamespace(perf_counter=clock())  # type: ignore[assignment]

NEEDS = ("samples", "reward", "groups")
DEFAULTS = {"objective.advantage": "grpo", "objective.loss": "ppo"}


def collect(phases: Phases) -> Batch:
    number, steps = phases.step.number - 1, int(os.environ.get(STEPS_PER_TURN, 1))
    with phases.timed("turn"):
        if number % steps == 0:
            wait_for_turn(1 + number // steps)
    return grpo.collect(phases)


def learn(phases: Phases, batch: Batch) -> None:
    grpo.learn(phases, batch)
    peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    phases.step.metrics[PEAK] = float(peak)
