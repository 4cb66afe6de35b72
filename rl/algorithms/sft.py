"""SFT: supervised fine-tuning on the responses in the data.

    loss = - sum_t log pi(y_t | x, y_<t) / number of response tokens in the mini-batch

Only response tokens count, including the end-of-sequence token; in a conversation (data.messages_key) only
the assistant's turns. Packing, optimizer and checkpoints are shared with the RL algorithms. Validation
measures the loss of held-out responses. A step is one batch of data.prompts_per_step. docs/sft.md describes
data and validation.

Left out: a loss on prompt tokens, because the policy never generates prompts.
"""

from torch import Tensor

from rl.data.batch import Batch
from rl.objectives.aggregate import aggregate
from rl.phases.phases import Phases
from rl.training.loss import Totals
from rl.training.packing import MicroBatch

NEEDS = ("responses",)
DEFAULTS = {"validation.loss": True, "validation.greedy": False}


def collect(phases: Phases) -> Batch:
    batch = phases.targets(phases.draw_prompts())
    num_tokens = batch.prompt_lengths.sum() + batch.lengths.sum()
    phases.metrics["sft/trained_share"] = float(batch.mask.sum() / num_tokens)
    return batch


def learn(phases: Phases, batch: Batch) -> None:
    phases.update(batch, loss)


def loss(micro: MicroBatch, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
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
