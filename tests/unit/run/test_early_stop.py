"""The median rule and successive halving, and functions that take turns."""

import math
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from rl.checks.batches import CheckFailed
from rl.config.options import ConfigError
from rl.config.sweep import Sweep
from rl.features.early_stop.early_stop import EarlyStop
from rl.features.sweep.alternating import AlternatingThreads
from rl.features.sweep.point_stop import PointStop
from rl.stopping.requests import REASONS, StopDecision

SCORES = {0: 0.9, 1: 0.5, 2: 0.2, 3: 0.6}


def play(early, steps, scores=SCORES):
    """Take steps of all points in turn; return {point: step after which it ended}."""
    ended = {}
    for step in range(1, steps + 1):
        for point in scores:
            if point not in ended:
                early.record(point, step, {"critic/score/mean": scores[point] * step})
                if point in early.reasons:
                    ended[point] = step
    return ended


def test_median_ends_what_never_reached_the_others_mean():
    early = EarlyStop(Sweep(stop="median", first=3), 4)
    assert play(early, 2) == {}
    ended = play(early, 8)
    assert 2 in ended and 0 not in ended
    assert early.reasons[2].startswith("sweep.stop=median after step 3: best critic/score/mean 0.6 < median")


def test_halving_keeps_the_best_half_at_each_rung():
    early = EarlyStop(Sweep(stop="halving", first=2), 4)
    ended = play(early, 8)
    assert {2, 1} <= ended.keys() and ended[2] <= 3 and ended[1] <= 3
    assert 3 in ended and 4 <= ended[3] <= 5 and 0 not in ended
    assert early.reasons[3] == "sweep.stop=halving after step 4: place 2 of 2 with critic/score/mean 2.4"


def test_a_decision_is_the_same_after_a_resume():
    records = {
        p: [{"training/global_step": s, "critic/score/mean": v * s} for s in (1, 2)]
        for p, v in SCORES.items()
    }
    early = EarlyStop(Sweep(stop="halving", first=4), 4)
    for point, steps in records.items():
        early.remember(point, steps, is_over=False)
    for step in (3, 4):
        for point, value in SCORES.items():
            early.record(point, step, {"critic/score/mean": value * step})
    assert early.reasons.keys() == {1, 2}


def test_metrics_lost_before_a_resume_are_found():
    early = EarlyStop(Sweep(stop="median", first=2), 2)
    early.remember(1, [{"training/global_step": 1, "critic/score/mean": 0.5}], is_over=False)
    early.record(0, 3, {"critic/score/mean": 0.5})  # of a run that continues a checkpoint of another one
    with pytest.raises(CheckFailed, match="of point 1 up to step 1 and of step 3, but none between"):
        early.record(1, 3, {"critic/score/mean": 0.5})


def test_a_decision_before_a_fault_is_made_again():
    early = EarlyStop(Sweep(stop="halving", first=2), 4)
    for point, value in SCORES.items():  # point 2 had ended, point 1 not yet
        steps = [{"training/global_step": s, "critic/score/mean": value * s} for s in (1, 2)]
        early.remember(point, steps, is_over=point == 2)
    early.record(0, 3, {"critic/score/mean": SCORES[0] * 3})
    assert early.reasons.keys() == {1, 2}


@pytest.mark.parametrize("value", [math.nan, math.inf, None])  # None: as metrics.jsonl has it
@pytest.mark.parametrize("rule", ["median", "halving"])
def test_a_value_that_is_not_finite_ranks_last(rule, value):
    early = EarlyStop(Sweep(stop=rule, first=1), 4)
    steps = [{"training/global_step": 1, "critic/score/mean": value}]
    for point in range(4):
        if point:
            early.record(point, 1, {"critic/score/mean": SCORES[point]})
        else:
            early.remember(0, steps, is_over=False)
    assert early.reasons.keys() == {0, 2}
    # One value among others of a point is left out of its mean.
    early = EarlyStop(Sweep(stop="median", first=2), 3)
    for step, values in enumerate([(0.6, 0.5, value), (0.6, 0.5, 0.7)], start=1):
        for point, own in enumerate(values):
            early.record(point, step, {"critic/score/mean": own})
    assert early.reasons.keys() == {1}


