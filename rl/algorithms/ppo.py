"""PPO: proximal policy optimization with a critic (arXiv:1707.06347, for language models arXiv:2203.02155).

A critic V estimates the future reward at every token. Advantages are generalised advantage estimates
(arXiv:1506.02438), whitened over the batch. The reward of a token is minus its KL divergence from the
reference policy, plus the score at the last token. Policy and critic learn from the same mini-batches:

    delta_t = r_t + gamma V_{t+1} - V_t,   A_t = sum_{s >= t} (gamma lam)^(s - t) delta_s
    target_t = A_t + V_t
    J = E[ min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t) ]
    L_critic = E[ max((V - target)^2, (clip(V, V_old - c, V_old + c) - target)^2) ] / 2

The critic is a separate model (`critic.path`) with its own optimizer. If it starts from a language model, its
values begin at 0, and `critic.warmup_steps` lets it learn before the policy changes. With
`objective.reward_kl.controller=adaptive` the KL coefficient is adapted (arXiv:1909.08593). The critic's loss
is the mean over tokens for every `objective.aggregation`.

VAPO (arXiv:2504.05118) computes target_t with lam = 1, and A_t with a lam that grows with the length of the
response (`objective.lam_critic`, `objective.length_adaptive_alpha`). PF-PPO (arXiv:2409.06957) weighs the
policy loss of a sample by the rank of its reward among the samples of the prompt (`objective.filtration`).

Left out: a KL penalty on the old policy instead of the clip, because the paper found it worse;
InstructGPT's pretraining loss (PPO-ptx), because a batch holds only the policy's responses; and VAPO's
likelihood of correct responses.
"""

from rl.data.batch import Batch
from rl.objectives.advantages.gae import gae
from rl.objectives.returns import whiten
from rl.phases.phases import Phases
from rl.phases.policy_gradient import filtered, policy_loss, token_selection

NEEDS = ("samples", "reward", "critic")
DEFAULTS = {
    "objective.advantage": "gae",
    "objective.loss": "ppo",
    "objective.reward_kl.coef": 0.001,
    "rollout.samples_per_prompt": 1,
}


def collect(phases: Phases) -> Batch:
    prompts = phases.draw_prompts()
    batch = phases.generate(prompts)
    phases.score_samples(batch)
    return batch


def learn(phases: Phases, batch: Batch) -> None:
    config, goal = phases.config, phases.config.objective
    phases.log_probs(batch)
    phases.values(batch)
    batch.extra |= filtered(batch, config)
    phases.apply_kl_penalty(batch)
    with phases.timed("adv"):
        lengths = batch.trajectory_lengths
        # For example, with gamma = lam = 1 an advantage is the reward to go minus the value.
        advantages, batch.extra["returns"] = gae(
            batch.column("token_rewards"),
            batch.column("old_values"),
            lengths,
            batch.mask,
            gamma=goal.gamma,
            lam=goal.lam,
            lam_critic=goal.lam_critic,
            length_adaptive_alpha=goal.length_adaptive_alpha,
        )
        batch.advantages = whiten(advantages, batch.mask) if goal.whiten else advantages
    phases.update_critic(batch)
    if phases.step.number > config.critic.warmup_steps:
        phases.update(batch, policy_loss(config), select_tokens=token_selection(config))
