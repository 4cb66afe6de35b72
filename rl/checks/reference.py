"""Checks a pass of the reference, a teacher or a reward model by a second, small pass.

The second pass has one sample of the batch, alone. Its outputs must be those that the run uses.
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


class SecondPass:
    """The second passes of one model. slack: `agreement.logprob_slack`. name: of the model, for messages."""

    def __init__(self, model: TrainingEngine, slack: float, name: str = "the reference"):
        weights, self._name = model.weight_map, name
        self._output = "values" if model.spec.has_values else "logprobs"
        self._model, self._limit = model, slack * rounding_limit(weights.hf, weights.dtype)
        self._routes = count_experts(weights.weights) > 0
        self.sample: int | None = None
        """Index in its batch of the sample that was computed alone."""
        self._alone: tuple[int, Tensor] | None = None
        """Hash of the sample that was computed alone, and its outputs."""

    def take(self, batch: Batch, plan: MicroBatchPlan) -> None:
        """Run the second pass, with the same weights as the first. Collective over the world.

        plan: a mini-batch of the first pass.
        """
        sizes = (batch.lengths > 0) * (batch.prompt_lengths + batch.lengths)
        counted = [i for i in samples_of(plan) if 0 < sizes[i] <= LONGEST]
        # A pass alone has no recorded experts, or tokens of a truncated distribution.
        is_bare = not batch.held and not any(prompt.images for prompt in batch.prompts)
        self._alone = self.sample = None
        if self._limit and is_bare and counted:
            self.sample = alone = min(counted, key=lambda i: int(sizes[i]))
            one = shortened(batch, [alone], LONGEST)
            self._alone = _key(batch, alone), output_alone(self._model, one, plan, self._output)

    def check(self, batch: Batch, outputs: Tensor, *, is_same: bool = False) -> None:
        """Raise LogprobMismatch unless the outputs that the run uses are those of the second pass.

        outputs: of the batch, float32 [T]. is_same: whether the batch is that of `take`. Not collective.
        """
        key, found = self._alone or (0, None)
        sample = self.sample
        if not is_same:
            sample = next((i for i in range(len(batch)) if found is not None and _key(batch, i) == key), None)
        if sample is not None:
            own = outputs[batch.offsets[sample] : batch.offsets[sample + 1]]
            self.compare(batch, sample, own, usual=float(outputs[outputs.isfinite()].abs().mean()))

    def compare(self, batch: Batch, sample: int, own: Tensor, *, usual: float = 0.0) -> None:
        """Compare the outputs of the sample that was computed alone; NaN where they are unknown.

        usual: mean size of the outputs of all samples, with which the rounding of a value near 0 grows, too.
        With routed experts a tenth of the tokens is left out, because rounding may route them otherwise.
        """
        assert self._alone is not None
        found, own = (each[own.isfinite()] for each in (self._alone[1], own))
        gaps = (found - own).abs().double().sort().values
        gaps = gaps[: len(gaps) - (len(gaps) // 10 + 1 if self._routes else 0)]
        size = max(1.0, usual, float(own.abs().mean())) if len(gaps) else 1.0
        gap = float(gaps.mean()) / self._limit / size if len(gaps) else 0.0
        if gap > 1:
            raise LogprobMismatch(
                f"reference check: {place(batch, sample)} has {self._output} of {self._name} that differ by "
                f"{gap:.2g} times the bound of rounding from those of a pass with this sample alone: they "
                "are of other tokens or samples, or at another temperature, samples of a row see each other, "
                "or a pass is random."
            )


def _key(batch: Batch, sample: int) -> int:
    return hash((batch.prompt_ids[sample].tobytes(), batch.response_ids[sample].tobytes()))
