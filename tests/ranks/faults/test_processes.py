"""Facts about real processes: the end of one, and several that race for one lock."""

import json
import subprocess
import sys
from dataclasses import replace

from rl.faults.lock import FILE_NAME
from rl.faults.process import this_process
from tests.spawn import run_ranks

RACE = """
import os
import sys
from pathlib import Path
from rl.faults.lock import RunLock

run, meeting, rank = Path(sys.argv[1]), Path(sys.argv[2]), os.environ["RANK"]

def meet(name):
    (meeting / f"{name}.{rank}").touch()
    while len(list(meeting.glob(f"{name}.*"))) < 4:
        pass

meet("ready")
try:
    RunLock.take(run, silent_s=60)
    print("mine")
except ValueError:
    print("refused")
meet("done")
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
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / FILE_NAME).write_text(json.dumps(record))
    answers = run_ranks(4, RACE, tmp_path / "run", meeting)
    assert sorted(answers) == ["mine\n"] + ["refused\n"] * 3
    assert [path.name for path in (tmp_path / "run").iterdir()] == [FILE_NAME]
