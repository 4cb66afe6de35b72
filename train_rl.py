"""Reinforcement learning on a large language model as one SPMD program: every rank runs this file.

    lockstep train --config configs/quickstart.yaml                   or: python train_rl.py --config ...
    torchrun --nproc-per-node 2 -m lockstep train --config configs/quickstart.yaml run.max_steps=10
    srun lockstep train --config configs/qwen2.5-0.5b_gsm8k_grpo_1gpu.yaml
    mpirun -n 2 lockstep train --config configs/quickstart.yaml

`--help` shows the keys that people change first, `--help training` the keys of a section. `--print-config`
prints the resolved configuration, `--changed` only what differs from the defaults. `--dry-run --world-size N`
estimates, on a machine without a GPU, whether the run fits into the memory of N GPUs (`--dry-run --help`).

Exit codes: 0, done; 2, the input is invalid, and rank 0 prints one sentence; 75, stopped by a time limit or a
signal, and the same command continues the run; 130, interrupted by Ctrl-C, without a last checkpoint; 1, a
fault, with its cause in the last lines of the log (docs/faults.md). For example, a misspelt key ends the
program with code 2.
"""

import atexit
import contextlib
import datetime
import io
import os
import platform
import resource
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import rl  # noqa: F401  refuses an old Python

if TYPE_CHECKING:
    from rl.config.schema import Config
    from rl.runtime.device import Device
    from rl.runtime.ranks import Ranks

PRINTING = {"-h", "--help", "--print-config", "--dry-run"}
"""Options that make the program print and exit."""
NEEDED = {"yaml", "numpy", "torch", "transformers", "safetensors", "pyarrow", "rich"}
"""Packages without which this is not the environment of Lockstep."""


def main(argv: list[str] | None = None, *, about: str | None = __doc__, first: Sequence[str] = ()) -> int:
    """Read the command line `argv` (None: sys.argv), start torch.distributed, run, and return the exit code.

    about: beginning of --help. first: keys that it shows; the keys that people change first, by default.
    Once torch.distributed has started, a code other than 0 ends the process here (`leave`).
    """
    argv = sys.argv[1:] if argv is None else argv
    if "--dry-run" in argv:
        from rl.dry_run.command import main as dry_run

        return dry_run(argv)
    from rl.runtime import start_up

    start_up.pause_collection()
    from rl.stopping.signals import expect_signals

    # Before other threads exist, because they would receive the signals that this thread blocks.
    expect_signals()
    # torch is imported after the configuration is checked: --help and a typo take a fraction of a second.
    from rl.config.checks import check
    from rl.config.command_line import parse_command_line
    from rl.config.options import ConfigError, to_yaml
    from rl.config.schema import FIRST_KEYS, Config, changed, derived_keys, load_config
    from rl.config.sweep_checks import load_points
    from rl.run_directory.named_metrics import check_named_metrics, metrics_help
    from rl.runtime.ranks import discover
    from rl.runtime.rendezvous import RendezvousError, join_ranks
    from rl.runtime.transformers_import import keep_scan

    ranks = None
    try:
        ranks = discover()
        start_up.begin(has_launcher=ranks.launcher != "single")
        nowhere = io.StringIO()  # only rank 0 prints the usage and --help
        out, err = (sys.stdout, sys.stderr) if ranks.rank == 0 else (nowhere, nowhere)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            command = parse_command_line(
                Config,
                argv,
                program=Path(sys.argv[0]).name,
                description=about,
                first=first or FIRST_KEYS,
                other_help=metrics_help,
            )
        config = load_config(command.config, command.overrides)
        points = load_points(command.config, command.overrides) if config.sweep.is_on else []
        warnings = check(config, points)
        check_named_metrics(config, points)
        derived = derived_keys(command.config, command.overrides)
    except ValueError as error:
        return refuse(error, ranks)
    if command.print_config:
        if ranks.rank == 0:
            print(to_yaml(changed(config) if command.changed else config), end="")
        return 0
    if ranks.rank == 0:
        for text in derived:
            print(f"set {text}", file=sys.stderr)
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
    if config.run.mode == "score_only":
        return score_stored(config, ranks)
    start_up.mark("config")
    try:
        # Before the slow import of torch, so that missing ranks are reported early.
        ranks = join_ranks(replace(ranks, run_dir=config.run.dir))
    except ValueError as error:
        return refuse(error, ranks)
    except RendezvousError as error:
        if not error.silent:
            print(f"error (rank {ranks.rank} on {platform.node()}): {error}", file=sys.stderr, flush=True)
        return 1

    start_up.mark("rendezvous")
    sizes = config.training
    splits_layers = max(sizes.tp, sizes.cp, sizes.expert_tp) > 1
    prepare_environment(ranks, in_order=splits_layers and not config.roles.is_on)
    keep_scan()
    from rl.runtime.session import leave_together, session

    start_up.mark("torch")
    time_limit = datetime.timedelta(seconds=config.watchdog.limits.start_up)
    with session(ranks, time_limit) as device:
        start_up.mark("process group")
        try:
            code = watched_run(config, points, ranks, device)
            if code:  # together, because a launcher ends the slower ranks when the first one exits
                leave(code, together=leave_together(ranks))
        except ConfigError as error:
            return refuse(error, ranks)
        except KeyboardInterrupt:
            if ranks.rank == 0:
                from rl.checkpoint.directory import complete

                found = complete(Path(config.run.dir, "checkpoints"))
                where = (
                    f"continues after step {found[-1].step}" if found else "begins again: no checkpoint yet"
                )
                print(f"interrupted; the same command {where}", file=sys.stderr)
            leave(130, together=False)
    return 0


