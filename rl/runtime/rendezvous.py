"""Where the ranks of a job meet: the first rank opens a port on its host, the others find it, and a rank that does not come
is named.

    ranks = meet(discover())        # before torch is imported: a rank that is missing is known within a minute

Under srun nothing is known but the node list and the job's id, from which every rank derives the same few candidate ports. The
first rank listens at the first candidate that is free. The others go through the candidates and say which job, step and
attempt they belong to; whoever listens there for another job refuses them, and they try the next. When all have come, each is
told to go on, and the same listening socket becomes torch.distributed's store: between the probing of a port and its use there
is no moment at which another process could take it. torchrun's agent has a store of its own; under mpirun the address is
broadcast.
"""

import contextlib
import json
import os
import random
import select
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from rl.runtime.ranks import Ranks, expand_hostlist, expand_tasks_per_node

FIRST_PORT, NUM_PORTS = 10000, 22000
"""Ports below the ephemeral range that Linux has by default, 32768 and up."""
CANDIDATES = 8
JOIN_TIMEOUT = "LOCKSTEP_JOIN_TIMEOUT"
"""Environment variable: seconds that the ranks of a step wait for each other; default JOIN_S."""
JOIN_S = 60.0
ANSWER_S = 2.0
"""Longest wait for a connection, and for a word of a listener that may be no rank of ours."""
RETRY_S = 0.25


class MeetingFailed(RuntimeError):
    """One sentence: who did not come, or why nobody can. `silent` if another rank says it."""

    def __init__(self, sentence: str, *, silent: bool = False):
        super().__init__(sentence)
        self.silent = silent


def meet(ranks: Ranks, environ: Mapping[str, str] | None = None, *, timeout: float | None = None) -> Ranks:
    """The same ranks with `master_port`, and on the first rank `listener`, the socket that is open there. Collective over
    the job under srun and mpirun.

    timeout: seconds until a rank counts as missing. Raises MeetingFailed.
    """
    env = os.environ if environ is None else environ
    if ranks.master_port or ranks.listener:
        return ranks
    if ranks.launcher == "slurm":
        return _meet_in_step(
            ranks, env, timeout if timeout is not None else float(env.get(JOIN_TIMEOUT, JOIN_S))
        )
    if ranks.launcher == "mpi":
        from mpi4py import MPI

        listener = listen_anywhere(ranks.world_size) if ranks.rank == 0 else None
        port = MPI.COMM_WORLD.bcast(listener.getsockname()[1] if listener else None)
        return replace(ranks, master_port=port, listener=listener)
    listener = listen_anywhere(1)
    return replace(ranks, master_port=listener.getsockname()[1], listener=listener)


# Ports --------------------------------------------------------------------------------------------------------------------


def candidate_ports(env: Mapping[str, str]) -> list[int]:
    """The ports of a step, in the order in which they are tried; a function of the ids of job and step alone. The elements of
    a job array have ids of their own."""
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", "0"))
    first = int(env["SLURM_JOB_ID"]) * 7 + int(step) * 4001
    # Further candidates at random distances, so that two jobs that share one do not share the rest.
    more = random.Random(first).sample(range(NUM_PORTS), CANDIDATES - 1)
    return [FIRST_PORT + (first + distance) % NUM_PORTS for distance in (0, *more)]


def outside_ephemeral_range(ports: list[int]) -> list[int]:
    """Those that the kernel of this host does not give to outgoing connections; all if it gives every one of them."""
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except OSError:  # a container without /proc
        return ports
    return [port for port in ports if not low <= port <= high] or ports


