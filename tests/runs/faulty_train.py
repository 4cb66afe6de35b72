"""train_rl.py with a fault: `faulty_train.py KIND PLACE RANK CALL <arguments of train_rl.py>`. The fault
comes on one rank, in the CALL-th call (from 1) of what PLACE names."""

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import train_rl

PLACES = {
    "generate": ("rl.rollout.engine", "RolloutEngine.generate"),
    "engine_step": ("rl.rollout.calls", "Calls.step"),
    "score": ("rl.phases.scorer", "Scorer.score"),
    "log_probs": ("rl.training.engine", "TrainingEngine.forward"),
    "update": ("rl.training.engine", "TrainingEngine.update"),
    "refit": ("rl.engines.memory", "refit"),
    "build_engines": ("rl.run.set_up", "build_engines"),
    "build_rollout": ("rl.features.roles.generators", "build_rollout"),
    "begin_group": ("rl.features.roles.stream_schedule", "StreamSchedule._open_group"),
    "deliver": ("rl.features.roles.stream_schedule", "StreamSchedule.ended"),
    "answer": ("rl.features.roles.generators", "Generators._answer"),
    "receive_weights": ("rl.features.roles.link", "Link.receive_weights"),
    "save": ("rl.checkpoint.store", "CheckpointStore.save"),
    "draw": ("rl.phases.draw", "Draw.next"),
    "targets": ("rl.phases.phases", "Phases.targets"),
    "learned": ("rl.features.carry_over.carry_over", "CarryOver.learned"),
    "export": ("rl.run.checkpoints", "export_hf"),
    "end": ("rl.run.loop", "note_end"),
}


def hang_here(*args):
    threading.Event().wait()


def hold_the_interpreter_lock(*args):
    ctypes.PyDLL(None).sleep(600)  # PyDLL: the lock is held meanwhile


def raise_here(*args):
    raise ValueError("injected: the reactor is on fire")


def refuse_here(*args):
    from rl.config.options import ConfigError

    raise ConfigError("injected=1 does not fit; remove it.")


def run_out_of_memory(*args):
    return bytearray(1 << 60)


def kill_this_rank(*args):
    os.kill(os.getpid(), signal.SIGKILL)


def stop_this_rank(*args):
    os.kill(os.getpid(), signal.SIGSTOP)


def kill_the_store(*args):
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        if b"store_server" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(int(pid), signal.SIGKILL)
    hang_here()


def grow(*args):
    args[0].ballast = bytearray(os.urandom(1 << 20) * 1200)


def flip_a_bit(phases, *args):
    import torch

    weight = dict(phases.engines.policy.model.named_parameters())["decoder.layers.0.mlp.linear_fc2.weight"]
    weight.data.view(torch.int32).view(-1)[7] ^= 1 << 12


def lose_the_lock(phases, *args):
    path = Path(phases.config.run.dir, "lock.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"token": "another", "host": "node7"}))


TAKE_OVER = """
import json, os, pathlib, shutil, signal, subprocess, sys
pid, run, *command = sys.argv[1:]
while pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
    pass
lock = pathlib.Path(run, "lock.json")
lock.write_text(json.dumps(json.loads(lock.read_text()) | {"pid": 1 << 23}))  # looks as if it had ended
try:
    subprocess.run([sys.executable, *command], check=True)
    shutil.copytree(run, run + "-of-the-other")
finally:
    os.kill(int(pid), signal.SIGCONT)
"""


def be_taken_over(*args):
    """Stop this process until another run has taken its directory and finished; copy the directory then."""
    from rl.config.schema import load_config

    run = load_config(Path(sys.argv[sys.argv.index("--config") + 1]), []).run.dir
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    command = [sys.executable, "-c", TAKE_OVER, str(os.getpid()), run, train_rl.__file__, *sys.argv[1:]]
    subprocess.Popen(command, env={name: v for name, v in os.environ.items() if name not in names})
    os.kill(os.getpid(), signal.SIGSTOP)


def set_the_clock_back(*args):
    """Set the clock of this rank back by 1000 s, and wait until rank 0 has looked for lost ranks."""
    right = time.time
    time.time = lambda: right() - 1000
    time.sleep(14)


def read_other_data(draw, *args):
    draw.rows = [*draw.rows[1:], draw.rows[0]]


KINDS = {
    function.__name__: function
    for function in (
        hang_here,
        hold_the_interpreter_lock,
        raise_here,
        refuse_here,
        run_out_of_memory,
        kill_this_rank,
        stop_this_rank,
        kill_the_store,
        grow,
        flip_a_bit,
        lose_the_lock,
        be_taken_over,
        set_the_clock_back,
        read_other_data,
    )
}


def inject(kind: str, place: str, call: int) -> None:
    importlib.import_module("rl.training")  # makes Megatron work without CUDA, before anything imports it
    module, path = PLACES[place]
    owner = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original, calls = getattr(owner, name), 0

    def faulty(*args, **options):
        nonlocal calls
        calls += 1
        if calls == call:
            KINDS[kind](*args)
        return original(*args, **options)

    setattr(owner, name, faulty)


if __name__ == "__main__":
    kind, place, rank, call, *sys.argv[1:] = sys.argv[1:]
    run = train_rl.watched_run

    def faulty_run(config, points, ranks, device):
        if ranks.rank == int(rank):
            inject(kind, place, int(call))
        return run(config, points, ranks, device)

    train_rl.watched_run = faulty_run
    train_rl.leave(train_rl.main())
