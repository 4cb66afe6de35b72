"""A check of the model's backward pass: its gradient is compared with differences of its log-probs.

A layer with a backward pass of its own may have wrong gradients although its outputs are right: for example
attention over context parallel ranks, a fused kernel, or the head. All other comparisons of an update begin
with the gradients of these layers. Once per start the weights w of the first layer's norm are set to w + r s
|w| and w - r s |w|, with random signs s and the mean |w| of the absolute weights. Half of the difference of
the mean log-prob is its slope along r s |w|. The gradient of w must give the same slope, and errors of all
later layers reach this gradient. A second difference, with r / 2, has a quarter of the error; the distance
between the two differences is therefore tolerated.

The 17 passes read about 256 tokens, cut from the first samples, and cost little beside a step of any model.
The model is compared with itself, so any tokens will do.

Models with routed experts are not compared, because another w sends some tokens to other experts. Models with
adapters are not compared, because their norms do not learn.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor
from torch.nn import Parameter

from rl.checks.logprobs import rounding_limit
from rl.data.batch import Batch
from rl.models.placement import count_experts
from rl.runtime.collectives import sum_over_world
from rl.training.engine import TrainingEngine
from rl.training.micro_batch_plans import MicroBatchPlan
from rl.training.packing import MicroBatch

DIRECTIONS = 4
"""Number of directions s."""
STEP = {torch.float32: 2.0**-7, torch.bfloat16: 2.0**-4}
"""The factor r by dtype: far above the distance of two numbers. The slope is off by about r^2."""
TOLERANCE = {torch.float32: 0.05, torch.bfloat16: 0.25}
"""Maximum distance of the measured slopes from the gradient's slopes, relative to their size."""
NONLINEAR = 0.25
"""Maximum distance between the slopes with r and with r / 2, relative to their size; above it nothing is
compared. For example, log-probs at a low temperature are far from linear in so large a change."""
GAP = 0.1
"""Difference of log-probs by rounding, in units of its bound (`rounding_limit`): right runs stay below it."""
INDEPENDENT = 256
"""Maximum number of tokens whose rounding errors count as independent: equal tokens are rounded equally."""
CUT = 64
"""Number of tokens kept: the last tokens of a prompt, and the first tokens of a response."""


class WrongBackward(RuntimeError):
    """Raised on every rank if the gradient of the model is not the slope of its log-probs."""


def check_slope(
    model: TrainingEngine, batch: Batch, plan: MicroBatchPlan, *, noise: float | None = None
) -> None:
    """Compare on the first samples of a plan. Raises WrongBackward. Collective over the world.

    The weights are bitwise the same afterwards. noise: measured noise of log-probs (`RoundingNoise`), in
    nats; None: the bound of rounding is used.
    """
    vectors = [w for w in model.learned_map.weights if w.layer == 0 and len(w.shapes[0]) == 1]
    norms = [w for w in vectors if w.expert is None and "norm" in w.hf[0]]
    if not norms or count_experts(model.weight_map.weights):
        return
    batch, few = _first_tokens(batch, plan, multiple=model.grid.micro_batch_multiple)
    tokens = batch.tokens_of([i for micros in few for micro in micros for i in micro])
    count = float((batch.mask[tokens] > 0).sum())
    if not count:
        return
    hf, dtype, device = model.weight_map.hf, model.weight_map.dtype, model.device.torch
    centre = float(model.chunks[0].config.layernorm_zero_centered_gamma)  # then w is added to 1
    parameter, gradient = model.gradient(batch, few, partial(_mean, count=count), norms[0])
    found, along = (
        torch.zeros(2, DIRECTIONS, dtype=torch.float64),
        torch.zeros(DIRECTIONS, dtype=torch.float64),
    )
    for number in range(DIRECTIONS):
        for half in range(2):
            step, means, ends = STEP[dtype] / (1 + half), [], []
            for factor in (step, -step):
                with _moved(parameter, number, factor, centre) as value:
                    means.append(_mean_logprob(model, batch, few, count))
                    ends.append(value)
            found[half, number] = (means[0] - means[1]) / 2 * (1 + half)
            size = max(1.0, *map(abs, means))  # log-probs are rounded in proportion to their size
        if gradient is not None:
            along[number] = float((ends[0] - ends[1]).mul(gradient).sum())
    along = sum_over_world(along, device)
    curvature, found = float((found[0] - found[1]).norm()), found[1]
    if curvature > NONLINEAR * float(found.norm()):
        return
    error = 2 * noise if noise else GAP * size * rounding_limit(hf, dtype)
    error *= math.sqrt(2 * DIRECTIONS / min(count, INDEPENDENT))  # error of the norm of the slopes
    gap, slope = float((found - along).norm()), max(float(found.norm()), float(along.norm()))
    if gap > TOLERANCE[dtype] * slope + curvature + 3 * error:
        raise WrongBackward(
            f"the gradient of the model is not the slope of its log-probs: along {DIRECTIONS} changes of "
            f"{norms[0].hf[0]} the mean log-prob of {count:.0f} tokens changes by {_listed(found)}, but by "
            f"{_listed(along)} according to the gradient. The backward pass of a layer, of the head, or of "
            "the communication between the ranks that share a sample (tp, cp, pp) is wrong."
        )


