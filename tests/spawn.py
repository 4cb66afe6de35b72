"""Real ranks for tests: one process per rank on this host, on their own port. None outlives the call.

    from tests.spawn import run_ranks

    def test_ranks_add_up():
        out = run_ranks(2, '''
            import sys
            import torch
            import torch.distributed as dist

            dist.init_process_group("gloo")
            total = torch.tensor(int(sys.argv[1]) + dist.get_rank())
            dist.all_reduce(total)
            print(int(total))
            dist.destroy_process_group()
        ''', 5)
        assert out == ["11\\n", "11\\n"]

Each rank has RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, so
`init_process_group` needs no arguments, and one OpenMP thread. Ranks are forked from a process that has
imported torch, Megatron, vLLM and the program (tests/fork_server.py), or are interpreters with `fresh=True`.

Rank 0 holds the store: end a program with a collective, or a slower rank may fail after its work is done.
"""

import atexit
import contextlib
import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Mapping
from pathlib import Path

GRACE = 2.0
"""Seconds within which the other ranks may end by themselves after one has failed."""
ROOT = Path(__file__).resolve().parent.parent
LOCKSTEP = ROOT / "lockstep" / "__main__.py"
"""The command `lockstep`, as a script for `run_ranks`."""
_ASKS = threading.Lock()
"""Held from a question to the fork server until its answer, as a test may start several worlds in threads."""


class RanksFailed(Exception):
    """Raised when a rank failed or not all ended in time; the message has their stderr, failed first."""

    def __init__(self, reason: str, stdout: list[str], stderr: list[str], returncodes: list[int | None]):
        self.stdout, self.stderr, self.returncodes = stdout, stderr, returncodes
        """One per rank; the return code is None for a rank that was still running and was killed."""
        super().__init__(reason)


def run_ranks(
    world_size: int,
    program: str | Path,
    *args: object,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    grace: float = GRACE,
    fresh: bool = False,
    with_stderr: bool = False,
) -> list[str]:
    """Run the program as `world_size` ranks; return the stdout of each, `with_stderr` followed by the stderr.

    program: Python source, which may be indented as in a test, or the path of a script.
    args: sys.argv[1:].
    timeout: seconds until the ranks are killed.
    grace: seconds for the others to end after one has failed.
    env: further variables, for example CUDA_VISIBLE_DEVICES, beside this process's own and a rank's.
    fresh: start interpreters instead of forks.

    Raises RanksFailed when a rank exits with a code other than 0.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        if isinstance(program, str):
            script = Path(directory, "program.py")  # a file, so that tracebacks show its lines
            script.write_text(textwrap.dedent(program))
        else:
            script = program
        port = free_port()
        ranks: list[_Rank] = []
        try:
            for rank in range(world_size):
                environ = _environment(rank, world_size, port) | dict(env or {})
                ranks.append((_Started if fresh else _Forked)(Path(directory), script, args, environ))
            culprit = _wait(ranks, time.monotonic() + timeout)
            if culprit is not None:
                _wait_for_all(ranks, time.monotonic() + grace)
            returncodes = [rank.poll() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        stdout, stderr = [r.stdout.read_text() for r in ranks], [r.stderr.read_text() for r in ranks]
    if all(code == 0 for code in returncodes):
        return [out + err for out, err in zip(stdout, stderr)] if with_stderr else stdout
    if culprit is None:
        late = [rank for rank, code in enumerate(returncodes) if code is None]
        reason = f"rank {', '.join(map(str, late))} of {world_size} did not end within {timeout} s"
        order = list(range(world_size))
    else:
        reason = f"rank {culprit} of {world_size} exited with {returncodes[culprit]}"
        order = sorted(range(world_size), key=lambda rank: rank != culprit)
    said = "".join(f"\n--- stderr of rank {rank}\n{stderr[rank]}" for rank in order if stderr[rank])
    raise RanksFailed(reason + said, stdout, stderr, returncodes)


def free_port() -> int:
    """Return a free port below the ephemeral range, so that no outgoing connection takes it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10000, 32000)
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class _Rank:
    """One rank, which writes to files: unlike pipes, they need no reader while the rank runs."""

    pid: int

    def __init__(self, directory: Path, script: Path, args: tuple, env: dict[str, str]):
        self.stdout, self.stderr = (directory / f"{name}.{env['RANK']}" for name in ("stdout", "stderr"))
        self.stdout.touch()
        self.stderr.touch()
        self.start([str(script), *map(str, args)], env)

    def start(self, command: list[str], env: dict[str, str]) -> None:
        raise NotImplementedError

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the rank runs."""
        raise NotImplementedError

    def kill(self) -> None:
        """End the rank and the processes that it started."""
        with contextlib.suppress(ProcessLookupError):  # it left nothing behind
            os.killpg(self.pid, signal.SIGKILL)
        while self.poll() is None:
            time.sleep(0.005)


class _Started(_Rank):
    def start(self, command: list[str], env: dict[str, str]) -> None:
        with self.stdout.open("w") as out, self.stderr.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, *command], env=env, stdout=out, stderr=err, start_new_session=True
            )
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.poll()


class _Forked(_Rank):
    def start(self, command: list[str], env: dict[str, str]) -> None:
        script, *arguments = command
        answer = _ask_fork_server(
            start=dict(
                script=script,
                arguments=arguments,
                directory=os.getcwd(),
                environ=env,
                stdout=str(self.stdout),
                stderr=str(self.stderr),
            )
        )
        if not isinstance(answer, int):
            raise RuntimeError(f"tests/fork_server.py could not start rank {env['RANK']}: {answer}")
        self.pid = answer

    def poll(self) -> int | None:
        (code,) = _ask_fork_server(poll=[self.pid])
        return code


def _ask_fork_server(**request: object):
    with _ASKS:
        server = _fork_server()
        assert server.stdin is not None and server.stdout is not None
        print(json.dumps(request), file=server.stdin, flush=True)
        answer = server.stdout.readline()
    if not answer:
        raise RuntimeError(f"tests/fork_server.py ended with {server.wait()}")
    return json.loads(answer)


@functools.cache
def _fork_server() -> subprocess.Popen:
    """Return the server, which the first call starts; it ends with this process."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    server = subprocess.Popen(
        [sys.executable, ROOT / "tests" / "fork_server.py"],
        env=os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # an interrupt of pytest reaches it as the end of its input
    )
    atexit.register(server.communicate)
    assert server.stdout is not None
    if json.loads(server.stdout.readline() or "null") != "ready":
        raise RuntimeError(f"tests/fork_server.py ended with {server.wait()}; its error is above")
    return server


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | dict(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        PYTHONPATH=path,
    )


def _wait_for_all(ranks: list[_Rank], deadline: float) -> None:
    while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
        time.sleep(0.05)


def _wait(ranks: list[_Rank], deadline: float) -> int | None:
    """Wait until a rank has failed, and return it; until all have ended or time is over, and return None."""
    while time.monotonic() < deadline:
        codes = [rank.poll() for rank in ranks]
        if failed := [rank for rank, code in enumerate(codes) if code]:
            return failed[0]
        if None not in codes:
            return None
        time.sleep(0.05)
    return None
