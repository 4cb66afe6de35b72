"""Checks that a critic does not see the token that it rates.

The value at a token is an estimate before this token is sampled. If a value is read one token too late, the
critic still learns, and better than it should: its values contain the outcome.
"""

from dataclasses import replace

from rl.checks.batches import CheckFailed, place
from rl.checks.few_samples import first_alone, shortened
from rl.data.batch import Batch
from rl.models.sizes import num_experts
from rl.training.engine import TrainingEngine
from rl.training.micro_batch_plans import MicroBatchPlan

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
    lengths = batch.lengths.tolist()
    answered = [i for micros in plan for micro in micros for i in micro if lengths[i]]
    if not answered or any(prompt.images for prompt in batch.prompts):
        return False
    sample = min(answered, key=lengths.__getitem__)
    one = shortened(batch, [sample], LONGEST)
    (response,) = one.response_ids
    changed = response.copy()
    changed[-1] = next((token for token in one.prompt_ids[0] if token != response[-1]), response[-1] - 1)
    rows = first_alone(plan, multiple=critic.grid.micro_batch_multiple)
    values, others = (
        critic.forward(replace(one, response_ids=[ids]), [rows], ("values",))[0].double()
        for ids in (response, changed)
    )
    size = float(values.abs().mean())
    gap = float((values - others).abs().max())
    if gap > CHANGE * size:
        raise CheckFailed(
            f"value check: {place(batch, sample)} has the value {float(values[-1]):.3g} at its last token, "
            f"but {float(others[-1]):.3g} if this token is another one (values differ by {gap:.3g} at most): "
            "the critic sees the token that it rates, so its values are read too late."
        )
    return size > 0
