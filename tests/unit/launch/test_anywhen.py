"""Runs in jobs that start now, on simulated queues with synthetic traces of other users' jobs."""

import random
from statistics import median

import pytest

from launch.anywhen.decision import Limits, Plan, Size
from tests.unit.launch.queue_simulator import HOUR, Cluster, Job, Simulation, trace

NODES, FIXED, STEPS, BEGIN = 16, 8, 200, 48 * HOUR
SIZES = [Size(nodes, 36.0 * (FIXED / nodes) ** 0.9) for nodes in range(1, FIXED + 1)]
"""200 steps take two hours on half of the cluster."""


def plan(**limits: float | str) -> Plan:
    return Plan(SIZES, Limits(**limits), 24 * HOUR, start_s=300, lead_s=300, turn_s=120)  # type: ignore[arg-type]


def others(seed: int) -> list[tuple[float, Job]]:
    return trace(random.Random(seed), NODES, load=0.9, hours=300)


def hours_of_one_job(seed: int) -> float:
    """Return the hours until one job on FIXED nodes has taken all steps."""
    jobs, cluster, now = others(seed), Cluster(NODES), 0.0
    need = 300 + STEPS * 36.0
    mine = Job("fixed", FIXED, need * 1.1 + 300, need)
    while mine.started < 0:
        while jobs and jobs[0][0] <= now:
            cluster.submit(jobs.pop(0)[1])
        if now == BEGIN:
            cluster.submit(mine)
        cluster.advance(now)
        now += 120
    return (mine.started + need - BEGIN) / HOUR


def test_a_run_in_holes_needs_less_than_0_6_of_one_job():
    """Over 50 traces, in the median; and with a limit of node-hours no moment exceeds it."""
    one = [hours_of_one_job(seed) for seed in range(50)]
    cut = []
    for seed in range(50):
        run = Simulation(NODES, others(seed), plan(), STEPS)
        cut.append(run.run(BEGIN))
    print(f"one job {median(one):.1f} h, in holes {median(cut):.1f} h, ratio {median(cut) / median(one):.2f}")
    assert median(cut) <= 0.6 * median(one)


@pytest.mark.parametrize("seed", range(3))
def test_limits_hold_while_jobs_are_refused_killed_held(seed):
    """The simulation checks the limits at each moment, and the pauses between requests."""
    rng = random.Random(seed)

    def hostile(simulation: Simulation) -> None:
        simulation.refuses = rng.random() < 0.3
        for job in simulation.live():
            if rng.random() < 0.002:
                simulation.cluster.kill(job)
            elif job.started < 0 and rng.random() < 0.01:
                job.is_held = True

    limits = plan(jobs=2 + seed, node_hours=25.0)
    run = Simulation(NODES, others(seed), limits, STEPS, stays=True)
    hours = run.run(BEGIN, hostile)
    assert run.done == STEPS
    print(f"{hours:.1f} h, {len(run.requests)} requests, {run.spent / HOUR:.0f} node-hours: {run.layouts}")
