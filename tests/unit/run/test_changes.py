from pathlib import Path

import numpy as np
import pytest
import yaml

from rl.checkpoint.store import Saved
from rl.config.options import ConfigError, to_yaml
from rl.config.schema import load_config
from rl.data.prompts import Prompt
from rl.run.changes import changes, contents
from rl.run.checkpoints import find_checkpoint


class Store:
    """A run directory with one checkpoint, of step 150, and another run with one."""

    def __init__(self, written, newest=True):
        self.directory, self._written = Path("runs/a/checkpoints"), yaml.safe_load(to_yaml(written))
        self._newest = Saved(150, self.directory / "step_000150") if newest else None

    def newest(self):
        return self._newest

    def config_of(self, saved):
        return self._written

    def named(self, path):
        return Saved(150, Path(path, "checkpoints/step_000150"))


def config(*overrides):
    return load_config(None, ["run.name=a", "data.train=[a.parquet]", "model.path=m", *overrides])


CHANGED = [
    "run.name=b",
    "algorithm=ppo",
    "model.path=n",
    "data.train=[b.parquet]",
    "data.prompt_key=question",
    "reward.function=own.py:score",
    "reward.kwargs={x: 1}",
    "teacher.sources={a: {path: m}}",
    "critic.path=m",
]


@pytest.mark.parametrize("override", CHANGED)
def test_the_directory_of_another_run_is_refused(override):
    store, other, key = Store(config()), config("run.dir=runs/a", override), override.partition("=")[0]
    with pytest.raises(ConfigError, match=f"runs/a belongs to another run .*{key}: .* -> .*accept_changes"):
        find_checkpoint(other, store)
    accepted = config("run.dir=runs/a", override, "checkpoint.accept_changes=true")
    assert find_checkpoint(accepted, store)[0].step == 150


def test_keys_that_tune_a_run_are_printed_and_not_refused():
    own = config("training.tp=2", "run.max_steps=200", "training.optimizer.lr=3e-6")
    assert find_checkpoint(own, Store(config()))[0].step == 150
    found = changes(own, yaml.safe_load(to_yaml(config())))
    assert found["training.tp"] == "1 -> 2" and found["training.optimizer.lr"].endswith("-> 3e-06")
    assert "run.max_steps" not in found


def test_unnamed_runs_and_keys_of_later_versions_are_not_compared():
    written = yaml.safe_load(to_yaml(config("run.name=run")))
    del written["training"], written["reward"]["function"]
    assert changes(config("training.tp=2", "reward.function=own.py:score"), written) == {}


def test_other_contents_under_the_same_paths_are_found(tmp_path):
    """A reward that was edited, other rows and another tokenizer changed the run in silence."""
    file = tmp_path / "own.py"
    file.write_text("def score(**row): return 1.0")
    own = config(f"reward.function={file}:score")

    def prompt(ids, truth):
        return Prompt(0, np.array(ids, np.int32), "", "", truth, {})

    before = contents(own, [prompt([1, 2], "3"), prompt([4], "5")])
    assert before == contents(own, [prompt([1, 2], "3"), prompt([4], "5")])
    for rows in ([prompt([1, 2], "3")], [prompt([1, 9], "3"), prompt([4], "5")]):
        assert contents(own, rows)["data.train"] != before["data.train"]
    assert contents(own, [prompt([1, 2], "3"), prompt([4], "6")])["data.train"] != before["data.train"]
    other = Prompt(0, np.array([1, 2], np.int32), "", "", "3", {"level": 2})
    assert contents(own, [other]) != contents(own, [prompt([1, 2], "3")])  # rewards and environments read it
    file.write_text("def score(**row): return 0.0")
    assert contents(own, [])[str(file)] != before[str(file)]


def test_changed_files_of_environments_and_tools_are_found(tmp_path):
    """An environment that was edited changed the run in silence; its file was missing in code/."""
    files = [tmp_path / name for name in ("game.py", "other.py", "tool.py")]
    for file in files:
        file.write_text("")
    game, other, tool = files
    agents = f"agents={{environment: '{game}:Game', sources: {{a: '{other}:Game'}}, tools: ['{tool}:look']}}"
    own = config("algorithm=grpo", agents)
    before = contents(own, [])
    assert before.keys() >= {str(file) for file in files}
    for file in files:
        file.write_text("1")
    assert all(contents(own, [])[str(file)] != before[str(file)] for file in files)


def test_a_checkpoint_of_the_last_step_is_not_trained_on_in_silence():
    """The run would print that it is finished."""
    store = Store(config(), newest=False)
    begun = config("checkpoint.resume=runs/b", "run.max_steps=150", "run.dir=runs/c")
    with pytest.raises(
        ConfigError, match="resume=runs/b is at step 150, but run.max_steps=150 .*weights_only"
    ):
        find_checkpoint(begun, store)
    for more in ("run.max_steps=151", "checkpoint.weights_only=true"):
        begun = config("checkpoint.resume=runs/b", "run.max_steps=150", more)
        assert find_checkpoint(begun, store)[1].step == 150


def test_an_unnamed_run_takes_the_name_of_its_config_file(tmp_path):
    (tmp_path / "mine.yaml").write_text("model: {path: m}")
    assert load_config(str(tmp_path / "mine.yaml")).run.dir == "runs/mine"
    assert load_config(str(tmp_path / "mine.yaml"), ["run.name=b"]).run.dir == "runs/b"
    assert load_config(None).run.dir == "runs/run"


def test_another_end_is_named_if_the_learning_rate_decays_to_it():
    later, decays = ("run.max_steps=9",), ("training.optimizer.schedule=cosine",)
    for rate, words in (
        ((), {}),
        (decays, {"run.max_steps": "10 -> 9 (changes the decay of the learning rate)"}),
    ):
        saved = yaml.safe_load(to_yaml(config("run.max_steps=10", *rate)))
        assert changes(config(*later, *rate), saved) == words
