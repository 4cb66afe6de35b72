"""The rendezvous of a job's ranks: rank 0 listens at a port of its host, and the other ranks find that port.

    ranks = join_ranks(discover())    # before the import of torch: a missing rank is reported within a minute

Under srun, PALS, jsrun and Flux a rank knows only the first node, the job's id and the job's key. From id and
key every rank derives the same few candidate ports, which nobody else can predict. Rank 0 listens at the
first free candidate. The others try the candidates in turn. Rank and listener prove to each other that they
know the key. A rank also sends its job, step and attempt, and a listener of another job, step or attempt
refuses the rank. When all ranks have arrived, rank 0 answers each, and the same listening socket becomes
torch.distributed's store. Therefore no other process can take the port between its choice and its use.

torchrun's agent has a store of its own. Under mpirun the address and the key are broadcast.
"""

import contextlib
import hashlib
import hmac
import ipaddress
import json
import os
import random
import select
import socket
import time
from collections.abc import Generator, Mapping
from dataclasses import replace
from pathlib import Path

from rl.runtime.job_key import NUM_BYTES, JobKey, is_proof, nonce, proof, share_file
from rl.runtime.other_launchers import LAUNCHERS, read_number
from rl.runtime.ranks import Ranks, tasks_of_nodes
from rl.runtime.strangers import most_strangers

FIRST_PORT, NUM_PORTS = 10000, 22000
"""Range of the ports, below Linux's default ephemeral range, which begins at 32768."""
LOOPBACK = "127.0.0.1"
CANDIDATES = 8
"""Number of candidate ports of a step."""
JOIN_TIMEOUT = "LOCKSTEP_JOIN_TIMEOUT"
"""Environment variable: seconds that the ranks of a step wait for each other; default JOIN_S."""
JOIN_S = 60.0
ANSWER_S = 2.0
"""Maximum wait for a connection or an answer of a listener, in seconds; another program may listen there."""
ANSWERS_PER_S = 1000
"""Number of ranks that rank 0 welcomes per second at least. A rank that did not wait for its turn would
connect again and again, and rank 0 would answer only connections that are closed already."""
MAX_LINE = 512
"""Maximum length of a rank's message, in bytes."""
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
    """Return the ranks with `master_port` and `key`, and on rank 0 with `listener`, the socket at that port.

    Collective over the job under srun and mpirun. timeout: seconds after which a rank counts as missing.
    Raises RendezvousError, and ValueError if the job's key cannot be shared.
    """
    env = os.environ if environ is None else environ
    if ranks.launcher == "torchrun":
        if ranks.world_size == 1 or ranks.key is not None:
            return ranks
        return replace(ranks, key=_shared_key(ranks, env))
    if ranks.master_port or ranks.listener:
        return ranks
    if ranks.world_size == 1:
        listener = listen_anywhere(1, LOOPBACK)
        return replace(ranks, master_port=listener.getsockname()[1], listener=listener)
    if ranks.launcher == "mpi":
        from mpi4py import MPI

        found = listen_anywhere(ranks.world_size, address_to_bind(ranks)) if ranks.rank == 0 else None
        port = bytearray(8 if found is None else found.getsockname()[1].to_bytes(8, "big"))
        secret = bytearray((ranks.key or JobKey(nonce())).secret)
        for rank_0s in (port, secret):
            MPI.COMM_WORLD.Bcast(rank_0s)  # as bytes: bcast would send a pickle
        return replace(
            ranks, master_port=int.from_bytes(port, "big"), listener=found, key=JobKey(bytes(secret))
        )
    seconds = timeout if timeout is not None else float(env.get(JOIN_TIMEOUT, JOIN_S))
    return _join_step(replace(ranks, key=_shared_key(ranks, env)), env, seconds)


def _shared_key(ranks: Ranks, env: Mapping[str, str]) -> JobKey:
    """Return the key from the environment, else from a file in the run directory, or in the user's cache."""
    if ranks.key is not None:
        return ranks.key
    cache = env.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return share_file(Path(ranks.run_dir or Path(cache, "lockstep", "keys")), attempt_of(ranks, env))


