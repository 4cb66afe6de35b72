"""Finds the change of a forward pass that makes a mismatch between engine and trainer vanish.

The mismatch ends the run anyway, so a few more passes over one micro-batch of each rank cost nothing.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rl.checks.few_samples import compared_tokens
from rl.data.batch import Batch
from rl.objectives.segments import segment_sum
from rl.training.engine import TrainingEngine
from rl.training.micro_batch_plans import MicroBatchPlan, samples_of

LARGEST = 10**9
"""Number of parameters up to which a pass has a copy of the weights with the adapter."""
VANISHED = 2.0
"""Factor by which a change must reduce the mean difference to be named as the cause."""
UNSHARED, ALONE = "that shares no prompts", "with each sample alone"
"""Changes of a pass that must not change the trainer's log-probs."""


def cause_of(
    model: TrainingEngine,
    batch: Batch,
    plans: list[MicroBatchPlan],
    counted: Tensor,
    *,
    limit: float,
    engine_tp: int,
) -> str:
    """Return a sentence about the change that makes the mismatch vanish. Collective over the world.

    The parts of the model check their own inputs first and may raise. plans: the mini-batches. counted: bool
    [T], the compared tokens. limit: mean difference that rounding explains, in nats. engine_tp: number of
    tensor parallel ranks of an engine.
    """
    model.parts.metrics(model.device.torch)
    engine, old = batch.column("rollout_logprobs"), batch.column("old_logprobs")

    def gap(logprobs: Tensor, among: Tensor) -> float:
        gaps = (logprobs - engine)[among].abs().double()
        return float(gaps.mean()) if len(gaps) else 0.0

    plan = max(_parts(model, plans), key=lambda part: gap(old, compared_tokens(part, batch, counted)))
    few = compared_tokens(plan, batch, counted)
    before, tried, changed = gap(old, few), list[tuple[float, str]](), dict[str, float]()
    for text, logprobs, among in _rearranged(batch, old, few):
        if (after := gap(logprobs, among)) <= limit:
            return f"{text}, the difference is {after:.2g} instead of {before:.2g}."
    first, second = (model.forward(batch, [plan], ("logprobs",))[0] for _ in range(2))
    if float((first - second)[few].abs().double().mean()) > limit:
        return "Two passes of the trainer over the same samples differ: a pass is random (dropout)."
    for text, run in _changes(model, batch, plan, first):
        found = run()
        # The only update of a step may have moved the weights since `old`; then equal passes differ, too.
        moved = gap(old + found - first, few) if found is not first else before
        tried.append((min(gap(found, few), moved), text))
        if text in (UNSHARED, ALONE):
            changed[text] = float((found - first)[few].abs().double().mean())
    ranks = f" (ranks that share a sample: {sharing})" if (sharing := model.grid.sharing) else ""
    after, text = min(tried)
    if after <= max(limit, before / VANISHED):
        return f"In a pass {text}{ranks}, the difference is {after:.2g} instead of {before:.2g}."
    for text, own in changed.items():  # the update may have moved the weights, away from the engine's
        if own > limit:
            return f"A pass {text}{ranks} changes the trainer's log-probs by {own:.2g}, but must not."
    holds = (segment_sum(few.double(), batch.lengths) > 0).repeat_interleave(batch.lengths)
    versions, causes = batch.weight_versions, "the engine has a cache or copies of older weights"
    if versions is not None and bool((versions[holds] < versions[few].max()).any()):
        causes += ", which changed during these samples"
    causes += ", or other functions"
    if engine_tp > 1:
        causes += f", or its ranks (rollout.tp={engine_tp}) hold wrong parts of weights, such as key heads"
    if sharing:
        causes += f", or ranks that share a sample ({sharing}) communicate wrongly"
    return f"The difference remains in a pass {', '.join(text for _, text in tried)}: {causes}."


