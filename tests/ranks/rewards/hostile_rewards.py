"""Faulty reward functions for test_pool.py; each scores a number by itself.

`fails_as_named` fails in the way that the response names. Others do what their name says, some only if the
response is "bad".
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time


def is_good(response):
    return response != "bad"


def plain(response, **extra):
    return {"score": float(response), "acc": 1.0, "pred": f"<{response}>", "feedback": f"{response}!"}


def spin():
    while True:
        pass


def fill_memory():
    data = []
    while True:
        data.append(bytearray(1 << 20))


def raises():
    raise RuntimeError("broken")


def interrupt():
    raise KeyboardInterrupt


def recurse():
    return recurse()


def write_everywhere(data):
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(fd, data)
    return 1.0


FAILURES = {
    "raises": raises,
    "interrupts": interrupt,
    "recurses": recurse,
    "allocates": fill_memory,
    "exits": lambda: sys.exit(0),
    "exits at once": lambda: os._exit(3),
    "crashes": lambda: ctypes.string_at(0),
    "kills itself": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kills its group": lambda: os.killpg(0, signal.SIGKILL),
    "kills its parent": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "kills its parent's group": lambda: os.killpg(os.getpgid(os.getppid()), signal.SIGKILL),
    "stops its parent": lambda: [os.kill(os.getppid(), signal.SIGSTOP), os._exit(1)],
    "closes all": lambda: os.closerange(0, 1000),
    "writes garbage": lambda: write_everywhere(b"garbage\n" * 10),
    "writes without end": lambda: write_everywhere(b"x" * (1 << 22)),
    "forges": lambda: write_everywhere(b'{"i": 0, "values": {"score": 9.0}, "prediction": null}\n'),
    "forges an error": lambda: write_everywhere(b'{"i": 4, "error": 5, "values": {"score": 9.0}}\n'),
    "returns nan": lambda: float("nan"),
    "returns text": lambda: "1.0",
    "returns too much": lambda: {"score": 1.0} | {f"value {i}": 1.0 for i in range(100_000)},
    "sleeps": lambda: time.sleep(1000),
    "spins": spin,
    "stops itself": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def fails_as_named(response, **extra):
    return FAILURES[response]() if response in FAILURES else float(response)


def prints(response, **extra):
    for stream in (sys.stdout, sys.stderr):
        stream.write("x" * (4 << 20) + '{"i": 0}\n')
    os.write(1, b'{"i": 0}\n')
    return float(response)


def forks(response, **extra):
    os.fork()
    return float(response)


def forks_an_exit(response, **extra):
    if os.fork() == 0:
        sys.exit(1)
    return float(response)


def changes_directory(response, extra_info=None, **extra):
    assert os.getcwd() == extra_info["cwd"]
    os.mkdir(path := os.path.join(extra_info["scratch"], f"{response}"))
    os.chdir(path)
    os.rmdir(path)
    return float(response)


def leaves_an_alarm(response, **extra):
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    if int(response) % 4 == 3:
        signal.setitimer(signal.ITIMER_REAL, 0)
        time.sleep(0.1)
    return float(response)


def ignores_signals(response, extra_info=None, **extra):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(os.getpid(), number)
        os.kill(os.getppid(), number)
    return float(response)


def length(response, **extra):
    return len(response)


def whereabouts(response, **extra):
    return {
        "score": float(response),
        "pid": os.getpid(),
        "parent": os.getppid(),
        "threads": int(os.environ["OMP_NUM_THREADS"]),
        "stdin": len(sys.stdin.read()),
        "group": os.getpgid(os.getppid()),
    }


VARIABLES = ("MINE", "SLURM_TMPDIR", "SLURM_JWT", "TRACKER_API_KEY")


def shows_variables(response, **extra):
    return {"score": float(response), **{name: float(name in os.environ) for name in VARIABLES}}


DAEMON = (
    "import os, sys, time; os.setsid(); open(sys.argv[1], 'a').write(f'{os.getpid()} '); time.sleep(1000)"
)


def start_daemon(extra_info):
    """Start a process in its own session, and end its parent. With `clean`, its environment is empty."""
    path = extra_info["pid_file"]
    if os.fork() == 0:
        subprocess.Popen([sys.executable, "-c", DAEMON, path], env={} if extra_info["clean"] else None)
        os._exit(0)
    os.wait()
    while not os.path.exists(path) or not os.path.getsize(path):
        time.sleep(0.01)
    time.sleep(0.1)


def leaves_a_daemon(response, extra_info=None, **extra):
    if extra_info and "pid_file" in extra_info:
        start_daemon(extra_info)
        if extra_info["end"] == "kill":
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(0 if extra_info["end"] == "return" else 1000)
    return float(response)


def forks_continuously(response, extra_info=None, **extra):
    """Start a process that forks and exits, again and again."""
    if not is_good(response):
        if os.fork() == 0:
            while True:
                open(extra_info["heartbeat"], "w").close()
                if os.fork():
                    os._exit(0)
        time.sleep(1000)
    return float(response)


SERVER = []


def keeps_a_server(response, **extra):
    if not SERVER:
        SERVER.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    SERVER[0].stdin.write(b"a\n")
    SERVER[0].stdin.flush()
    assert SERVER[0].stdout.readline() == b"a\n"
    return {"score": float(response), "server": SERVER[0].pid}


BEGUN = []


async def awaits(response, extra_info, **extra):
    """Returns once as many calls as extra_info["together"] have begun."""
    BEGUN.append(response)
    while len(BEGUN) < extra_info["together"]:
        await asyncio.sleep(0.01)
    return float(response)


async def hangs(response, **extra):
    await asyncio.sleep(0.01 if is_good(response) else 1000)
    return float(response)


async def blocks(response, **extra):
    await asyncio.sleep(0.01)
    if not is_good(response):
        time.sleep(1000)
    return float(response)


async def dies(response, **extra):
    await asyncio.sleep(0.01)
    if not is_good(response):
        os._exit(5)
    return float(response)


async def exits_in_a_task(response, **extra):
    await asyncio.sleep(0.01)
    if not is_good(response):
        await asyncio.create_task(leave())  # asyncio lets it end the event loop
    return float(response)


async def leave():
    sys.exit(1)


async def works_without_awaiting(response, **extra):
    time.sleep(0.2)
    return float(response)
