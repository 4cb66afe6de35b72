"""Reinforcement learning on a large language model, one SPMD program: every rank runs this file.

    torchrun --nproc-per-node 2 train_rl.py --config configs/quickstart.yaml run.max_steps=10
    srun python train_rl.py --config configs/qwen2.5-0.5b_gsm8k_grpo_1gpu.yaml
    mpirun -n 2 python train_rl.py --config configs/quickstart.yaml
    python train_rl.py --config configs/quickstart.yaml

`--help` lists every key, `--print-config` prints the resolved configuration, `--dry-run --world-size N` says on a machine
without a GPU whether the run would fit into memory on N of them (`--dry-run --help`). Exit code 0: done; 2: the input cannot
work, said in one sentence by the first rank; 75: stopped for time or by a signal, the same command goes on; 1: anything else,
with the first cause in the last lines of the log (docs/faults.md).
"""

import atexit
import contextlib
import datetime
import io
import os
import platform
import sys

PRINTING = {"-h", "--help", "--print-config", "--dry-run"}
"""Options that make the program print something and exit."""


def main() -> int:
    if "--dry-run" in sys.argv[1:]:
        from rl.dry_run.command import main as dry_run

        return dry_run(sys.argv[1:])
    from rl.stopping.signals import expect_signals

    expect_signals()  # before any thread, which would be hit by what this one blocks
    # Nothing here imports torch: --help, --print-config and a typo take a fraction of a second.
    from rl.config.checks import check
    from rl.config.options import ConfigError, parse_command_line, to_yaml
    from rl.config.schema import Config, load_config
    from rl.runtime.ranks import discover

    ranks = None
    try:
        ranks = discover()
        quiet = io.StringIO()  # usage and --help are for the first rank to print
        out, err = (sys.stdout, sys.stderr) if ranks.rank == 0 else (quiet, quiet)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            command = parse_command_line(Config, sys.argv[1:], description=__doc__)
        config = load_config(command.config, command.overrides)
        warnings = check(config)
    except ValueError as error:
        return _refuse(error, ranks)
    if command.print_config:
        if ranks.rank == 0:
            print(to_yaml(config), end="")
        return 0
    if ranks.rank == 0:
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)

    from rl.runtime.rendezvous import MeetingFailed, meet

    try:
        ranks = meet(
            ranks
        )  # before torch is imported, which takes a while at scale: a rank that is missing shall be known
    except MeetingFailed as error:
        if not error.silent:
            print(f"error (rank {ranks.rank} on {platform.node()}): {error}", file=sys.stderr, flush=True)
        return 1
    prepare_environment(ranks)
    from rl.runtime.session import leave_together, session

    start_up = datetime.timedelta(seconds=config.watchdog.limits.start_up)
    with session(ranks, start_up) as device:
        try:
            code = watched_run(config, ranks, device)
            if code:
                leave(
                    code, together=leave_together(ranks)
                )  # a launcher ends the slower ranks when the first one leaves so
        except ConfigError as error:
            return _refuse(error, ranks)
        except KeyboardInterrupt:
            if ranks.rank == 0:
                print(
                    f"interrupted; the same command goes on from the newest checkpoint in {config.run.dir}",
                    file=sys.stderr,
                )
            leave(130, together=False)
    return 0


