"""A process that has imported what ranks import and forks them: a rank starts at once, not after ten seconds.

tests/spawn.py starts it, once per session. It reads one JSON object per line and answers each with one
line: {"start": {...}} forks a rank and returns its pid; {"poll": [pid, ...]} returns the ranks' exit codes,
null while they run. When its input ends, it kills the ranks that still run and exits. It must never start a
thread or a process group: forked ranks would inherit their locks and sockets, but not the threads.

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
MODELS = ("qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "mixtral", "deepseek_v2", "deepseek_v3")
"""Architectures of tests/checkpoints.py, in transformers and, but for the last, in vLLM."""


def import_all() -> dict[str, str]:
    """Import what ranks import; return the variables that this set, which ranks then have too."""
    before = dict(os.environ)
    from rl.runtime.ranks import discover
    from train_rl import prepare_environment

    prepare_environment(discover())
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # as rl.runtime.session does, which comes too late here
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # read by pyarrow
    import importlib

    import pyarrow.parquet  # noqa: F401
    import safetensors.torch  # noqa: F401
    from vllm import LLM, SamplingParams  # noqa: F401

    import rl.run.loop  # noqa: F401
    import rl.training.engine  # noqa: F401

    for name in MODELS:
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        if name != "deepseek_v3":
            importlib.import_module(f"vllm.model_executor.models.{name}")
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def fork_rank(
    script: str,
    arguments: Sequence[str],
    directory: str,
    environ: dict[str, str],
    stdout: str,
    stderr: str,
    answers: int,
) -> int:
    """Fork a rank that runs `python script *arguments` in its own session; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        os.close(answers)
        for descriptor, path, flags in (
            (0, os.devnull, os.O_RDONLY),
            (1, stdout, os.O_WRONLY),
            (2, stderr, os.O_WRONLY),
        ):
            opened = os.open(path, flags)
            os.dup2(opened, descriptor)
            os.close(opened)
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
    running: set[int] = set()
    codes: dict[int, int] = {}
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if start := request.get("start"):
            start["environ"] = changed | start["environ"]
            answer: object = fork_rank(**start, answers=answers.fileno())
            running.add(answer)
            codes.pop(answer, None)  # of an earlier rank with the same number
        else:
            for pid in request["poll"]:
                if pid in running:
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        running.remove(pid)
                        codes[pid] = os.waitstatus_to_exitcode(status)
            answer = [codes.get(pid) for pid in request["poll"]]
        print(json.dumps(answer), file=answers, flush=True)
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # not tests/
    main()
