"""The rendezvous of a job's ranks: rank 0 listens at a port of its host, and the other ranks find that port.

    ranks = join_ranks(discover())    # before the import of torch: a missing rank is reported within a minute

Under srun a rank knows only the node list and the job's id. From these every rank derives the same few
candidate ports. Rank 0 listens at the first free candidate. The others try the candidates in turn and send
their job, step and attempt; a listener of another job refuses them. When all ranks have arrived, rank 0
answers each, and the same listening socket becomes torch.distributed's store. Therefore no other process can
take the port between its choice and its use.

torchrun's agent has a store of its own. Under mpirun the address is broadcast.
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

from rl.runtime.ranks import Ranks, tasks_of_nodes

FIRST_PORT, NUM_PORTS = 10000, 22000
"""Range of the ports, below Linux's default ephemeral range, which begins at 32768."""
CANDIDATES = 8
"""Number of candidate ports of a step."""
JOIN_TIMEOUT = "LOCKSTEP_JOIN_TIMEOUT"
"""Environment variable: seconds that the ranks of a step wait for each other; default JOIN_S."""
JOIN_S = 60.0
ANSWER_S = 2.0
"""Longest wait for a connection or an answer of a listener, in seconds; another program may listen there."""
RETRY_S = 0.25
"""Pause between two rounds through the candidate ports, in seconds."""


class RendezvousError(RuntimeError):
    """Raised if ranks are missing or no port is free. `silent` if another rank reports the cause."""

    def __init__(self, sentence: str, *, silent: bool = False):
        super().__init__(sentence)
        self.silent = silent


def join_ranks(
    ranks: Ranks, environ: Mapping[str, str] | None = None, *, timeout: float | None = None
) -> Ranks:
    """Return the ranks with `master_port`, and on rank 0 with `listener`, the open socket at that port.

    Collective over the job under srun and mpirun. timeout: seconds after which a rank counts as missing.
    Raises RendezvousError.
    """
    env = os.environ if environ is None else environ
    if ranks.master_port or ranks.listener:
        return ranks
    if ranks.launcher == "slurm":
        seconds = timeout if timeout is not None else float(env.get(JOIN_TIMEOUT, JOIN_S))
        return _join_step(ranks, env, seconds)
    if ranks.launcher == "mpi":
        from mpi4py import MPI

        listener = listen_anywhere(ranks.world_size) if ranks.rank == 0 else None
        port = MPI.COMM_WORLD.bcast(listener.getsockname()[1] if listener else None)
        return replace(ranks, master_port=port, listener=listener)
    listener = listen_anywhere(1)
    return replace(ranks, master_port=listener.getsockname()[1], listener=listener)


# Ports --------------------------------------------------------------------------------------------------


def candidate_ports(env: Mapping[str, str]) -> list[int]:
    """Return the ports of a step in the order of trial, a function of the ids of job and step."""
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", "0"))
    first = int(env["SLURM_JOB_ID"]) * 7 + int(step) * 4001
    # Random distances, so that two jobs that share one candidate do not share the rest.
    more = random.Random(first).sample(range(NUM_PORTS), CANDIDATES - 1)
    return [FIRST_PORT + (first + distance) % NUM_PORTS for distance in (0, *more)]


def outside_ephemeral_range(ports: list[int]) -> list[int]:
    """Return the ports that the kernel does not use for outgoing connections; all if it uses every one."""
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except OSError:  # a container without /proc
        return ports
    return [port for port in ports if not low <= port <= high] or ports


