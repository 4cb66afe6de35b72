"""A process that has imported what ranks import and forks them: a rank starts at once, not after ten seconds.

tests/spawn.py starts it, once per session. It reads one JSON object per line and answers each with one
line: {"start": {...}} forks a rank and returns its pid, or a text if its files cannot be opened;
{"poll": [pid, ...]} returns the ranks' exit codes, null while they run. When its input ends, it kills the
ranks that still run and exits. It must never start a thread or a process group: forked ranks would inherit
their locks and sockets, but not the threads.

Forked ranks cannot test three things: the order of imports, variables that libraries read on import, and a
different hash seed on each rank. tests/runs/test_launchers.py and tests/slurm start interpreters for these.
"""

import atexit
import contextlib
import gc
import json
import os
import signal
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODELS = (
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "llama",
    "mistral",
    "mixtral",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "granite",
    "gemma3",
    "gpt_oss",
    "minimax_m2",
    "phi3",
)
"""Architectures of tests/checkpoints.py, in transformers and, but for the last, in vLLM."""
IMPORTED_LATE = (
    "pyarrow.pandas_compat",  # with the first table
    "vllm.distributed.device_communicators.cpu_communicator",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.async_scheduler",
    "rl.config.checks",
    "rl.config.command_line",
    "rl.rollout.cpu_async",
    "rl.run.rollout_writer",
    "rl.run_directory.named_metrics",
)
"""Modules that a run imports in a function."""


def import_all() -> dict[str, str]:
    """Import what ranks import; return the variables that this set, which ranks then have too."""
    before = dict(os.environ)
    from rl.runtime.ranks import discover
    from train_rl import prepare_environment

    prepare_environment(discover())
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # as rl.runtime.session does, which comes too late here
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # read by pyarrow
    import importlib

    import pandas  # noqa: F401  pyarrow imports it when it first writes a table
    import pyarrow.parquet  # noqa: F401
    import safetensors.torch  # noqa: F401
    import vllm.v1.worker.cpu_worker  # noqa: F401
    import vllm.v1.worker.gpu_worker  # noqa: F401  as rl.engines.engines.finish_imports
    from vllm import LLM, SamplingParams  # noqa: F401

    import rl.run.loop  # noqa: F401
    import rl.training.engine  # noqa: F401

    for name in MODELS:
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        if name != "deepseek_v3":
            importlib.import_module(f"vllm.model_executor.models.{name}")
    for name in IMPORTED_LATE:
        importlib.import_module(name)
    prepare_engine()
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def prepare_engine() -> None:
    """Replace vLLM's Triton kernels in all modules and configure its loggers, once for all ranks.

    vLLM does both in each process with an engine, which takes half a second.
    """
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed
    from vllm.platforms import current_platform

    configure_logging_if_needed(LoggingConfig())
    current_platform.register_triton_kernel_overrides()
    current_platform.register_triton_kernel_overrides = lambda: None


def fork_rank(
    script: str,
    arguments: Sequence[str],
    directory: str,
    environ: dict[str, str],
    stdout: str,
    stderr: str,
    answers: int,
) -> int:
    """Fork a rank that runs `python script *arguments` in its own session; return its pid.

    The session and its files are open when this returns, so that the caller may kill the rank and remove
    them at any later time. Raises OSError if a file cannot be opened.
    """
    files = ((os.devnull, os.O_RDONLY), (stdout, os.O_WRONLY), (stderr, os.O_WRONLY))
    opened = [os.open(path, flags) for path, flags in files]
    has_begun, begins = os.pipe()
    pid = os.fork()
    if pid:
        os.close(begins)
        os.read(has_begun, 1)  # returns when the rank closes its end
        for file in (*opened, has_begun):
            os.close(file)
        return pid
    code = 1
    try:
        os.setsid()
        for descriptor, file in enumerate(opened):
            os.dup2(file, descriptor)
        for file in (*opened, answers, has_begun, begins):
            os.close(file)
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environ)
        code = run_script(script, arguments)
    except BaseException:
        traceback.print_exc()
    finally:  # the rank must not return into the loop of the server
        with contextlib.suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def run_script(script: str, arguments: Sequence[str]) -> int:
    """Run a file as the interpreter runs its main program; return the exit code."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    module = types.ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module
    try:
        exec(compile(Path(script).read_text(), script, "exec"), module.__dict__)
    except SystemExit as leave:
        if leave.code is None or isinstance(leave.code, int):
            return leave.code or 0
        print(leave.code, file=sys.stderr)
        return 1
    return 0


class Ranks:
    """The ranks that this process has forked."""

    def __init__(self) -> None:
        self.running: set[int] = set()
        self.codes: dict[int, int] = {}
        """Exit codes of ranks that have ended, by pid."""

    def start(self, start: dict, answers: int) -> int | str:
        """Fork a rank; return its pid, or why there is none."""
        try:
            pid = fork_rank(**start, answers=answers)
        except OSError as error:
            return str(error)
        self.codes.pop(pid, None)  # of an earlier rank: the system uses numbers again
        self.running.add(pid)
        return pid

    def poll(self, pids: Sequence[int]) -> list[int | None]:
        """Return the exit codes of these ranks, None for one that runs."""
        for pid in self.running.intersection(pids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.running.remove(pid)
                self.codes[pid] = os.waitstatus_to_exitcode(status)
        return [self.codes.get(pid) for pid in pids]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # libraries' notes on what a CPU host lacks
        changed = import_all()
    gc.collect()
    gc.freeze()  # ranks need not look at these objects, and their pages stay shared
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"imports started {threads - 1} threads, which forked ranks would lack"
    ranks = Ranks()
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if start := request.get("start"):
            start["environ"] = changed | start["environ"]
            answer: object = ranks.start(start, answers.fileno())
        else:
            answer = ranks.poll(request["poll"])
        print(json.dumps(answer), file=answers, flush=True)
    for pid in ranks.running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # not tests/
    main()