def score_stored(config: "Config", ranks: "Ranks") -> int:
    """Apply the reward function to stored rollouts in this process; return the exit code."""
    if ranks.world_size > 1:
        return refuse(ValueError("run.mode=score_only uses one process; start it without a launcher."), None)
    from rl.config import wing

    try:
        return wing.door(config, "score_only")(config)
    except ValueError as error:
        return refuse(error, ranks)


def watched_run(config: "Config", points: "list[Config]", ranks: "Ranks", device: "Device") -> int:
    """Lock the run directory, start the watchdog, run, and return the exit code. Collective over the world.

    points: configs of the points of a sweep in one job; empty for a single run.

    Raises ConfigError on every rank. Any other error is reported, and then ends the process.
    """
    import torch.distributed as dist

    from rl.config import wing
    from rl.config.options import ConfigError
    from rl.engines.inputs import Inputs
    from rl.faults.agreement import agree_on_config, agree_on_table, fail_together
    from rl.faults.lock import check_lock, is_of_another, make_run_directory
    from rl.faults.watchdog import Watchdog
    from rl.run_directory.record import code_hashes, writing
    from rl.run_directory.status import Status
    from rl.runtime import start_up, tracing
    from rl.runtime.collectives import broadcast_object
    from rl.runtime.session import job
    from rl.stopping.requests import refuse_if_stopped_by_hand
    from rl.stopping.signals import note_sigterm

    start_up.mark("transformers")
    agree_on_config(config)
    with fail_together():
        hashes = code_hashes(config)
    agree_on_table(hashes, "run different programs")
    lock = None
    with fail_together():
        if ranks.rank == 0:
            refuse_if_stopped_by_hand(config.run.dir)
            lock = make_run_directory(config)
    start, before = broadcast_object(("", "") if lock is None else (lock.token, lock.before))
    status = Status(
        config.run.dir,
        max_steps=config.run.max_steps,
        leads=ranks.rank == 0,
        start=start,
        is_taken_over=lambda: is_of_another(config.run.dir, start, before),
    )
    note_sigterm(lambda: status.interrupt("SIGTERM"))
    watchdog = None
    try:
        with fail_together(), writing(config.run.dir):  # raises if a rank cannot see the directory
            watchdog = Watchdog(
                config.watchdog,
                config.memory,
                run_dir=config.run.dir,
                device=device,
                store=job().store,
                lock=lock,
                status=status,
            )
        with fail_together():
            inputs = Inputs(config, ranks.world_size)
        if not device.is_cuda and ranks.rank == 0 and not points:
            from rl.dry_run.host import memory_warning
            from rl.faults.process import host_bytes_available, resident_bytes

            own = ranks.local_world_size * resident_bytes()
            if warning := memory_warning(config, ranks, host_bytes_available() + own):
                print(f"warning: {warning}", file=sys.stderr, flush=True)
        start_up.mark("inputs")
        if points:
            run_points = wing.door(config, "run")  # imports Megatron and vLLM, so only now
            code = run_points(config, points, inputs, device, watchdog)
        else:
            from rl.run.loop import run

            code = run(config, inputs, device, watchdog)
            tracing.finish()
        check_lock(lock)
        if watchdog.excluded is not None:
            if not watchdog.excluded.meet(ranks.rank, ranks.world_size):
                watchdog.close()
                leave(code, together=False)  # process groups with a dead rank cannot be destroyed
        dist.monitored_barrier(job().group)  # otherwise the first rank to exit would look lost
        return code
    except ConfigError as error:
        status.refuse(str(error))
        # With roles, the ranks of the other role may be at another point of the program.
        if watchdog is not None and config.roles.is_on:
            leave(watchdog.refuse(str(error)), together=False)
        raise
    except KeyboardInterrupt:
        status.interrupt()
        raise
    except SystemExit as error:  # raised by a user's file; the other ranks only see that this rank has ended
        status.fail(f"rank {ranks.rank} ({platform.node()}) called sys.exit({error.code!r})")
        raise
    except Exception as error:
        if watchdog is None:
            status.fail(f"rank {ranks.rank} failed in start-up: {type(error).__name__}: {error}")
            raise
        leave(watchdog.fail(error), together=False)
    finally:
        if watchdog is not None:
            watchdog.close()