def test_a_metric_that_no_point_logs_ends_the_sweep():
    early = EarlyStop(Sweep(stop="median", first=2, metric="reward/misspelt/mean"), 2)
    for step, point in ((1, 0), (1, 1), (2, 0)):
        early.record(point, step, {"reward/format/mean": 0.5})
    with pytest.raises(ConfigError, match="no point has logged in 2 steps"):
        early.record(1, 2, {"reward/format/mean": 0.5})
    validates_later = EarlyStop(Sweep(stop="median", first=1, metric="val-core/math/acc/mean@1"), 1, due=4)
    validates_later.record(0, 3, {})


@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_step_after_the_end_of_a_point_decides_nothing(is_ahead):
    """The point took the step before the decision, or had begun it."""
    early = EarlyStop(Sweep(stop="median", first=1), 3)
    early.record(0, 1, {"critic/score/mean": 0.1})
    for step in (1, 2):
        if is_ahead == (step == 1):
            early.record(0, 2, {"critic/score/mean": 9.0})
        for point, score in ((1, 0.5), (2, 0.5)):
            early.record(point, step, {"critic/score/mean": score})
    assert early.reasons.keys() == {0}


class Requests:
    """Stop requests of the job or of a point. One call of `agree` finds each request."""

    def __init__(self):
        self.pending = StopDecision("", save=False)

    def agree(self):
        found, self.pending = self.pending, StopDecision(self.pending.reason, save=False)
        return found

    def record_step(self, step, save, *, unstoppable):
        return ""


@pytest.fixture
def world():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def point_stops(config, lasts):
    """Return the requests of the job and of each point, and the points' steps."""
    early, job, to_save = EarlyStop(config, len(lasts)), Requests(), set()
    steps = [SimpleNamespace(number=0, metrics={}) for _ in lasts]
    of_points = [
        PointStop(Requests(), job, early, to_save, point, steps[point], last)
        for point, last in enumerate(lasts)
    ]
    return job, of_points, steps


def complete(stop, step, number, score):
    step.number, step.metrics = number, {"critic/score/mean": score}
    stop.record_step(1.0, 0.0, unstoppable=0.0)


def test_a_point_with_fewer_steps_does_not_end_the_rule(world):
    _, stops, steps = point_stops(Sweep(stop="halving", first=3), [2, 4, 4])
    for number in (1, 2, 3):
        for point, stop in enumerate(stops):
            if number <= 2 or point:
                complete(stop, steps[point], number, float(point))
    assert [bool(stop.agree().reason) for stop in stops] == [False, True, False]


def test_a_request_to_save_reaches_every_point_once():
    job, stops, _ = point_stops(Sweep(), [4, 4])
    job.pending = StopDecision("", save=True)
    assert [stop.agree().save for stop in (*stops, *stops)] == [True, True, False, False]


def test_a_rule_ends_a_point_although_the_job_is_stopped(world):
    job, stops, steps = point_stops(Sweep(stop="halving", first=1), [4, 4])
    for point, stop in enumerate(stops):
        complete(stop, steps[point], 1, float(point))
    steps[0].number, steps[0].metrics = 2, {}  # begun, and ended by the stop request
    job.pending = StopDecision(REASONS[1], save=False)
    reasons = [stop.agree().reason for stop in stops]
    assert reasons[0].startswith("sweep.stop=halving after step 1") and reasons[1] == REASONS[1]


def turns(*functions, log):
    def answer(asks):
        log.append(dict(asks))
        return {index: 10 * ask for index, ask in asks.items()}

    return AlternatingThreads(functions, answer, prepare=lambda: None, follow=lambda thread: None)


def test_turns_are_taken_in_order_and_answered_together():
    log = []

    def twice(wait):
        log.append("first a")
        total = wait(1)
        log.append("second a")
        return total + wait(2)

    def once(wait):
        log.append("first b")
        return wait(3)

    assert turns(twice, once, log=log).run() == [30, 30]
    assert log == ["first a", "first b", {0: 1, 1: 3}, "second a", {0: 2}]


def test_an_error_of_one_turn_ends_all():
    def fails(wait):
        wait(1)
        raise ArithmeticError("lost")

    with pytest.raises(ArithmeticError, match="lost"):
        turns(fails, lambda wait: wait(2) and wait(3), log=[]).run()
