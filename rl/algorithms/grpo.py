"""GRPO: group relative policy optimization (DeepSeekMath, arXiv:2402.03300), and Dr.GRPO (arXiv:2503.20783).

A group of G responses is sampled for each prompt. The advantage of a response is its reward minus the group's
mean, divided by the group's standard deviation; there is no critic. The policy maximises PPO's clipped
objective on every token of the response, minus kl_coef times the KL divergence from the reference policy.

    J = E[ sum_t min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A) - kl_coef KL_t ]
    r_t = pi(y_t) / pi_old(y_t)

There are two differences from the paper. The loss is the mean over all tokens of the mini-batch
(`objective.aggregation=token-mean`, as in DAPO and verl); the paper uses `seq-mean-token-mean`. The KL term
is off unless `objective.kl_coef` is set. Dr.GRPO is `objective.normalize_by_std=false
objective.aggregation=seq-mean-token-sum-norm`.

You can choose any loss (`objective.loss`), and any advantage (`objective.advantage`) that needs no further
model; docs/algorithms.md lists them.

Left out: process supervision, because a reward function gives one score per response; and iterations with a
new reference policy, because a new run from the exported checkpoint has a new reference policy.

`rl.run.loop` calls `collect`, then `learn`; `rl.phases.phases` has the phases.
"""

from rl.data.batch import Batch
from rl.phases.phases import Phases
from rl.phases.policy_gradient import advantages, policy_loss, token_selection

NEEDS = ("samples", "reward", "groups")
DEFAULTS = {"objective.advantage": "grpo", "objective.loss": "ppo"}


def collect(phases: Phases) -> Batch:
    prompts = phases.draw_prompts()
    batch = phases.generate(prompts)
    phases.score_samples(batch)
    return batch


def learn(phases: Phases, batch: Batch) -> None:
    phases.log_probs(batch)
    phases.apply_kl_penalty(batch)
    with phases.timed("adv"):
        # For example, the rewards 1, 0, 0, 0 of a group have the advantages 1.5, -0.5, -0.5, -0.5.
        batch.advantages = advantages(batch, phases.config)
    phases.update(batch, policy_loss(phases.config), select_tokens=token_selection(phases.config))