def prepare_environment(ranks: "Ranks", *, in_order: bool = True) -> None:
    """Set the variables that libraries read when they are first imported, and the limit of open files.

    in_order: whether a GPU must run all work in the order in which it was launched.
    """
    from rl.runtime.proxies import without_proxies
    from rl.runtime.rendezvous import address_of_host
    from rl.sandbox.private_directory import socket_directory

    ranks.export()
    os.environ.update(without_proxies(ranks, address_of_host(ranks)))
    # The limit of open files is raised, because rank 0 holds a connection to every rank, and because
    # unrelated processes may connect to the ports that libraries open.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # the system-wide limit is lower now
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # With --cpus-per-task Slurm binds each task to its own cores; they must not be divided again.
    own_cpus = os.environ.get("SLURM_CPUS_PER_TASK") if ranks.launcher == "slurm" else None
    cpus = own_cpus or max(1, len(os.sched_getaffinity(0)) // ranks.local_world_size)
    defaults = {
        "OMP_NUM_THREADS": str(cpus),
        # Spinning OpenMP threads make a generation 20 times slower if there are more threads than cores.
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
        # Every request has a seed. vLLM then never uses FlashInfer's sampler, but would compile it.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": socket_directory(),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # vLLM on CPU warns of its NUMA binding on every rank
        # Number of collectives that the flight recorder keeps for the watchdog's dump.
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",  # a model is a directory; no rank waits for a hub
    }
    if in_order:
        # If ranks share layers, Megatron launches a collective before the product that it overlaps, and the
        # GPU must keep this order. CUDA reads the variable when it initialises. With roles the GPU keeps
        # several queues: in a single queue, a message that waits for its receiver would block collectives
        # that other ranks need.
        defaults["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if ranks.on_one_host:  # then nothing must listen on an interface that other nodes reach
        defaults |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")
        defaults["VLLM_HOST_IP"] = "127.0.0.1"
    elif address := address_of_host(ranks):
        # Without it, vLLM's message queue for a group that spans several nodes would listen on the interface
        # that leads to the internet, or on all interfaces.
        defaults["VLLM_HOST_IP"] = address
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def refuse(error: Exception, ranks: "Ranks | None") -> int:
    """Report invalid input and exit with code 2.

    If all ranks fail, only rank 0 prints the error. Otherwise each rank that fails prints it.
    """
    from rl.runtime.torchrun_summary import show_in_summary

    show_in_summary(f"error: {error}")
    if ranks is None or ranks.rank == 0:
        print(f"error: {error}", file=sys.stderr, flush=True)
    if ranks is not None and ranks.world_size > 1:
        from rl.runtime.session import leave_together

        together = leave_together(ranks)
        if not together and ranks.rank > 0:
            print(f"error (rank {ranks.rank}): {error}", file=sys.stderr, flush=True)
        # At once on all ranks, because the launcher would end a slower rank by a signal.
        leave(2, together=together)
    return 2


def advice_on(error: ModuleNotFoundError) -> str:
    """Return what to do if the environment of Lockstep is not active; "" if another package is missing."""
    package = (error.name or "").partition(".")[0]
    if package not in NEEDED:
        return ""
    return (
        f"{sys.executable} has no package {package}; activate the environment of Lockstep (source "
        f".venv/bin/activate), or make it with bash {Path(__file__).resolve().parent}/tools/install_cpu.sh."
    )


def leave(code: int, *, together: bool = True) -> NoReturn:
    """Run the exit handlers and end the process without the interpreter's teardown.

    Megatron and vLLM still hold gloo groups. During the teardown, threads of these groups sometimes end a
    finished run with SIGABRT.

    together: whether every rank exits.
    """
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")  # Open MPI reports a rank that does not finalise as failed
    if mpi is not None and together and not mpi.Is_finalized():
        mpi.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if PRINTING & set(sys.argv[1:]):
        from rl.stopping.signals import end_on_closed_pipe

        end_on_closed_pipe()
    try:
        leave(main())
    except ModuleNotFoundError as error:
        if not (advice := advice_on(error)):
            raise
        print(f"error: {advice}", file=sys.stderr)
        leave(2)
