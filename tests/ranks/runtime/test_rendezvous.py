"""The meeting of a step's ranks, as processes on this host with the variables that Slurm sets."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from rl.runtime import rendezvous
from rl.runtime.job_key import key_from
from rl.runtime.ranks import discover
from rl.runtime.rendezvous import (
    CANDIDATES,
    FIRST_PORT,
    NUM_PORTS,
    candidate_ports,
    listen,
    listen_anywhere,
    outside_ephemeral_range,
)
from rl.runtime.strangers import most_strangers
from tests.spawn import ROOT

KEY = "the key of the jobs of these tests"
PROGRAM = """
import json
from rl.runtime.ranks import discover
from rl.runtime.rendezvous import RendezvousError, join_ranks

try:
    ranks = join_ranks(discover())
    print(json.dumps([ranks.rank, ranks.master_port]))
except RendezvousError as error:
    print(json.dumps([str(error), error.silent]))
"""


def step(job, rank, *, world=4, nodes="node[1-2]", tasks="2(x2)", **more):
    """Variables of a rank of two nodes with two tasks each; both nodes are this host."""
    node = rank // 2
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(world),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURMD_NODENAME": f"node{node + 1}",
        "MASTER_ADDR": "127.0.0.1",
        "LOCKSTEP_JOB_KEY": KEY,
        **more,
    }


def start(env):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "MASTER", "RANK", "WORLD"))}
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.Popen(
        command,
        env=clean | {"PYTHONPATH": str(ROOT)} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answers(processes, timeout=60):
    """Return the output of each rank; the seconds are a guard against hanging."""
    out = []
    for process in processes:
        out_text, error = process.communicate(timeout=timeout)
        assert process.returncode == 0, error
        out.append(json.loads(out_text))
    return out


def meeting(job, ranks=range(4), **more):
    return [start(step(job, rank, **more)) for rank in ranks]


# Ports --------------------------------------------------------------------------------------------------


def ports(job, step_id="0", restart=0):
    return candidate_ports(f"{job}.{step_id}.{restart}", key_from({"LOCKSTEP_JOB_KEY": KEY}).secret)


def test_ports_follow_from_the_key_and_the_attempt():
    found = {
        (job, step_id): tuple(ports(job, step_id)) for job in range(71230, 71260) for step_id in range(20)
    }
    assert len(set(found.values())) == 600
    other = candidate_ports("71230.0.0", bytes(32))
    assert len(set(other)) == CANDIDATES and not set(other) <= set(ports(71230))
    every = {port for some in found.values() for port in some} | set(ports(2**31 - 2, 999))
    assert min(every) >= FIRST_PORT > 1024 and max(every) < FIRST_PORT + NUM_PORTS <= 32768


def test_ports_of_this_hosts_ephemeral_range_are_left_out(monkeypatch):
    monkeypatch.setattr(rendezvous.Path, "read_text", lambda path: "15000\t60999\n")
    assert outside_ephemeral_range([14999, 15000, 60999, 61000]) == [14999, 61000]
    assert outside_ephemeral_range([15000, 20000]) == [15000, 20000]  # rather one of them than none


def test_a_free_port_stays_taken_from_its_probing_on():
    with listen_anywhere(1, "127.0.0.1") as listener:
        assert listen([listener.getsockname()[1]], 1, "127.0.0.1") is None


# Meetings -----------------------------------------------------------------------------------------------


def test_jobs_and_a_stranger_on_the_same_port_do_not_collide():
    """Two jobs have one MASTER_PORT; on it the second finds the first job, and a stranger never answers."""
    with socket.create_server(("127.0.0.1", ports(9)[0])), socket.create_server(("", ports(9)[1])):
        met = answers(meeting(9))
    assert met == [[rank, ports(9)[2]] for rank in range(4)]
    given = ports(10)[0]
    first = start(step(11, 0, MASTER_PORT=str(given)))
    lost = start(step(12, 1, MASTER_PORT=str(given), LOCKSTEP_JOIN_TIMEOUT="4"))
    assert "did not open" in answers([lost])[0][0]
    assert answers([first, *meeting(11, ranks=[1, 2, 3], MASTER_PORT=str(given))])[3] == [3, given]


def flux(rank, **more):
    """Variables of a rank of `flux run -N 2 -n 4`; both nodes are this host."""
    task = {"FLUX_TASK_RANK": str(rank), "FLUX_TASK_LOCAL_ID": str(rank % 2), "FLUX_JOB_NNODES": "2"}
    return task | {"FLUX_JOB_SIZE": "4", "FLUX_JOB_ID": "f3XyZ", "MASTER_ADDR": "127.0.0.1"} | more


def test_ranks_of_another_scheduler_meet_by_the_jobs_key():
    met = answers([start(flux(rank, LOCKSTEP_JOB_KEY=KEY)) for rank in range(4)])
    assert [rank for rank, _ in met] == [0, 1, 2, 3] and len({port for _, port in met}) == 1
    waiting = {"LOCKSTEP_JOB_KEY": KEY, "LOCKSTEP_JOIN_TIMEOUT": "3"}
    (sentence, _), *_ = answers([start(flux(rank, **waiting)) for rank in range(3)])
    assert sentence.startswith("rank 3 of 4 did not come within 3 s of rank 0's start. LOCKSTEP_JOIN_TIMEOUT")


def test_missing_ranks_are_named():
    without_last = meeting(77, ranks=[0, 1, 2], LOCKSTEP_JOIN_TIMEOUT="3")
    without_first = meeting(78, ranks=[1], LOCKSTEP_JOIN_TIMEOUT="2")
    without_address = meeting(79, ranks=[1], MASTER_ADDR="nowhere.invalid", LOCKSTEP_JOIN_TIMEOUT="1000")
    (sentence, silent), *others = answers(without_last)
    assert not silent and re.search(
        r"rank 3 of 4 did not come within 3 s .* missing on node2 \(1 of 2 came\)", sentence
    ), sentence
    assert all(silent for _, silent in others)  # the first rank has said it
    [(sentence, silent)] = answers(without_first)
    assert not silent and "rank 0 of 4, expected on 127.0.0.1, did not open" in sentence
    [(sentence, _)] = answers(without_address)  # at once
    assert "nowhere.invalid, has no address on" in sentence and "MASTER_ADDR" in sentence


def test_a_rank_of_an_earlier_attempt_is_no_rank_of_this_one():
    old = start(step(80, 3, LOCKSTEP_JOIN_TIMEOUT="6"))
    new = meeting(80, ranks=range(3), SLURM_RESTART_COUNT="1", LOCKSTEP_JOIN_TIMEOUT="4")
    said = answers([old, *new])
    assert "rank 3 of 4 did not come" in said[1][0] and "did not open" in said[0][0]


def test_clients_without_the_key_take_no_place_and_delay_nobody():
    first = start(step(81, 0))
    address, callers = ("127.0.0.1", ports(81)[0]), []
    place = json.dumps(["81.0.0", 3, "node2"]).encode() + b"\n"
    old = b'lockstep 81.0.0\t[3, "node2"]\n'
    silent = [b""] * (most_strangers() + 20)
    for word in (*silent, b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 600, old, bytes(64) + place):
        deadline = time.monotonic() + 60
        while True:
            try:
                caller = socket.create_connection(address)
                break
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
        callers.append(caller)
        with contextlib.suppress(ConnectionError):
            caller.sendall(word)
            if word:
                caller.shutdown(socket.SHUT_WR)
                assert len(caller.makefile("rb").read()) == 32  # a question, and no answer
    met = answers([first, *meeting(81, ranks=[1, 2, 3])])
    for caller in callers:
        caller.close()
    assert met == [[rank, ports(81)[0]] for rank in range(4)]  # at the first candidate


def test_sixty_four_ranks_meet():
    env = step(82, 0, world=64, nodes="node[1-2]", tasks="32(x2)")
    first = start(env)
    with ThreadPoolExecutor(63) as threads:
        others = [discover(env | {"SLURM_PROCID": str(rank)}) for rank in range(1, 64)]
        met = list(
            threads.map(
                lambda ranks: rendezvous.join_ranks(ranks, env | {"SLURM_PROCID": str(ranks.rank)}), others
            )
        )
    assert {ranks.master_port for ranks in met} == {ports(82)[0]} == {answers([first])[0][1]}


def test_without_a_launcher_the_port_is_any_free_one():
    alone = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RANK", "WORLD"))
    }
    ranks = rendezvous.join_ranks(discover(alone), alone)
    with ranks.listener:
        assert ranks.listener.getsockname()[1] == ranks.master_port >= FIRST_PORT
