"""The points of a sweep, their names and the numbers of their tasks."""

import pytest

from launch.points import SweepRun, make_points, tasks_text
from rl.config.options import ConfigError
from rl.config.point_names import name_of, short_names

LR, SAMPLES, TP, PP, CLIP = (
    "training.optimizer.lr",
    "rollout.samples_per_prompt",
    "training.tp",
    "training.pp",
    "objective.clip_high",
)
KNOWN = {
    LR: 1e-6,
    SAMPLES: 8,
    TP: 1,
    PP: 1,
    CLIP: 0.2,
    "critic.optimizer.lr": 1e-5,
    "run.seed": 1,
    "reward.function": "a:b",
}


def values(**sweep):
    return [dict(point.values) for point in make_points(sweep, KNOWN)]


def test_a_grid_is_every_combination_the_last_key_fastest():
    assert values(grid={LR: [1e-6, 2e-6], SAMPLES: [4, 8]}) == [
        {LR: 1e-6, SAMPLES: 4},
        {LR: 1e-6, SAMPLES: 8},
        {LR: 2e-6, SAMPLES: 4},
        {LR: 2e-6, SAMPLES: 8},
    ]


def test_zip_goes_side_by_side_and_multiplies_with_the_rest():
    assert values(zip={TP: [1, 2], PP: [2, 1]}, seeds=2) == [
        {TP: 1, PP: 2, "run.seed": 1},
        {TP: 1, PP: 2, "run.seed": 2},
        {TP: 2, PP: 1, "run.seed": 1},
        {TP: 2, PP: 1, "run.seed": 2},
    ]


def test_random_draws_stay_when_more_are_asked_for():
    spec = {
        LR: {"log_uniform": [1e-7, 1e-5]},
        CLIP: {"uniform": [0.2, 0.3]},
        SAMPLES: {"choice": [4, 8]},
        TP: {"integer": [1, 4]},
    }
    few = values(random={"points": 3, "seed": 7, "keys": spec})
    more = values(random={"points": 20, "seed": 7, "keys": spec})
    other = values(random={"points": 3, "seed": 8, "keys": spec})
    assert more[:3] == few and other != few
    assert all(
        1e-7 <= v[LR] <= 1e-5 and 0.2 <= v[CLIP] <= 0.3 and v[SAMPLES] in (4, 8) and 1 <= v[TP] <= 4
        for v in more
    )
    assert sum(v[LR] < 1e-6 for v in more) >= 5  # half of them, on a log scale


def test_conditions_leave_points_out():
    sweep = dict(grid={TP: [1, 2, 4], PP: [1, 2]})
    assert values(**sweep, skip=[f"{TP} * {PP} > 4"])[-1] == {TP: 4, PP: 1}
    assert values(**sweep, only=[f"{TP} == {PP}"]) == [{TP: 1, PP: 1}, {TP: 2, PP: 2}]
    # Keys that are not swept have the config's value.
    assert len(values(**sweep, skip=[f"{SAMPLES} == 8 and {TP} == 4"])) == 4


def test_a_name_follows_from_the_points_own_values():
    before = {
        point.name: point.values for point in make_points({"grid": {LR: [1e-6, 2e-6]}, "seeds": 2}, KNOWN)
    }
    after = {
        point.name: point.values
        for point in make_points({"grid": {LR: [5e-7, 1e-6, 2e-6]}, "seeds": [3, 2, 1]}, KNOWN)
    }
    assert before.keys() == {"lr=1e-06_seed=1", "lr=1e-06_seed=2", "lr=2e-06_seed=1", "lr=2e-06_seed=2"}
    assert before.items() <= after.items()


def test_names_are_distinct_and_valid_for_directories():
    assert short_names([LR, SAMPLES]) == {LR: "lr", SAMPLES: "samples_per_prompt"}
    assert short_names([LR, "critic.optimizer.lr"]) == {LR: LR, "critic.optimizer.lr": "critic.optimizer.lr"}
    assert (
        name_of({"reward.function": "my dir/f.py:score"}, {"reward.function": "function"})
        == "function=my-dir-f.py-score"
    )
    long = name_of({"reward.function": "x" * 300}, {"reward.function": "function"})
    assert len(long) <= 120 and long != name_of(
        {"reward.function": "x" * 301}, {"reward.function": "function"}
    )


def test_overrides_are_what_the_program_takes():
    assert SweepRun(
        "", {LR: 1e-6, "a": True, "b": [1, 2], "c": "x:y", "d": None, "e": 0.30000000000000004}
    ).overrides == [f"{LR}=1e-06", "a=true", "b=[1, 2]", "c=x:y", "d=null", "e=0.30000000000000004"]


@pytest.mark.parametrize(
    "sweep, words",
    [
        ({}, "nothing to sweep"),
        ({"grid": {"training.lr": [1]}}, "training.lr"),
        ({"grid": {LR: [1]}, "zip": {LR: [2]}}, "twice"),
        ({"grid": {LR: 1}}, "must be a list"),
        ({"grid": {LR: []}}, "must be a list"),
        ({"grid": {LR: [1e-6, 1e-6]}}, "both called lr=1e-06; remove one"),
        # Different values were to be removed, too.
        ({"grid": {LR: ["a b", "a,b"]}}, "both called lr=a-b; names keep only letters"),
        ({"zip": {TP: [1, 2], PP: [1]}}, "equally long"),
        ({"grid": {LR: [1]}, "skip": "tp > 1"}, "list of conditions"),
        ({"grid": {LR: [1]}, "only": [f"{LR} > 1"]}, "leave no point"),
        ({"random": {"points": 1, "keys": {}}}, "takes points, seed and keys"),
        ({"random": {"points": 1, "seed": 0, "keys": {LR: {"log_uniform": [0, 1]}}}}, "log_uniform"),
        ({"random": {"points": "4", "seed": 0, "keys": {}}}, "points must be a number of at least 1"),
        ({"random": {"points": 4, "seed": 0, "keys": [LR]}}, "keys a mapping of keys to distributions"),
        ({"seeds": 0}, "seeds of the sweep is 0, but must be a list of values or a number of at least 1"),
    ],
)
def test_what_is_wrong_with_a_sweep_is_said(sweep, words):
    with pytest.raises(ConfigError, match=words):
        make_points(sweep, KNOWN)


def test_task_numbers_are_written_as_ranges():
    assert tasks_text([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert tasks_text([3]) == "3"


def test_a_misspelt_key_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"did you mean training\.optimizer\.lr\?"):
        values(grid={"training.optimizer.lrr": [1e-6]})
