"""Checks the log-probs of the reference by a second, small pass with the reference weights.

The second pass has two micro-batches. The first holds a few samples of the first pass of this start, whose
log-probs may not change as long as the run lasts: other weights, an adapter that stays on or another
temperature would change them. The second holds one whole sample of the present batch, alone. Its log-probs
must be in the batch when the model learns from it.
"""

import torch
from torch import Tensor

from rl.checks.batches import place
from rl.checks.few_samples import first_samples, shortened
from rl.checks.logprobs import LogprobMismatch, rounding_limit
from rl.data.batch import Batch, concatenate
from rl.models.placement import count_experts
from rl.training.engine import TrainingEngine
from rl.training.micro_batch_plans import MicroBatchPlan

CUT = 32
"""Maximum number of tokens that are kept of the prompt (the last ones) and of the response (the first
ones)."""
TOKENS = 64
"""Approximate number of tokens of the samples that are kept from the first pass."""
LONGEST = 1024
"""Number of tokens above which no sample of the present batch is computed alone."""
REPEATED = 0.25
"""Share of the bound of rounding by which log-probs of the kept samples may change. Their pass has the same
shape each time."""


class ReferencePass:
    """The second passes of one model. slack: `agreement.logprob_slack`."""

    def __init__(self, model: TrainingEngine, slack: float):
        weights = model.weight_map
        self._model, self._limit = model, slack * rounding_limit(weights.hf, weights.dtype)
        self._routes = count_experts(weights.weights) > 0
        self._kept: tuple[Batch, Tensor] | None = None
        """Samples of the first pass, and their log-probs."""
        self._alone: tuple[int, Tensor] | None = None
        """Hash of the sample that was computed alone, and its log-probs."""

    def take(self, batch: Batch, plan: MicroBatchPlan) -> None:
        """Run the second pass. Call it with the reference weights in use. Collective over the world.

        plan: a mini-batch of the first pass. Raises LogprobMismatch if the log-probs of the kept samples have
        changed.
        """
        if not self._limit or any(prompt.images for prompt in batch.prompts):
            return
        kept = self._first(batch, plan) if self._kept is None else self._kept[0]
        counted = [i for micros in plan for micro in micros for i in micro if 0 < _size(batch, i) <= LONGEST]
        if batch.held:  # recorded experts or tokens of a truncated distribution, which a pass alone has not
            counted = []
        alone = min(counted, key=lambda i: _size(batch, i), default=None)
        few = concatenate([kept, shortened(batch, [] if alone is None else [alone], LONGEST)])
        few.groups = torch.arange(len(few))  # no prompts are shared
        multiple = self._model.grid.micro_batch_multiple
        places = [list(range(len(kept))), list(range(len(kept), len(few)))]
        micros: list[list[int]] = [*places, *([[]] * (-len(places) % multiple))]
        rows: MicroBatchPlan = [micros if rank == 0 else [[]] * len(micros) for rank in range(len(plan))]
        (found,) = self._model.forward(few, [rows], ("logprobs",))
        first = int(few.offsets[len(kept)])
        self._alone = None if alone is None else (_key(batch, alone), found[first:])
        if self._kept is None:
            self._kept = kept, found[:first]
        elif (gap := self._gap(found[:first], self._kept[1])) > REPEATED:
            raise LogprobMismatch(
                "reference check: the log-probs of the reference for samples of its first pass have changed "
                f"by {gap:.2g} times the bound of rounding: it has other weights than at the start, an "
                "adapter is on, or its temperature or positions changed."
            )

    def check(self, batch: Batch, logprobs: Tensor) -> None:
        """Raise LogprobMismatch unless the log-probs that the model learns from are the reference's.

        Not collective.
        """
        if self._alone is None:
            return
        key, found = self._alone
        for sample in range(len(batch)):
            if _key(batch, sample) == key:
                own = logprobs[batch.offsets[sample] : batch.offsets[sample + 1]]
                if (gap := self._gap(found, own)) > 1:
                    raise LogprobMismatch(
                        f"reference check: {place(batch, sample)} has log-probs of the reference that differ "
                        f"by {gap:.2g} times the bound of rounding from those of a pass with this sample "
                        "alone: they are of other tokens or samples, samples of a row see each other, or a "
                        "pass is random (dropout)."
                    )
                return

    def _first(self, batch: Batch, plan: MicroBatchPlan) -> Batch:
        few = first_samples(plan, lambda i: min(_size(batch, i), 2 * CUT), enough=TOKENS)
        return shortened(batch, [sample for samples in few for sample in samples], CUT)

    def _gap(self, found: Tensor, before: Tensor) -> float:
        """Return the mean difference, relative to the bound of rounding.

        With routed experts a tenth of the tokens is left out, because rounding may route them otherwise.
        """
        gaps = (found - before).abs().double().sort().values
        gaps = gaps[: len(gaps) - (len(gaps) // 10 + 1 if self._routes else 0)]
        size = max(1.0, float(before.abs().mean())) if len(gaps) else 1.0
        return float(gaps.mean()) / (self._limit * size) if len(gaps) else 0.0


def _size(batch: Batch, sample: int) -> int:
    """Return the number of tokens of a sample; 0 without a response, which no pass computes."""
    response = len(batch.response_ids[sample])
    return response and len(batch.prompt_ids[sample]) + response


def _key(batch: Batch, sample: int) -> int:
    return hash((batch.prompt_ids[sample].tobytes(), batch.response_ids[sample].tobytes()))
