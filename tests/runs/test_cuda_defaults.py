"""What CUDA chooses by itself works: runs of several ranks on the stand-in for CUDA.

tests/rehearsal/as_on_cuda.py says what these runs choose. tests/runs/test_random_layouts.py draws layouts for
it, tests/runs/test_bitwise_runs.py bitwise numerics, and `python -m tests.matrix --on-cuda` combinations.
"""

import random

import pytest

from tests.matrix import FEATURES, FOR_CPU, draw, run, save_inputs
from tests.toy import ON_CUDA, ON_TE, SFT, TRAIN, train, write_config

LORA = ("adapter.kind=lora", "adapter.rank=4")
SHARED = ("algorithm=ppo", "critic.share_base=true", *LORA)
VIEWS = ("algorithm=tests/runs/view_loss.py", *SFT[1:])
REFUSED = ("cp 2",)
"""Features that a GPU refuses for a model in float32."""
TOLERANCE = 1e-5
"""Relative difference of sums in float32."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cuda")
    save_inputs(directory)
    return directory


@pytest.mark.parametrize("keys", [LORA, SHARED], ids=["policy", "critic on the policy's base"])
def test_adapters_learn_on_two_ranks(keys, config):
    steps = train(2, config, *keys, program=ON_CUDA)
    assert len(steps) == 2
    for step in steps:
        assert step["actor/grad_norm"] > 0 and step["training/rollout_probs_diff_mean"] < 1e-4
        assert keys is LORA or step["critic/grad_norm"] > 0


def test_adapters_of_experts_learn_on_two_ranks(inputs, tmp_path):
    keys = (*LORA, f"model.path={inputs}/experts", "training.ep=2")
    steps = train(2, write_config(tmp_path, inputs, *keys), program=ON_CUDA)
    assert [step["actor/grad_norm"] > 0 for step in steps] == [True, True]


def test_a_loss_that_is_a_view_learns_with_pipeline_stages(toy, tmp_path):
    losses = []
    for name, keys in (("plain", SFT), ("views", VIEWS)):
        config = write_config(tmp_path, toy, *keys, "training.pp=2")
        losses.append([step["sft/loss"] for step in train(2, config, run=tmp_path / name, program=ON_CUDA)])
    assert losses[0] == losses[1]


def test_adapters_learn_the_same_with_cudas_defaults(toy, tmp_path):
    found = []
    for name, program in (("cpu", TRAIN), ("cuda", ON_CUDA)):
        steps = train(2, write_config(tmp_path, toy, *SFT, *LORA), run=tmp_path / name, program=program)
        found.append([step[key] for step in steps for key in ("sft/loss", "actor/grad_norm")])
    assert found[0] == pytest.approx(found[1], rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        (),
        LORA,
        SHARED,
        ("training.pp=2",),
        ("training.cp=2",),
        ("model.path=DIR/experts", "training.ep=2"),
        ("model.path=DIR/experts", "training.ep=2", *LORA),
    ],
    ids=["all weights", "adapter", "critic on the base", "pp", "cp", "experts", "adapters of experts"],
)
def test_layers_of_transformer_engine_learn_on_two_ranks(keys, inputs, tmp_path):
    own = [key.replace("DIR", str(inputs)) for key in keys]
    config = write_config(tmp_path, inputs, "model.dtype=bfloat16", *own)
    with_te, without = (
        train(2, config, run=tmp_path / program.stem, program=program) for program in (ON_TE, ON_CUDA)
    )
    assert len(with_te) == 2
    # The samples of the first step are the same.
    assert with_te[0]["actor/grad_norm"] == pytest.approx(without[0]["actor/grad_norm"], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FEATURES if name not in REFUSED])
def test_a_feature_runs_and_resumes(name, inputs, tmp_path):
    assert run([name], inputs, tmp_path, resumes=True, program=ON_CUDA) == ""


@pytest.mark.slow
@pytest.mark.parametrize("names", draw(24, 3, random.Random(4), ranks=4), ids=" + ".join)
def test_three_features_run_on_four_ranks(names, inputs, tmp_path):
    problem = run(names, inputs, tmp_path, resumes=False, ranks=4, program=ON_CUDA)
    assert problem == "" or FOR_CPU in problem
