import threading
from dataclasses import replace

import pytest

from rl.config.limits import PhaseLimits
from rl.faults.phase_tracker import PHASES, PhaseTracker, phase_label


@pytest.fixture
def tracker(tmp_path):
    with open(tmp_path / "native.txt", "w") as file:
        tracker = PhaseTracker(replace(PhaseLimits(), score=7.0), file)
        yield tracker
        tracker.close()


def test_every_phase_has_a_limit():
    assert set(PHASES) == set(vars(PhaseLimits()))


def test_a_phase_is_entered_and_left_and_its_limit_goes_with_it(tracker):
    assert tracker.current.label == "start-up"
    tracker.begin_step(3)
    before = tracker.current
    with tracker.phase("score", 3) as place:
        assert (
            place is tracker.current
            and place.label == "score of step 3"
            and place.limit_s == 7.0
            and place.seconds < 5
        )
    after = tracker.current
    assert (after.phase, after.step) == (before.phase, before.step) == ("other", 3)
    assert before.number < place.number < after.number


def test_after_an_exception_the_place_is_still_where_it_was_raised(tracker):
    with pytest.raises(RuntimeError):
        with tracker.phase("update", 2):
            raise RuntimeError
    assert tracker.current.label == phase_label("update", 2)


def test_another_thread_sees_the_frame_of_the_main_flow(tracker):
    seen = []
    thread = threading.Thread(target=lambda: seen.append(tracker.main_frame()))
    thread.start()
    thread.join()
    [(at, waits)] = seen
    assert (
        "test_phase_tracker.py" in at
        and at.endswith("test_another_thread_sees_the_frame_of_the_main_flow")
        and not waits
    )
