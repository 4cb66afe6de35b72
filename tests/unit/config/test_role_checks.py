"""Roles: which ranks they are, and what does not fit together."""

import re

import pytest

from rl.config.options import ConfigError
from rl.config.role_checks import check_roles, role_ranks
from rl.config.schema import Config, load_config

SPLIT = ("roles.train=0-3", "roles.rollout=4-5", "roles.lag=0")


def config_of(*overrides: str) -> Config:
    return load_config(None, [*SPLIT, *overrides])


def test_ranks_of_roles():
    assert role_ranks(config_of(), 6) == (range(4), range(4, 6))
    assert role_ranks(Config(), 3) == (range(3), range(3))
    with pytest.raises(ConfigError, match="name 6 ranks, but the job has 8; .* end at 7"):
        role_ranks(config_of(), 8)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ("roles.train=1-3", "roles.train=1-3 must begin at rank 0"),
        ("roles.rollout=5-6", "roles.rollout=5-6 at the rank after its last, 4"),
        ("roles.rollout=", "roles.rollout=(empty) must be the first and the last rank"),
        ("roles.rollout=5-4", "roles.rollout=5-4 must be the first and the last rank"),
        ("roles.min_replicas=3", "with rollout.tp=1 has 2 replicas; set at most that many"),
    ],
)
def test_what_does_not_fit_is_refused(options, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        check_roles(config_of(*options.split()))


def test_what_fits_is_accepted():
    check_roles(Config())
    check_roles(config_of())
    check_roles(config_of("roles.lag=2", "roles.granularity=sample", "rollout_correction.truncate_tokens=2"))
