import json
import mmap
import threading
from dataclasses import replace

import torch

from rl.config.limits import PhaseLimits
from rl.faults import heartbeat
from rl.faults.diagnosis import lost_ranks
from rl.faults.heartbeat import HeartbeatReader, HeartbeatWriter, heartbeat_path, read_heartbeat
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
    held = mmap.mmap(-1, 64 << 20)  # not from memory that the process has freed and kept
    for page in range(0, len(held), mmap.PAGESIZE):
        held[page] = 1
    assert 60 << 20 < resident_bytes() - before < 80 << 20
    held.close()


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
        assert [found is None for found in HeartbeatReader(str(tmp_path), 4).read()] == [
            True,
            True,
            True,
            False,
        ]


def test_the_memory_of_a_gpu_is_read_in_the_main_thread(tmp_path, monkeypatch):
    """Each thread has its own current GPU, and the allocator may hang with the main thread."""
    readers = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "memory_allocated", lambda: readers.append(threading.current_thread()) or 3 << 30
    )
    with open(tmp_path / "native.txt", "w") as file:
        tracker = PhaseTracker(PhaseLimits(), file)
        watchdog = threading.Thread(target=HeartbeatWriter(str(tmp_path), 0, tracker).write)
        watchdog.start()
        watchdog.join()
        tracker.close()
    assert read_heartbeat(str(tmp_path), 0).device_memory_gib == 3
    assert set(readers) == {threading.main_thread()}


def test_a_wrong_clock_makes_no_rank_silent(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(heartbeat.time, "time", lambda: 0.0)  # decades behind
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: clock[0])
    with open(tmp_path / "native.txt", "w") as file:
        tracker = PhaseTracker(PhaseLimits(), file)
        writer = HeartbeatWriter(str(tmp_path), 0, tracker)
        writer._process = replace(this_process(), host="node77", space="another boot/pid:[1]")
        reader, lost = HeartbeatReader(str(tmp_path), 1), []
        for now in (100.0, 120.0, 140.0):
            clock[0] = now
            writer.write()
            lost += lost_ranks(reader.read(), 30)
        tracker.close()
    assert lost == []
    clock[0] = 171.0
    assert lost_ranks(reader.read(), 30) == [0]
