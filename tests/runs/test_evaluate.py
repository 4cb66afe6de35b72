"""run.mode=evaluate: the metrics of a run's own validation, from its checkpoints."""

import json

import pytest

from rl.config.run_models import run_models
from rl.config.schema import load_config
from rl.run_directory.rollout_files import VALIDATIONS, read, stored_steps
from tests.records import records
from tests.spawn import RanksFailed, run_ranks
from tests.toy import TRAIN, train, write_config

EVALUATE = "run.mode=evaluate"
VALIDATES = (
    "validation.every=1",
    "validation.samples_per_prompt=4",
    "validation.max_prompts=8",
    "checkpoint.every=1",
    "checkpoint.keep_last=0",
    "objective.kl_coef=0.01",
)
STEP = "training/global_step"


def validation(record: dict) -> dict[str, float]:
    return {name: value for name, value in record.items() if name.startswith(("val-core/", "val-aux/"))}


@pytest.fixture(scope="module")
def trained(toy, tmp_path_factory):
    directory = tmp_path_factory.mktemp("evaluate")
    config = write_config(directory, toy, f"data.val=[{toy}/test.parquet]", *VALIDATES)
    return config, train(2, config)


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_it_gives_the_metrics_of_the_run_bitwise(trained, ranks):
    config, steps = trained
    train(ranks, config, EVALUATE, "data.train=[]", run=config.parent / "run")  # which it does not read
    found = records(config.parent / "run-eval")
    assert [step[STEP] for step in found] == [1, 2]
    assert [validation(step) for step in found] == [validation(step) for step in steps[1:]]
    assert any(name.endswith("best@4/mean") for name in found[0])
    for directory in VALIDATIONS.values():
        runs = config.parent / "run", config.parent / "run-eval"
        own, again = (read(stored_steps(run, directory)[2]).to_pylist() for run in runs)
        assert own == again and len(own) == 8 * (4 if "sampled" in directory else 1)
    (config.parent / "run-eval" / "evaluation.json").unlink()


def test_a_start_continues_with_the_next_pass(trained):
    config, steps = trained
    one = f"checkpoint.resume={config.parent}/run/checkpoints/step_000002"
    train(2, config, EVALUATE, one, run=config.parent / "one")
    file = config.parent / "one-eval" / "evaluation.json"
    whole = json.loads(file.read_text())
    cut = json.loads(file.read_text())
    del cut["checkpoints"][0]["passes"]["sampled"]
    cut["checkpoints"][0]["passes"]["greedy"]["val-core/toy/acc/mean@1"] = 7.0  # is not measured again
    file.write_text(json.dumps(cut))
    train(1, config, EVALUATE, one, run=config.parent / "one")
    again = json.loads(file.read_text())["checkpoints"][0]["passes"]
    assert again["greedy"]["val-core/toy/acc/mean@1"] == 7.0
    assert again["sampled"] == whole["checkpoints"][0]["passes"]["sampled"]
    train(
        1,
        config,
        EVALUATE,
        "checkpoint.resume=never",
        "validation.samples_per_prompt=0",
        run=config.parent / "one",
    )
    [model] = json.loads(file.read_text())["checkpoints"]  # other settings begin again
    assert model["passes"].keys() == {"greedy"}
    own, earlier = file.parent, file.parent.with_name("one-eval.1")
    found = {
        run: {name: [*stored_steps(run, VALIDATIONS[name])] for name in VALIDATIONS} for run in (own, earlier)
    }
    assert found == {own: {"greedy": [0], "sampled": []}, earlier: {"greedy": [2], "sampled": [2]}}
    assert json.loads((earlier / file.name).read_text())["checkpoints"][0]["passes"] == again
    assert [record[STEP] for record in records(earlier)] == [2]
    assert load_config(str(earlier / "config.yaml")).validation.samples_per_prompt == 4
    own = validation(steps[0])
    assert {name: own[name] for name in model["passes"]["greedy"]} == model["passes"]["greedy"]


def test_nothing_learns_and_a_wrong_path_is_refused(trained):
    config, _ = trained
    models = run_models(load_config(str(config), [EVALUATE]))
    assert models.keys() == {"policy"}
    assert not models["policy"].learns and not models["policy"].keeps_reference
    with pytest.raises(RanksFailed) as failure:
        train(1, config, EVALUATE, f"checkpoint.resume={config.parent}", run=config.parent / "none")
    assert failure.value.returncodes == [2]
    assert "is neither a checkpoint nor the directory of a run" in failure.value.stderr[0]


def test_a_run_without_checkpoints_is_refused_and_a_table_without_votes_says_why(trained, tmp_path):
    config, _ = trained
    small = "validation.max_prompts=2", "validation.samples_per_prompt=2", "validation.greedy=false"
    arguments = ("--config", config, EVALUATE, f"run.dir={tmp_path}/misspelt", *small)
    with pytest.raises(RanksFailed) as failure:
        run_ranks(1, TRAIN, *arguments, timeout=200)
    assert f"run.dir={tmp_path}/misspelt has no checkpoint to evaluate" in failure.value.stderr[0]
    never = "checkpoint.resume=never"
    [said] = run_ranks(1, TRAIN, *arguments, never, timeout=200, with_stderr=True)
    assert "no maj@k, because the reward returns no answer" in said
