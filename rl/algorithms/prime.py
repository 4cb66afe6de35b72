"""PRIME: process reinforcement through implicit rewards (arXiv:2502.01456).

A second language model phi starts from the same weights as the policy and learns during the run to
distinguish correct from wrong responses, by cross-entropy on sigmoid(beta log(phi(y) / phi_ref(y))). The
log-ratio of phi at a token is then a reward for this token, although nothing labels single tokens:

    r_t = beta log(phi(y_t) / phi_ref(y_t))
    A_t = process_coef * sum_{s >= t} gamma^(s - t) (r_s - leave-one-out mean)
          + outcome_coef * (outcome - leave-one-out mean)

The policy learns from A, whitened over the batch, with PPO's loss. The step excludes prompts with a mean
outcome below `implicit_reward.min_accuracy` or above `implicit_reward.max_accuracy`. Rewards are computed
before the reward model's own update, as in the paper's algorithm 1, from log-probs at temperature 1. The
outcome is the reward function's `acc`, or its score if it returns no `acc`, clamped to 0..1.

Left out: implicit rewards in other estimators (the paper tests them), because only `prime` reads a second
model's rewards.
"""

from functools import partial

import torch
from torch import Tensor

from rl.config.schema import Config
from rl.data.batch import Batch
from rl.objectives.advantages.prime import prime
from rl.objectives.preference import counted, log_ratios, outcome_loss
from rl.objectives.segments import segment_mean
from rl.phases.phases import Phases
from rl.phases.policy_gradient import policy_loss, token_selection
from rl.training.loss import Totals
from rl.training.packing import MicroBatch

NEEDS = ("samples", "reward", "groups", "implicit_reward")
DEFAULTS = {"objective.advantage": "prime", "objective.loss": "ppo"}


def collect(phases: Phases) -> Batch:
    prompts = phases.draw_prompts()
    batch = phases.generate(prompts)
    phases.score_samples(batch)
    return of_medium_difficulty(phases, batch)


def learn(phases: Phases, batch: Batch) -> None:
    config = phases.config
    phases.log_probs(batch)
    process_rewards = phases.implicit_rewards(batch)
    phases.update_implicit_reward(batch, partial(reward_loss, config=config))
    with phases.timed("adv"):
        batch.advantages = prime(
            process_rewards,
            batch.column("labels"),
            batch.groups,
            batch.lengths,
            batch.mask,
            process_coef=config.implicit_reward.process_coef,
            outcome_coef=config.implicit_reward.outcome_coef,
            gamma=config.objective.gamma,
        )
    phases.update(batch, policy_loss(config), select_tokens=token_selection(config))


def of_medium_difficulty(phases: Phases, batch: Batch) -> Batch:
    """Return the groups whose mean outcome is within the bounds, possibly none; `labels` are the outcomes."""
    batch.extra["labels"] = labels = batch.outcomes.clamp(0, 1)
    means = segment_mean(labels, batch.groups.bincount())
    bounds = phases.config.implicit_reward
    kept = ((means >= bounds.min_accuracy) & (means <= bounds.max_accuracy)).nonzero().squeeze(1).tolist()
    phases.metrics["prime/kept_groups"] = len(kept)
    return batch.keep_groups(kept)


def reward_loss(micro: MicroBatch, totals: Totals, *, config: Config) -> tuple[Tensor, dict[str, Tensor]]:
    """Return this micro-batch's part of the mean cross-entropy of the reward model, and its metrics.

    The mean is over the mini-batch's samples that have a token with mask 1.
    """
    enters = counted(micro.mask, micro.lengths)
    ratios = log_ratios(micro.logprobs, micro.column("implicit_ref_logprobs"), micro.mask, micro.lengths)
    # An excluded sample has log-ratio 0. With label 1 the sample counts as inaccurate, so it adds nothing.
    labels = torch.where(enters, micro.column("labels"), 1.0)
    value, stats = outcome_loss(ratios, labels, beta=config.implicit_reward.beta)
    total = torch.where(enters, value, 0.0).sum() / totals.num_samples
    return total, {
        "implicit_reward/loss": total,
        "implicit_reward/accuracy": stats["accuracy"] / totals.num_samples,
    }