def listen(ports: list[int], backlog: int) -> socket.socket | None:
    """A socket that listens at the first of `ports` that is free, on all addresses of this host; None if none is."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    for port in ports:
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", port), family=family, backlog=max(backlog, 128), dualstack_ipv6=both
            )
    return None


def listen_anywhere(backlog: int) -> socket.socket:
    """The same at a port that this host has free, below the ephemeral range if one can be found there."""
    choice = random.SystemRandom().sample(range(FIRST_PORT, FIRST_PORT + NUM_PORTS), 64)
    listener = listen(outside_ephemeral_range(choice), backlog) or listen([0], backlog)
    if listener is None:
        raise MeetingFailed(f"{socket.gethostname()} has no port free to listen at.")
    return listener


# A step of Slurm ----------------------------------------------------------------------------------------------------------


def _meet_in_step(ranks: Ranks, env: Mapping[str, str], timeout: float) -> Ranks:
    ports = [int(env["MASTER_PORT"])] if "MASTER_PORT" in env else candidate_ports(env)
    # A requeued job has the id of its earlier attempt, some rank of which may still be about.
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID"))
    token = f"lockstep {env['SLURM_JOB_ID']}.{step}.{env.get('SLURM_RESTART_COUNT', '0')}"
    if ranks.rank == 0:
        listener = listen(outside_ephemeral_range(ports), ranks.world_size)
        if listener is None:
            raise MeetingFailed(
                f"all ports of this step, {', '.join(map(str, ports))}, are taken on {socket.gethostname()}; "
                "set MASTER_PORT to a free one."
            )
        _receive_all(listener, token, ranks.world_size, _tasks_of_nodes(env), timeout)
        return replace(ranks, master_port=listener.getsockname()[1], listener=listener)
    _require_address(ranks.master_addr)
    return replace(ranks, master_port=_find_first_rank(ranks, env, ports, token, timeout))


def _tasks_of_nodes(env: Mapping[str, str]) -> dict[str, int]:
    """Node -> ranks it should have."""
    nodes = expand_hostlist(env.get("SLURM_STEP_NODELIST") or env["SLURM_NODELIST"])
    return dict(
        zip(nodes, expand_tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env["SLURM_TASKS_PER_NODE"]))
    )


def _require_address(host: str) -> None:
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise MeetingFailed(
            f"the first node of the step, {host}, has no address on {socket.gethostname()} ({error.strerror}); set "
            "MASTER_ADDR to a name or address of it that every node reaches."
        ) from error


def _receive_all(
    listener: socket.socket, token: str, world_size: int, tasks: Mapping[str, int], timeout: float
) -> None:
    """Wait for a word of every other rank, then let all go on. Raises MeetingFailed, here and on all who came."""
    came: dict[int, tuple[socket.socket, str]] = {}
    deadline = time.monotonic() + timeout
    try:
        with contextlib.closing(_callers(listener, token, deadline)) as callers:
            while len(came) < world_size - 1 and (call := next(callers, None)) is not None:
                connection, rank, node = call
                came[rank] = (connection, node)
        missing = _missing(world_size, came, tasks, timeout)
        for connection, _ in came.values():
            with contextlib.suppress(OSError):  # it has gone meanwhile; the next collective will tell
                connection.sendall(b"stop\n" if missing else b"go\n")
    finally:
        for connection, _ in came.values():
            connection.close()
    if missing:
        listener.close()
        raise MeetingFailed(missing)


def _missing(
    world_size: int, came: Mapping[int, tuple[socket.socket, str]], tasks: Mapping[str, int], timeout: float
) -> str:
    """Which ranks have not come, and on which nodes there are too few; '' if all came."""
    absent = [rank for rank in range(1, world_size) if rank not in came]
    if not absent:
        return ""
    here = [node for _, node in came.values()] + [next(iter(tasks))]  # the first rank is on the first node
    short = {
        node: f"{here.count(node)} of {number}" for node, number in tasks.items() if here.count(node) < number
    }
    nodes = ", ".join(f"{node} ({count} came)" for node, count in list(short.items())[:16])
    some = ", ".join(map(str, absent[:16])) + (f" and {len(absent) - 16} more" if len(absent) > 16 else "")
    return (
        f"rank {some} of {world_size} did not come within {timeout:.0f} s of the first rank's start; ranks are missing on "
        f"{nodes}. {JOIN_TIMEOUT} sets the time; see the logs of these ranks and nodes."
    )


def _callers(
    listener: socket.socket, token: str, deadline: float
) -> Iterator[tuple[socket.socket, int, str]]:
    """(connection, rank, node) of each rank of this step that calls, until the deadline. A caller of another step is sent on,
    and one that says nothing keeps nobody waiting."""
    listener.setblocking(False)
    poller = select.poll()
    poller.register(listener, select.POLLIN)
    calling: dict[int, tuple[socket.socket, bytearray]] = {}
    try:
        while (left := deadline - time.monotonic()) > 0:
            for fd, _ in poller.poll(left * 1000):
                if fd == listener.fileno():
                    with contextlib.suppress(OSError):  # the caller has hung up again
                        connection, _ = listener.accept()
                        connection.setblocking(False)
                        calling[connection.fileno()] = (connection, bytearray())
                        poller.register(connection, select.POLLIN)
                    continue
                connection, said = calling[fd]
                if _hear(connection, said):
                    continue
                poller.unregister(fd)
                del calling[fd]
                name, _, rest = bytes(said).decode(errors="replace").partition("\t")
                if name == token and rest.endswith("\n"):
                    connection.setblocking(True)
                    connection.sendall(b"welcome\n")
                    yield connection, *json.loads(rest)
                else:
                    with contextlib.suppress(OSError):
                        connection.sendall(b"elsewhere\n")
                    connection.close()
    finally:
        for connection, _ in calling.values():
            connection.close()
        listener.setblocking(True)


def _hear(connection: socket.socket, said: bytearray) -> bool:
    """Take what has arrived; False if the line is complete, too long, or its sender gone."""
    try:
        piece = connection.recv(512)
    except OSError:
        piece = b""
    said += piece
    return bool(piece) and not said.endswith(b"\n") and len(said) < 512


def _find_first_rank(
    ranks: Ranks, env: Mapping[str, str], ports: list[int], token: str, timeout: float
) -> int:
    """The port at which the first rank listens, when all have come."""
    node = env.get("SLURMD_NODENAME", socket.gethostname())
    word = f"{token}\t{json.dumps([ranks.rank, node])}\n".encode()
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for port in ports:
            with contextlib.suppress(OSError):  # nobody there, or not yet
                with socket.create_connection((ranks.master_addr, port), timeout=ANSWER_S) as connection:
                    connection.sendall(word)
                    answers = connection.makefile("r", encoding="utf-8", errors="replace")
                    if answers.readline() != "welcome\n":
                        continue
                    connection.settimeout(timeout + ANSWER_S)  # the first rank counts from its own start
                    end = answers.readline()
                    if end == "go\n":
                        return port
                    raise MeetingFailed(
                        "the first rank says which ranks are missing.", silent=end == "stop\n"
                    )
        time.sleep(RETRY_S)  # between two looks for a rank that is still starting
    raise MeetingFailed(
        f"rank 0 of {ranks.world_size}, expected on {ranks.master_addr}, did not open one of the ports "
        f"{', '.join(map(str, ports))} within {timeout:.0f} s ({JOIN_TIMEOUT}); see the log of rank 0, or set MASTER_ADDR if "
        "that is not an address of the first node that others reach."
    )
