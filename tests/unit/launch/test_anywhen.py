"""Runs in jobs that start now, on simulated queues with synthetic traces of other users' jobs."""

import os
import random
import subprocess
from statistics import median

import pytest

from launch.anywhen.command import GUARD, TURNS
from launch.anywhen.decision import Plan, QueueView, Size, decide
from launch.anywhen.turns import FOLLOWED
from rl.config.elastic import JobLimits
from tests.unit.launch.queue_simulator import HOUR, Cluster, Job, Simulation, trace

NODES, FIXED, STEPS, BEGIN = 16, 8, 200, 48 * HOUR
SIZES = [Size(nodes, 36.0 * (FIXED / nodes) ** 0.9) for nodes in range(1, FIXED + 1)]
"""200 steps take two hours on half of the cluster."""


def plan(not_before: float = 0.0, **limits: float) -> Plan:
    own, times = JobLimits(**limits), dict(start_s=300.0, lead_s=300.0, turn_s=120.0)  # type: ignore[arg-type]
    return Plan(SIZES, own, 24 * HOUR, max_steps=STEPS, not_before=not_before, **times)


def cluster(seed: int) -> Cluster:
    return Cluster(NODES, trace(random.Random(seed), NODES, load=0.9, hours=300))


def hours_of_one_job(seed: int) -> float:
    """Return the hours until one job on FIXED nodes has taken all steps."""
    queue, need = cluster(seed), 300 + STEPS * 36.0
    mine = Job("fixed", FIXED, need * 1.1 + 300, need)
    while mine.started < 0:
        queue.advance(queue.now + 120)
        if queue.now == BEGIN:
            queue.submit(mine)
    return (mine.started + need - BEGIN) / HOUR


def test_a_run_in_holes_needs_less_than_0_6_of_one_job():
    """Over 50 traces, in the median."""
    one = median(hours_of_one_job(seed) for seed in range(50))
    cut = median(Simulation(cluster(seed), plan()).run(BEGIN) for seed in range(50))
    print(f"one job {one:.1f} h, in holes {cut:.1f} h, ratio {cut / one:.2f}")
    assert cut <= 0.6 * one


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

    run = Simulation(cluster(seed), plan(BEGIN + HOUR * seed, jobs=2 + seed, node_hours=25.0), stays=True)
    hours = run.run(BEGIN, hostile)
    assert run.done == STEPS
    print(f"{hours:.1f} h, {len(run.requests)} requests, {run.spent / HOUR:.0f} node-hours: {run.layouts}")


def test_the_last_step_gets_a_job():
    view = QueueView(plan(), 0.0, [], lambda: {"": [9e9] * NODES}, lambda ask: True, steps_left=1)
    assert decide(view)[1]


COMMAND = """#!/bin/bash
echo "$(basename "$0")" "$@" "${STAGED:-}" >>"$CALLS"
if [ -n "$LOCKSTEP_GIVEN" ]; then grep -za STAGED "$LOCKSTEP_GIVEN" >>"$CALLS"; fi
case $(basename "$0")-$3 in
squeue-*) echo "$STATE" ;;
python-begin) exit "$CODE" ;;
python-follow) [ "$STATE" = RUNNING ] || { sleep 1; echo "python follow ends" >>"$CALLS"; exit "$FOLLOW"; } ;;
esac
"""


@pytest.mark.parametrize(
    ("code", "state", "restarts", "last"),
    [
        (0, "RUNNING", 0, "python -m launch.anywhen.turns end"),
        (3, "RUNNING", 0, "python -m launch.anywhen.turns begin"),
        (1, "RUNNING", 2, "scontrol update JobId=7 StartTime=now+108minutes"),
        (1, "RUNNING", 3, "squeue"),
        (1, "COMPLETING", 0, "squeue"),
        (0, "COMPLETING", 0, "python follow ends"),
        (FOLLOWED, "COMPLETING", 0, "python -m launch.anywhen.turns end"),
    ],
)
def test_a_job_whose_turns_do_not_begin_starts_again(code, state, restarts, last, tmp_path):
    """For example on a node without a file system, on which nobody would request its successor."""
    for name in ("squeue", "scontrol", "a=b/python"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(COMMAND)
        (tmp_path / name).chmod(0o755)
    turns = TURNS.format(python=tmp_path / "a=b" / "python", directory=tmp_path, train="config.yaml")
    env = dict(PATH=f"{tmp_path}:{os.environ['PATH']}", CALLS=str(tmp_path / "calls"), STATE=state)
    env |= dict(SLURM_RESTART_COUNT=str(restarts), SLURM_JOB_ID="7", LOCKSTEP_ROOT="/")
    begins, follows = ("0", str(code)) if code == FOLLOWED else (str(code), "0")
    env |= dict(CODE=begins, FOLLOW=follows)
    work = "kill -TERM $$" if state == "COMPLETING" else ":"
    script = f"set -eu\n{GUARD}export STAGED=/copy\ntrain() {{ {work}; }}\n{turns}"
    subprocess.run(["bash", "-c", script, "job", "1"], env=env, timeout=60)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[-1].startswith(last)
    pythons = [call for call in calls if call.startswith("python -m")]
    assert all(call.endswith(" /copy") for call in pythons) and not any("STAGED" in call for call in calls)
