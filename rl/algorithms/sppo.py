"""SPPO: self-play preference optimization (arXiv:2405.00675), online.

A group of responses is sampled and scored for each prompt. The win rate of a response is the share of the
others that it beats. The policy's log-ratio to the policy that sampled is trained towards eta times the win
rate above one half, which approaches the Nash equilibrium of the preference game:

    L = E[ (log pi(y)/pi_t(y) - eta (P(y beats pi_t) - 1/2))^2 ],   eta = 1 / preference.beta

The paper computes P with a preference model. Here the reward function decides who wins, and ties count one
half. An iteration is a step.
"""

from functools import partial

from rl.config.schema import Config
from rl.data.batch import Batch
from rl.objectives.preference import counted, log_ratios, sppo_loss, win_rates
from rl.phases.phases import Phases
from rl.training.loss import Totals
from rl.training.packing import MicroBatch

NEEDS = ("samples", "reward", "groups", "preference")
DEFAULTS = {}


def collect(phases: Phases) -> Batch:
    prompts = phases.draw_prompts()
    batch = phases.generate(prompts)
    phases.score_samples(batch, prompts)
    return batch


def learn(phases: Phases, batch: Batch) -> None:
    phases.log_probs(batch)
    batch.labels = win_rates(batch.rewards, batch.groups)
    phases.update(batch, partial(loss, config=phases.config))


def loss(micro: MicroBatch, totals: Totals, *, config: Config):
    """Return the mean over the mini-batch's samples that have a counted token."""
    enters = counted(micro.mask, micro.lengths)
    ratios = log_ratios(micro.logprobs, micro.old_logprobs, micro.mask, micro.lengths)[enters]
    total = sppo_loss(ratios, micro.labels[enters], eta=1 / config.preference.beta).sum() / totals.num_samples
    return total, {
        "preference/loss": total,
        "preference/log_ratio": ratios.detach().abs().sum() / totals.num_samples,
    }
