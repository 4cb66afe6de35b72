"""ORPO: odds ratio preference optimization (arXiv:2403.07691), from pairs in the data.

ORPO is supervised fine-tuning on the chosen response, with a term that makes the response's odds greater than
the odds of the rejected response. It needs no reference policy, and no separate fine-tuning before it:

    L = E[ -log P(y_w) - beta log sigmoid(log odds(y_w) - log odds(y_l)) ]
    log P(y) = log pi(y) / |y|,   odds(y) = P(y) / (1 - P(y))

data.prompts_per_step counts pairs.

Left out: nothing.
"""

from functools import partial

import torch
from torch import Tensor

from rl.config.schema import Config
from rl.data.batch import Batch
from rl.objectives.preference import counted, mean_logprobs, mean_of_pairs, orpo_loss
from rl.phases.phases import Phases
from rl.training.loss import Totals
from rl.training.packing import MicroBatch

NEEDS = ("pairs", "preference")
DEFAULTS: dict[str, object] = {}


def collect(phases: Phases) -> Batch:
    return phases.draw_pairs()


def learn(phases: Phases, batch: Batch) -> None:
    phases.update(batch, partial(loss, config=phases.config))


def loss(micro: MicroBatch, totals: Totals, *, config: Config) -> tuple[Tensor, dict[str, Tensor]]:
    """Return this micro-batch's part of the mean loss over the mini-batch's pairs, and its metrics.

    A pair is excluded if one of its responses has no token with mask 1.
    """
    enters = counted(micro.mask, micro.lengths, unit=2)
    means = torch.where(enters, mean_logprobs(micro.logprobs, micro.mask, micro.lengths), 0.0)
    value, stats = orpo_loss(means, beta=config.preference.beta)
    return mean_of_pairs(value, stats, enters, num_pairs=totals.num_units)