def listen(ports: list[int], backlog: int) -> socket.socket | None:
    """Return a socket that listens at the first free port, on all addresses; None if none is free."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    backlog = max(backlog, 128)
    for port in ports:
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=family, backlog=backlog, dualstack_ipv6=both)
    return None


def listen_anywhere(backlog: int) -> socket.socket:
    """Return a socket that listens at any free port, below the ephemeral range if possible."""
    choice = random.SystemRandom().sample(range(FIRST_PORT, FIRST_PORT + NUM_PORTS), 64)
    listener = listen(outside_ephemeral_range(choice), backlog) or listen([0], backlog)
    if listener is None:
        raise RendezvousError(f"{socket.gethostname()} has no free port to listen at.")
    return listener


# A step of Slurm ----------------------------------------------------------------------------------------


def _join_step(ranks: Ranks, env: Mapping[str, str], timeout: float) -> Ranks:
    ports = [int(env["MASTER_PORT"])] if "MASTER_PORT" in env else candidate_ports(env)
    # A requeued job has the same id as its earlier attempt, of which a rank may still run.
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID"))
    token = f"lockstep {env['SLURM_JOB_ID']}.{step}.{env.get('SLURM_RESTART_COUNT', '0')}"
    if ranks.rank == 0:
        listener = listen(outside_ephemeral_range(ports), ranks.world_size)
        if listener is None:
            raise RendezvousError(
                f"all ports of this step, {', '.join(map(str, ports))}, are taken on {socket.gethostname()}; "
                "set MASTER_PORT to a free one."
            )
        _receive_all(listener, token, ranks.world_size, tasks_of_nodes(env), timeout)
        return replace(ranks, master_port=listener.getsockname()[1], listener=listener)
    _require_address(ranks.master_addr)
    return replace(ranks, master_port=_find_first_rank(ranks, env, ports, token, timeout))


def _require_address(host: str) -> None:
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise RendezvousError(
            f"the first node of the step, {host}, has no address on {socket.gethostname()} "
            f"({error.strerror}); set MASTER_ADDR to a name or address of it that every node reaches."
        ) from error


def _receive_all(
    listener: socket.socket, token: str, world_size: int, tasks: Mapping[str, int], timeout: float
) -> None:
    """Wait for every other rank, then answer all.

    Raises RendezvousError, here and on the ranks that arrived.
    """
    arrived: dict[int, tuple[socket.socket, str]] = {}
    deadline = time.monotonic() + timeout
    try:
        with contextlib.closing(_arrivals(listener, token, deadline)) as arrivals:
            while len(arrived) < world_size - 1 and (arrival := next(arrivals, None)) is not None:
                connection, rank, node = arrival
                arrived[rank] = (connection, node)
        missing = _describe_missing(world_size, arrived, tasks, timeout)
        for connection, _ in arrived.values():
            with contextlib.suppress(OSError):  # that rank has ended meanwhile; the next collective will fail
                connection.sendall(b"stop\n" if missing else b"go\n")
    finally:
        for connection, _ in arrived.values():
            connection.close()
    if missing:
        listener.close()
        raise RendezvousError(missing)


def _describe_missing(
    world_size: int,
    arrived: Mapping[int, tuple[socket.socket, str]],
    tasks: Mapping[str, int],
    timeout: float,
) -> str:
    """Return a sentence that names the missing ranks and their nodes; '' if all arrived."""
    absent = [rank for rank in range(1, world_size) if rank not in arrived]
    if not absent:
        return ""
    present = [node for _, node in arrived.values()] + [next(iter(tasks))]  # rank 0 is on the first node
    counts = {node: present.count(node) for node in tasks}
    short = [f"{node} ({counts[node]} of {n} came)" for node, n in tasks.items() if counts[node] < n]
    some = ", ".join(map(str, absent[:16])) + (f" and {len(absent) - 16} more" if len(absent) > 16 else "")
    return (
        f"rank {some} of {world_size} did not come within {timeout:.0f} s of rank 0's start; ranks are "
        f"missing on {', '.join(short[:16])}. {JOIN_TIMEOUT} sets the time; see the logs of these ranks and "
        "nodes."
    )


def _arrivals(
    listener: socket.socket, token: str, deadline: float
) -> Iterator[tuple[socket.socket, int, str]]:
    """Yield (connection, rank, node) of each rank of this step that connects, until the deadline.

    Clients of another step are refused. A client that sends nothing delays no other.
    """
    listener.setblocking(False)
    poller = select.poll()
    poller.register(listener, select.POLLIN)
    clients: dict[int, tuple[socket.socket, bytearray]] = {}
    try:
        while (left := deadline - time.monotonic()) > 0:
            for fd, _ in poller.poll(left * 1000):
                if fd == listener.fileno():
                    with contextlib.suppress(OSError):  # the client has closed its connection
                        connection, _ = listener.accept()
                        connection.setblocking(False)
                        clients[connection.fileno()] = (connection, bytearray())
                        poller.register(connection, select.POLLIN)
                    continue
                connection, received = clients[fd]
                if _receive(connection, received):
                    continue
                poller.unregister(fd)
                del clients[fd]
                name, _, rest = bytes(received).decode(errors="replace").partition("\t")
                if name == token and rest.endswith("\n"):
                    connection.setblocking(True)
                    connection.sendall(b"welcome\n")
                    yield connection, *json.loads(rest)
                else:
                    with contextlib.suppress(OSError):
                        connection.sendall(b"elsewhere\n")
                    connection.close()
    finally:
        for connection, _ in clients.values():
            connection.close()
        listener.setblocking(True)


def _receive(connection: socket.socket, received: bytearray) -> bool:
    """Append what arrived; return False if the line is complete or too long, or the connection closed."""
    try:
        piece = connection.recv(512)
    except OSError:
        piece = b""
    received += piece
    return bool(piece) and not received.endswith(b"\n") and len(received) < 512


def _find_first_rank(
    ranks: Ranks, env: Mapping[str, str], ports: list[int], token: str, timeout: float
) -> int:
    """Return the port at which rank 0 listens, after all ranks have arrived."""
    node = env.get("SLURMD_NODENAME", socket.gethostname())
    message = f"{token}\t{json.dumps([ranks.rank, node])}\n".encode()
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for port in ports:
            with contextlib.suppress(OSError):  # nobody listens there, or not yet
                with socket.create_connection((ranks.master_addr, port), timeout=ANSWER_S) as connection:
                    connection.sendall(message)
                    answers = connection.makefile("r", encoding="utf-8", errors="replace")
                    if answers.readline() != "welcome\n":
                        continue
                    connection.settimeout(timeout + ANSWER_S)  # rank 0 counts from its own start
                    end = answers.readline()
                    if end == "go\n":
                        return port
                    raise RendezvousError("rank 0 reports which ranks are missing.", silent=end == "stop\n")
        time.sleep(RETRY_S)  # rank 0 may still be starting
    raise RendezvousError(
        f"rank 0 of {ranks.world_size}, expected on {ranks.master_addr}, did not open one of the ports "
        f"{', '.join(map(str, ports))} within {timeout:.0f} s ({JOIN_TIMEOUT}); see the log of rank 0, or "
        "set MASTER_ADDR if that is not an address of the first node that others reach."
    )