def attempt_of(ranks: Ranks, env: Mapping[str, str]) -> str:
    """Return a text that distinguishes this start of the program from others, identical on all ranks.

    For example, a requeued job has the same id as its earlier attempt, and an old rank may still run.
    """
    if ranks.launcher == "slurm":
        step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID"))
        return f"{env['SLURM_JOB_ID']}.{step}.{env.get('SLURM_RESTART_COUNT', '0')}"
    if ranks.launcher in LAUNCHERS:
        return f"{ranks.launcher} {env[LAUNCHERS[ranks.launcher].step]}"
    return f"{env.get('TORCHELASTIC_RUN_ID', '')} {ranks.master_addr} {ranks.master_port}"


# Addresses and ports ------------------------------------------------------------------------------------


def address_to_bind(ranks: Ranks) -> str:
    """Return the address for rank 0's listener: the address that the other nodes use, else loopback.

    Returns '', which means all addresses, if this host does not know this address, or has several.
    """
    if ranks.on_one_host:
        return LOOPBACK
    found = set()
    with contextlib.suppress(OSError, ValueError):
        for *_, place in socket.getaddrinfo(ranks.master_addr, None, type=socket.SOCK_STREAM):
            address = ipaddress.ip_address(place[0])
            if not address.is_loopback and not address.is_link_local:
                found.add(str(address))
        (only,) = found
        listener = listen([0], 1, only)
        if listener is not None:
            listener.close()
            return only
    return ""


