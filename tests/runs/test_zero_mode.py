"""A run with model.numerics=bitwise has no difference to the engine and no pass for old log-probs."""

from tests.toy import train, write_config

BITWISE = ("model.numerics=bitwise", "training.tp=2", "rollout.tp=2")


def test_a_bitwise_run_skips_the_old_log_probs(toy, tmp_path):
    # The KL penalty in the reward reads old log-probs before the update.
    overrides = (*BITWISE, "objective.reward_kl.coef=0.01", "rollout.temperature=0.7")
    steps = train(2, write_config(tmp_path, toy, *overrides))
    assert len(steps) == 2
    for step in steps:
        assert step["training/rollout_probs_diff_max"] == 0.0
        assert "timing_s/old_log_prob" not in step and "timing_s/ref" in step
        assert step["actor/grad_norm"] > 0 and step["actor/entropy"] > 1
