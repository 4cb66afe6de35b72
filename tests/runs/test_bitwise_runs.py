"""A run with model.numerics=bitwise has no difference to the engine and no pass for old log-probs."""

import pytest

from tests.checkpoints import save_tiny
from tests.spawn import RanksFailed
from tests.toy import ON_CUDA, TRAIN, UNSCORED, train, write_config

ONE_UPDATE = "training.prompts_per_minibatch=0"
"""A step with several updates computes its old log-probs in a pass (`rl.phases.old_logprobs`)."""
BITWISE = ("model.numerics=bitwise", "training.tp=2", "rollout.tp=2")


@pytest.mark.parametrize(
    "program, temperature",
    [(TRAIN, 0.7), pytest.param(ON_CUDA, 1.0, marks=pytest.mark.slow)],
    ids=["CPU", "CUDA's defaults"],
)
def test_a_bitwise_run_skips_the_old_log_probs(program, temperature, toy, tmp_path):
    overrides = (*BITWISE, ONE_UPDATE, f"rollout.temperature={temperature}")
    steps = train(2, write_config(tmp_path, toy, *overrides), program=program)
    assert len(steps) == 2
    for step in steps:
        assert step["training/rollout_probs_diff_max"] == 0.0
        assert "timing_s/old_log_prob" not in step
        assert step["actor/grad_norm"] > 0 and step["actor/entropy"] > 1


@pytest.mark.parametrize(
    "kind, layout, program",
    [
        ("lora", "tp", TRAIN),
        *(
            pytest.param(kind, layout, program, marks=pytest.mark.slow)
            for program in (TRAIN, ON_CUDA)
            for kind, layout in (("dora", "tp"), ("lora", "moe"))
        ),
    ],
)
def test_adapters_in_the_weights_are_bitwise_exact(config, tmp_path, kind, layout, program):
    adapter = (f"adapter.kind={kind}", "adapter.rank=4", "adapter.init=pissa", "run.max_steps=2")
    if layout == "moe":
        adapter += (f"model.path={save_tiny('Qwen3MoeForCausalLM', tmp_path / 'moe', seed=1)}",)
    steps = train(2, config, *BITWISE, *adapter, program=program)
    assert all(step["training/rollout_probs_diff_max"] == 0.0 for step in steps)
    if program is not TRAIN:
        return  # rounding changes the samples of vLLM's own sampler
    fast = train(2, config, "training.tp=2", *adapter, run=tmp_path / "fast")
    # Only the first step has the same samples; its gradient equals the ordinary kernels' gradient.
    assert steps[0]["actor/grad_norm"] == pytest.approx(fast[0]["actor/grad_norm"], rel=1e-3)


def test_spin_learns_with_bitwise_numerics(config):
    [step] = train(1, config, "model.numerics=bitwise", "algorithm=spin", "run.max_steps=1", *UNSCORED)
    assert step["actor/grad_norm"] > 0


def test_a_replay_with_another_learning_rate_names_the_cause(config, tmp_path):
    bitwise = ("model.numerics=bitwise", "logging.rollouts=all")
    train(1, config, *bitwise)
    replay = ("run.mode=train_only", f"run.rollouts={tmp_path}/run")
    with pytest.raises(RanksFailed) as failure:
        train(1, config, *bitwise, *replay, "training.optimizer.lr=3e-3", run=tmp_path / "again")
    assert "such as training.optimizer.lr, differs" in failure.value.stderr[0]
    assert "libraries" not in failure.value.stderr[0]
