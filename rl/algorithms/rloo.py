"""RLOO: REINFORCE with a leave-one-out baseline (Ahmadian et al., 'Back to Basics', arXiv:2402.14740).

k responses are sampled for each prompt; the baseline of a response is the mean reward of the other k - 1. The
whole response is one action, and the KL divergence from the reference policy is part of its reward:

    R(y) = score(y) - reward_kl.coef * log(pi(y) / pi_ref(y))
    J = E[ 1/k sum_i (R(y_i) - mean_{j != i} R(y_j)) log pi(y_i) ]

The default loss is PPO's. In the first update its gradient equals the paper's, and PPO's loss stays valid in
further updates; `objective.loss=reinforce` selects the paper's loss. log pi(y) is a sum over tokens, so a
sample's loss is too (`seq-mean-token-sum`); verl averages over tokens.

Left out: the paper's moving-average baseline, because other samples are a better baseline.
"""

from rl.data.batch import Batch
from rl.phases.phases import Phases
from rl.phases.policy_gradient import advantages, policy_loss, token_selection

NEEDS = ("samples", "reward", "groups")
DEFAULTS = {
    "objective.advantage": "rloo",
    "objective.loss": "ppo",
    "objective.aggregation": "seq-mean-token-sum",
    "objective.reward_kl.coef": 0.01,
}


def collect(phases: Phases) -> Batch:
    prompts = phases.draw_prompts()
    batch = phases.generate(prompts)
    phases.score_samples(batch)
    return batch


def learn(phases: Phases, batch: Batch) -> None:
    phases.log_probs(batch)
    phases.apply_kl_penalty(batch)
    with phases.timed("adv"):
        # For example, the rewards 1, 0, 0 of a group have the advantages 1, -1/2, -1/2.
        batch.advantages = advantages(batch, phases.config)
    phases.update(batch, policy_loss(phases.config), select_tokens=token_selection(phases.config))
