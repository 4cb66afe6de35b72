"""Kill a toy run repeatedly at random times and check that nothing is lost.

    python tools/dev/torture.py --kills 100 --out /tmp/torture
    python tools/dev/torture.py --kills 20 --config configs/toy/grpo.yaml --out /tmp/torture run.max_steps=8

The first run is not disturbed. Then the same command is started in a new directory, and one rank or all ranks
receive SIGKILL: half of the time at a random time, half of the time while a checkpoint is being written. The
run is restarted until it ends by itself; further runs follow in new directories until the number of kills is
reached. After every kill each checkpoint directory must be complete, and every run that ends must have
bitwise the metrics of the first run, with carry-over also its prompts of each step. Exit code 0 if so.

Ranks are forked from a process that has imported everything, so that a start takes one second instead of ten.
Without --config the run is a GRPO run of 12 steps on the toy task on --ranks ranks that saves after each
step; every second run saves in the background.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Python searches only tools/dev/ for modules when it runs this file as a script.
sys.path.insert(0, str(ROOT))

import pyarrow.parquet as pq  # noqa: E402

from rl.checkpoint.directory import complete, expected_files, read_manifest  # noqa: E402
from rl.checkpoint.shards import check_file  # noqa: E402
from rl.config.command_line import add_config, make_parser  # noqa: E402
from rl.config.schema import Config  # noqa: E402
from rl.run_directory.consumed import FILE_NAME  # noqa: E402
from tools.make_toy import make_toy  # noqa: E402
from tools.records import comparable  # noqa: E402

SECONDS_TO_FOLLOW = 2.0
"""Seconds for ranks to end by themselves after one has died; then they are killed."""
SECONDS_TO_END = 600.0
"""Maximum seconds of a run without kills."""
POLL_S = 0.002
INTO_SAVE_S = 0.05
"""Largest delay in seconds between the start of a save and a kill that targets it."""


class Lost(Exception):
    """Raised when a run, a metric or a checkpoint was lost."""


@dataclass
class KillCounts:
    kills: int = 0
    of_one_rank: int = 0
    while_saving: int = 0
    runs: int = 0
    checkpoints_read: int = 0
    starts: int = 0
    started_at: float = field(default_factory=time.monotonic)

    def line(self) -> str:
        return (
            f"{self.kills} kills ({self.of_one_rank} of one rank, {self.while_saving} during a save), "
            f"{self.starts} starts, {self.runs} runs ended, checkpoints read {self.checkpoints_read} times, "
            f"{time.monotonic() - self.started_at:.0f} s"
        )


class World:
    """The ranks of one start, as forked processes of this host."""

    def __init__(self, num_ranks: int, arguments: Sequence[str], log: Path):
        port = _free_port()
        self.pids = [_fork_rank(rank, num_ranks, port, arguments, log) for rank in range(num_ranks)]
        self.codes: dict[int, int] = {}
        """Exit code by pid, negative for a signal, for example -9 for SIGKILL."""

    def running(self) -> list[int]:
        for pid in self.pids:
            if pid not in self.codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.codes[pid] = os.waitstatus_to_exitcode(status)
        return [pid for pid in self.pids if pid not in self.codes]

    def kill(self, pids: Sequence[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # the rank has ended
                os.killpg(pid, signal.SIGKILL)  # with its children, the scoring workers

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` and return whether all ranks have ended."""
        deadline = time.monotonic() + seconds
        while self.running():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def end(self) -> None:
        """End the other ranks as a launcher does after one rank has died."""
        self.wait(SECONDS_TO_FOLLOW)
        self.kill(self.pids)
        self.wait(SECONDS_TO_END)

    @property
    def ended_well(self) -> bool:
        return all(self.codes.get(pid) == 0 for pid in self.pids)


