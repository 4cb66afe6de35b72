"""Forks the ranks of one node of an elastic run from a process that has already imported their modules.

Each agent (`launch.elastic`) starts one such process. Imports take most of the start of a run; a forked rank
needs none, so it starts within a second, also in a recovery.

The agent and this process exchange JSON, one object per line. To start a rank, the agent sends [environment,
arguments, log file]. The process answers with the pid, and later with [pid, exit code]. When the agent ends,
this process and its ranks end, too.
"""

import atexit
import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

TRAIN = Path(__file__).resolve().parents[1] / "train_rl.py"


class NodeRanks:
    """The ranks of this node, as the agent sees them."""

    def __init__(self, arguments: list[str], number: int):
        """Start the process, which begins its imports.

        arguments: command line of train_rl.py. number: number of ranks on this node.
        """
        self.codes: dict[int, int | None] = {}
        """pid -> exit code, for each rank of the present generation. The code is None while the rank runs."""
        self.is_ready = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "launch.elastic_ranks", str(number), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # select must see every line that has not been read
            preexec_fn=end_with_parent,
        )

    def poll(self) -> None:
        """Read all answers that have arrived. Raises EOFError if the process has ended."""
        assert self._process.stdout is not None
        while select.select([self._process.stdout], [], [], 0)[0]:
            answer = self._read()
            if answer == "ready":
                self.is_ready = True
            elif answer[0] in self.codes:
                self.codes[answer[0]] = answer[1]

    def start(self, environ: dict[str, str], arguments: list[str], log: Path) -> None:
        assert self._process.stdin is not None
        self.poll()
        self._process.stdin.write(json.dumps([environ, arguments, str(log)]).encode() + b"\n")
        self._process.stdin.flush()
        while not isinstance(pid := self._read(), int):
            pass  # this answer reports the exit of a rank of an earlier generation
        self.codes[pid] = None

    def kill(self) -> None:
        """Kill the ranks and the processes that they started, and clear `codes`."""
        for pid in self.codes:
            _signal(os.killpg, pid, signal.SIGKILL)
        while None in self.codes.values():
            pid, code = self._read()
            self.codes[pid] = code
        self.codes = {}

    def ask_to_stop(self) -> None:
        for pid, code in self.codes.items():
            if code is None:
                _signal(os.kill, pid, signal.SIGUSR2)

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()  # does not block for long: the process writes whole lines
        if not line:
            code = self._process.wait()
            if not self.is_ready and code > 0:  # its traceback is above
                raise RuntimeError("the ranks' program cannot be imported on this node")
            raise EOFError(f"the process that starts the ranks has ended with code {code}")
        return json.loads(line)


def _signal(send: Callable[[int, int], None], pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # the process has ended meanwhile
        send(pid, number)


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends. Call it between fork and exec."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


# In the process -----------------------------------------------------------------------------------------


def main(number: int, arguments: list[str]) -> None:
    """Import all modules, then fork ranks on request until the input ends.

    number: number of ranks on this node. arguments: command line of train_rl.py.
    """
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    gc.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        set_here = import_all(number, arguments)
    gc.collect()
    gc.freeze()  # the collector ignores the present objects, so their memory pages stay shared with the ranks
    can_fork = len(os.listdir("/proc/self/task")) == 1  # a fork copies only one thread
    if not can_fork:
        print("a module started a thread, so that each start of a rank imports all modules", file=sys.stderr)
    _tell(answers, "ready")
    running: set[int] = set()
    pending = b""
    while True:
        if select.select([0], [], [], 0.2)[0]:
            if not (piece := os.read(0, 1 << 20)):
                return
            *lines, pending = (pending + piece).split(b"\n")
            for line in lines:
                environ, words, log = json.loads(line)
                start = fork if can_fork else execute
                pid = start(set_here | environ, words, log, answers.fileno())
                running.add(pid)
                _tell(answers, pid)
        for pid in sorted(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                _tell(answers, [pid, os.waitstatus_to_exitcode(status)])


def import_all(number: int, arguments: list[str]) -> dict[str, str]:
    """Import the modules that a rank of this config imports; return the environment variables set
    meanwhile."""
    from rl.config.command_line import parse_command_line
    from rl.config.needs import needs_engine
    from rl.config.schema import Config, load_config
    from rl.runtime.ranks import Ranks as World
    from rl.runtime.transformers_import import keep_scan
    from train_rl import prepare_environment

    command = parse_command_line(Config, arguments, description="")
    config = load_config(command.config, command.overrides)
    before = dict(os.environ)
    world = World(0, 2 * number, 0, number, "slurm", "")  # placeholder: the first of two nodes
    prepare_environment(world, in_order=not config.roles.is_on)
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # see rl.runtime.session
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # read by pyarrow
    keep_scan()
    import rl.run.loop  # noqa: F401

    if needs_engine(config):
        import vllm.entrypoints.llm
        import vllm.v1.worker.gpu_worker  # noqa: F401
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {k: v for k, v in os.environ.items() if before.get(k) != v and k not in own}


def fork(environ: dict[str, str], arguments: list[str], log: str, answers: int) -> int:
    """Fork a rank in a session of its own; return its pid.

    answers: descriptor of the answers to the agent; the rank closes its copy.
    """
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    has_begun, begins = os.pipe()
    if pid := os.fork():
        os.close(begins)
        os.read(has_begun, 1)  # returns when the rank's session exists, so that `kill` can reach it
        os.close(has_begun)
        os.close(file)
        return pid
    code = 1
    try:
        _begin_rank()
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, opened in enumerate((nothing, file, file)):
            os.dup2(opened, descriptor)
        for opened in (nothing, file, has_begun, begins, answers):
            os.close(opened)
        os.environ.clear()
        os.environ.update(environ)
        sys.argv = [str(TRAIN), *arguments]
        module = types.ModuleType("__main__")
        module.__file__ = str(TRAIN)
        sys.modules["__main__"] = module
        exec(compile(TRAIN.read_text(), str(TRAIN), "exec"), module.__dict__)
        code = 0
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:  # a rank must not return into the loop of this process
        threading._shutdown()  # type: ignore[attr-defined]  # typeshed has no private names
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def execute(environ: dict[str, str], arguments: list[str], log: str, answers: int) -> int:
    """Start a rank as a new interpreter; return its pid. Used where the process cannot fork."""
    with open(log, "a") as file:
        command = [sys.executable, str(TRAIN), *arguments]
        nothing = subprocess.DEVNULL
        return subprocess.Popen(
            command, env=environ, preexec_fn=_begin_rank, stdin=nothing, stdout=file, stderr=file
        ).pid


def _begin_rank() -> None:
    os.setsid()
    end_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # SIGUSR2 stays blocked


def _tell(answers: FileIO, answer: object) -> None:
    answers.write(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
