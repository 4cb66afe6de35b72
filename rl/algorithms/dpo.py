"""DPO: direct preference optimization (arXiv:2305.18290), from pairs in the data.

There is no reward and no generation. The policy learns to prefer the chosen response of each pair over the
rejected one by more than the reference policy does. The reference policy is the initial policy of the run.

    L = -E[ log sigmoid(beta (log pi(y_w)/pi_ref(y_w) - log pi(y_l)/pi_ref(y_l))) ]

`preference.loss` selects the hinge or IPO loss instead. data.prompts_per_step counts pairs; both responses of
a pair are in one micro-batch. Online variants are `spin` (the data's response against the policy's) and
`sppo` (the policy's responses against each other).

Left out: fine-tuning the reference on the chosen responses first, because `sft` does this in a run of its
own.
"""

from functools import partial

import torch
from torch import Tensor

from rl.config.schema import Config
from rl.data.batch import Batch
from rl.objectives.preference import counted, log_ratios, mean_of_pairs, pair_loss
from rl.phases.phases import Phases
from rl.training.loss import Totals
from rl.training.packing import MicroBatch

NEEDS = ("pairs", "reference", "preference")
DEFAULTS: dict[str, object] = {}


def collect(phases: Phases) -> Batch:
    return phases.draw_pairs()


def learn(phases: Phases, batch: Batch) -> None:
    phases.reference(batch)
    phases.update(batch, partial(loss, config=phases.config))


def loss(
    micro: MicroBatch, totals: Totals, *, config: Config, reference: str = "ref_logprobs"
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return this micro-batch's part of the mean loss over the mini-batch's pairs, and its metrics.

    reference: name of the column that holds the reference policy's log-probs.
    A pair is excluded if one of its responses has no token with mask 1.
    """
    preference = config.preference
    ratios = log_ratios(micro.logprobs, micro.column(reference), micro.mask, micro.lengths)
    enters = counted(micro.mask, micro.lengths, unit=2)
    ratios = torch.where(enters, ratios, 0.0)  # ratios[enters] would wait for the device
    value, stats = pair_loss(
        ratios, beta=preference.beta, loss=preference.loss, label_smoothing=preference.label_smoothing
    )
    return mean_of_pairs(value, stats, enters, num_pairs=totals.num_units)
