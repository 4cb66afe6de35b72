import sys
import threading
from dataclasses import replace

import pytest

from rl.config.limits import PhaseLimits
from rl.faults.phase_tracker import PHASES, PhaseTracker
from rl.runtime.job_store import own_store


@pytest.fixture
def tracker(tmp_path):
    with open(tmp_path / "native.txt", "w") as file:
        tracker = PhaseTracker(replace(PhaseLimits(), score=7.0), file)
        yield tracker
        tracker.close()


def test_every_phase_has_a_limit():
    assert set(PHASES) == set(vars(PhaseLimits()))


def test_a_phase_is_entered_and_left(tracker):
    assert tracker.current.label == "start-up"
    tracker.begin_step(3)
    before = tracker.current
    with tracker.phase("score", 3) as entry:
        assert entry is tracker.current
        assert (entry.label, entry.limit_s) == ("score of step 3", 7.0)
    after = tracker.current
    assert (after.phase, after.step) == (before.phase, before.step) == ("other", 3)
    assert before.number < entry.number < after.number


def test_a_phase_that_raised_stays_current(tracker):
    with pytest.raises(RuntimeError), tracker.phase("update", 2):
        raise RuntimeError
    assert tracker.current.label == "update of step 2"


def test_another_thread_reads_the_main_threads_frame(tracker):
    seen = []
    thread = threading.Thread(target=lambda: seen.append(tracker.main_frame()))
    thread.start()
    thread.join()
    [(at, waits)] = seen
    assert "test_phase_tracker.py" in at and at.endswith("test_another_thread_reads_the_main_threads_frame")
    assert not waits


def test_a_wait_for_the_store_is_that_of_its_caller(tracker):
    store, seen, main = own_store(), [], threading.get_ident()
    other = store.clone()

    def look() -> None:
        while "/rl/runtime/" not in sys._current_frames()[main].f_code.co_filename:
            pass
        seen.append(tracker.main_frame()[0])
        other.set("seen", "")

    thread = threading.Thread(target=look)
    thread.start()
    assert store.wait(["seen"], 60)
    thread.join()
    assert seen[0].endswith("test_a_wait_for_the_store_is_that_of_its_caller")


def test_a_wait_for_environments_has_a_limit_of_its_own(tmp_path):
    with open(tmp_path / "native.txt", "w") as file:
        tracker = PhaseTracker(replace(PhaseLimits(), generate=100.0, environments=7.0), file)
        with tracker.phase("generate", 3) as entry:
            tracker.wait("12 live, oldest 43 s, 3.1")
            waiting = tracker.current
            assert waiting.label == "waiting for environments (12 live, oldest 43 s, 3.1) of step 3"
            assert (waiting.limit_s, waiting.number) == (7.0, entry.number)
            tracker.wait("11 live, oldest 44 s, 3.1")
            assert tracker.current.entered == waiting.entered and "11 live" in tracker.current.label
            tracker.wait("")
            after = tracker.current  # the phase goes on, with its whole time
            assert (after.label, after.number, after.limit_s) == (entry.label, entry.number, 100.0)
            assert after.entered >= waiting.entered
        tracker.close()
