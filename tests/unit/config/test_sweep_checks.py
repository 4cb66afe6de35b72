"""Refusals of keys that differ between the points of a sweep in one job, and of features that they use."""

import json

import pytest

from rl.config.checks import check
from rl.config.options import ConfigError
from rl.config.schema import load_config
from rl.config.sweep_checks import load_points

ADAPTER = ("adapter.kind=lora", "adapter.in_engine=adapter")


def check_points(*points, overrides=()):
    given = ["model.path=m", "data.train=[d]", "algorithm=grpo", *ADAPTER, *overrides]
    given.append(f"sweep.adapters={json.dumps(points)}")
    return check(load_config(None, given), load_points(None, given))


def test_points_of_one_kind_are_accepted():
    assert check_points({"run.seed": 1}, {"algorithm": "rloo"}, {"adapter.rank": 4}) == []


@pytest.mark.parametrize(
    ("points", "overrides", "reason"),
    [
        ([{"algorithm": "dpo"}], (), "the run's own `algorithm`"),
        ([{"adapter.kind": "none"}], (), "point .* requires an adapter.kind other than none"),
        ([{"algorithm": "ppo"}], (), "trains a second model .critic."),
        ([{"rollout.temperature": 0.5}], (), "all points share it"),
    ],
)
def test_what_points_cannot_share_is_refused(points, overrides, reason):
    with pytest.raises(ConfigError, match=reason):
        check_points(*points, overrides=overrides)
