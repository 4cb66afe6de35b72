"""Keys with defaults that follow from other keys."""

import pytest

from rl.config.checks import check
from rl.config.consequences import CONSEQUENCES
from rl.config.objective import LOSSES
from rl.config.options import ConfigError, flatten
from rl.config.schema import derived_keys, load_config

DATA = ("model.path=m", "data.train=[d]")
ROLES = ("roles.train=0-0", "roles.rollout=1-1")
GAME = ("agents.environment=game.py:Game", "rollout.deterministic=true")
SWEEP = ("adapter.kind=lora", "sweep.adapters=[{run.seed:1},{run.seed:2}]")
GMPO = (
    "objective.loss=gmpo",
    "objective.aggregation=seq-mean-token-mean",
    "objective.clip_low=0.4",
    "objective.clip_high=0.4",
)
CASES = {
    "rollout_correction.truncate_tokens": (ROLES, 2.0, 0.0),
    "rollout_correction.truncate_samples": (("rollout.carry_over=true", *GMPO), 2.0, 0.0),
    "agents.order": (GAME, "waves", "arrival"),
    "adapter.in_engine": (SWEEP, "adapter", "merged"),
    "training.shared_prefix": (("training.mtp.head_lr=0.001",), False, True),
}
"""Key -> keys that it follows from, its value, and a value that does not suit them.

For example, training.mtp.head_lr=0.001 sets training.shared_prefix to false; true does not suit it.
"""


def test_every_consequence_has_a_case():
    assert [each.key for each in CONSEQUENCES] == list(CASES)


@pytest.mark.parametrize("key", CASES)
def test_a_form_sets_what_it_needs_and_no_key_that_is_given(key):
    form, value, unfit = CASES[key]
    config = load_config(None, [*DATA, *form])
    check(config, [])
    assert flatten(config)[key] == value
    [said] = derived_keys(None, [*DATA, *form])
    assert said.startswith(f"{key}={value}, because ")
    given = [*DATA, *form, f"{key}={unfit}"]
    assert flatten(load_config(None, given))[key] == unfit and not derived_keys(None, given)
    with pytest.raises(ConfigError, match=key.rpartition(".")[2].split("_")[0]):
        check(load_config(None, given), [])


@pytest.mark.parametrize("loss", [name for name, loss in LOSSES.items() if loss.recipe])
def test_a_loss_by_its_name_alone_is_the_published_one(loss):
    recipe = {f"objective.{key}": value for key, value in LOSSES[loss].recipe.items()}
    chosen = [*DATA, f"objective.loss={loss}"]
    found = flatten(load_config(None, chosen))
    assert {key: found[key] for key in recipe} == recipe
    assert len(derived_keys(None, chosen)) == len(recipe)
    assert not derived_keys(None, [*chosen, *(f"{key}={value}" for key, value in recipe.items())])


def test_another_correction_stays():
    config = load_config(None, [*DATA, *ROLES, "rollout_correction.bypass=true"])
    assert config.rollout_correction.truncate_tokens == 0
    assert not derived_keys(None, [*DATA, "algorithm=sft"])


def test_weights_in_fp8_need_the_correction_too():
    config = load_config(None, [*DATA, "rollout.quantization=fp8"])
    assert config.rollout_correction.truncate_tokens == 2.0
