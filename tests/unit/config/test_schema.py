"""The real tree in rl/config/schema.py, its docs and how it is loaded."""

import pytest

from rl.config.command_line import help_text, tree_docs
from rl.config.options import ConfigError, flatten, load, to_yaml
from rl.config.schema import FIRST_KEYS, Config, changed, load_config, resolve
from tests.configs import config_with
from tests.each import each


def test_the_help_has_every_key_and_ends_each_doc_as_a_sentence():
    docs, text = tree_docs(Config), help_text(Config, 120)
    for key in flatten(Config()):
        assert f"  {key}  (" in text and docs[key].endswith((".", ")")), key


def test_the_config_survives_the_round_trip_through_yaml(tmp_path):
    config = config_with(
        "reward.kwargs={tolerance: 1e-6}", "rollout.stop=['</answer>', 'a: b']", "run.name=1e-6"
    )
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load(Config, path) == config
    assert config.training.optimizer.lr == 1e-6


@each(
    "override, nearest",
    [
        ("run.learning_rate=1e-6", "training.optimizer.lr"),
        ("training.lr=1e-6", "training.optimizer.lr"),
        ("run.steps=3", "run.max_steps"),
        ("rollout.max_prompt_tokens=3", "data.max_prompt_tokens"),
        ("rollout.num_samples_per_prompt=3", "rollout.samples_per_prompt"),
        ("rollout.samples=3", "rollout.samples_per_prompt"),  # not logging.rollouts
        ("trainer.tp=3", "training.tp"),
        ("objective.kl_coeff=0.1", "objective.kl_coef"),
        ("data.seed=1", "run.seed"),
        ("rollout.min_replicas=1", "roles.min_replicas"),
    ],
)
def test_a_mistyped_key_leads_to_the_one_that_was_meant(override, nearest):
    with pytest.raises(ConfigError) as caught:
        config_with(override)
    assert f"; did you mean {nearest}" in str(caught.value)


def test_resolve_fills_the_run_directory_from_the_name():
    config = load(Config, None, ["run.name=a"])
    resolved = resolve(config)
    assert resolved.run.dir == "runs/a" and config.run.dir == "" and resolve(resolved) == resolved
    assert load_config(None, ["run.name=a"]).run.dir == "runs/a"


def test_resolve_keeps_a_given_run_directory():
    assert resolve(config_with("run.dir=/scratch/x")).run.dir == "/scratch/x"


def test_only_what_differs_from_the_algorithms_defaults_is_changed(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "algorithm: dapo\nmodel: {path: m}\nrun: {max_steps: 7, mode: train}\n"
    )
    config = load_config(str(tmp_path / "mine.yaml"), ["training.optimizer.lr=1e-5"])
    assert changed(config) == {
        "algorithm": "dapo",
        "run": {"name": "mine", "dir": "runs/mine", "max_steps": 7},
        "model": {"path": "m"},
        "training": {"optimizer": {"lr": 1e-5}},
    }
    (tmp_path / "again.yaml").write_text(to_yaml(changed(config)))
    assert load_config(str(tmp_path / "again.yaml")) == config
    assert set(FIRST_KEYS) <= set(flatten(Config())) and len(FIRST_KEYS) == 20


def test_of_several_files_later_ones_win_key_by_key(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("run: {seed: 2, max_steps: 7}")
    second.write_text("run: {seed: 3}")
    run = load_config([first, second], ["run.max_steps=8"]).run
    assert (run.name, run.seed, run.max_steps) == ("b", 3, 8)


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("data: {train_files: a.parquet}\nactor_rollout_ref: {}", "verl; translate it with lockstep convert"),
        ("model_name_or_path: a", "TRL; docs/trl.md"),
    ],
)
def test_a_config_of_another_program_is_named(tmp_path, text, program):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=f"a.yaml is a config of {program}"):
        load_config(str(tmp_path / "a.yaml"))
