"""ReMax (arXiv:2310.10505): REINFORCE with the reward of the greedy response to the prompt as its baseline.

    A(y) = R(y) - R(greedy response),   J = E[ A(y) log pi(y) ]

The greedy response is generated with the same weights and scored, but not trained on. One sample per prompt
is enough; the baseline costs one more response. The KL divergence from the reference policy can be a term of
the loss (`objective.kl_coef`) or of R(y) (`objective.reward_kl.coef`); both are off by default. The greedy
response's reward has no KL term; any baseline that does not depend on y leaves the gradient unbiased. The
default loss is PPO's; in the first update after the generation, its gradient equals REINFORCE's.

Left out: nothing.
"""

from rl.data.batch import Batch
from rl.phases.phases import Phases
from rl.phases.policy_gradient import advantages, policy_loss, token_selection

NEEDS = ("samples", "reward", "greedy_baseline")
DEFAULTS = {
    "objective.advantage": "remax",
    "objective.loss": "ppo",
    "objective.aggregation": "seq-mean-token-sum",
    "rollout.samples_per_prompt": 1,
}


def collect(phases: Phases) -> Batch:
    prompts = phases.draw_prompts()
    batch = phases.generate(prompts)
    batch.extra["baselines"] = phases.greedy_rewards(prompts)[batch.groups]
    phases.score_samples(batch)
    return batch


def learn(phases: Phases, batch: Batch) -> None:
    phases.log_probs(batch)
    phases.apply_kl_penalty(batch)
    with phases.timed("adv"):
        batch.advantages = advantages(batch, phases.config)
    phases.update(batch, policy_loss(phases.config), select_tokens=token_selection(phases.config))
