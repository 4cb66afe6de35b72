"""Measure the control plane with thousands of simulated ranks on this machine.

    python tools/dev/many_ranks.py 512 4096 16384

A simulated rank is a thread that calls what a rank calls: the rendezvous, the job's store, heartbeats and the
fault board. Its messages go through loopback with their proofs. The collectives on gloo are not simulated;
the tool counts the bytes of their objects. The parent process is rank 0, with the store in a process beside
it. For each part the tool prints the seconds, the cpu seconds of these two processes, the bytes through
loopback, the descriptors of rank 0 (rendezvous) or of the store (of a fault: the number of files), and the
exponents of the growth of cpu seconds and bytes over the two largest N. Other traffic through loopback
counts, too; `unshare --net` keeps it out.
"""

import argparse
import json
import math
import multiprocessing
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rl.config.limits import PhaseLimits  # noqa: E402
from rl.config.options import flatten  # noqa: E402
from rl.config.schema import Config  # noqa: E402
from rl.faults.diagnosis import diagnose, lost_ranks, summarize  # noqa: E402
from rl.faults.fault_board import Fault, FaultBoard  # noqa: E402
from rl.faults.heartbeat import DIRECTORY, HeartbeatReader, HeartbeatWriter  # noqa: E402
from rl.faults.phase_tracker import PhaseTracker  # noqa: E402
from rl.runtime.job_key import JobKey, nonce  # noqa: E402
from rl.runtime.job_store import JobStore, StoreProcess, connect_to  # noqa: E402
from rl.runtime.plain_data import decode, encode  # noqa: E402
from rl.runtime.ranks import Ranks  # noqa: E402
from rl.runtime.rendezvous import join_ranks, listen_anywhere  # noqa: E402

PROCESSES = 16
"""Processes of the simulated ranks. Each connects to an address of its own, because a pair of addresses has
only 28,000 ports for connections."""
PER_NODE = 8
JOIN_S = 300.0
STACK = 60_000
"""Bytes of the stacks that a rank writes after an overrun, the size of a real rank's file."""


@dataclass
class SimulatedRanks:
    """The simulated ranks of one process."""

    process: int
    ranks: range
    world_size: int
    run_dir: str
    key: JobKey
    port: int = 0
    owns_boards: bool = True
    """Whether each rank has the second connection to the store that a real one has."""
    boards: list[FaultBoard] = field(default_factory=list)
    stores: list[JobStore] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.7.{1 + self.process}"

    def each(self, act: Callable[[int], object]) -> None:
        """Call `act` for each rank in a thread of its own, and wait for all."""
        errors: list[BaseException] = []

        def safely(rank: int) -> None:
            try:
                act(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=safely, args=(rank,)) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    # What ranks do ------------------------------------------------------------------------------------------

    def rendezvous(self) -> None:
        self.each(
            lambda rank: join_ranks(self._rank(rank), environment(self.world_size, rank), timeout=JOIN_S)
        )

    def connect(self) -> None:
        first = connect_to(self.address, self.port, self.key.secret)
        self.stores = [first.clone() for _ in self.ranks]
        # A rank's board has a connection of its own; the ranks of a process share it if descriptors lack.
        boards = [FaultBoard(first) for _ in (self.ranks if self.owns_boards else "1")]
        self.boards = boards * (1 if self.owns_boards else len(self.ranks))

    def poll(self) -> None:
        for board in self.boards:
            assert board.first() is None

    def queue(self) -> None:
        for store in self.stores:
            assert store.pop("work") is not None

    def stop(self) -> None:
        self.each(lambda rank: self._store(rank).wait(["stop"], JOIN_S))

    def heartbeat(self) -> None:
        with open(os.devnull, "w") as backstop:
            tracker = PhaseTracker(PhaseLimits(), backstop)
            for rank in self.ranks:
                HeartbeatWriter(self.run_dir, rank, tracker).write()
            tracker.close()

    def fault(self) -> None:
        """Do what a watchdog does when all ranks exceed the limit of a phase at once."""

        def end(rank: int) -> None:
            board = self.boards[rank - self.ranks.start]
            stacks = Path(self.run_dir, "stacks", f"step_1_rank_{rank}.txt")
            stacks.write_text("x" * STACK)
            board.claim()
            board.post(Fault("overrun", rank, "update of step 1 took longer than 600 s"))
            board.acknowledge()

        self.each(end)

    def _store(self, rank: int) -> JobStore:
        return self.stores[rank - self.ranks.start]

    def _rank(self, rank: int) -> Ranks:
        return Ranks(rank, self.world_size, rank % PER_NODE, PER_NODE, "slurm", self.address, key=self.key)


