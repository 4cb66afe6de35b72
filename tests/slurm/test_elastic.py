"""Elastic runs on a real Slurm cluster: nodes lose power in each phase, are paused, return, die at random."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import median

import pytest

from launch.elastic_files import ElasticGeneration, Lease
from tests.records import comparable, records, rollouts
from tests.slurm.cluster import PATIENCE_S, status, wait_for, write_slow_config
from tests.spawn import ROOT
from tests.toy import train

pytestmark = pytest.mark.slow

LAYOUTS = "run.elastic.layouts=[{nodes: 2, training.tp: 2}, {nodes: 1, rollout.tp: 2}]"
ELASTIC = ("run.elastic.min_nodes=1", "run.elastic.max_nodes=2", "run.elastic.lost_s=6", LAYOUTS)
SIZE = ("--ntasks-per-node=2", "--gpus-per-node=0")
KILLS = int(os.environ.get("ELASTIC_KILLS", "3"))
PARTS = ("notice_s", "agree_s", "start_s", "load_s", "step_s", "total_s")


@pytest.fixture
def start(cluster, toy, tmp_path):
    """Submit an elastic run on some nodes, as `start(steps, overrides)`; return its job."""

    def submit(steps: int, *overrides: str, nodes: int = 2, first: int = 1, **env: str) -> str:
        own = (*ELASTIC, "checkpoint.every=1", "logging.rollouts=all", f"run.max_steps={steps}", *overrides)
        names = ",".join(f"node{first + n}" for n in range(nodes))
        command = (f"--nodes={nodes}", f"--nodelist={names}", *SIZE, ROOT / "slurm" / "elastic.sbatch")
        config = write_slow_config(tmp_path, toy, reward_s=0.05)
        return cluster.submit(*command, config, *own, cwd=tmp_path, **env)

    return submit


def generations(run: Path) -> list[ElasticGeneration]:
    found = [json.loads(path.read_text()) for path in sorted((run / "elastic").glob("generation-*"))]
    return [
        ElasticGeneration(**it | {"members": [Lease(**member) for member in it["members"]]}) for it in found
    ]


def in_phase(run: Path, phase: str, step: int, rank: int = 3):
    """Wait until a rank is in a phase of a step or a later one."""

    def is_there() -> bool:
        try:
            beat = json.loads((run / "heartbeat" / f"rank_{rank}.json").read_text())
        except (OSError, ValueError):
            return False
        return beat["step"] >= step and beat["phase"] == phase

    wait_for(is_there, f"{phase} of step {step}")


def widths(run: Path) -> list[int]:
    return [len(generation.members) for generation in generations(run)]


def ran_wide(run: Path, number: int) -> bool:
    """Return whether generation `number` or a later one has two nodes and has taken a step."""
    found = status(run)
    at = next((g for g in generations(run) if g.number == found.get("restarts", 0)), None)
    return at is not None and at.number >= number and len(at.members) == 2 and found["step"] > at.step


def resumed(tmp_path: Path) -> dict[int, int]:
    """Return the generations that loaded the run, each with the step of its checkpoint."""
    found, number = {}, 0
    for log in tmp_path.glob("*.out"):
        for line in log.read_text().splitlines():
            if match := re.match(r"generation (\d+) on", line):
                number = int(match[1])
            elif match := re.search(r"^ready in .*?(?:resuming after step (\d+))?$", line):
                found[number] = int(match[1] or 0)
    return found


def assert_planned(run: Path, tmp_path: Path, steps: int) -> None:
    """Compare with a run that is stopped and resumed at the same steps, in the layouts of the generations."""
    planned, config, begun = tmp_path / "planned", tmp_path / "config.yaml", resumed(tmp_path)
    for at in generations(run):
        later = [step for number, step in begun.items() if number > at.number]
        last = min([steps, *later])
        if at.number in begun and begun[at.number] < last:
            own = ("checkpoint.every=1", f"run.max_steps={last}", *at.overrides)
            train(sum(member.ranks for member in at.members), config, *own, run=planned)
    assert comparable(run) == comparable(planned)


@pytest.mark.parametrize(
    "phase, node", [("generate", "node2"), ("update", "node1"), ("refit", "node2"), ("save", "node1")]
)
def test_a_run_survives_a_node_that_loses_power(cluster, start, tmp_path, phase, node):
    """node1 holds rank 0, the batch script and srun; the node returns by a job that the run submits."""
    job, run = start(10**6, "watchdog.beat_s=0.1"), tmp_path / "run"
    in_phase(run, phase, 2)
    cluster.switch("lose-node", node)
    try:
        wait_for(lambda: (run / "elastic" / "recoveries.jsonl").exists(), "a step on the other node")
        assert widths(run)[:2] == [2, 1]
        wait_for(lambda: ran_wide(run, 3), "a step on two nodes")
        (run / "stop").touch()
        wait_for(lambda: generations(run)[-1].code == 0, "the end")
    finally:
        cluster.switch("start-node", node)
    facts = cluster.wait(job, states=("COMPLETED", "CANCELLED"))
    assert facts["Restarts"] == "0" and facts["JobState"] == ("CANCELLED" if node == "node1" else "COMPLETED")
    print(phase, (run / "elastic" / "recoveries.jsonl").read_text())
    assert_planned(run, tmp_path, status(run)["step"])


def test_a_node_that_was_paused_does_not_write(cluster, start, tmp_path):
    job, run = start(40, "watchdog.beat_s=0.1", NO_JOIN="1"), tmp_path / "run"
    in_phase(run, "update", 2)
    paused = [member for member in generations(run)[0].members if member.node == "node1"]
    old = [
        pid for pid in processes(cluster, "node1") if b"elastic" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert paused and old
    for pid in old:
        os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: status(run).get("restarts") == 2 and status(run)["step"] >= 3, "a step of node2")
    finally:
        for pid in old:
            os.kill(pid, signal.SIGCONT)
    wait_for(lambda: ran_wide(run, 3) or status(run)["state"] == "finished", "two nodes again, or the end")
    assert cluster.wait(job)["Restarts"] == "0"
    assert widths(run)[:2] == [2, 1]
    assert_planned(run, tmp_path, 40)


def test_agents_run_without_slurm(toy, tmp_path):
    """A node is an address of this machine here, with one rank. Its disk fails, and then its agent dies."""
    config, run, agents = write_slow_config(tmp_path, toy, reward_s=0.05), tmp_path / "run", []
    own = [
        *ELASTIC[:3],
        "run.elastic.layouts=[{nodes: 2}, {nodes: 1}]",
        "checkpoint.every=1",
        f"run.max_steps={10**6}",
    ]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    environ |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "launch.elastic", "--config", config, "--ranks=1", "--nodes=2"]
    for number in (1, 2):
        node = f"--node=127.0.1.{number}"
        agents.append(subprocess.Popen([*command, node, *own], env=environ, cwd=tmp_path))
    try:
        wait_for(lambda: ran_wide(run, 1), "a step on both")
        other = [*command, "--node=127.0.1.3", *own, "run.seed=5"]
        done = subprocess.run(other, env=environ, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 2 and "is that of a live run with another config" in done.stderr
        lease = run / "elastic" / f"{generations(run)[0].members[0].key}.json.partial"
        wait_for(partial(make_directory, lease), "no lease can be written there")
        wait_for(lambda: widths(run) == [2, 1] and has_stepped(run), "a step on one")
        lease.rmdir()
        wait_for(lambda: ran_wide(run, 3), "a step on both")
        agents[0].kill()
        wait_for(lambda: len(widths(run)) == 4 and has_stepped(run), "a step on one")
        (run / "stop").touch()
        assert agents[1].wait(PATIENCE_S) == 0 and widths(run) == [2, 1, 2, 1, 0]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert [record["training/global_step"] for record in records(run)] == [*range(1, status(run)["step"] + 1)]


def make_directory(path: Path) -> bool:
    with contextlib.suppress(FileExistsError):
        path.mkdir()
    return path.is_dir()


def processes(cluster, node: str) -> list[int]:
    """Return the processes of a node below its init, by their ids on this machine."""
    found, todo = [], [int((cluster.lab / "run" / f"init-{node}.pid").read_text())]
    while todo:
        pid = todo.pop()
        tasks = Path(f"/proc/{pid}/task")
        for children in tasks.glob("*/children"):
            below = [int(child) for child in children.read_text().split()]
            found += below
            todo += below
    return found


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_nodes_of_a_job_that_is_to_end_leave(cluster, start, tmp_path, jobs):
    """Two nodes of one job, or each of a job of its own; the signalled job is requeued and comes back."""
    all_jobs, run = [start(10**6, "watchdog.beat_s=0.1", nodes=3 - jobs)], tmp_path / "run"
    if jobs == 2:
        all_jobs.append(start(10**6, "watchdog.beat_s=0.1", nodes=1, first=2))
    in_phase(run, "update", 2)
    number = generations(run)[-1].number
    cluster.run("scancel", "--signal=USR2", all_jobs[0])
    wait_for(lambda: ran_wide(run, number + 2), "a step on two nodes")
    (run / "stop").touch()
    found = [int(cluster.wait(job, states=("COMPLETED",))["Restarts"]) for job in all_jobs]
    assert found == [1, 0][:jobs]
    assert [g.reason for g in generations(run)].count("start") == 3 - jobs
    assert_planned(run, tmp_path, status(run)["step"])


def test_a_second_death_during_the_recovery(cluster, start, tmp_path):
    """The spare node replaces node2; then node1 dies, with rank 0, the batch script and srun."""
    job, run = start(16, "watchdog.beat_s=0.1", nodes=3, NO_JOIN="1"), tmp_path / "run"
    in_phase(run, "save", 2)
    try:
        cluster.switch("lose-node", "node2")
        wait_for(lambda: len(generations(run)) == 2, "the next generation")
        cluster.switch("lose-node", "node1")
        wait_for(lambda: status(run)["state"] == "finished", "the end")
    finally:
        for node in ("node1", "node2"):
            cluster.switch("start-node", node)
    assert cluster.wait(job)["Restarts"] == "0"
    assert [g.nodes for g in generations(run)] == [["node1", "node2"], ["node1", "node3"], ["node3"], []]
    assert_planned(run, tmp_path, 16)


def test_a_job_that_loses_all_nodes_at_once_is_requeued(cluster, start, tmp_path):
    job, run = start(12, "watchdog.beat_s=0.1"), tmp_path / "run"
    in_phase(run, "update", 2)
    for what in ("lose-node", "start-node"):
        for node in ("node1", "node2"):
            cluster.switch(what, node)
    assert cluster.wait(job, states=("COMPLETED",))["Restarts"] == "1"
    assert [generation.reason for generation in generations(run)] == ["start", "start", "done"]
    assert_planned(run, tmp_path, 12)


def test_random_kills_lose_no_prompt_and_need_no_requeue(cluster, start, tmp_path):
    """ELASTIC_KILLS kills of nodes, agents and ranks at random times, while the run recovers, and in a save.

    A node loses power only while another member has it: nothing in a job survives the loss of all nodes.
    """
    first, run, rng = (
        start(10**6, "watchdog.beat_s=0.1", nodes=1, MAX_ATTEMPTS="100"),
        tmp_path / "run",
        random.Random(0),
    )
    start(10**6, "watchdog.beat_s=0.1", nodes=1, first=2, MAX_ATTEMPTS="100")
    wait_for(lambda: ran_wide(run, 1), "a step on two nodes")
    without, done = set[tuple[int, str]](), Counter[str]()
    for number in range(KILLS):
        kind, moment = (
            ("node", "agent", "rank")[number % 3],
            ("any time", "recovery", "save")[number // 3 % 3],
        )
        if moment != "recovery":
            wait_for(lambda: has_stepped(run), "a step")
            time.sleep(rng.uniform(1, 10))
        if moment == "save":
            in_phase(run, "save", 1, rank=0)
        at, node = wait_for(partial(victim, run, without, kind, rng), "a node that may die")
        print(number, kind, moment, node, at, status(run)["step"], flush=True)
        done[f"{kind}, {moment}"] += 1
        if kind == "node":
            without.add((at, node))
            cluster.switch("lose-node", node)
            time.sleep(3)
            cluster.switch("start-node", node)
        else:
            kill_one(cluster, node, kind, rng)
            time.sleep(rng.uniform(0, 8))
    wait_for(lambda: ran_wide(run, generations(run)[-1].number), "a step on two nodes")
    (run / "stop").touch()
    wait_for(lambda: generations(run)[-1].code == 0, "the end")
    jobs = [path.name[4:] for path in (run / "elastic").glob("job-*")]
    restarts = {job: int(cluster.job(job)["Restarts"]) for job in jobs}
    steps = status(run)["step"]
    config = tmp_path / "config.yaml"
    train(2, config, f"run.max_steps={steps}", "logging.rollouts=all", run=tmp_path / "whole")
    drawn, whole = Counter(prompts_of(run)), Counter(prompts_of(tmp_path / "whole"))
    lost, doubled = sum((whole - drawn).values()), sum((drawn - whole).values())
    print(f"{dict(done)}; requeues of jobs {restarts}; {steps} steps, {lost} samples lost, {doubled} doubled")
    lines = (run / "elastic" / "recoveries.jsonl").read_text().splitlines()
    recoveries = [found for found in map(json.loads, lines) if found["reason"] != "nodes change"]
    for part in PARTS:
        seconds = sorted(each[part] for each in recoveries)
        print(part, "min, median, max:", seconds[0], median(seconds), seconds[-1], "of", len(seconds))
    assert first in restarts and set(restarts.values()) == {0} and lost == doubled == 0
    assert [record["training/global_step"] for record in records(run)] == list(range(1, steps + 1))


def has_stepped(run: Path) -> bool:
    at, found = generations(run)[-1], status(run)
    return found.get("restarts") == at.number and found["step"] > at.step


def victim(run: Path, without: set, kind: str, rng) -> tuple[int, str] | None:
    """Return the newest generation, and one of its nodes; with `kind` node only if another one has power."""
    at = generations(run)[-1]
    live = [node for node in at.nodes if (at.number, node) not in without]
    return (at.number, rng.choice(live)) if len(live) > (kind == "node") else None


def kill_one(cluster, node: str, kind: str, rng) -> None:
    module = b"launch.elastic" if kind == "agent" else b"launch.elastic_ranks"
    for pid in rng.sample(found := processes(cluster, node), len(found)):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if words[1:3] == [b"-m", module] and (kind == "agent" or is_rank(pid)):
                return os.kill(pid, signal.SIGKILL)
        except OSError:  # it has ended meanwhile
            continue


def is_rank(pid: int) -> bool:
    """Return whether a process is a forked rank, which leads a session of its own."""
    return os.getsid(pid) == pid


def prompts_of(run: Path) -> list:
    """Return step and prompt of every sample that was learned from."""
    return sorted((row["step"], row["prompt_index"]) for row in rollouts(run))
