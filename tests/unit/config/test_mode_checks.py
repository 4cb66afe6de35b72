"""run.mode: what does not fit together."""

import re

import pytest

from rl.config.mode_checks import check_mode
from rl.config.options import ConfigError
from rl.config.schema import load_config, needs_engine, needs_reward, validates

GENERATE, SCORE = "run.mode=rollout_only logging.rollouts=all", "run.mode=score_only"
LEARN = "run.mode=train_only run.rollouts=runs/one run.dir=runs/two"


@pytest.mark.parametrize(
    "options, sentence",
    [
        ("run.rollouts=runs/one", "not with run.mode=train; leave it out"),
        (f"{GENERATE} algorithm=sft", "algorithm=sft learns from responses in the data"),
        (f"{LEARN} algorithm=spin", "algorithm=spin learns from responses in the data"),
        (f"{LEARN} rollout.carry_over=true", "cannot be combined with rollout.carry_over=true"),
        (f"{GENERATE} roles.train=0 roles.rollout=1", "cannot be combined with the section roles"),
        ("run.mode=rollout_only", "logging.rollouts=sample does not store all samples"),
        ("run.mode=train_only run.dir=runs/two", "needs run.rollouts, the directory of another run"),
        ("run.mode=train_only run.rollouts=runs/../runs/one run.dir=runs/one", "set both"),
        (f"{SCORE} reward.judge.path=models/judge", "reward.judge.path gives scores too"),
        (f"{SCORE} agents.environment=game.py:Game", "the section agents gives scores too"),
    ],
)
def test_contradictions_are_refused(options, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        check_mode(load_config(None, options.split()))


def test_train_only_needs_neither_engine_nor_reward():
    config = load_config(None, [*LEARN.split(), "data.val=[test.parquet]"])
    check_mode(config)
    assert not needs_engine(config) and not needs_reward(config) and not validates(config)