def environment(world_size: int, rank: int) -> dict[str, str]:
    """Return what Slurm tells a rank."""
    return {
        "SLURM_JOB_ID": str(os.getppid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": f"node[0-{world_size // PER_NODE - 1}]",
        "SLURM_STEP_TASKS_PER_NODE": f"{PER_NODE}(x{world_size // PER_NODE})",
        "SLURMD_NODENAME": f"node{rank // PER_NODE}",
    }


def serve(group: SimulatedRanks, pipe: Connection) -> None:
    """Carry out what the parent asks for, in a process with its share of the ranks."""
    threading.stack_size(256 << 10)
    while (words := pipe.recv()) is not None:
        name, values = words
        for key, value in values.items():
            setattr(group, key, value)
        try:
            getattr(group, name)()
            pipe.send(None)
        except BaseException as error:
            pipe.send(f"{name}: {error!r}")


class SimulatedJob:
    """Seconds, bytes and descriptors of each part for one N."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.rows: dict[str, dict[str, float]] = {}
        run_dir = tempfile.mkdtemp(prefix="many-ranks-")
        Path(run_dir, "stacks").mkdir()
        Path(run_dir, DIRECTORY).mkdir()
        self.run_dir, self.key = Path(run_dir), JobKey(nonce())
        cuts = [1 + (world_size - 1) * part // PROCESSES for part in range(PROCESSES + 1)]
        context = multiprocessing.get_context("fork")
        self.pipes = []
        for part, (first, end) in enumerate(zip(cuts, cuts[1:])):
            mine, theirs = context.Pipe()
            group = SimulatedRanks(part, range(first, end), world_size, run_dir, self.key)
            context.Process(target=serve, args=(group, theirs), daemon=True).start()
            self.pipes.append(mine)

    def part(
        self, name: str, *, here: Callable[[], object] = lambda: None, pid: int = 0, **values: object
    ) -> None:
        """Let the ranks carry out a part, with `here` on rank 0. pid: process whose descriptors count."""
        processes = [os.getpid(), *([pid] if pid else [])]
        before, began = loopback_bytes(), time.perf_counter()
        cpu = sum(map(cpu_seconds, processes))
        for pipe in self.pipes:
            pipe.send((name, values))
        here()
        problems = [problem for pipe in self.pipes if (problem := pipe.recv())]
        assert not problems, problems
        self.rows[name] = {
            "s": time.perf_counter() - began,
            "cpu": sum(map(cpu_seconds, processes)) - cpu,
            "bytes": loopback_bytes() - before,
            "fds": descriptors(pid) if pid else 0,
        }

    def alone(self, name: str, act: Callable[[], object], num_bytes: int = 0) -> None:
        """Measure what rank 0 does alone."""
        cpu, began = cpu_seconds(os.getpid()), time.perf_counter()
        act()
        seconds, cpu = time.perf_counter() - began, cpu_seconds(os.getpid()) - cpu
        self.rows[name] = {"s": seconds, "cpu": cpu, "bytes": num_bytes, "fds": 0}

    def run(self) -> dict[str, dict[str, float]]:
        ranks = Ranks(0, self.world_size, 0, PER_NODE, "slurm", "127.0.0.1", key=self.key)
        env = environment(self.world_size, 0) | {"SLURM_JOB_ID": str(os.getpid())}

        def meet() -> None:
            listener = join_ranks(ranks, env, timeout=JOIN_S).listener
            assert listener is not None
            listener.close()

        peak, is_over = [0], threading.Event()

        def sample() -> None:
            while not is_over.wait(0.1):
                peak.append(descriptors(os.getpid()))

        sampler = threading.Thread(target=sample)
        sampler.start()
        self.part("rendezvous", here=meet)
        is_over.set()
        sampler.join()
        self.rows["rendezvous"]["fds"] = max(peak)
        listener = listen_anywhere(self.world_size, "")
        port = listener.getsockname()[1]
        store = StoreProcess(listener, self.key.secret)
        pid = store._process.pid
        own = connect_to("127.0.0.1", port, self.key.secret)
        try:
            self._with_store(own, port, pid)
        finally:
            store.close()
            for pipe in self.pipes:
                pipe.send(None)
        return self.rows

    def _with_store(self, own: JobStore, port: int, pid: int) -> None:
        world, board = self.world_size, FaultBoard(own)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.part("connect", port=port, pid=pid, owns_boards=2 * world + 100 < most)
        self.part("poll", pid=pid)
        self.alone("fill queue", lambda: fill(own, world))
        self.part("queue", pid=pid)
        self.part("stop", here=lambda: own.set("stop", "1"))
        self.part("heartbeat")
        reader, files = HeartbeatReader(str(self.run_dir), world), list(self.run_dir.glob(f"{DIRECTORY}/*"))
        self.alone("read beats", lambda: reader.read(), sum(file.stat().st_size for file in files))
        beats = reader.read()

        def view() -> None:
            lost_ranks(beats, 300.0)
            summarize(beats, diagnose(beats, 3.75), 3.75)

        self.alone("view", view)
        self.part("fault", here=lambda: wait_for(lambda: board.num_acknowledged() >= world - 1))
        table = {key: "0" * 64 for key in flatten(Config())}
        content = encode(table)
        self.alone(
            "table that differs", lambda: [decode(content) for _ in range(world)], len(content) * world
        )
        self.rows["phase agreement"] = {"s": 0, "cpu": 0, "bytes": 8 * 11 * world, "fds": 0}
        stacks = list((self.run_dir / "stacks").iterdir())
        self.rows["files of a fault"] = {"s": 0, "cpu": 0, "bytes": sum(f.stat().st_size for f in stacks)}
        self.rows["files of a fault"]["fds"] = len(stacks)


def fill(store: JobStore, count: int) -> None:
    for _ in range(count):
        store.push("work", b"x" * 100)


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.05)


def loopback_bytes() -> int:
    """Return the bytes that loopback has received, headers included."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "lo:" in line)
    return int(line.split(":")[1].split()[0])


def cpu_seconds(pid: int) -> float:
    """Return the seconds that a process and its threads have computed, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sizes", metavar="N", type=int, nargs="+", help="number of ranks, a multiple of 8")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures")
    arguments = parser.parse_args(argv)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    found = {size: SimulatedJob(size).run() for size in sorted(arguments.sizes)}
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print(
        "part".ljust(18)
        + "".join(f"{f'N={size}: s':>12}{'cpu s':>8}{'MB':>9}{'files':>7}" for size in found)
        + "  exponent"
    )
    for name in next(iter(found.values())):
        rows = [found[size][name] for size in found]
        cells = "".join(
            f"{row['s']:12.2f}{row['cpu']:8.2f}{row['bytes'] / 1e6:9.2f}{row['fds']:7.0f}" for row in rows
        )
        print(name.ljust(18) + cells + f"  {growth(list(found), rows)}")
    return 0


def growth(sizes: list[int], rows: list[dict[str, float]]) -> str:
    """Return the exponents of cpu seconds and of bytes over the two largest N; '-' if there is no figure."""
    if len(rows) < 2:
        return "-"
    step = math.log(sizes[-1] / sizes[-2])
    parts = [
        f"{math.log(rows[-1][name] / rows[-2][name]) / step:.2f}"
        if min(rows[-1][name], rows[-2][name]) > 0
        else "-"
        for name in ("cpu", "bytes")
    ]
    return " / ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
