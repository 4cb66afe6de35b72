"""An ordinary user of this machine who attacks a run (tests/runs/intruder.py)."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.spawn import ROOT


@contextlib.contextmanager
def attacked(payload: Path, roots: list[int]) -> Iterator[dict]:
    """Attack the ports of all descendants of these processes; afterwards the dict has what was found.

    payload: a file that the attacker's code would create in a process of the run.
    """
    command = [sys.executable, ROOT / "tests" / "runs" / "intruder.py", payload]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    quiet = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    intruder, ended, found = subprocess.Popen(command, env=quiet, **pipes), threading.Event(), {}
    assert intruder.stdout.readline() == "ready\n"

    def name_ports() -> None:
        while not ended.wait(0.1):
            print(json.dumps(sorted(ports_of(roots, but=intruder.pid))), file=intruder.stdin, flush=True)

    thread = threading.Thread(target=name_ports)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()
        found |= json.loads(intruder.communicate()[0])


def ports_of(roots: list[int], *, but: int) -> set[int]:
    """Return the ports at which the processes below `roots` listen, except Slurm's ports."""
    parents, of_slurm = {}, set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = path.read_text().rpartition(")")
            parents[int(path.parent.name)] = int(rest.split()[1])
            if "(slurm" in name or name.endswith("(srun"):  # garbage at its ports ends srun
                of_slurm.add(int(path.parent.name))
    own = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in own and pid != but} - own:
        own |= more
    sockets: set[str] = set()
    for pid in own - set(roots) - of_slurm:
        with contextlib.suppress(OSError):
            sockets |= {path.readlink().name for path in Path(f"/proc/{pid}/fd").iterdir()}
    listening = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = (fields := line.split())
            if state == "0A" and f"socket:[{fields[9]}]" in sockets:
                listening.add(int(local.rpartition(":")[2], 16))
    return listening


def assert_harmless(found: dict, payload: Path) -> None:
    """Assert that an attack took place, read nothing and ran nothing."""
    attacks, results = ("forged", "disturbed", "questions", "uid"), ("answers", "keys of the project")
    assert all(found.get(name) for name in attacks) and not any(found.get(name) for name in results), found
    assert not payload.exists()
