from dataclasses import replace

import pytest

from rl.faults.diagnosis import diagnose, lost_ranks, summarize
from rl.faults.heartbeat import Heartbeat
from rl.faults.process import this_process

NOW = 1000.0
WAITS = Heartbeat(
    rank=0,
    process=this_process(),
    job="",
    phase="score",
    step=3,
    number=40,
    since=NOW - 600,
    time=NOW - 1,
    at="rl/phases/scoring.py:51 score",
    waits=True,
    host_memory_gib=1.0,
    device_memory_gib=0.0,
)


def ranks(*changes: dict) -> list[Heartbeat | None]:
    return [replace(WAITS, rank=rank, **change) for rank, change in enumerate(changes)]


def test_the_rank_that_does_not_wait_is_guilty():
    beats = ranks({}, {}, {"waits": False, "at": "reward.py:7 score"}, {})
    diagnosis = diagnose(beats, NOW, 30)
    assert diagnosis.at_fault == (2,)
    said = summarize(beats, diagnosis, NOW, 30)
    assert said.startswith(
        f"rank 2 ({WAITS.process.host}) in score of step 3 for 600 s at reward.py:7 score (not waiting"
    )
    assert said.endswith("waiting: ranks 0, 1, 3 in score of step 3 at rl/phases/scoring.py:51 score")


def test_a_rank_that_is_behind_is_guilty_whether_it_waits_or_not():
    assert diagnose(ranks({}, {"number": 38}, {"waits": False}), NOW, 30).at_fault == (1,)


def test_a_rank_without_a_heartbeat_comes_before_all_others():
    beats = ranks({"number": 38}, {"time": NOW - 90}, {"waits": False})
    diagnosis = diagnose(beats, NOW, 30)
    assert diagnosis.at_fault == (1,)
    assert f"rank 1 ({WAITS.process.host}), last heartbeat 90 s ago in score of step 3 (ended" in summarize(
        beats, diagnosis, NOW, 30
    )


def test_a_process_that_has_ended_is_lost_however_fresh_its_heartbeat():
    ended = replace(this_process(), started=1)
    assert lost_ranks(ranks({}, {"process": ended}, {}), NOW, 30) == [1]


def test_a_rank_that_never_came_is_not_called_lost():
    assert lost_ranks([None, *ranks({})], NOW, 30) == []


@pytest.mark.parametrize("waits", [True, False])
def test_nobody_is_accused_if_all_are_at_one_place(waits):
    beats = ranks({"waits": waits}, {"waits": waits})
    diagnosis = diagnose(beats, NOW, 30)
    assert diagnosis.at_fault == () and summarize(beats, diagnosis, NOW, 30).startswith(
        "all are at the same place: ranks 0, 1 in score"
    )


def test_a_summary_of_a_thousand_ranks_is_one_readable_line():
    beats = ranks(*[{"waits": False} if rank % 2 else {} for rank in range(1000)])
    said = summarize(beats, diagnose(beats, NOW, 30), NOW, 30)
    assert "\n" not in said and len(said) < 1000 and "and 496 more ranks" in said and "and 492 more" in said
