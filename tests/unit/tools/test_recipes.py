"""The shipped recipes: they fit their GPUs, and their runs log the expected points."""

import re
import subprocess
import sys

import pytest

from rl.config.checks import check
from rl.config.schema import load_config
from tools import recipes

NAMES = recipes.names()


def config_of(recipe):
    return load_config(str(recipes.ROOT / "configs" / f"{recipe.config}.yaml"), recipe.overrides)


@pytest.mark.parametrize("name", [name for name in NAMES if recipes.read_recipe(name).model])
def test_the_dry_run_of_a_recipe_fits_its_gpus(name):
    recipe = recipes.read_recipe(name)
    larger = [gpu for gpu in recipes.GPUS if gpu >= recipe.gpu_memory_gb]
    assert larger and [recipe.dry_run(gpu, plan=False).problems for gpu in larger] == [[]] * len(larger)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_a_recipe_logs_its_expected_points(name):
    recipe = recipes.read_recipe(name)
    config = config_of(recipe)
    assert check(config) == []
    validated = {0, config.run.max_steps, *range(0, config.run.max_steps, config.validation.every)}
    k = 1 if config.validation.greedy else config.validation.samples_per_prompt
    for point in recipe.expected():
        assert point.low < point.high
        if point.metric.startswith("val-core/"):
            assert point.step in validated and re.search(rf"/acc/mean@{k}$", point.metric)
        else:
            assert 1 <= point.step <= config.run.max_steps


def test_recipes_do_not_share_a_run_directory():
    directories = [config_of(recipes.read_recipe(name)).run.dir for name in NAMES]
    assert len(set(directories)) == len(NAMES)


@pytest.mark.parametrize("points", ["{}", "{a: 1}", "{a: {1: 0.5}}", "{a: {one: [0, 1]}}"])
def test_malformed_points_are_refused(tmp_path, points):
    file = tmp_path / "own.yaml"
    file.write_text(f"config: quickstart\npoints: {points}\n")
    with pytest.raises(ValueError, match="points"):
        recipes.read_recipe(str(file)).expected()


def test_an_unknown_recipe_is_refused_with_the_known_names():
    with pytest.raises(ValueError, match="quickstart"):
        recipes.read_recipe("quickstrat")


def test_an_unknown_recipe_is_one_sentence():
    command = [sys.executable, str(recipes.ROOT / "tools" / "recipes.py"), "nope"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 2 and found.stderr.startswith("error: recipe=nope does not exist; give a file")
    assert found.stderr.count("\n") == 1
