import json
from dataclasses import replace

from rl.config.limits import PhaseLimits
from rl.faults.heartbeat import HeartbeatWriter, heartbeat_path, read_heartbeat, read_heartbeats
from rl.faults.phase_tracker import PhaseTracker
from rl.faults.process import process_from, resident_bytes, this_process


def test_process_is_identified_by_its_record():
    mine = this_process()
    assert process_from(json.loads(json.dumps(mine.as_dict()))) == mine and mine.is_gone() is False
    # A process on another host or in another container cannot be examined.
    assert replace(mine, host="node77", space="another boot/pid:[1]").is_gone() is None
    assert replace(mine, space=mine.space.partition("/")[0] + "/pid:[1]").is_gone() is None


def test_resident_memory_includes_a_new_buffer():
    before = resident_bytes()
    held = bytearray(b"x") * (64 << 20)
    assert 60 << 20 < resident_bytes() - before < 80 << 20 and held


def test_heartbeat_is_read_as_written(tmp_path):
    with open(tmp_path / "native.txt", "w") as file:
        tracker = PhaseTracker(PhaseLimits(), file)
        tracker.begin_step(5)
        HeartbeatWriter(str(tmp_path), 3, tracker).write()
        tracker.close()
    beat = read_heartbeat(str(tmp_path), 3)
    assert (beat.rank, beat.phase, beat.step, beat.process) == (3, "other", 5, this_process())
    assert beat.host_memory_gib > 0
    assert [path.name for path in (tmp_path / "heartbeat").iterdir()] == ["rank_3.json"]
    for text in ("", "{", "[]", '{"rank": 3}'):
        heartbeat_path(str(tmp_path), 1).write_text(text)
        assert [found is None for found in read_heartbeats(str(tmp_path), 4)] == [True, True, True, False]
