"""SimPO: simple preference optimization (arXiv:2405.14734), from pairs in the data.

SimPO is DPO with another reward of a response: beta times its mean log-probability per token. This reward
needs no reference policy and does not grow with the length. The chosen response has to win by at least gamma:

    L = -E[ log sigmoid(beta/|y_w| log pi(y_w) - beta/|y_l| log pi(y_l) - gamma) ]

The default beta and gamma are the paper's for the base model of Llama 3 8B. data.prompts_per_step counts
pairs.

Left out: the likelihood term of TRL's CPO trainer (`cpo_alpha`), because the paper has none.
"""

from functools import partial

import torch
from torch import Tensor

from rl.config.schema import Config
from rl.data.batch import Batch
from rl.objectives.preference import counted, mean_logprobs, mean_of_pairs, pair_loss
from rl.phases.phases import Phases
from rl.training.loss import Totals
from rl.training.packing import MicroBatch

NEEDS = ("pairs", "preference")
DEFAULTS = {"preference.beta": 2.0, "preference.gamma": 1.0}


def collect(phases: Phases) -> Batch:
    return phases.draw_pairs()


def learn(phases: Phases, batch: Batch) -> None:
    phases.update(batch, partial(loss, config=phases.config))


def loss(micro: MicroBatch, totals: Totals, *, config: Config) -> tuple[Tensor, dict[str, Tensor]]:
    """Return this micro-batch's part of the mean loss over the mini-batch's pairs, and its metrics.

    A pair is excluded if one of its responses has no token with mask 1.
    """
    goal = config.preference
    enters = counted(micro.mask, micro.lengths, unit=2)
    means = torch.where(enters, mean_logprobs(micro.logprobs, micro.mask, micro.lengths), 0.0)
    options = dict(beta=goal.beta, gamma=goal.gamma, label_smoothing=goal.label_smoothing)
    value, stats = pair_loss(means, loss="sigmoid", **options)
    return mean_of_pairs(value, stats, enters, num_pairs=totals.num_units)
