"""run.mode: replays of stored samples, and what they read."""

import pytest

from rl.config.checks import check
from rl.config.needs import needs_engine, needs_reward, validates
from rl.config.options import ConfigError
from rl.config.schema import load_config

GENERATE = "run.mode=rollout_only logging.rollouts=all"
LEARN = "run.mode=train_only run.rollouts=runs/one run.dir=runs/two"


@pytest.mark.parametrize("options", ["run.dir=runs/two", "run.rollouts=runs/../runs/one run.dir=runs/one"])
def test_a_replay_does_not_read_what_it_replaces(options):
    run = ["model.path=toy", "data.train=toy.jsonl", "run.mode=train_only", *options.split()]
    with pytest.raises(ConfigError, match="needs run.rollouts, the directory of another run .* set both"):
        check(load_config(None, run))


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


def test_an_evaluation_needs_no_training_data():
    model, held_out = ["model.path=toy", "run.mode=evaluate"], "data.val=test.parquet"
    assert check(load_config(None, [*model, held_out])) == []
    with pytest.raises(ConfigError, match="run.mode=evaluate with an empty data.val has nothing to measure"):
        check(load_config(None, model))
    with pytest.raises(ConfigError, match="data.train is empty"):
        check(load_config(None, [held_out, "model.path=toy"]))


def test_train_only_needs_neither_engine_nor_reward():
    config = load_config(None, [*LEARN.split(), "data.val=[test.parquet]"])
    assert not needs_engine(config) and not needs_reward(config) and not validates(config)