def _first_tokens(batch: Batch, plan: MicroBatchPlan, *, multiple: int) -> tuple[Batch, MicroBatchPlan]:
    """Return the first samples of a plan, cut, with about INDEPENDENT counted tokens, and their own plan.

    Each sample stays on its data parallel rank. Samples with images stay whole, because the model must find
    every token of an image. multiple: of the micro-batches of a pass (`Grid.micro_batch_multiple`).
    """
    is_cut = not any(prompt.images for prompt in batch.prompts)
    ranks: dict[int, int] = {}
    count = 0
    for samples in zip_longest(*([i for micro in micros for i in micro] for micros in plan)):
        for rank, sample in enumerate(samples):
            if sample is None or count >= INDEPENDENT:
                continue
            mask = batch.mask[batch.offsets[sample] : batch.offsets[sample + 1]]
            if own := int((mask[: CUT if is_cut else None] > 0).sum()):
                ranks[sample] = rank
                count += own
    chosen = sorted(ranks)
    places = {sample: place for place, sample in enumerate(chosen)} if is_cut else {i: i for i in chosen}
    few = [[[places[i] for i in chosen if ranks[i] == rank]] for rank in range(len(plan))]
    few = [micros + [[]] * (multiple - 1) for micros in few]
    if not is_cut:
        return batch, few
    masks = [batch.mask[batch.offsets[i] : batch.offsets[i + 1]][:CUT] for i in chosen]
    return Batch(
        prompt_ids=[batch.prompt_ids[i][-CUT:] for i in chosen],
        response_ids=[batch.response_ids[i][:CUT] for i in chosen],
        groups=batch.groups[chosen].unique(return_inverse=True)[1],
        truncated=batch.truncated[chosen],
        mask=torch.cat(masks) if masks else batch.mask[:0],
    ), few


def _mean(micro: MicroBatch, *, count: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Return this micro-batch's part of the mean log-prob."""
    return torch.where(micro.mask > 0, micro.logprobs, 0.0).sum() / count, {}


def _mean_logprob(model: TrainingEngine, batch: Batch, plan: MicroBatchPlan, count: float) -> float:
    (logprobs,) = model.forward(batch, [plan], ("logprobs",))
    return float(torch.where(batch.mask > 0, logprobs, 0.0).double().sum()) / count


@contextmanager
def _moved(parameter: Parameter | None, number: int, factor: float, centre: float) -> Iterator[Tensor]:
    """Change a parameter by `factor` of the mean of |w + centre|, with the signs of a direction.

    Yields its values.
    """
    if parameter is None:
        yield torch.zeros(0)
        return
    kept = parameter.detach().clone()
    generator = torch.Generator().manual_seed(number)
    signs = torch.randint(2, kept.shape, generator=generator).to(kept.device) * 2.0 - 1.0
    parameter.data.copy_(kept + factor * (kept + centre).abs().mean() * signs)
    yield parameter.detach().double()
    parameter.data.copy_(kept)


def _listed(values: Tensor) -> str:
    return ", ".join(f"{value:.3g}" for value in values.tolist())
