"""Facts about real processes: the end of one, and several that race for one lock."""

import json
import subprocess
import sys
from dataclasses import replace

from rl.faults.lock import FILE_NAME
from rl.faults.process import this_process
from tests.spawn import ROOT

RACE = """
import sys
from pathlib import Path
from rl.faults.lock import RunLock
print("ready", flush=True)
sys.stdin.readline()
try:
    RunLock.take(Path(sys.argv[1]), silent_s=60)
    print("mine", flush=True)
except ValueError:
    print("refused", flush=True)
sys.stdin.read()
"""


def test_a_zombie_is_gone():
    child = subprocess.Popen([sys.executable, "-c", "print(1)"], stdout=subprocess.PIPE)
    assert child.stdout.read() == b"1\n"
    with open(f"/proc/{child.pid}/stat") as stat:
        started = int(stat.read().rpartition(")")[2].split()[19])
    process = replace(this_process(), pid=child.pid, started=started)
    while process.is_gone() is False:  # its output is closed, so it is about to end
        pass
    assert child.returncode is None and process.is_gone() is True
    child.wait()


def test_one_of_many_takes_a_stale_lock(tmp_path):
    record = this_process().as_dict() | {"job": "", "restarts": 0, "token": "old", "pid": 1 << 23}
    (tmp_path / FILE_NAME).write_text(json.dumps(record))
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    takers = [subprocess.Popen([sys.executable, "-c", RACE, tmp_path], cwd=ROOT, **pipes) for _ in range(4)]
    assert [taker.stdout.readline() for taker in takers] == ["ready\n"] * 4
    for taker in takers:  # all imports are done, so they race from here
        taker.stdin.write("go\n")
        taker.stdin.flush()
    answers = [taker.stdout.readline().strip() for taker in takers]
    for taker in takers:
        taker.communicate()
    assert sorted(answers) == ["mine"] + ["refused"] * 3
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
