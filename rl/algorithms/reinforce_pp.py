"""REINFORCE++ (arXiv:2501.03262), and its variant with a group baseline.

REINFORCE++ is REINFORCE with PPO's clipped loss and without a critic. The KL divergence from the reference
policy is subtracted from the reward of every token. Advantages are whitened over all tokens of the batch, not
over the group of a prompt:

    A_t = sum_{s >= t} gamma^(s - t) (score at the last token - reward_kl.coef * log(pi(y_s) / pi_ref(y_s)))
    A'_t = (A_t - mean A) / std A

One sample per prompt is enough. With several, `objective.advantage=reinforce++-baseline` first subtracts the
group's mean from the reward of a sample. The paper combines this variant with `objective.reward_kl.coef=0`
and a k2 divergence in the loss (`objective.kl_coef`, `objective.kl_estimator=k2`).

Left out: normalising and clipping of rewards, as in OpenRLHF, because a reward function can do both.
"""

from rl.data.batch import Batch
from rl.phases.phases import Phases
from rl.phases.policy_gradient import advantages, policy_loss, token_selection

NEEDS = ("samples", "reward", "groups")
DEFAULTS = {"objective.advantage": "reinforce++", "objective.loss": "ppo", "objective.reward_kl.coef": 0.01}


def collect(phases: Phases) -> Batch:
    prompts = phases.draw_prompts()
    batch = phases.generate(prompts)
    phases.score_samples(batch)
    return batch


def learn(phases: Phases, batch: Batch) -> None:
    phases.log_probs(batch)
    phases.apply_kl_penalty(batch)
    with phases.timed("adv"):
        batch.advantages = advantages(batch, phases.config)
    phases.update(batch, policy_loss(phases.config), select_tokens=token_selection(phases.config))
