"""Checks passes of the reference, teachers, reward models and critics by passes of one sample alone."""

from dataclasses import replace

from torch import Tensor

from rl.checks.batches import CheckFailed, place
from rl.checks.few_samples import output_alone, shortened
from rl.checks.logprobs import LogprobMismatch, rounding_limit
from rl.data.batch import Batch
from rl.models.placement import count_experts
from rl.models.sizes import num_experts
from rl.training.engine import TrainingEngine
from rl.training.micro_batch_plans import MicroBatchPlan, samples_of

LONGEST, KEPT = 1024, 256
"""Number of tokens above which no sample is computed alone, and that are kept of a critic's sample."""
CHANGE = 0.01
"""Maximum change of a value, relative to the mean size of values: two passes of one shape round equally."""


class SecondPass:
    """The second passes of one model. slack: `agreement.logprob_slack`. name: of the model, for messages."""

    def __init__(self, model: TrainingEngine, slack: float, name: str = "the reference"):
        weights, self._name = model.weight_map, name
        self._output = "values" if model.spec.has_values else "logprobs"
        self._model, self._limit = model, slack * rounding_limit(weights.hf, weights.dtype)
        self._routes = count_experts(weights.weights) > 0
        self.cause = (
            "of other tokens, rows or sums of the head, at another temperature, seeing other samples, or a "
            "pass is random"
        )
        self.sample: int | None = None
        """Index in its batch of the sample that was computed alone."""
        self._alone: tuple[int, Tensor] | None = None
        """Hash of the sample that was computed alone, and its outputs."""

    def take(self, batch: Batch, plan: MicroBatchPlan) -> None:
        """Run the second pass, with the same weights as the first. plan: of the first. Collective."""
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

        outputs: of the batch, float32 [T]. is_same: whether the batch is the one of `take`. Not collective.
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

        usual: mean size of all outputs. With routed experts a tenth of the tokens is left out.
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
                f"{gap:.2g} times the bound of rounding from those of a pass with this sample alone: "
                f"{self.cause}."
            )


def _key(batch: Batch, sample: int) -> int:
    return hash((batch.prompt_ids[sample].tobytes(), batch.response_ids[sample].tobytes()))


def check_foresight(critic: TrainingEngine, batch: Batch, plan: MicroBatchPlan) -> bool:
    """Raise CheckFailed on every rank if a critic's value depends on the token that it rates, the last one.

    The shortest response of a mini-batch is computed twice, alone; in mixtures another token may change the
    rounding of all. Returns whether values were compared: a new value head is 0. Collective over the world.
    """
    if num_experts(critic.weight_map.hf):
        return True
    answered = [i for i in samples_of(plan) if batch.lengths[i]]
    if not answered or any(prompt.images for prompt in batch.prompts):
        return False
    sample = min(answered, key=lambda i: int(batch.lengths[i]))
    one = shortened(batch, [sample], KEPT)
    changed = one.response_ids[0].copy()
    changed[-1] = next((token for token in one.prompt_ids[0] if token != changed[-1]), changed[-1] - 1)
    other = replace(one, response_ids=[changed])
    values, others = (output_alone(critic, each, plan, "values").double() for each in (one, other))
    size, gap = float(values.abs().mean()), float((values - others).abs().max())
    if gap > CHANGE * size:
        raise CheckFailed(
            f"value check: {place(batch, sample)} has the value {float(values[-1]):.3g} at its last token, "
            f"but {float(others[-1]):.3g} if this token is another one (values differ by {gap:.3g} at most): "
            "the critic sees the token that it rates."
        )
    return size > 0
