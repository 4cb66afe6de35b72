"""compare --parting names the step and the stage at which a planted change makes two runs part."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.spawn import run_ranks
from tests.toy import train
from tools.comparison.parting import parting

PARTED = Path(__file__).with_name("parted_train.py")
STEPS = ("run.max_steps=3", "training.prompts_per_minibatch=4", "logging.rollouts=none")
FAST = ("scores", 2), ("weights", 1)
PLANTED = [
    pytest.param(stage, step, marks=() if (stage, step) in FAST else pytest.mark.slow)
    for stage in ("prompts", "tokens", "engine log-probs", "scores", "old log-probs", "weights")
    for step in (1, 2, 3)
]
KEYS = {
    "run.seed=7": "prompts",
    "rollout.temperature=0.9": "tokens",
    "reward.function=TOY/reward.py:same": "scores",
    "objective.normalize_by_std=false": "advantages",
    "objective.entropy_coef=0.01": "gradient",
    "training.optimizer.lr=1.001e-3": "gradient",  # of the second update of the step
}
"""Changed key -> stage of step 1 at which the runs part."""


@pytest.fixture(scope="module")
def equal(toy, tmp_path_factory):
    """Return a run without a change, and the directory of its config."""
    from tests.toy import write_config

    directory = tmp_path_factory.mktemp("equal")
    train(1, write_config(directory, toy), *STEPS)
    return directory / "run"


@pytest.mark.parametrize("stage, step", PLANTED)
def test_a_planted_change_is_named(config, equal, tmp_path, stage, step):
    arguments = ("--config", config, f"run.dir={tmp_path / 'run'}", *STEPS)
    run_ranks(1, PARTED, stage, step, *arguments, timeout=400)
    first, *settings = parting(equal, tmp_path / "run")
    assert first.startswith(f"the runs part at step {step}: {stage}"), first
    assert first.endswith("(another value)") and settings == []


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_a_changed_key_is_named(config, toy, equal, tmp_path, key):
    key = key.replace("TOY", str(toy))
    train(1, config, *STEPS, key, run=tmp_path / "run")
    first, setting, *more = parting(equal, tmp_path / "run")
    assert first.startswith(f"the runs part at step 1: {KEYS[key.replace(str(toy), 'TOY')]}"), first
    assert setting.startswith(f"config: {key.partition('=')[0]}: ") and more == []


@pytest.mark.slow
def test_a_changed_weight_of_the_model_is_named(config, toy, equal, tmp_path):
    shutil.copytree(toy / "model", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"][3, 5] += 0.01
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    train(1, config, *STEPS, f"model.path={tmp_path / 'model'}", run=tmp_path / "run")
    first, *_ = parting(equal, tmp_path / "run")
    assert first.startswith("the runs part at step 1: weights at the start")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["training.tp=2", "training.cp=2"])
def test_another_layout_parts_by_rounding(config, equal, tmp_path, layout):
    train(2, config, *STEPS, layout, run=tmp_path / "run")
    first, *settings = parting(equal, tmp_path / "run")
    assert first.endswith("(rounding)") and "step 1" in first, first
    assert "environment: world_size: 1 and 2" in settings


def test_equal_runs_do_not_part(config, equal, tmp_path):
    train(1, config, *STEPS, run=tmp_path / "run")
    assert parting(equal, tmp_path / "run") == ["the runs do not part in the 3 steps that both have stored"]
