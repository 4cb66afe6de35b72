"""SFT: supervised fine-tuning on the responses in the data, for a warm-up before reinforcement learning.

    loss = - sum_t log pi(y_t | x, y_<t) / number of response tokens in the mini-batch

Only response tokens count, with the end-of-sequence token. Engine, packing, optimizer and checkpoints are
those of the RL algorithms; no generation engine is built unless validation needs one. A step is one batch of
data.prompts_per_step.
"""

from rl.data.batch import Batch
from rl.objectives.aggregate import aggregate
from rl.phases.phases import Phases
from rl.training.loss import Totals
from rl.training.packing import MicroBatch

NEEDS = ("responses",)
DEFAULTS = {}


def collect(phases: Phases) -> Batch:
    return phases.targets(phases.draw_prompts())


def learn(phases: Phases, batch: Batch) -> None:
    phases.update(batch, loss)


def loss(micro: MicroBatch, totals: Totals):
    """Return the negative log-likelihood of a micro-batch, divided by the mini-batch's token count."""
    nll = aggregate(
        -micro.logprobs,
        micro.mask,
        micro.lengths,
        "token-mean",
        num_tokens=totals.num_tokens,
        num_samples=totals.num_samples,
    )
    return nll, {"sft/loss": nll}
