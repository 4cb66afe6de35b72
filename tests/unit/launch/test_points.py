"""The points of a sweep, their names and the numbers of their tasks."""

import pytest

from launch.points import Point, make_points, name_of, short_names, tasks_text
from rl.config.options import ConfigError

LR, SAMPLES, TP, PP, CLIP = (
    "training.optimizer.lr rollout.samples_per_prompt training.tp training.pp objective.clip_high".split()
)
KNOWN = {LR: 1e-6, SAMPLES: 8, TP: 1, PP: 1, CLIP: 0.2, "critic.optimizer.lr": 1e-5, "run.seed": 1}
KNOWN["reward.function"] = "a:b"


def values(**sweep):
    return [dict(point.values) for point in make_points(sweep, KNOWN)]


def test_a_grid_is_every_combination_the_last_key_fastest():
    expected = [{LR: lr, SAMPLES: samples} for lr in (1e-6, 2e-6) for samples in (4, 8)]
    assert values(grid={LR: [1e-6, 2e-6], SAMPLES: [4, 8]}) == expected


def test_zip_goes_side_by_side_and_multiplies_with_the_rest():
    expected = [{TP: tp, PP: pp, "run.seed": seed} for tp, pp in ((1, 2), (2, 1)) for seed in (1, 2)]
    assert values(zip={TP: [1, 2], PP: [2, 1]}, seeds=2) == expected


def test_random_draws_stay_when_more_are_asked_for():
    keys = {LR: {"log_uniform": [1e-7, 1e-5]}, CLIP: {"uniform": [0.2, 0.3]}}
    keys |= {SAMPLES: {"choice": [4, 8]}, TP: {"integer": [1, 4]}}
    few, more, other = (
        values(random={"points": points, "seed": seed, "keys": keys})
        for points, seed in ((3, 7), (20, 7), (3, 8))
    )
    assert more[:3] == few and other != few
    assert all(1e-7 <= v[LR] <= 1e-5 and 0.2 <= v[CLIP] <= 0.3 for v in more)
    assert all(v[SAMPLES] in (4, 8) and 1 <= v[TP] <= 4 for v in more)
    assert sum(v[LR] < 1e-6 for v in more) >= 5  # half of them, on a log scale


def test_conditions_leave_points_out():
    sweep = dict(grid={TP: [1, 2, 4], PP: [1, 2]})
    assert values(**sweep, skip=[f"{TP} * {PP} > 4"])[-1] == {TP: 4, PP: 1}
    assert values(**sweep, only=[f"{TP} == {PP}"]) == [{TP: 1, PP: 1}, {TP: 2, PP: 2}]
    # Keys that are not swept have the config's value.
    assert len(values(**sweep, skip=[f"{SAMPLES} == 8 and {TP} == 4"])) == 4


def test_a_name_follows_from_the_points_own_values():
    sweeps = dict(grid={LR: [1e-6, 2e-6]}, seeds=2), dict(grid={LR: [5e-7, 1e-6, 2e-6]}, seeds=[3, 2, 1])
    before, after = ({point.name: point.values for point in make_points(sweep, KNOWN)} for sweep in sweeps)
    assert before.keys() == {f"lr={lr}_seed={seed}" for lr in ("1e-06", "2e-06") for seed in (1, 2)}
    assert before.items() <= after.items()


def test_names_tell_equal_ends_apart_and_are_fit_for_directories():
    def name(value):
        return name_of({"reward.function": value}, {"reward.function": "function"})

    assert short_names([LR, SAMPLES]) == {LR: "lr", SAMPLES: "samples_per_prompt"}
    assert short_names([LR, "critic.optimizer.lr"]) == {LR: LR, "critic.optimizer.lr": "critic.optimizer.lr"}
    assert name("my dir/f.py:score") == "function=my-dir-f.py-score"
    assert len(name("x" * 300)) <= 120 and name("x" * 300) != name("x" * 301)


def test_overrides_are_what_the_program_takes():
    point = Point("", {LR: 1e-6, "a": True, "b": [1, 2], "c": "x:y", "d": None, "e": 0.30000000000000004})
    expected = f"{LR}=1e-06;a=true;b=[1, 2];c=x:y;d=null;e=0.30000000000000004"
    assert point.overrides == expected.split(";")


@pytest.mark.parametrize(
    "sweep, words",
    [
        ({}, "nothing to sweep"),
        ({"grid": {"training.lr": [1]}}, "training.lr"),
        ({"grid": {LR: [1]}, "zip": {LR: [2]}}, "twice"),
        ({"grid": {LR: 1}}, "must be a list"),
        ({"grid": {LR: []}}, "must be a list"),
        ({"grid": {LR: [1e-6, 1e-6]}}, "both called lr=1e-06"),
        ({"zip": {TP: [1, 2], PP: [1]}}, "equally long"),
        ({"grid": {LR: [1]}, "skip": "tp > 1"}, "list of conditions"),
        ({"grid": {LR: [1]}, "only": [f"{LR} > 1"]}, "leave no point"),
        ({"random": {"points": 1, "keys": {}}}, "takes points, seed and keys"),
        ({"random": {"points": 1, "seed": 0, "keys": {LR: {"log_uniform": [0, 1]}}}}, "log_uniform"),
    ],
)
def test_what_is_wrong_with_a_sweep_is_said(sweep, words):
    with pytest.raises(ConfigError, match=words):
        make_points(sweep, KNOWN)


def test_task_numbers_are_written_as_ranges():
    assert tasks_text([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert tasks_text([3]) == "3"
