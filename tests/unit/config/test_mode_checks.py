"""run.mode: what does not fit together."""

import re

import pytest

from rl.config.checks import check
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


@pytest.mark.parametrize("options", [LEARN, GENERATE, "run.mode=check", "run.mode=train"])
def test_a_mode_takes_the_config_of_a_run_with_agents(options):
    files = ["model.path=toy", "data.train=toy.jsonl", "agents.environment=game.py:Game"]
    check(load_config(None, [*files, *options.split()]))
    held_out = ["algorithm=sft", "data.val=toy.jsonl", "validation.greedy=true"]
    if options in ("run.mode=check", "run.mode=train"):
        check(load_config(None, [*files, *held_out, *options.split()]))


def test_a_replay_is_told_which_keys_it_does_not_read():
    run = ["model.path=toy", "data.train=toy.jsonl", "rollout.temperature=0.7", *LEARN.split()]
    assert check(load_config(None, run)) == []
    [warning] = check(load_config(None, [*run, "rollout.deterministic=true", "reward.workers=2"]))
    assert warning == (
        "run.mode=train_only generates and scores nothing: rollout.deterministic=true and reward.workers=2 "
        "have no effect."
    )


def test_train_only_needs_neither_engine_nor_reward():
    config = load_config(None, [*LEARN.split(), "data.val=[test.parquet]"])
    check_mode(config)
    assert not needs_engine(config) and not needs_reward(config) and not validates(config)
