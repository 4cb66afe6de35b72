from dataclasses import replace

from rl.faults.diagnosis import diagnose, lost_ranks, reports_loss_of_store, summarize
from rl.faults.heartbeat import Heartbeat
from rl.faults.process import this_process

WAITING = Heartbeat(
    rank=0,
    process=this_process(),
    job="",
    phase="score",
    step=3,
    number=40,
    phase_s=599.0,
    time=0.0,
    clock=0.0,
    silent_s=1.0,
    age_s=1.0,
    at="rl/phases/scoring.py:51 score",
    waits=True,
    host_memory_gib=1.0,
    device_memory_gib=0.0,
)
HOST = WAITING.process.host


def found(*changes: dict) -> tuple[tuple[int, ...], str]:
    """The ranks at fault and the summary for ranks that differ from WAITING by these changes."""
    heartbeats = [replace(WAITING, rank=rank, **change) for rank, change in enumerate(changes)]
    diagnosis = diagnose(heartbeats, 30)
    return diagnosis.at_fault, summarize(heartbeats, diagnosis, 30)


def test_the_rank_that_does_not_wait_is_at_fault():
    at_fault, summary = found({}, {}, {"waits": False, "at": "reward.py:7 score"}, {})
    assert at_fault == (2,)
    assert summary.startswith(
        f"rank 2 ({HOST}) in score of step 3 for 600 s at reward.py:7 score (not waiting"
    )
    assert summary.endswith("waiting: ranks 0, 1, 3 in score of step 3 at rl/phases/scoring.py:51 score")


def test_a_silent_rank_precedes_one_that_is_behind_and_that_one_all_others():
    assert found({}, {"number": 38}, {"waits": False})[0] == (1,)
    at_fault, summary = found({"number": 38}, {"silent_s": 90.0, "age_s": 90.0}, {"waits": False})
    assert at_fault == (1,)
    assert f"rank 1 ({HOST}), last heartbeat 90 s ago in score of step 3 (ended" in summary


def test_lost_ranks_have_ended_and_had_a_heartbeat():
    ended = replace(WAITING, rank=1, process=replace(this_process(), started=1))
    assert lost_ranks([None, ended, replace(WAITING, rank=2)], 30) == [1]


def test_ranks_of_another_host_report_the_loss_of_the_store():
    ended = replace(this_process(), started=1)
    far = [replace(this_process(), host=host, space="unknown") for host in ("node1", "node1", "node2")]
    for processes, reporters in (
        ([this_process(), this_process()], [0]),
        ([ended, this_process()], [1]),
        ([ended, this_process(), *far], [1, 2]),
        ([*far[:2], this_process(), far[2]], [0, 2]),  # node1 may be gone
    ):
        heartbeats = [replace(WAITING, rank=rank, process=own) for rank, own in enumerate(processes)]
        found = [rank for rank in range(len(processes)) if reports_loss_of_store(rank, [*heartbeats, None])]
        assert found == reporters


def test_no_rank_is_at_fault_if_all_are_in_one_place():
    for waits in (True, False):
        at_fault, summary = found({"waits": waits}, {"waits": waits})
        assert at_fault == () and summary.startswith("all are at the same place: ranks 0, 1 in score")


def test_the_summary_of_many_ranks_is_one_short_line():
    _, summary = found(*[{"waits": False} if rank % 2 else {} for rank in range(1000)])
    assert "\n" not in summary and len(summary) < 1000
    assert "and 496 more ranks" in summary and "and 492 more" in summary


def test_phases_of_two_roles_are_not_compared():
    generator = {"role": "rollout 0", "number": 12, "phase": "generate", "waits": False}
    at_fault, _ = found({"role": "train", "phase": "wait_samples"}, {"role": "train"}, generator)
    assert at_fault == (2,)
    at_fault, _ = found({"role": "train"}, {"role": "train", "number": 39}, generator)
    assert at_fault == (1,)
