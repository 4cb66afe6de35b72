"""KTO: Kahneman-Tversky optimization (arXiv:2402.01306), from single responses with a label.

A response is desirable or undesirable; no pairs are needed. The loss compares a response's log-ratio,
log(pi(y)/pi_ref(y)), with z, an estimate of the policy's KL divergence from the reference. Far from z the
loss saturates:

    L = E[ desirable_weight   (1 - sigmoid(beta (log pi(y)/pi_ref(y) - z))) ]    desirable y
    L = E[ undesirable_weight (1 - sigmoid(beta (z - log pi(y)/pi_ref(y)))) ]    undesirable y
    z = max(0, mean of log pi(y')/pi_ref(y'))

For z each prompt is paired with a response y' to another prompt: the nearest earlier one in the mini-batch. z
uses the current weights and has no gradient. TRL instead takes y' from the previous row of the file within a
micro-batch, which may have the same prompt. z costs two more forward passes, one of them by the reference
policy. With unequal numbers of labels, desirable_weight * (number of desirable responses) should be 1 to 4/3
times undesirable_weight * (number of undesirable responses). data.prompts_per_step counts responses.

Left out: TRL's `apo_zero_unpaired`, because it is the loss of another paper.
"""

from functools import partial

import torch
from torch import Tensor

from rl.config.schema import Config
from rl.data.batch import Batch
from rl.objectives.preference import counted, kto_loss, log_ratios
from rl.phases.phases import Phases
from rl.training.loss import Totals
from rl.training.packing import MicroBatch

NEEDS = ("labels", "reference", "preference")
DEFAULTS = {"data.response_key": "completion"}


def collect(phases: Phases) -> Batch:
    return phases.draw_labelled()


def learn(phases: Phases, batch: Batch) -> None:
    others = phases.mismatched(batch)
    phases.reference(batch)
    phases.reference(others)
    phases.update(batch, partial(loss, config=phases.config), mismatched=others)


def loss(micro: MicroBatch, totals: Totals, *, config: Config, kl: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Return this micro-batch's part of the mean loss over the mini-batch's samples, and its metrics.

    Samples without a token with mask 1 are excluded. kl: z of the mini-batch.
    """
    # For example, with 100 desirable and 300 undesirable responses use weights of 3 to 4 and 1.
    goal = config.preference
    enters = counted(micro.mask, micro.lengths)
    ratios = log_ratios(micro.logprobs, micro.column("ref_logprobs"), micro.mask, micro.lengths)
    weights = dict(desirable_weight=goal.desirable_weight, undesirable_weight=goal.undesirable_weight)
    value, margin = kto_loss(ratios, micro.column("labels"), beta=goal.beta, kl=kl, **weights)

    def mean(x: Tensor) -> Tensor:
        return torch.where(enters, x, 0.0).sum() / totals.num_samples

    total = mean(value)
    return total, {
        "preference/loss": total,
        "preference/accuracy": mean((margin > 0).to(value.dtype)),
        "preference/margin": mean(margin),
        "preference/kl": mean(torch.full_like(margin, kl)),
    }