def _rearranged(batch: Batch, old: Tensor, few: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (text, log-probs, compared tokens) of changes that need no pass."""
    sample = torch.arange(len(batch)).repeat_interleave(batch.lengths)
    for shift in (1, -1):
        within = few & (sample.roll(shift) == sample)
        yield f"With the trainer's log-probs moved by {shift:+d} token", old.roll(shift), within
    engine = batch.column("rollout_logprobs")[few].double()
    factor = float((old[few].double() * engine).sum() / engine.square().sum().clamp(min=1e-9))
    yield f"With the trainer's log-probs divided by {factor:.4g}", old / factor, few
    shown = torch.tensor([bool(batch.prompts[i].images) if batch.prompts else False for i in batch.groups])
    has_images = shown.repeat_interleave(batch.lengths)
    if (few & has_images).any() and (few & ~has_images).any():
        yield "Without the samples with images", old, few & ~has_images


def _changes(
    model: TrainingEngine, batch: Batch, plan: MicroBatchPlan, first: Tensor
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield changes and functions that return log-probs, float32 [T]. first: those of an unchanged pass."""

    def run(batch: Batch = batch, plan: MicroBatchPlan = plan, **changed: Any) -> Tensor:
        kept = {name: getattr(model, name) for name in changed}
        vars(model).update(changed)
        found = model.forward(batch, [plan], ("logprobs",))[0]
        vars(model).update(kept)
        return found

    yield "of the same samples again", lambda: first
    if batch.held and not any(prompt.images for prompt in batch.prompts):
        plain = replace(batch, held={}, rollout_logprobs=None)
        yield f"without the engine's {' and '.join(sorted(batch.held))}", lambda: run(plain)
    if model.shares_prompts:
        yield UNSHARED, lambda: run(shares_prompts=False)
    yield ALONE, lambda: run(plan=_alone(plan, model.grid.micro_batch_multiple))
    if model.spec.temperature != 1:
        yield "at temperature 1", lambda: run(spec=replace(model.spec, temperature=1.0))
    if model.has_frozen_weights:
        yield "without the adapter", lambda: _beside_adapter(model, run, merges=False)
        if sum(math.prod(shape) for w in model.weight_map.weights for shape in w.shapes) <= LARGEST:
            name = "with the adapter merged into the weights, which its layers must equal"
            yield name, lambda: _beside_adapter(model, run, merges=True)
    elif model.reference is not None:

        def of_reference() -> Tensor:
            with model.reference_weights():
                return run()

        yield "with the reference weights", of_reference


def _beside_adapter(model: TrainingEngine, run: Callable[[], Tensor], *, merges: bool) -> Tensor:
    """Run a pass with the weights alone. merges: whether they contain the adapter. Collective."""
    merge, base = model.parts.merging(), [*model.weight_map.local()] if merges else []
    learned = [parameter for _, parameter in model.learned_map.local()]
    kept = [(parameter, parameter.data) for parameter in (*learned, *(own for _, own in base))]
    for weight, parameter in base:
        parameter.data = merge(weight, parameter).detach()
    for parameter in learned:
        parameter.data = parameter.data.clone()
    for part in model.parts:
        part.set_aside()
    found = run()
    for parameter, data in kept:
        parameter.data = data
    return found


def _parts(model: TrainingEngine, plans: list[MicroBatchPlan]) -> Iterator[MicroBatchPlan]:
    """Yield one micro-batch of each rank, or as many as a pass needs."""
    size = model.grid.micro_batch_multiple
    for plan in plans:
        for first in range(0, len(plan[0]), size):
            yield [micros[first : first + size] for micros in plan]


def _alone(plan: MicroBatchPlan, multiple: int) -> MicroBatchPlan:
    """Return a plan with one sample in each micro-batch."""
    own = [[[i] for i in samples_of([micros])] for micros in plan]
    number = -(-max(map(len, own)) // multiple) * multiple
    return [micros + [[]] * (number - len(micros)) for micros in own]
