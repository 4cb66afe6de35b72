"""Environments with tools that fail, in every way that a worker has to survive."""

import asyncio
import ctypes
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time


class Hostile:
    """One tool that does what its argument names."""

    def __init__(self, pid_file=""):
        self.pid_file, self.state = pid_file, 0

    def reset(self, row):
        return [{"role": "user", "content": row["prompt"]}]

    def act(self, what: str) -> str:
        """Do something.

        Args:
            what: what to do
        """
        self.state += 1
        if what == "pids":
            return f"{os.getpid()} {os.getppid()}"
        if what == "names its variables":
            return " ".join(os.environ)
        if what == "raises":
            raise RuntimeError("broken")
        elif what == "wrong argument":
            raise ValueError("no such city")
        elif what == "exits":
            sys.exit(3)
        elif what == "hangs":
            time.sleep(1000)
        elif what == "forks":
            os.fork()  # the child returns too
        elif what == "eats memory":
            return len([bytearray(1 << 20) for _ in range(1 << 14)])
        elif what == "returns 10 MB":
            return "x" * 10_000_000
        elif what == "returns half a surrogate":
            return "a\ud800b"
        elif what == "crashes":
            ctypes.string_at(0)
        elif what == "kills itself":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "kills its parent":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)  # the kernel kills this process too
        elif what == "holds the interpreter lock":
            ctypes.PyDLL(None).sleep(1000)
        elif what == "leaves a daemon":
            leave_a_daemon(self.pid_file)
        return f"state {self.state}"

    def score(self, messages):
        return {"score": self.state, "turns": len(messages)}


def leave_a_daemon(pid_file):
    """Start a process that has no parent and a session of its own."""
    program = f"import os, time; open({pid_file!r}, 'a').write(f'{{os.getpid()}}\\n'); time.sleep(1000)"
    popen = f"subprocess.Popen([sys.executable, '-c', {program!r}], start_new_session=True)"
    command = f"import subprocess, sys; {popen}"
    subprocess.run([sys.executable, "-c", command], check=True)
    while not os.path.exists(pid_file):
        time.sleep(0.01)


class Game:
    """A game with async methods: halve the distance to the ground truth."""

    calls = 0

    async def reset(self, row):
        self.secret = int(row["ground_truth"])
        return "Guess:"

    async def step(self, text):
        Game.calls += 1
        if text == "block":
            time.sleep(1000)
        if text == "together":  # returns when all are waiting
            while Game.calls < 20:
                await asyncio.sleep(0.01)
        if text == "wait":
            await asyncio.sleep(1000)
        right = text == str(self.secret)
        return ("right" if right else "wrong"), float(right), right


class Agent:
    """Drives itself, and waits until it is closed."""

    def run(self, base_url, api_key, row):
        if base_url == "wait":
            threading.Event().wait(1000)
        return {"score": 1.0, "url_length": len(base_url + api_key)}


class Server:
    """Tools that are known at run time."""

    async def list_tools(self):
        schema = {"name": "echo", "description": "Echo.", "parameters": {"type": "object", "properties": {}}}
        return [{"type": "function", "function": schema}]

    async def call_tool(self, name, arguments):
        return {"name": name, **arguments}


def add(a: int, b: int = 1, *, sign: int = 1) -> int:
    """Add two numbers."""
    return sign * (a + b)


class Sqlite:
    """Holds an object that only the thread that made it may use."""

    def reset(self, row):
        self.database = sqlite3.connect(":memory:")
        return row["prompt"]

    def query(self, sql: str) -> list:
        """Run a query."""
        return self.database.execute(sql).fetchall()

    def close(self):
        self.database.close()


class Fragile:
    """A game with a second turn that goes wrong, as `what` says, for the prompt with ground truth 0."""

    def __init__(self, what):
        self.what, self.turns = what, 0

    def reset(self, row):
        self.is_bad = row["ground_truth"] == "0"
        return row["prompt"]

    def step(self, text):
        self.turns += 1
        if self.is_bad and self.turns == 2:
            if self.what == "kills itself":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.what == "hangs":
                time.sleep(1000)
            raise RuntimeError("wrong answer")
        return "more", 1.0, self.turns == 3


class Wrong:
    """Returns something that its caller cannot use."""

    def __init__(self, start="Go."):
        self.start = start

    def reset(self, row):
        return self.start

    def step(self, text):
        return "more", 1.0

    def score(self):
        return "good"
