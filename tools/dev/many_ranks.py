"""Measure the control plane with thousands of simulated ranks on this machine.

    python tools/dev/many_ranks.py 512 4096 16384

A simulated rank is a thread that calls what a rank calls: the rendezvous, the job's store, heartbeats and the
fault board. Its messages go through loopback with their proofs. The parent process is rank 0, with the store
in a process beside it. The collectives on gloo are not simulated. The last rows are what rank 0 computes, and
what it receives in its collectives of objects, when 671 billion parameters are saved and resumed; the boxes
in each rank's file follow from a plan.

For each part the tool prints the seconds, the cpu seconds of rank 0 and the store, the MB through loopback or
in files, the descriptors of the store or the number of files, and the exponents of the growth of cpu seconds
and MB over the two largest N. Other traffic through loopback counts, too; `unshare --net` keeps it out.
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
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rl.checkpoint.directory import rank_file  # noqa: E402
from rl.checkpoint.regions import regions  # noqa: E402
from rl.checkpoint.shards import ShardIndex, StoredBox, Written  # noqa: E402
from rl.config.limits import PhaseLimits  # noqa: E402
from rl.faults.diagnosis import diagnose, lost_ranks, summarize  # noqa: E402
from rl.faults.fault_board import Fault, FaultBoard  # noqa: E402
from rl.faults.heartbeat import DIRECTORY, HeartbeatReader, HeartbeatWriter  # noqa: E402
from rl.faults.phase_tracker import PhaseTracker  # noqa: E402
from rl.models import architecture  # noqa: E402
from rl.models.boxes import overlap  # noqa: E402
from rl.models.placement import TrainingPlacement, count_experts  # noqa: E402
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
MODEL = Path(__file__).resolve().parents[2] / "configs" / "models" / "deepseek-v3" / "config.json"
STATES = ("master", "exp_avg", "exp_avg_sq")


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
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            list(pool.map(act, self.ranks))

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
        self.each(lambda rank: self.stores[rank - self.ranks.start].wait(["stop"], JOIN_S))

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
            Path(self.run_dir, "stacks", f"step_1_rank_{rank}.txt").write_text("x" * STACK)
            board.claim()
            board.post(Fault("overrun", rank, "update of step 1 took longer than 600 s"))
            board.acknowledge()

        self.each(end)

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
        self.rows: dict[str, tuple[float, float, float, int]] = {}
        self.run_dir, self.key = Path(tempfile.mkdtemp(prefix="many-ranks-")), JobKey(nonce())
        for name in ("stacks", DIRECTORY):
            (self.run_dir / name).mkdir()
        cuts = [1 + (world_size - 1) * part // PROCESSES for part in range(PROCESSES + 1)]
        context = multiprocessing.get_context("fork")
        self.pipes = []
        for part, (first, end) in enumerate(zip(cuts, cuts[1:])):
            mine, theirs = context.Pipe()
            group = SimulatedRanks(part, range(first, end), world_size, str(self.run_dir), self.key)
            context.Process(target=serve, args=(group, theirs), daemon=True).start()
            self.pipes.append(mine)

    def measure(
        self, name: str, act: Callable[[], object], *, pid: int = 0, size: tuple[int, int] | None = None
    ) -> None:
        """Carry out a part. pid: the store's process. size: bytes and files, in place of loopback's bytes."""
        processes = [os.getpid(), *([pid] if pid else [])]
        before, began = loopback_bytes(), time.perf_counter()
        cpu = sum(map(cpu_seconds, processes))
        act()
        seconds, cpu = time.perf_counter() - began, sum(map(cpu_seconds, processes)) - cpu
        num_bytes, files = size or (loopback_bytes() - before, descriptors(pid) if pid else 0)
        self.rows[name] = seconds, cpu, num_bytes / 1e6, files

    def ranks(
        self, name: str, here: Callable[[], object] = lambda: None, *, pid: int = 0, **values: object
    ) -> None:
        """Measure what the ranks do, with `here` on rank 0. values: attributes of SimulatedRanks to set."""

        def act() -> None:
            for pipe in self.pipes:
                pipe.send((name, values))
            here()
            problems = [problem for pipe in self.pipes if (problem := pipe.recv())]
            assert not problems, problems

        self.measure(name, act, pid=pid)

    def run(self) -> dict[str, tuple[float, float, float, int]]:
        rank_0 = Ranks(0, self.world_size, 0, PER_NODE, "slurm", "127.0.0.1", key=self.key)
        env = environment(self.world_size, 0) | {"SLURM_JOB_ID": str(os.getpid())}

        def meet() -> None:
            listener = join_ranks(rank_0, env, timeout=JOIN_S).listener
            assert listener is not None
            listener.close()

        self.ranks("rendezvous", meet)
        listener = listen_anywhere(self.world_size, "")
        port = listener.getsockname()[1]
        store = StoreProcess(listener, self.key.secret)
        try:
            self._with_store(connect_to("127.0.0.1", port, self.key.secret), port, store._process.pid)
        finally:
            store.close()
            for pipe in self.pipes:
                pipe.send(None)
        if self.world_size % 512 == 0:
            self._checkpoint()
        return self.rows

    def _with_store(self, own: JobStore, port: int, pid: int) -> None:
        world, board = self.world_size, FaultBoard(own)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.ranks("connect", port=port, pid=pid, owns_boards=2 * world + 100 < most)
        self.ranks("poll", pid=pid)
        for _ in range(world):
            own.push("work", b"x" * 100)
        self.ranks("queue", pid=pid)
        self.ranks("stop", lambda: own.set("stop", "1"))
        self.ranks("heartbeat")
        reader = HeartbeatReader(str(self.run_dir), world)
        self.measure("beats", reader.read, size=size_of(self.run_dir / DIRECTORY))
        beats = reader.read()

        def view() -> None:
            lost_ranks(beats, 300.0)
            summarize(beats, diagnose(beats, 3.75), 3.75)

        self.measure("view", view)

        def wait() -> None:
            while board.num_acknowledged() < world - 1:
                time.sleep(0.05)

        self.ranks("fault", wait)
        self.measure("stacks", lambda: None, size=size_of(self.run_dir / "stacks"))

    def _checkpoint(self) -> None:
        """Measure the manifest, and what rank 0 does with the boxes of all files before it loads its own."""
        files = planned_index(self.world_size)
        mine, text = files[0], manifest_of(files)
        self.measure("manifest", lambda: json.dumps(json.loads(text), indent=1), size=(len(text), 1))
        contents = [encode(index, StoredBox) for index in files]
        del files
        index: ShardIndex = {}

        def gather() -> None:
            for content in contents:
                for name, stored in decode(content, StoredBox).items():
                    index.setdefault(name, []).extend(stored)

        self.measure("boxes", gather, size=(len(contents) * max(map(len, contents)), len(contents)))

        def plan() -> None:
            own = [(name, stored.box) for name, boxes in mine.items() for stored in boxes]
            assert all(any(overlap(stored.box, box) for stored in index[name]) for name, box in own)

        self.measure("resume plan", plan, size=(0, 0))


def planned_index(world_size: int) -> list[ShardIndex]:
    """Return the boxes in each rank's file of a checkpoint of MODEL.

    The layout is that of configs/ppo_deepseek671b.yaml. As the distributed optimizer does, the ranks with the
    same weights cut the row of all their elements into equal ranges.
    """
    hf = json.loads(MODEL.read_text())
    weights = architecture(hf).weights(hf)
    experts = count_experts(weights)
    placement = TrainingPlacement(world_size, 8, 16, hf["num_hidden_layers"], 32, 1, experts, vpp=2)
    rows = defaultdict(list)
    for weight in weights:
        tp = placement.cut_size(weight)
        for tp_rank in range(tp if weight.cut.split else 1):
            pieces = weight.megatron_pieces(tp, tp_rank)
            shape = tuple(max(stop for _, stop in sides) for sides in zip(*(p.local_box for p in pieces)))
            rows[placement.place(weight), tp_rank].append((pieces, shape))
    files: list[ShardIndex] = [{} for _ in range(world_size)]

    def add(rank: int, part: str, pieces: list, shape: tuple[int, ...], start: int, stop: int) -> None:
        for region in regions(pieces, shape, start, stop):
            name = f"policy/{part}/{region.hf}"
            key = f"{name}[{','.join(f'{first}:{last}' for first, last in region.box)}]"
            files[rank].setdefault(name, []).append(StoredBox(region.box, rank_file(rank), key))

    for (place, tp_rank), parameters in rows.items():
        holders = placement.holders(place)
        ranks = holders.ranks[holders.tp_ranks == tp_rank].tolist()
        share, at = math.ceil(sum(math.prod(shape) for _, shape in parameters) / len(ranks)), 0
        for number, (pieces, shape) in enumerate(parameters):
            size = math.prod(shape)
            add(ranks[number % len(ranks)], "weight", pieces, shape, 0, size)
            for owner in range(at // share, (at + size - 1) // share + 1):
                start, stop = max(at, owner * share) - at, min(at + size, (owner + 1) * share) - at
                for part in STATES:
                    add(ranks[owner], part, pieces, shape, start, stop)
            at += size
    return files


def manifest_of(files: list[ShardIndex]) -> str:
    """Return the manifest of a checkpoint, with a shape and a checksum for each tensor."""
    tensors = {name: boxes[0].box for index in files for name, boxes in index.items()}
    sizes = {rank_file(rank): asdict(Written(1 << 34, 1 << 31)) for rank in range(len(files))}
    shapes = {name.split("/")[2]: [stop for _, stop in box] for name, box in tensors.items()}
    return json.dumps({"files": sizes, "tensors": shapes, "checksums": dict.fromkeys(tensors, 1 << 63)})


def size_of(directory: Path) -> tuple[int, int]:
    """Return the bytes and the number of the files of a directory."""
    sizes = [file.stat().st_size for file in directory.iterdir()]
    return sum(sizes), len(sizes)


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
    parser = argparse.ArgumentParser(description="Measure the control plane of N simulated ranks.")
    parser.add_argument("sizes", metavar="N", type=int, nargs="+", help="number of ranks, a multiple of 8")
    sizes = sorted(parser.parse_args(argv).sizes)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    found = [SimulatedJob(size).run() for size in sizes]
    print("part".ljust(18), *(f"{f'N={size}: s':>12}{'cpu s':>8}{'MB':>9}{'files':>7}" for size in sizes))
    for name in found[0]:
        rows = [parts[name] for parts in found]
        cells = "".join("{:12.2f}{:8.2f}{:9.2f}{:7}".format(*row) for row in rows)
        figures = list(zip(*rows[-2:]))[1:3] if len(rows) > 1 else []  # cpu seconds and MB
        grows = [math.log(b / a, sizes[-1] / sizes[-2]) if a and b else math.nan for a, b in figures]
        print(f"{name:18}{cells}  exponents", *(f"{exponent:.2f}" for exponent in grows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
