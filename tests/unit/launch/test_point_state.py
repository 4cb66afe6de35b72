"""The state of a point of a sweep in one job; the sweep's heartbeats are the point's heartbeats."""

import json
import subprocess
import time

from launch.runs import LOCK, SILENT_S, read_runs
from rl.faults.lock import FILE_NAME, RunLock
from rl.run_directory.status import Status


def write_beat(directory, age):
    (directory / "heartbeat").mkdir(exist_ok=True)
    (directory / "heartbeat" / "rank_0.json").write_text(json.dumps({"time": time.time() - age}))


def test_a_point_lives_as_long_as_its_sweep(tmp_path):
    point = tmp_path / "lr=0.1"
    point.mkdir()
    Status(str(point), max_steps=4, leads=True).write(step=1)
    status = json.loads((point / "status.json").read_text())
    (point / "status.json").write_text(json.dumps(status | {"job": "", "time": time.time() - 2 * SILENT_S}))
    assert read_runs([point])[0].state == "lost"
    write_beat(tmp_path, 0)
    assert read_runs([point])[0].state == "running"
    write_beat(tmp_path, 2 * SILENT_S)
    assert read_runs([point])[0].state == "lost"


def test_a_run_whose_process_was_killed_here_is_lost(tmp_path):
    Status(str(tmp_path), max_steps=4, leads=True).write(step=1)
    write_beat(tmp_path, 0)
    lock = RunLock.take(tmp_path, silent_s=1)
    assert lock.path.name == LOCK == FILE_NAME and read_runs([tmp_path])[0].state == "running"
    ended = subprocess.Popen(["true"])
    ended.wait()
    lock.path.write_text(json.dumps(json.loads(lock.path.read_text()) | {"pid": ended.pid}))
    assert read_runs([tmp_path])[0].state == "lost"
