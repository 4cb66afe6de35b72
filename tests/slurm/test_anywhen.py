"""A run in jobs that start now, on a real Slurm with 16 nodes and the jobs of other users.

An hour of a synthetic trace lasts a minute, the shortest time limit of Slurm. In one test real ranks train
while the administrator refuses, kills and holds jobs. The other compares a run with one fixed job; its ranks
only sleep, because 16 nodes on this machine would not be faster than one.
"""

import json
import math
import os
import random
import re
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from launch.anywhen.record import JobRecord, records
from rl.config.durations import seconds_of
from rl.runtime.ranks import expand_hostlist
from tests.records import comparable
from tests.slurm.cluster import PATIENCE_S, Cluster, running_cluster, status, wait_for
from tests.toy import SFT, train, write_config
from tests.unit.launch import queue_simulator as simulated
from tests.unit.launch.test_anywhen import BEGIN, FIXED, NODES, STEPS

pytestmark = pytest.mark.slow

SCALE, TURN_S, JOBS, NODE_HOURS = 60.0, 5.0, 3, 4.0
STEP_S = 36.0 / SCALE
LAYOUTS = "run.elastic.layouts=[{nodes: 1}, {nodes: 2, training.tp: 2}, {nodes: 4}, {nodes: 8}]"
OWN = (LAYOUTS, "run.elastic.min_nodes=1", "run.elastic.max_nodes=8", "checkpoint.every=10", *SFT)
PACED = """#!{python}
import json, os, pathlib, signal, sys, time

signal.signal(signal.SIGUSR2, lambda *_: sys.exit(75))
directory, nodes = pathlib.Path("{run}"), int(os.environ["SLURM_NNODES"])
if os.environ["SLURM_PROCID"] == "0":
    path, plan = directory / "status.json", json.loads((directory / "anywhen" / "plan.json").read_text())
    step_s = next(size["step_s"] for size in plan["sizes"] if size["nodes"] == nodes)
    step = json.loads(path.read_text())["checkpoint_step"] if path.exists() else 0
    while step < plan["max_steps"]:
        time.sleep(step_s)
        step += 1
        with (directory / "metrics.jsonl").open("a") as file:
            line = {{"training/global_step": step, "time": time.time(), "timing_s/step": step_s}}
            file.write(json.dumps(line) + "\\n")
        state = "finished" if step == plan["max_steps"] else "running"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({{"state": state, "step": step, "checkpoint_step": step}}))
        partial.replace(path)
"""


class Run:
    """A run that is submitted by `--anywhen` to a cluster, with short times.

    most: nodes of its largest job. start_s: assumed seconds of a job before its first step.
    """

    def __init__(self, cluster: Cluster, toy: Path, directory: Path, *, most: int, start_s: float):
        self.cluster, self.directory = cluster, directory / "run"
        config = write_config(directory, toy)
        size = ("--nodes=8", "--gpus-per-node=0", "--ranks-per-node=1", "--cpus-per-task=16", "--time=8:00")
        limits = ("run.limits.partitions=[main]", f"run.limits.jobs={JOBS}", "run.limits.efficiency=0")
        limits += (f"run.limits.node_hours={NODE_HOURS}",)
        command = (sys.executable, "-m", "lockstep", "submit", "--anywhen", "--config", config, *size)
        own = ("--dry-run", "--signal-lead=15", "--", *OWN, f"run.max_steps={STEPS}")
        cluster.run(*command, *own, *limits, cwd=directory)
        self.plan = json.loads((self.anywhen / "plan.json").read_text())
        sizes = [size for size in self.plan["sizes"] if size["nodes"] <= most]
        for size in sizes:
            size["step_s"] = STEP_S * (FIXED / size["nodes"]) ** 0.9
        self.plan |= {"turn_s": TURN_S, "start_s": start_s, "sizes": sizes}
        (self.anywhen / "plan.json").write_text(json.dumps(self.plan))

    @property
    def anywhen(self) -> Path:
        return self.directory / "anywhen"

    @property
    def requests(self) -> list[JobRecord]:
        return records(self.anywhen)

    def submit(self, **env: str) -> None:
        """Take a turn, as `submit --anywhen` does; it may be refused."""
        turn = "from launch.anywhen.turns import *; follow(Path(sys.argv[1]), 1)"
        command = [sys.executable, "-c", turn, str(self.anywhen)]
        subprocess.run(command, env=self.cluster.env | env, cwd=self.directory.parent, timeout=99)

    def in_queue(self) -> list[dict[str, str]]:
        """Return the run's jobs, and check the limits of the user at this moment."""
        names, form = ("id", "state", "nodes", "limit", "partition", "name"), "%i|%T|%D|%l|%P|%j"
        lines = self.cluster.run("squeue", "-h", "-o", form).splitlines()
        mine = [dict(zip(names, line.split("|"))) for line in lines if f"|{self.plan['name']}" in line]
        here = {job["id"] for job in mine}
        spent = sum(job.spent_node_s for job in self.requests if job.job not in here)
        booked = sum(int(job["nodes"]) * seconds_of(job["limit"]) for job in mine)
        assert len(mine) <= JOBS and {job["partition"] for job in mine} <= {"main"}
        assert booked + spent <= NODE_HOURS * 3600
        return mine

    def check_requests(self) -> None:
        """Check that no two requests were closer than a turn; print them."""
        times = [job.asked["time"] for job in self.requests]
        assert all(b - a >= 0.99 * TURN_S for a, b in zip(times, times[1:])), "a storm of requests"
        begun = sorted((job for job in self.requests if job.begun), key=lambda job: job.begun["time"])
        refused = sum(not job.job for job in self.requests)
        print(f"{len(times)} requests, {refused} refused; layouts {[job.asked['nodes'] for job in begun]}")


