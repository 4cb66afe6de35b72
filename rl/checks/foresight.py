"""Checks that a critic does not see the token that it rates.

The value at a token is an estimate before this token is sampled. If a value is read one token too late, the
critic still learns, and better than it should: its values contain the outcome.
"""

from dataclasses import replace

from rl.checks.batches import CheckFailed, place
from rl.checks.few_samples import output_alone, shortened
from rl.data.batch import Batch
from rl.models.sizes import num_experts
from rl.training.engine import TrainingEngine
from rl.training.micro_batch_plans import MicroBatchPlan, samples_of

CHANGE = 0.01
"""Maximum change of a value, relative to the mean size of values: two passes of one shape round equally."""
LONGEST = 256
"""Number of tokens that are kept of a prompt and of a response."""


def check_foresight(critic: TrainingEngine, batch: Batch, plan: MicroBatchPlan) -> bool:
    """Raise CheckFailed on every rank if a value depends on the last token of its response.

    The shortest response of a mini-batch is computed twice, alone: as it is, and with another last token. No
    value may change. Mixtures of experts are not compared, because another token may change the rounding of
    all. Returns whether there was anything to compare: a new value head is 0. Collective over the world.
    """
    if num_experts(critic.weight_map.hf):
        return True
    answered = [i for i in samples_of(plan) if batch.lengths[i]]
    if not answered or any(prompt.images for prompt in batch.prompts):
        return False
    sample = min(answered, key=lambda i: int(batch.lengths[i]))
    one = shortened(batch, [sample], LONGEST)
    changed = one.response_ids[0].copy()
    changed[-1] = next((token for token in one.prompt_ids[0] if token != changed[-1]), changed[-1] - 1)
    other = replace(one, response_ids=[changed])
    values, others = (output_alone(critic, each, plan, "values").double() for each in (one, other))
    size, gap = float(values.abs().mean()), float((values - others).abs().max())
    if gap > CHANGE * size:
        raise CheckFailed(
            f"value check: {place(batch, sample)} has the value {float(values[-1]):.3g} at its last token, "
            f"but {float(others[-1]):.3g} if this token is another one (values differ by {gap:.3g} at most): "
            "the critic sees the token that it rates, so its values are read too late."
        )
    return size > 0
