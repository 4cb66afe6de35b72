"""Elastic runs on a real Slurm cluster: nodes lose power in each phase, are paused, return, die at random."""

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from launch.elastic_files import Generation, Lease
from tests.records import comparable, records, rollouts
from tests.slurm.cluster import status, wait_for, write_slow_config
from tests.spawn import ROOT
from tests.toy import train

pytestmark = pytest.mark.slow

LAYOUTS = "run.elastic.layouts=[{nodes: 2, training.tp: 2}, {nodes: 1, rollout.tp: 2}]"
ELASTIC = ("run.elastic.min_nodes=1", "run.elastic.max_nodes=2", "run.elastic.lost_s=6", LAYOUTS)
SIZE = ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=0")
KILLS = int(os.environ.get("ELASTIC_KILLS", "3"))


@pytest.fixture
def start(cluster, toy, tmp_path):
    """Submit an elastic run on node1 and node2, as `start(steps, overrides)`; return its job."""

    def submit(steps: int, *overrides: str, **env: str) -> str:
        own = (*ELASTIC, "checkpoint.every=1", "logging.rollouts=all", f"run.max_steps={steps}", *overrides)
        file = ROOT / "slurm" / "elastic.sbatch"
        place = ("--nodelist=node1,node2", *SIZE, file)
        return cluster.submit(
            *place, write_slow_config(tmp_path, toy, reward_s=0.05), *own, cwd=tmp_path, **env
        )

    return submit


def generations(run: Path) -> list[Generation]:
    found = [json.loads(path.read_text()) for path in sorted((run / "elastic").glob("generation-*"))]
    return [Generation(**it | {"members": [Lease(**member) for member in it["members"]]}) for it in found]


def in_phase(run: Path, phase: str, step: int):
    """Wait until rank 3 is in a phase of a step or a later one."""

    def is_there() -> bool:
        try:
            beat = json.loads((run / "heartbeat" / "rank_3.json").read_text())
        except (OSError, ValueError):
            return False
        return beat["step"] >= step and beat["phase"] == phase

    wait_for(is_there, f"{phase} of step {step}")


def widths(run: Path) -> list[int]:
    return [len(generation.members) for generation in generations(run)]


def ran_wide(run: Path, number: int) -> bool:
    """Return whether a generation from `number` on has two nodes and has taken a step."""
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
    job, run = start(40, "watchdog.beat_s=0.1"), tmp_path / "run"
    in_phase(run, phase, 2)
    cluster.switch("lose-node", node)
    try:
        wait_for(lambda: (run / "elastic" / "recoveries.jsonl").exists(), "a step on the other node")
        assert widths(run)[:2] == [2, 1]
        wait_for(lambda: ran_wide(run, 3), "a step on two nodes")
        wait_for(lambda: status(run)["state"] == "finished", "the end")
    finally:
        cluster.switch("start-node", node)
    facts = cluster.wait(job, states=("COMPLETED", "CANCELLED"))
    assert facts["Restarts"] == "0" and facts["JobState"] == ("CANCELLED" if node == "node1" else "COMPLETED")
    print(phase, (run / "elastic" / "recoveries.jsonl").read_text())
    assert_planned(run, tmp_path, 40)


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


def test_random_kills_lose_no_prompt_and_need_no_requeue(cluster, start, tmp_path):
    """ELASTIC_KILLS kills of nodes, agents and ranks at random times, also while the run recovers."""
    steps = 6 + 20 * KILLS
    job, run, rng = start(steps, MAX_ATTEMPTS="100"), tmp_path / "run", random.Random(0)
    wait_for(lambda: status(run)["step"] >= 1, "step 1")
    for number in range(KILLS):
        time.sleep(rng.uniform(1, 20))
        if status(run)["state"] == "finished":
            break
        at = generations(run)[-1]
        node = rng.choice(at.nodes)
        kind = rng.choice(("node", "agent", "rank"))
        print(number, kind, node, at.number, status(run)["step"], flush=True)
        if kind == "node":
            cluster.switch("lose-node", node)
            time.sleep(3)
            cluster.switch("start-node", node)
            continue
        words = b"launch.elastic\0" if kind == "agent" else b"launch.elastic_ranks\0"
        for pid in rng.sample(found := processes(cluster, node), len(found)):
            try:
                if words in Path(f"/proc/{pid}/cmdline").read_bytes() and (kind == "agent" or is_rank(pid)):
                    os.kill(pid, signal.SIGKILL)
                    break
            except OSError:  # it has ended meanwhile
                continue
    wait_for(lambda: status(run)["state"] == "finished", "the end", timeout=3600)
    assert cluster.job(job)["Restarts"] == "0"
    assert [record["training/global_step"] for record in records(run)] == list(range(1, steps + 1))
    drawn = prompts_of(run)
    train(
        2, tmp_path / "config.yaml", f"run.max_steps={steps}", "logging.rollouts=all", run=tmp_path / "whole"
    )
    assert drawn == prompts_of(tmp_path / "whole")
    print((run / "elastic" / "recoveries.jsonl").read_text())


def is_rank(pid: int) -> bool:
    """Return whether a process is a forked rank, which leads a session of its own."""
    return os.getsid(pid) == pid


def prompts_of(run: Path) -> list:
    """Return step and prompt of every sample that was learned from."""
    return sorted((row["step"], row["prompt_index"]) for row in rollouts(run))