@contextmanager
def other_users(cluster: Cluster, directory: Path, seed: int, widest: int = NODES) -> Iterator[None]:
    """Submit the jobs of a trace, from the moment BEGIN on; those that run or wait then come first."""
    trace = simulated.trace(random.Random(seed), NODES, load=0.9, hours=60)
    trace = [(at, job) for at, job in trace if job.nodes <= widest]
    queue, over = simulated.Cluster(NODES, trace), threading.Event()
    while queue.now < BEGIN:
        queue.advance(queue.now + 120)

    def submit(job: simulated.Job, past_s: float = 0.0) -> None:
        hours, rest_s = math.ceil((job.seconds - past_s) / 3600), (job.runs_s - past_s) / SCALE
        words = ("--exclusive", f"--nodes={job.nodes}", f"--time={hours}", "--job-name=a\nb|c")
        words += ("--partition=main", "--output=/dev/null", f"--wrap=sleep {rest_s:.1f}")
        cluster.submit(*words, cwd=directory)

    def feed() -> None:
        began = time.monotonic()
        for at, job in trace:
            if at > BEGIN:
                if over.wait(max(0.0, began + (at - BEGIN) / SCALE - time.monotonic())):
                    return
                with suppress(AssertionError):  # the partition may be closed
                    submit(job)

    for job in queue.running:
        submit(job, BEGIN - job.started)
    for job in queue.waiting:
        submit(job)
    thread = threading.Thread(target=feed)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_hostile_scheduler_loses_nothing(slurm, toy, tmp_path):
    """An administrator refuses, kills and holds jobs at random moments, among other users' jobs."""
    rng, done = random.Random(0), Counter[str]()
    kinds = ["kill", "refuse", "hold"] * 2
    rng.shuffle(kinds)
    with running_cluster(NODES) as cluster, other_users(cluster, tmp_path, 0, widest=4):
        run = Run(cluster, toy, tmp_path, most=4, start_s=60.0)
        deadline = time.monotonic() + PATIENCE_S
        while status(run.directory)["state"] != "finished":
            assert time.monotonic() < deadline, (status(run.directory), run.requests)
            mine = run.in_queue()
            if not any(
                job["state"] == "RUNNING" for job in mine
            ):  # cron calls again: all were killed or held
                run.submit()
            elif kinds and status(run.directory)["step"] > 25 * (6 - len(kinds)) and rng.random() < 0.3:
                kind = kinds.pop()
                done[kind] += disturb(cluster, kind, rng, mine)
            time.sleep(0.5)
        wait_for(lambda: not run.in_queue(), "the end of the last job")
        print(dict(done))
        run.check_requests()
    assert_planned(run.directory, tmp_path)


def write_paced(run: Run, directory: Path) -> str:
    """Write an interpreter that sleeps in place of training, and return its path."""
    path = directory / "paced"
    path.write_text(PACED.format(python=sys.executable, run=run.directory))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_cancelled_job_ends_the_run_of_two_users_commands(cluster, toy, tmp_path):
    """Two commands at once make one request. After scancel nothing is requested, and the successor leaves."""
    run = Run(cluster, toy, tmp_path, most=1, start_s=10.0)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: run.submit(PYTHON=write_paced(run, tmp_path)), range(2)))
    assert len(run.requests) == 1
    wait_for(lambda: status(run.directory)["step"] and len(run.requests) > 1, "a successor")
    cluster.run("scancel", run.requests[0].job)
    wait_for(lambda: not run.in_queue(), "the end of the run")
    found = run.requests
    run.submit()
    assert run.requests == found and (run.anywhen / "stop").read_text() == f"job {found[0].job} was cancelled"
    assert not any(job.begun and job.ended.get("code") != 3 for job in found[1:])


