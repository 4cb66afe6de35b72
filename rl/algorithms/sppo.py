"""SPPO: self-play preference optimization (arXiv:2405.00675), online.

A group of responses is sampled and scored for each prompt. The win rate of a response is the fraction of the
other responses that it beats. pi_t is the policy that sampled the responses. The log-ratio of a response,
log(pi(y)/pi_t(y)), is trained towards eta times (win rate - 1/2). This approaches the Nash equilibrium of the
preference game:

    L = E[ (log pi(y)/pi_t(y) - eta (P(y beats pi_t) - 1/2))^2 ],   eta = 1 / preference.beta

An iteration is a step. The default eta is the paper's 1000; verl's recipe has 1.

Left out: the paper's preference model for P, because a reward function scores single responses. Instead the
higher reward wins, and a tie counts one half.
"""

from functools import partial

import torch
from torch import Tensor

from rl.config.schema import Config
from rl.data.batch import Batch
from rl.objectives.preference import counted, log_ratios, sppo_loss, win_rates
from rl.phases.phases import Phases
from rl.training.loss import Totals
from rl.training.packing import MicroBatch

NEEDS = ("samples", "reward", "groups", "preference")
DEFAULTS = {"preference.beta": 0.001}


def collect(phases: Phases) -> Batch:
    prompts = phases.draw_prompts()
    batch = phases.generate(prompts)
    phases.score_samples(batch)
    return batch


def learn(phases: Phases, batch: Batch) -> None:
    phases.log_probs(batch)
    # For example, the rewards 3, 2, 1, 0 of a group have the win rates 1, 2/3, 1/3, 0.
    batch.extra["labels"] = win_rates(batch.column("rewards"), batch.groups)
    phases.update(batch, partial(loss, config=phases.config))


def loss(micro: MicroBatch, totals: Totals, *, config: Config) -> tuple[Tensor, dict[str, Tensor]]:
    """Return this micro-batch's part of the mean loss over the mini-batch's samples, and its metrics.

    Samples without a token with mask 1 are excluded.
    """
    enters = counted(micro.mask, micro.lengths)
    ratios = log_ratios(
        micro.logprobs, micro.column("old_logprobs"), micro.mask, micro.lengths
    )  # 0 if excluded
    losses = sppo_loss(ratios, micro.column("labels"), eta=1 / config.preference.beta)
    total = torch.where(enters, losses, 0.0).sum() / totals.num_samples
    return total, {
        "preference/loss": total,
        "preference/log_ratio": ratios.detach().abs().sum() / totals.num_samples,
    }
