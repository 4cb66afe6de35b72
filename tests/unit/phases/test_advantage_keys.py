"""Estimators of `objective.advantage` on a batch, and the numbers that gdpo takes of a score.

tests/unit/checks/test_advantage_checks.py compares every estimator, with each key, with the check's second
computation from the columns of the batch."""

import itertools

import pytest
import torch

from rl.config.objective import ADVANTAGES
from rl.config.options import ConfigError
from rl.objectives.advantages.gdpo import gdpo
from rl.objectives.advantages.opo import opo
from rl.phases.policy_gradient import advantages
from tests.unit.phases.test_policy_gradient import config_of, example

BASELINES = torch.arange(10) / 7
OF_BATCHES = [name for name in ADVANTAGES if name not in ("gae", "prime")]
"""Estimators except gae and prime, because the files of their algorithms call them."""


def gdpo_of(batch, reward_columns=(), reward_weights=()):
    """Return the pure function's advantages of a batch, per token."""
    names = dict(reward_columns=list(reward_columns), reward_weights=list(reward_weights))
    return gdpo(batch.score_details, batch.groups, **names).repeat_interleave(batch.lengths)


def found(batch, name, **objective):
    batch.extra["baselines"] = BASELINES
    return advantages(batch, config_of(advantage=name, **objective))


def test_no_two_estimators_are_the_same():
    batch = example()
    results = {name: found(batch, name)[batch.mask > 0] for name in OF_BATCHES}
    for one, other in itertools.combinations(results, 2):
        assert not torch.allclose(results[one], results[other]), (one, other)


def test_opo_weighs_by_the_tokens_that_enter_the_loss():
    batch = example()
    batch.mask[5:17] = torch.eye(12)[
        3
    ]  # a sample of 12 tokens weighs like a sample of one token if one token counts
    by_length = opo(batch.rewards, batch.groups, batch.lengths, torch.ones(60))
    assert not torch.allclose(found(batch, "opo"), by_length)


def test_gdpo_takes_all_numbers_beside_the_score_by_default():
    batch = example()
    assert torch.equal(found(batch, "gdpo"), found(batch, "gdpo", reward_columns=["format", "length"]))
    # What the score and the accuracy say does not matter, nor which samples failed.
    for name in ("acc", "score", "failed"):
        batch.score_details[name] = torch.rand(10)
    assert torch.equal(found(batch, "gdpo"), gdpo_of(example()))


def test_gdpo_takes_the_columns_and_weights_that_are_named():
    batch = example()
    named = {"reward_columns": ["acc", "length"], "reward_weights": [2.0, 0.5]}
    expected = gdpo_of(batch, **named)
    assert torch.equal(found(batch, "gdpo", **named), expected)
    assert not torch.allclose(found(batch, "gdpo", **(named | {"reward_weights": [0.5, 2.0]})), expected)
    unweighted = found(batch, "gdpo", reward_columns=["acc", "length"])
    assert torch.equal(unweighted, gdpo_of(batch, **(named | {"reward_weights": [1.0, 1.0]})))


def test_gdpo_takes_0_where_a_sample_lacks_a_number():
    batch, zeroed = example(), example()
    batch.score_details["format"][[0, 5]] = float("nan")
    zeroed.score_details["format"][[0, 5]] = 0.0
    assert torch.equal(found(batch, "gdpo"), gdpo_of(zeroed))


def test_gdpo_names_missing_columns():
    with pytest.raises(
        ConfigError,
        match="requires tone, wit besides the score, but .* returns acc, failed, format, length, score",
    ):
        found(example(), "gdpo", reward_columns=["tone", "format", "wit"])


def test_gdpo_without_any_number_beside_the_score_is_refused():
    batch = example()
    batch.score_details = {"failed": torch.zeros(10), "acc": torch.ones(10)}
    with pytest.raises(
        ConfigError,
        match="reward_columns requires at least one number besides the score, but .* returns acc, failed",
    ):
        found(batch, "gdpo")