def test_a_preempted_job_requests_its_successor(cluster, toy, tmp_path):
    """Slurm gives it KillWait (10 s). The node-hours allowed no successor before its end."""
    run = Run(cluster, toy, tmp_path, most=1, start_s=10.0)
    run.plan["limits"]["node_hours"] = 500 / 3600
    (run.anywhen / "plan.json").write_text(json.dumps(run.plan))
    run.submit(PYTHON=write_paced(run, tmp_path))
    wait_for(lambda: status(run.directory)["step"], "a step")
    cluster.run("scontrol", "update", "PartitionName=main", "GraceTime=0")
    try:
        urgent = ("--partition=urgent", "--nodes=4", "--exclusive", "--wrap=sleep 1")
        cluster.submit(*urgent, cwd=tmp_path)
        wait_for(lambda: len(run.requests) > 1 and run.requests[1].begun, "a job in its place")
    finally:
        cluster.run("scontrol", "update", "PartitionName=main", "GraceTime=60")
    first, second = run.requests
    assert cluster.job(first.job)["JobState"] == "PREEMPTED" and not (run.anywhen / "stop").exists()
    (run.directory / "stop").touch()
    cluster.run("scancel", second.job)
    wait_for(lambda: not run.in_queue(), "the end of the run")


def disturb(cluster: Cluster, kind: str, rng: random.Random, jobs: list[dict[str, str]]) -> bool:
    """Do what an administrator does to a run's jobs; return False if there is no job for it."""
    if kind == "kill":
        running = [job["id"] for job in jobs if job["state"] == "RUNNING"]
        if not running:
            return False
        node = expand_hostlist(cluster.job(rng.choice(running))["NodeList"])[
            0
        ]  # with scancel the run would end
        cluster.switch("lose-node", node)
        cluster.switch("start-node", node)
    elif kind == "refuse":
        cluster.run("scontrol", "update", "PartitionName=main", "State=DRAIN")
        time.sleep(15)
        cluster.run("scontrol", "update", "PartitionName=main", "State=UP")
    elif waiting := [job["id"] for job in jobs if job["state"] == "PENDING"]:
        cluster.run("scontrol", "hold", rng.choice(waiting))
    else:
        return False
    return True


def assert_planned(run: Path, tmp_path: Path) -> None:
    """Compare with a run that is stopped and resumed at the same steps, in the layouts of the jobs."""
    planned, starts, steps = tmp_path / "planned", [], status(run)["step"]
    for path in run.glob("environment*.json"):
        found = json.loads(path.read_text())
        starts.append((found["after_step"], found["world_size"], found["time"]))
    starts.sort()
    for (_, world, _), last in zip(starts, [step for step, *_ in starts[1:]] + [steps]):
        own = ["training.tp=2"] if world == 2 else []
        train(world, tmp_path / "config.yaml", *OWN, f"run.max_steps={last}", *own, run=planned)
    assert comparable(run) == comparable(planned)
    assert [record["training/global_step"] for record in comparable(run)] == list(range(1, steps + 1))


@pytest.mark.parametrize("seed", json.loads(os.environ.get("ANYWHEN_TRACES", "[6]")))
def test_a_run_in_holes_beside_one_fixed_job(slurm, toy, tmp_path, seed):
    """Each has a cluster of its own with the same trace; the figures are printed. Some traces need
    pytest's -o faulthandler_timeout=0."""
    with running_cluster(NODES) as one, running_cluster(NODES) as other:
        run = Run(other, toy, tmp_path, most=8, start_s=10.0)
        file = Path(run.plan["file"])
        file.write_text(re.sub("#SBATCH --signal.*\n", "", file.read_text()))  # a minute early, for Slurm
        ranks = write_paced(run, tmp_path)
        with other_users(one, tmp_path, seed), other_users(other, tmp_path, seed):
            began = time.time()
            wrap = f"--wrap=sleep {5 + STEPS * STEP_S:.0f}"
            fixed = one.submit(f"--nodes={FIXED}", "--exclusive", "--time=3", wrap, cwd=tmp_path)
            while status(run.directory)["state"] != "finished":
                if not run.in_queue() or len(run.requests) < JOBS:
                    run.submit(PYTHON=ranks)
                time.sleep(2)
            job = one.wait(fixed, timeout=3600.0)
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["training/global_step"] for line in lines] == list(range(1, STEPS + 1))
    run.check_requests()
    holes, ended = lines[-1]["time"], time.mktime(time.strptime(job["EndTime"], "%Y-%m-%dT%H:%M:%S"))
    print(f"trace {seed}: {holes - began:.0f} s in holes, {ended - began:.0f} s in one job")
