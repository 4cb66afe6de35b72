"""Checks the log-probs of the reference by a second, small pass with the reference weights.

The second pass has one sample of the present batch, alone. Its log-probs must be in the batch when the model
learns from it.
"""

from torch import Tensor

from rl.checks.batches import place
from rl.checks.few_samples import output_alone, shortened
from rl.checks.logprobs import LogprobMismatch, rounding_limit
from rl.data.batch import Batch
from rl.models.placement import count_experts
from rl.training.engine import TrainingEngine
from rl.training.micro_batch_plans import MicroBatchPlan, samples_of

LONGEST = 1024
"""Number of tokens above which no sample is computed alone."""


class ReferencePass:
    """The second passes of one model. slack: `agreement.logprob_slack`."""

    def __init__(self, model: TrainingEngine, slack: float):
        weights = model.weight_map
        self._model, self._limit = model, slack * rounding_limit(weights.hf, weights.dtype)
        self._routes = count_experts(weights.weights) > 0
        self._alone: tuple[int, Tensor] | None = None
        """Hash of the sample that was computed alone, and its log-probs."""

    def take(self, batch: Batch, plan: MicroBatchPlan) -> None:
        """Run the second pass. Call it with the reference weights in use. Collective over the world.

        plan: a mini-batch of the first pass.
        """
        sizes = (batch.lengths > 0) * (batch.prompt_lengths + batch.lengths)
        counted = [i for i in samples_of(plan) if 0 < sizes[i] <= LONGEST]
        # A pass alone has no recorded experts, or tokens of a truncated distribution.
        is_bare = not batch.held and not any(prompt.images for prompt in batch.prompts)
        self._alone = None
        if self._limit and is_bare and counted:
            alone = min(counted, key=lambda i: int(sizes[i]))
            one = shortened(batch, [alone], LONGEST)
            self._alone = _key(batch, alone), output_alone(self._model, one, plan, "logprobs")

    def check(self, batch: Batch, logprobs: Tensor) -> None:
        """Raise LogprobMismatch unless the log-probs that the model learns from are the reference's.

        With routed experts a tenth of the tokens is left out, because rounding may route them otherwise. Not
        collective.
        """
        key, found = self._alone or (0, None)
        sample = next((i for i in range(len(batch)) if found is not None and _key(batch, i) == key), None)
        if sample is None or found is None:
            return
        own = logprobs[batch.offsets[sample] : batch.offsets[sample + 1]]
        gaps = (found - own).abs().double().sort().values
        gaps = gaps[: len(gaps) - (len(gaps) // 10 + 1 if self._routes else 0)]
        gap = float(gaps.mean()) / self._limit / max(1.0, float(own.abs().mean())) if len(gaps) else 0.0
        if gap > 1:
            raise LogprobMismatch(
                f"reference check: {place(batch, sample)} has log-probs of the reference that differ by "
                f"{gap:.2g} times the bound of rounding from those of a pass with this sample alone: they "
                "are of other tokens or samples, samples of a row see each other, or a pass is random."
            )


def _key(batch: Batch, sample: int) -> int:
    return hash((batch.prompt_ids[sample].tobytes(), batch.response_ids[sample].tobytes()))