def watched_run(config, ranks, device) -> int:
    """The run, with its directory locked and watched over; returns the exit code. Collective over the world; raises ConfigError
    on every rank alike."""
    import torch.distributed as dist

    from rl.config.options import ConfigError
    from rl.engines.inputs import Inputs
    from rl.faults.agreement import agree_on_config, agree_on_table, fail_together
    from rl.faults.lock import is_of_another, make_run_directory
    from rl.faults.watchdog import Watch
    from rl.run_directory.record import code_hashes
    from rl.run_directory.status import Status
    from rl.runtime.collectives import from_first_rank
    from rl.runtime.session import control_group
    from rl.stopping.requests import refuse_if_stopped_by_hand

    agree_on_config(config)
    with fail_together():
        hashes = code_hashes(config)
    agree_on_table(hashes, "run different programs")
    lock = None
    with fail_together():
        if ranks.rank == 0:
            refuse_if_stopped_by_hand(config.run.dir)
            lock = make_run_directory(config)
    start = from_first_rank("" if lock is None else lock.token)
    status = Status(
        config.run.dir,
        max_steps=config.run.max_steps,
        leads=ranks.rank == 0,
        start=start,
        is_taken_over=lambda: is_of_another(config.run.dir, start),
    )
    watch = None
    try:
        with fail_together():  # a rank that cannot see rank 0's directory fails here
            store = dist.distributed_c10d._get_default_store()
            own = dict(run_dir=config.run.dir, device=device, store=store, lock=lock, status=status)
            watch = Watch(config.watchdog, config.memory, **own)
        with fail_together():
            inputs = Inputs(config, ranks.world_size)
        from rl.run.loop import run  # imports Megatron and vLLM: only now

        code = run(config, inputs, device, watch)
        dist.monitored_barrier(
            control_group()
        )  # or the first to leave would look lost to the watch of the others
        return code
    except ConfigError as error:
        status.refuse(str(error))
        raise
    except KeyboardInterrupt:
        status.interrupt()
        raise
    except SystemExit as error:  # of a user's file; the other ranks only see that this one is gone
        status.fail(f"rank {ranks.rank} ({platform.node()}) called sys.exit({error.code!r})")
        raise
    except Exception as error:
        if watch is None:
            status.fail(f"rank {ranks.rank} failed in start-up: {type(error).__name__}: {error}")
            raise
        watch.fail(error)
        leave(1, together=False)
    finally:
        if watch is not None:
            watch.close()


def prepare_environment(ranks) -> None:
    """Variables that libraries read when they are first imported."""
    ranks.export()
    # With --cpus-per-task Slurm binds each task to its own cores: they are not to be shared again.
    own_cpus = os.environ.get("SLURM_CPUS_PER_TASK") if ranks.launcher == "slurm" else None
    cpus = own_cpus or max(1, len(os.sched_getaffinity(0)) // ranks.local_world_size)
    os.environ.setdefault("OMP_NUM_THREADS", str(cpus))
    # A waiting OpenMP thread must not spin: with more threads than cores a generation takes 20 times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine lives in this process
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # vLLM on CPU warns of its NUMA binding on every rank
    os.environ.setdefault(
        "TORCH_FR_BUFFER_SIZE", "2000"
    )  # the flight recorder: last collectives, for the watchdog's dump
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a model is a directory; nobody should wait for a hub


def _refuse(error: Exception, ranks) -> int:
    """Every rank fails alike and the first says why; a rank that fails alone says so itself."""
    if ranks is None or ranks.rank == 0:
        print(f"error: {error}", file=sys.stderr, flush=True)
    if ranks is not None and ranks.world_size > 1:
        from rl.runtime.session import leave_together

        together = leave_together(ranks)
        if not together and ranks.rank > 0:
            print(f"error (rank {ranks.rank}): {error}", file=sys.stderr, flush=True)
        leave(
            2, together=together
        )  # at once: the launcher would end a slower rank by a signal, and report that
    return 2


def leave(code: int, *, together: bool = True) -> None:
    """Exit handlers run, the teardown of the interpreter does not: gloo groups that Megatron and vLLM still hold then have
    running threads, and now and then end a finished run with SIGABRT. `together`: every rank leaves."""
    atexit._run_exitfuncs()
    mpi = sys.modules.get(
        "mpi4py.MPI"
    )  # its finaliser is none of atexit's, and Open MPI calls a rank without it failed
    if mpi is not None and together and not mpi.Is_finalized():
        mpi.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if PRINTING & set(sys.argv[1:]):
        from rl.stopping.signals import end_on_closed_pipe

        end_on_closed_pipe()
    leave(main())
