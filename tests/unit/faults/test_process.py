import json
import subprocess
import sys
from dataclasses import replace

import pytest

from rl.config.limits import PhaseLimits
from rl.faults.heartbeat import HeartbeatWriter, heartbeat_path, read_heartbeat, read_heartbeats
from rl.faults.phase_tracker import PhaseTracker
from rl.faults.process import process_from, resident_bytes, this_process


def test_this_process_lives_and_survives_a_round_through_json():
    record = json.loads(json.dumps(this_process().as_dict()))
    assert process_from(record) == this_process() and process_from(record).is_gone() is False


def test_a_process_that_ended_is_gone_before_its_parent_asks_for_its_exit_code():
    child = subprocess.Popen([sys.executable, "-c", "print(1)"], stdout=subprocess.PIPE)
    assert child.stdout.read() == b"1\n"
    with open(f"/proc/{child.pid}/stat") as stat:
        started = int(stat.read().rpartition(")")[2].split()[19])
    process = replace(this_process(), pid=child.pid, started=started)
    while process.is_gone() is False:  # ends within the test's patience, or the test hangs
        pass
    assert child.returncode is None and process.is_gone() is True
    child.wait()


def test_a_process_on_another_host_or_in_another_container_cannot_be_judged():
    mine = this_process()
    assert replace(mine, host="node77", space="another boot/pid:[1]").is_gone() is None
    assert replace(mine, space=mine.space.partition("/")[0] + "/pid:[1]").is_gone() is None


def test_resident_memory_grows_with_what_is_held():
    before = resident_bytes()
    held = bytearray(b"x") * (64 << 20)
    assert 60 << 20 < resident_bytes() - before < 80 << 20 and held


@pytest.fixture
def writer(tmp_path):
    with open(tmp_path / "native.txt", "w") as file:
        tracker = PhaseTracker(PhaseLimits(), file)
        tracker.begin_step(5)
        yield HeartbeatWriter(str(tmp_path), 3, tracker)
        tracker.close()


def test_a_heartbeat_is_read_as_it_was_written(writer, tmp_path):
    writer.write()
    beat = read_heartbeat(str(tmp_path), 3)
    assert (beat.rank, beat.phase, beat.step, beat.process) == (
        3,
        "other",
        5,
        this_process(),
    ) and beat.host_memory_gib > 0
    assert [path.name for path in (tmp_path / "heartbeat").iterdir()] == ["rank_3.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rank": 3}'])
def test_what_is_no_heartbeat_is_none(text, writer, tmp_path):
    heartbeat_path(str(tmp_path), 1).write_text(text)
    writer.write()
    assert [beat is None for beat in read_heartbeats(str(tmp_path), 4)] == [True, True, True, False]
