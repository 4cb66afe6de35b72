"""Whether a run of a config needs early log-probs and other things (rl/config/needs.py)."""

from rl.config.declarations import describe
from rl.config.needs import needs_early_logprobs
from tests.configs import config_with
from tests.each import each


@each(
    "overrides, early",
    [
        ((), False),
        (("objective.kl_coef=0.1", "objective.entropy_coef=0.1"), False),
        (("rollout_correction.truncate_samples=2",), False),
        (("algorithm=spin",), False),
        (("algorithm=ppo", "objective.reward_kl.coef=0"), False),
        (("algorithm=ppo",), True),
        (("objective.reward_kl.coef=0.01",), True),
        (("objective.advantage=optimal-token-baseline",), True),
        (("objective.loss=kl-cov",), True),
        (("objective.top_entropy=0.2", "objective.off_policy_mask=0.1"), False),
        (("objective.adaptive_entropy.target=0.2",), True),
        (("rollout_correction.reject=token-k2", "rollout_correction.reject_high=0.1"), True),
    ],
)
def test_readers_of_old_log_probs_before_the_first_update(overrides, early):
    assert needs_early_logprobs(config_with(*overrides)) == early


def test_an_algorithm_declares_that_it_reads_old_log_probs(tmp_path):
    own = tmp_path / "own.py"
    text = "NEEDS = {}\nDEFAULTS = {{}}\ndef collect(phases): ...\ndef learn(phases, batch): ..."
    for needs, early in (('("samples",)', False), ('("samples", "old_logprobs")', True)):
        describe.cache_clear()
        own.write_text(text.format(needs))
        assert needs_early_logprobs(config_with(f"algorithm={own}")) == early
