"""Each estimator of `objective.advantage` is its pure function, and every key reaches it."""

import itertools

import pytest
import torch

from rl.config.options import ConfigError
from rl.config.schema import ADVANTAGES
from rl.objectives.advantages.opo import opo
from rl.phases.policy_gradient import advantages
from tests.each import each
from tests.unit.phases.test_policy_gradient import config_of, example, function

OWN_MODEL = {"gae", "prime"}
"""Estimators that the files of their algorithms call."""
BASELINES = torch.arange(10) / 7
ALL = {"reward_columns": [], "reward_weights": []}
COLUMNS = {
    "grpo": ("rewards groups", {"normalize_by_std": True}),
    "grpo-passk": ("rewards groups", {"normalize_by_std": True}),
    "maxrl": ("rewards groups", {}),
    "gdpo": ("score_details groups", ALL),
    "rloo": ("rewards groups", {}),
    "opo": ("rewards groups lengths mask", {}),
    "gpg": ("rewards groups", {}),
    "remax": ("rewards baselines", {}),
    "reinforce++": ("token_rewards lengths mask", {"gamma": 1.0}),
    "reinforce++-baseline": ("rewards groups lengths mask", {}),
    "turn-return": (
        "rewards groups lengths mask turns turn_rewards",
        {"turn_gamma": 0.95, "normalize_by_std": True},
    ),
    "turn-spread": ("rewards groups lengths mask turns", {"turn_gamma": 0.95, "normalize_by_std": True}),
    "optimal-token-baseline": (
        "token_rewards groups lengths mask old_logprobs sum_p_squared loss_weights",
        {},
    ),
}
"""Columns of the batch and default keys of each estimator, in the order of its parameters."""


def expected_of(name, batch, **options):
    columns, keys = COLUMNS[name]
    result = function("advantages", name)(
        *[getattr(batch, column) for column in columns.split()], **(keys | options)
    )
    return result.repeat_interleave(batch.lengths) if len(result) == 10 else result


def found(batch, name, **objective):
    batch.baselines = BASELINES
    return advantages(batch, config_of(advantage=name, **objective))


def test_every_estimator_has_its_expectation_here():
    assert set(COLUMNS) == set(ADVANTAGES) - OWN_MODEL


@pytest.mark.parametrize("name", COLUMNS)
def test_advantages_are_those_of_the_pure_function(name):
    batch = example()
    batch.rewards = batch.rewards + 0.1 * torch.arange(
        10
    )  # rewards, not scores, are what advantages are made of
    result = found(batch, name)
    assert torch.equal(result, expected_of(name, batch))
    assert result.shape == batch.mask.shape and result.dtype == torch.float32
    assert result[batch.mask > 0].isfinite().all() and result[batch.mask > 0].unique().numel() > 2


def test_no_two_estimators_are_the_same():
    batch = example()
    results = {name: found(batch, name)[batch.mask > 0] for name in COLUMNS}
    for one, other in itertools.combinations(results, 2):
        assert not torch.allclose(results[one], results[other]), (one, other)


@each(
    "name, option",
    [
        ("grpo", {"normalize_by_std": False}),
        ("grpo-passk", {"normalize_by_std": False}),
        ("reinforce++", {"gamma": 0.7}),
        ("turn-return", {"turn_gamma": 0.5}),
        ("turn-spread", {"turn_gamma": 0.5}),
    ],
)
def test_keys_of_an_estimator_reach_it(name, option):
    batch = example()
    result = found(batch, name, **option)
    assert torch.equal(result, expected_of(name, batch, **option)) and not torch.allclose(
        result, found(batch, name)
    )


def test_opo_weighs_by_the_tokens_that_enter_the_loss():
    batch = example()
    batch.mask[5:17] = torch.eye(12)[
        3
    ]  # a sample of 12 tokens of which one counts weighs like one of one token
    by_length = opo(batch.rewards, batch.groups, batch.lengths, torch.ones(60))
    assert not torch.allclose(found(batch, "opo"), by_length)


def test_the_optimal_token_baseline_reads_loss_weights():
    batch = example()
    plain = found(batch, "optimal-token-baseline")
    batch.loss_weights = torch.rand(len(batch.mask), generator=torch.Generator().manual_seed(9))
    weighted = found(batch, "optimal-token-baseline")
    assert torch.equal(weighted, expected_of("optimal-token-baseline", batch)) and not torch.allclose(
        weighted, plain
    )


def test_gdpo_takes_all_numbers_beside_the_score_by_default():
    batch = example()
    assert torch.equal(found(batch, "gdpo"), found(batch, "gdpo", reward_columns=["format", "length"]))
    # What the score and the accuracy say does not matter, nor which samples failed.
    for name in ("acc", "score", "failed"):
        batch.score_details[name] = torch.rand(10)
    assert torch.equal(found(batch, "gdpo"), expected_of("gdpo", example()))


def test_gdpo_takes_the_columns_and_weights_that_are_named():
    batch = example()
    named = {"reward_columns": ["acc", "length"], "reward_weights": [2.0, 0.5]}
    expected = expected_of("gdpo", batch, **named)
    assert torch.equal(found(batch, "gdpo", **named), expected)
    assert not torch.allclose(found(batch, "gdpo", **(named | {"reward_weights": [0.5, 2.0]})), expected)
    unweighted = found(batch, "gdpo", reward_columns=["acc", "length"])
    assert torch.equal(unweighted, expected_of("gdpo", batch, **(named | {"reward_weights": [1.0, 1.0]})))


def test_gdpo_takes_0_where_a_sample_lacks_a_number():
    batch, zeroed = example(), example()
    batch.score_details["format"][[0, 5]] = float("nan")
    zeroed.score_details["format"][[0, 5]] = 0.0
    assert torch.equal(found(batch, "gdpo"), expected_of("gdpo", zeroed))


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