def address_of_host(ranks: Ranks) -> str:
    """Return this host's address in the network of rank 0's node; '' if it is unknown, or loopback."""
    with contextlib.suppress(OSError):  # no such name, or no route
        family, *_, place = socket.getaddrinfo(ranks.master_addr, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # chooses the address, and sends nothing
            address = probe.getsockname()[0]
        return "" if ipaddress.ip_address(address).is_loopback else address
    return ""


def candidate_ports(attempt: str, secret: bytes) -> list[int]:
    """Return the ports of a step in the order of trial, a function of its attempt and the job's key."""
    seed = hmac.digest(secret, b"ports of " + attempt.encode(), hashlib.sha256)
    return random.Random(seed).sample(range(FIRST_PORT, FIRST_PORT + NUM_PORTS), CANDIDATES)


def outside_ephemeral_range(ports: list[int]) -> list[int]:
    """Return the ports that the kernel does not use for outgoing connections.

    If the kernel uses every one of the ports, return all of them.
    """
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except OSError:  # a container without /proc
        return ports
    return [port for port in ports if not low <= port <= high] or ports


def listen(ports: list[int], backlog: int, host: str) -> socket.socket | None:
    """Return a socket that listens at the first free port; None if none is free.

    host: an address of this host; '' means all.
    """
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    backlog = max(backlog, 128)
    for port in ports:
        with contextlib.suppress(OSError):
            return socket.create_server((host, port), family=family, backlog=backlog, dualstack_ipv6=both)
    return None


def listen_anywhere(backlog: int, host: str) -> socket.socket:
    """Return a socket that listens at any free port, below the ephemeral range if possible."""
    choice = random.SystemRandom().sample(range(FIRST_PORT, FIRST_PORT + NUM_PORTS), 64)
    listener = listen(outside_ephemeral_range(choice), backlog, host) or listen([0], backlog, host)
    if listener is None:
        raise RendezvousError(f"{socket.gethostname()} has no free port to listen at.")
    return listener


# A step of Slurm ----------------------------------------------------------------------------------------


def _join_step(ranks: Ranks, env: Mapping[str, str], timeout: float) -> Ranks:
    assert ranks.key is not None
    secret, attempt = ranks.key.secret, attempt_of(ranks, env)
    ports = [read_number(env, "MASTER_PORT")] if "MASTER_PORT" in env else candidate_ports(attempt, secret)
    if ranks.rank == 0:
        listener = listen(outside_ephemeral_range(ports), ranks.world_size, address_to_bind(ranks))
        if listener is None:
            raise RendezvousError(
                f"all ports of this step, {', '.join(map(str, ports))}, are taken on {socket.gethostname()}; "
                "set MASTER_PORT to a free one."
            )
        tasks = tasks_of_nodes(env) if ranks.launcher == "slurm" else {}
        _receive_all(listener, secret, attempt, ranks.world_size, tasks, timeout)
        return replace(ranks, master_port=listener.getsockname()[1], listener=listener)
    _require_address(ranks.master_addr)
    return replace(ranks, master_port=_find_first_rank(ranks, env, ports, attempt, timeout))


def _require_address(host: str) -> None:
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise RendezvousError(
            f"the first node of the step, {host}, has no address on {socket.gethostname()} "
            f"({error.strerror}); set MASTER_ADDR to a name or address of it that every node reaches."
        ) from error


def _receive_all(
    listener: socket.socket,
    secret: bytes,
    attempt: str,
    world_size: int,
    tasks: Mapping[str, int],
    timeout: float,
) -> None:
    """Wait for every other rank, then answer all.

    Raises RendezvousError, here and on the ranks that arrived.
    """
    arrived: dict[int, tuple[_Client, str]] = {}
    deadline = time.monotonic() + timeout
    try:
        with contextlib.closing(
            _arrivals(listener, secret, attempt, deadline, beside=world_size)
        ) as arrivals:
            while len(arrived) < world_size - 1 and (arrival := next(arrivals, None)) is not None:
                client, rank, node = arrival
                arrived[rank] = (client, node)
        missing = _describe_missing(world_size, arrived, tasks, timeout)
        for client, _ in arrived.values():
            with contextlib.suppress(OSError):  # that rank has ended meanwhile; the next collective will fail
                client.answer("stop" if missing else "go", secret)
    finally:
        for client, _ in arrived.values():
            client.connection.close()
    if missing:
        listener.close()
        raise RendezvousError(missing)


def _describe_missing(
    world_size: int, arrived: Mapping[int, tuple["_Client", str]], tasks: Mapping[str, int], timeout: float
) -> str:
    """Return a sentence that names the missing ranks and their nodes; '' if all arrived."""
    absent = [rank for rank in range(1, world_size) if rank not in arrived]
    if not absent:
        return ""
    present = [node for _, node in arrived.values()] + [*tasks][:1]  # rank 0 is on the first node
    counts = {node: present.count(node) for node in tasks}
    short = [f"{node} ({counts[node]} of {n} came)" for node, n in tasks.items() if counts[node] < n]
    some = ", ".join(map(str, absent[:16])) + (f" and {len(absent) - 16} more" if len(absent) > 16 else "")
    where = f"; ranks are missing on {', '.join(short[:16])}" if short else ""
    return (
        f"rank {some} of {world_size} did not come within {timeout:.0f} s of rank 0's start{where}. "
        f"{JOIN_TIMEOUT} sets the time; see the logs of these ranks and nodes."
    )


class _Client:
    """A connection to rank 0's listener."""

    def __init__(self, connection: socket.socket):
        self.connection, self._nonce, self._received = connection, nonce(), bytearray()
        connection.setblocking(False)
        connection.sendall(self._nonce)  # fits the empty buffer of the socket

    def receive(self) -> bool:
        """Take what arrived; return False if the line is complete or too long, or the connection closed."""
        try:
            piece = self.connection.recv(MAX_LINE)
        except OSError:
            piece = b""
        self._received += piece
        head = 2 * NUM_BYTES
        return bool(piece) and len(self._received) < head + MAX_LINE and b"\n" not in self._received[head:]

    def line(self, secret: bytes) -> list:
        """Return the message of a rank that knows the key; [] for other clients."""
        theirs, found, line = (
            bytes(self._received[start:end]) for start, end in ((0, 32), (32, 64), (64, None))
        )
        self._nonces = self._nonce, theirs
        if not line.endswith(b"\n") or not is_proof(found, secret, "rank to rank 0", *self._nonces, line):
            return []
        return json.loads(line)

    def answer(self, word: str, secret: bytes) -> None:
        self.connection.setblocking(True)
        self.connection.sendall(proof(secret, word, *self._nonces))


def _arrivals(
    listener: socket.socket, secret: bytes, attempt: str, deadline: float, *, beside: int
) -> Generator[tuple[_Client, int, str], None, None]:
    """Yield (client, rank, node) of each rank of this attempt that connects, until the deadline.

    Other clients are refused. A client that sends nothing delays no other. beside: number of ranks, which may
    all connect at once beside the strangers.
    """
    listener.setblocking(False)
    poller = select.poll()
    poller.register(listener, select.POLLIN)
    clients: dict[int, _Client] = {}
    most = most_strangers() + beside

    def forget(fd: int) -> _Client:
        poller.unregister(fd)
        return clients.pop(fd)

    try:
        while (left := deadline - time.monotonic()) > 0:
            for fd, _ in poller.poll(left * 1000):
                if fd == listener.fileno():
                    with contextlib.suppress(OSError):  # the client has closed its connection
                        client = _Client(listener.accept()[0])
                        clients[client.connection.fileno()] = client
                        poller.register(client.connection, select.POLLIN)
                    if len(clients) > most:  # the oldest is closed
                        forget(next(iter(clients))).connection.close()
                    continue
                if fd not in clients or clients[fd].receive():
                    continue
                client = forget(fd)
                sent, *place = client.line(secret) or [None]
                if sent == attempt:
                    with contextlib.suppress(OSError):  # that rank has ended, and is missing
                        client.answer("welcome", secret)
                        yield client, *place
                else:
                    client.connection.close()
    finally:
        for client in clients.values():
            client.connection.close()
        listener.setblocking(True)


def _find_first_rank(
    ranks: Ranks, env: Mapping[str, str], ports: list[int], attempt: str, timeout: float
) -> int:
    """Return the port of rank 0's listener, after all ranks have arrived."""
    node = env.get("SLURMD_NODENAME", socket.gethostname())
    line = f"{json.dumps([attempt, ranks.rank, node])}\n".encode()
    assert ranks.key is not None
    deadline = time.monotonic() + timeout
    turn_s = max(ANSWER_S, ranks.world_size / ANSWERS_PER_S)
    while time.monotonic() < deadline:
        for port in ports:
            with contextlib.suppress(OSError):  # nobody listens there, or not yet
                with socket.create_connection((ranks.master_addr, port), timeout=turn_s) as connection:
                    answers = connection.makefile("rb")
                    nonces = answers.read(NUM_BYTES), nonce()
                    own = proof(ranks.key.secret, "rank to rank 0", *nonces, line)
                    connection.sendall(nonces[1] + own + line)
                    if not is_proof(answers.read(NUM_BYTES), ranks.key.secret, "welcome", *nonces):
                        continue
                    connection.settimeout(timeout + ANSWER_S)  # rank 0 counts from its own start
                    end = answers.read(NUM_BYTES)
                    if is_proof(end, ranks.key.secret, "go", *nonces):
                        return port
                    stopped = is_proof(end, ranks.key.secret, "stop", *nonces)
                    raise RendezvousError("rank 0 reports which ranks are missing.", silent=stopped)
        time.sleep(RETRY_S)  # rank 0 may still be starting
    raise RendezvousError(
        f"rank 0 of {ranks.world_size}, expected on {ranks.master_addr}, did not open one of the ports "
        f"{', '.join(map(str, ports))} within {timeout:.0f} s ({JOIN_TIMEOUT}); see the log of rank 0, "
        "set MASTER_ADDR if that is not an address of the first node that others reach, and LOCKSTEP_JOB_KEY "
        "if the nodes do not share run.dir."
    )
