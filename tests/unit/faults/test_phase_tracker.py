import threading
from dataclasses import replace

import pytest

from rl.config.limits import PhaseLimits
from rl.faults.phase_tracker import PHASES, Whereabouts, words


@pytest.fixture
def where(tmp_path):
    with open(tmp_path / "native.txt", "w") as file:
        where = Whereabouts(replace(PhaseLimits(), score=7.0), file)
        yield where
        where.close()


def test_every_phase_has_a_limit():
    assert set(PHASES) == set(vars(PhaseLimits()))


def test_a_phase_is_entered_and_left_and_its_limit_goes_with_it(where):
    assert where.place.words == "start-up"
    where.begin_step(3)
    before = where.place
    with where.phase("score", 3) as place:
        assert (
            place is where.place
            and place.words == "score of step 3"
            and place.limit_s == 7.0
            and place.seconds < 5
        )
    after = where.place
    assert (after.phase, after.step) == (before.phase, before.step) == ("other", 3)
    assert before.number < place.number < after.number


def test_after_an_exception_the_place_is_still_where_it_was_raised(where):
    with pytest.raises(RuntimeError):
        with where.phase("update", 2):
            raise RuntimeError
    assert where.place.words == words("update", 2)


def test_another_thread_sees_the_frame_of_the_main_flow(where):
    seen = []
    thread = threading.Thread(target=lambda: seen.append(where.frame()))
    thread.start()
    thread.join()
    [(at, waits)] = seen
    assert (
        "test_phase_tracker.py" in at
        and at.endswith("test_another_thread_sees_the_frame_of_the_main_flow")
        and not waits
    )
