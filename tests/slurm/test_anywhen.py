"""A run in jobs that start now, on a real Slurm whose administrator refuses, kills and holds jobs."""

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from launch.anywhen.record import records as requests
from rl.config.durations import seconds_of
from tests.records import comparable
from tests.slurm.cluster import PATIENCE_S, Cluster, status, wait_for
from tests.toy import SFT, train, write_config

pytestmark = pytest.mark.slow

STEPS, TURN_S, JOBS, NODE_HOURS = 300, 5.0, 3, 2.0
EVENTS = int(os.environ.get("ANYWHEN_EVENTS", "6"))
LAYOUTS = "run.elastic.layouts=[{nodes: 1}, {nodes: 2, training.tp: 2}, {nodes: 4}]"
OWN = (LAYOUTS, "run.elastic.min_nodes=1", "run.elastic.max_nodes=4", "checkpoint.every=10", *SFT)


@pytest.fixture
def submit(cluster, toy, tmp_path):
    """Write the plan with short times, and take a turn, as `submit()`; a turn may be refused."""
    config = write_config(tmp_path, toy)
    size = ("--nodes=4", "--gpus-per-node=0", "--ranks-per-node=1", "--cpus-per-task=16", "--time=3:00")
    limits = ("--partition=main", "--signal-lead=15", f"--jobs={JOBS}", f"--node-hours={NODE_HOURS}")
    command = (sys.executable, "-m", "lockstep", "submit", "--anywhen", "--config", config, *size, *limits)
    own = ("--dry-run", "--efficiency=0", "--", *OWN, f"run.max_steps={STEPS}")
    cluster.run(*command, *own, cwd=tmp_path)
    plan = tmp_path / "run" / "anywhen" / "plan.json"
    found = json.loads(plan.read_text())
    steps = [{**size, "step_s": 0.4 / size["nodes"]} for size in found["plan"]["sizes"]]
    found["plan"] |= {"turn_s": TURN_S, "start_s": 15.0, "sizes": steps}
    plan.write_text(json.dumps(found))
    turn = (
        "import sys; from pathlib import Path; from launch.anywhen.turns import turn; turn(Path(sys.argv[1]))"
    )

    def run() -> None:
        subprocess.run([sys.executable, "-c", turn, plan.parent], env=cluster.env, cwd=tmp_path, timeout=99)

    return run


def in_queue(cluster: Cluster, run: Path) -> list[dict]:
    """Return the run's jobs, and check the limits of the user at this moment."""
    name = json.loads((run / "anywhen" / "plan.json").read_text())["name"]
    lines = cluster.run("squeue", "-h", "-o", "%i|%T|%D|%l|%P|%j").splitlines()
    found = [
        dict(zip(("id", "state", "nodes", "limit", "partition", "name"), line.split("|"))) for line in lines
    ]
    mine = [job for job in found if job["name"].startswith(name)]
    booked = sum(int(job["nodes"]) * seconds_of(job["limit"]) for job in mine)
    here = {job["id"] for job in mine}
    spent = sum(job.spent_node_s for job in requests(run / "anywhen") if job.job not in here)
    assert len(mine) <= JOBS and {job["partition"] for job in mine} <= {"main"}
    assert booked + spent <= NODE_HOURS * 3600
    return mine


def test_a_hostile_scheduler_loses_nothing(cluster, submit, tmp_path):
    """The administrator refuses, kills and holds jobs, and other users' jobs come and go."""
    run, rng, done = tmp_path / "run", random.Random(0), Counter[str]()
    deadline, last = time.monotonic() + PATIENCE_S, time.monotonic()
    while status(run)["state"] != "finished":
        assert time.monotonic() < deadline, (status(run), requests(run / "anywhen"))
        mine = in_queue(cluster, run)
        if not mine:  # all were killed at once; the user, or cron, calls again
            submit()
        step, count = status(run)["step"], sum(done.values())
        if count < EVENTS and time.monotonic() - last > 6 and step > 40 * count and mine:
            last, job = time.monotonic(), rng.choice(mine)
            kind = ("kill", "refuse", "hold", "others")[count % 4]
            waiting = [each for each in mine if each["state"] == "PENDING"]
            if kind == "hold":
                job = next(iter(waiting), job)
            done[kind] += 1
            print(kind, job, step, flush=True)
            if kind == "kill":
                cluster.run("scancel", "--full", "--signal=KILL", job["id"])
                cluster.run("scancel", job["id"])
            elif kind == "others":
                wrap = ("--nodes=2", "--exclusive", "--time=1", "--wrap=sleep 15", "--partition=main")
                cluster.submit(*wrap, cwd=tmp_path)
            elif kind == "hold" and job["state"] == "PENDING":
                cluster.run("scontrol", "hold", job["id"])
            elif kind == "refuse":
                cluster.run("scontrol", "update", "PartitionName=main", "State=DRAIN")
                time.sleep(3 * TURN_S)
                cluster.run("scontrol", "update", "PartitionName=main", "State=UP")
        time.sleep(0.5)
    wait_for(lambda: not in_queue(cluster, run), "the end of the last job")
    jobs = requests(run / "anywhen")
    times = [job.asked["time"] for job in jobs]
    assert all(b - a >= 0.99 * TURN_S for a, b in zip(times, times[1:])), "a storm of requests"
    layouts = [
        job.asked["nodes"] for job in sorted(jobs, key=lambda job: job.begun.get("start", 0)) if job.begun
    ]
    print(
        f"{dict(done)}; {len(jobs)} requests, {sum(not job.job for job in jobs)} refused; layouts {layouts}"
    )
    assert_planned(run, tmp_path)


def assert_planned(run: Path, tmp_path: Path) -> None:
    """Compare with a run that is stopped and resumed at the same steps, in the layouts of the jobs."""
    planned, starts = tmp_path / "planned", []
    for path in run.glob("environment*.json"):
        found = json.loads(path.read_text())
        step = int(path.stem.rpartition("-")[2]) if "-after-step-" in path.stem else 0
        starts.append((step, found["world_size"], found["time"]))
    starts.sort()
    for (_, world, _), last in zip(starts, [step for step, *_ in starts[1:]] + [STEPS]):
        own = ["training.tp=2"] if world == 2 else []
        train(world, tmp_path / "config.yaml", *OWN, f"run.max_steps={last}", *own, run=planned)
    assert comparable(run) == comparable(planned)