def _fork_rank(rank: int, num_ranks: int, port: int, arguments: Sequence[str], log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    numbers = dict(
        RANK=rank, WORLD_SIZE=num_ranks, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=num_ranks, MASTER_PORT=port
    )
    os.environ.update({"MASTER_ADDR": "127.0.0.1"} | {name: str(number) for name, number in numbers.items()})
    sys.argv = ["train_rl.py", *arguments]
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    code = 1
    try:
        import train_rl

        code = train_rl.main()
    finally:  # the child must not return to the caller
        import traceback

        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def read_checkpoints(run_dir: Path) -> int:
    """Verify every checkpoint by its manifest and return their number. Raises DamagedError."""
    found = complete(run_dir / "checkpoints")
    for saved in found:
        for name, written in expected_files(read_manifest(saved.path)).items():
            check_file(saved.path / name, written, contents=True)
    return len(found)


def metrics_of(run_dir: Path) -> list[dict]:
    """Return the comparable records of a run, then the records of the prompts that it consumed."""
    records, consumed = comparable(run_dir), run_dir / FILE_NAME
    return records + [json.loads(line) for line in consumed.open()] if consumed.exists() else records


def torture(arguments: Sequence[str], out: Path, *, num_ranks: int, kills: int, seed: int) -> KillCounts:
    """Run the test. Raises Lost, or DamagedError for a checkpoint that cannot be read."""
    numbers, counts = random.Random(seed), KillCounts()
    start = time.monotonic()
    undisturbed = World(num_ranks, [*arguments, f"run.dir={out}/undisturbed"], out / "undisturbed.log")
    if not undisturbed.wait(SECONDS_TO_END) or not undisturbed.ended_well:
        undisturbed.kill(undisturbed.pids)
        raise Lost(f"the undisturbed run failed, see {out}/undisturbed.log")
    usual = time.monotonic() - start
    expected = metrics_of(out / "undisturbed")
    print(f"undisturbed: {len(expected)} records in {usual:.1f} s", flush=True)
    while counts.kills < kills:
        run_dir = out / f"run_{counts.runs}"
        background = f"checkpoint.background={str(counts.runs % 2 == 1).lower()}"
        _until_it_ends(
            [*arguments, f"run.dir={run_dir}", background], run_dir, num_ranks, kills, usual, numbers, counts
        )
        if metrics_of(run_dir) != expected:
            raise Lost(f"{run_dir}/metrics.jsonl differs from {out}/undisturbed/metrics.jsonl")
        shutil.rmtree(run_dir)
        counts.runs += 1
        print(counts.line(), flush=True)
    return counts


def _until_it_ends(
    arguments: Sequence[str],
    run_dir: Path,
    num_ranks: int,
    kills: int,
    usual: float,
    numbers: random.Random,
    counts: KillCounts,
) -> None:
    log = Path(f"{run_dir}.log")
    while True:
        world = World(num_ranks, arguments, log)
        counts.starts += 1
        killed = counts.kills < kills and _kill_sometime(world, run_dir, usual, numbers, counts)
        if killed:
            world.end()
        elif not world.wait(SECONDS_TO_END):
            world.kill(world.pids)
            raise Lost(f"a run without a kill does not end, see {log}")
        counts.checkpoints_read += read_checkpoints(run_dir)
        if world.ended_well:
            return
        if not killed:
            raise Lost(f"a run without a kill failed: exit codes {list(world.codes.values())}, see {log}")


def _kill_sometime(
    world: World, run_dir: Path, usual: float, numbers: random.Random, counts: KillCounts
) -> bool:
    """Kill one or all ranks at a random time or in the next save; return False if the run ended before."""
    instant = time.monotonic() + numbers.uniform(0, usual)
    into_save = numbers.uniform(0, INTO_SAVE_S) if numbers.random() < 0.5 else None
    leftovers = _unfinished(run_dir)
    while time.monotonic() < instant or (into_save is not None and not _unfinished(run_dir) - leftovers):
        if len(world.running()) < len(world.pids):
            return False
        time.sleep(POLL_S)
    time.sleep(into_save or 0)
    victims = [numbers.choice(world.pids)] if numbers.random() < 0.5 else world.pids
    counts.while_saving += bool(_unfinished(run_dir) - leftovers)
    world.kill(victims)
    counts.kills += 1
    counts.of_one_rank += len(victims) == 1
    return True


def _unfinished(run_dir: Path) -> set[tuple[str, int]]:
    """Return name and modification time of each incomplete checkpoint.

    The time of one that a kill left behind does not change until a save removes it.
    """
    found = set()
    for path in (run_dir / "checkpoints").glob("step_*.partial"):
        with contextlib.suppress(FileNotFoundError):  # it was just completed
            found.add((path.name, path.stat().st_mtime_ns))
    return found


def toy_config(out: Path) -> Path:
    toy = make_toy(out / "toy", layers=2, intermediate=128)
    # A few rows, because thousands take a second to read.
    pq.write_table(pq.read_table(toy / "train.parquet").slice(0, 64), toy / "few.parquet")
    (out / "reward.py").write_text("def score(response, **extra):\n    return len(set(response)) / 6\n")
    path = out / "config.yaml"
    path.write_text(
        f"""
        algorithm: grpo
        run: {{name: torture, max_steps: 12}}
        model: {{path: {toy}/model, dtype: float32}}
        data: {{train: [{toy}/few.parquet], max_prompt_tokens: 16, prompts_per_step: 4}}
        training: {{micro_batch_tokens: 200, optimizer: {{lr: 1.0e-3, weight_decay: 0.01}}}}
        rollout: {{samples_per_prompt: 2, max_response_tokens: 4, deterministic: true, cpu_kv_cache_mib: 16}}
        reward: {{function: "{out}/reward.py:score", workers: 1}}
        checkpoint: {{every: 1, keep_last: 2, keep_every: 5}}
        logging: {{tensorboard: false}}
        """
    )
    return path


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--kills", type=int, default=100, help="how often a run is killed")
    add("--ranks", type=int, default=2, help="ranks of the run")
    add("--seed", type=int, default=0, help="seed of the times and ranks of the kills")
    add("--out", required=True, help="directory for the runs and their logs; its contents are removed")
    add_config(
        parser, Config, required=False, about="YAML file of another run, deterministic and with checkpoints"
    )
    args = parser.parse_intermixed_args(argv)
    out = Path(args.out).resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    files = [f"--config={file}" for file in args.config or [toy_config(out)]]
    _import_everything()
    try:
        counts = torture(
            [*files, *args.overrides], out, num_ranks=args.ranks, kills=args.kills, seed=args.seed
        )
    except Lost as error:
        print(f"lost: {error}", file=sys.stderr)
        return 1
    print(f"nothing lost: {counts.line()}")
    return 0


def _import_everything() -> None:
    """Import what the ranks need before they are forked; no thread or process group may be started."""
    from rl.runtime.ranks import discover
    from train_rl import prepare_environment

    prepare_environment(discover())
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # rl.runtime.session sets it too late for this process
    from vllm import LLM, ModelRegistry, SamplingParams  # noqa: F401

    import rl.run.loop  # noqa: F401

    ModelRegistry.models["Qwen2ForCausalLM"].load_model_cls()


if __name__ == "__main__":
    sys.exit(main())
