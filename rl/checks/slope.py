"""Checks the backward pass of the model: compares its gradient with differences of its log-probs.

A layer that has its own backward pass may have wrong gradients although its outputs are right. Examples are
attention over context parallel ranks, a fused kernel, and the head. All other comparisons of an update start
from the gradients of these layers, so they do not see the error.

After each start of a run, the weights w of the first layer's norm are changed to w + r s |w| and to w - r s
|w|. Here s are random signs, and |w| is the mean of the absolute weights. Half of the difference between the
two mean log-probs is the slope of the mean log-prob along r s |w|. The gradient of w must give the same
slope. The gradient of the first norm is used because errors of all later layers reach it. A second
difference, with r / 2, has a quarter of the error. The distance between the two differences is therefore
tolerated.

There are four directions s. If their passes cost less than COST of the first step, all are compared in this
step, otherwise in the first few steps. For example, a step of 400,000 tokens compares four directions with
512 tokens, and a step of 4,000 tokens compares one direction with 22. The model is compared with itself, so
the choice of tokens does not matter.

Models with routed experts are not compared, because another w sends some tokens to other experts. Models with
adapters are not compared, because their norms do not learn.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from rl.checks.few_samples import first_samples, tokens_of
from rl.checks.logprobs import rounding_limit
from rl.data.batch import Batch
from rl.models.layout import Weight
from rl.models.placement import count_experts
from rl.runtime.collectives import sum_over_world
from rl.training.engine import TrainingEngine
from rl.training.micro_batch_plans import MicroBatchPlan
from rl.training.packing import MicroBatch

DIRECTIONS = 4
"""Number of directions s."""
STEP = {torch.float32: 2.0**-7, torch.bfloat16: 2.0**-4}
"""Factor r by dtype. It is far above the distance of two neighbouring numbers. The slope has an error of
about r^2."""
TOLERANCE = {torch.float32: 0.05, torch.bfloat16: 0.25}
"""Maximum distance of the measured slopes from the slopes by the gradient, relative to their size."""
NONLINEAR = 0.25
"""Maximum distance between the slopes with r and with r / 2, relative to their size. Above it nothing is
compared. For example, with a low temperature log-probs are far from linear in a change of this size."""
GAP = 0.1
"""Difference of log-probs that rounding causes, as a share of its bound (`rounding_limit`). Right runs stay
below it."""
INDEPENDENT = 256
"""Maximum number of tokens whose rounding errors count as independent. There is a maximum because equal
tokens are rounded equally."""
CUT = 64
"""Maximum number of tokens that are kept of a prompt (the last ones) and of a response (the first ones)."""
TOKENS = range(8, 512)
"""Possible numbers of tokens in a pass, including prompts."""
COST = 0.01
"""Largest cost of the comparison, relative to the cost of a step. A backward pass counts as two forward
passes. Therefore generating and learning from T response tokens counts as a forward pass over at least 4 T
tokens."""


class WrongBackward(RuntimeError):
    """Raised on every rank if the gradient of the model is not the slope of its log-probs."""


@dataclass(frozen=True)
class Slope:
    """The slopes along one direction, and the rounding error."""

    coarse: float
    """Change of the mean log-prob for the factor r."""
    fine: float
    """Twice the change of the mean log-prob for the factor r / 2."""
    gradient: float
    """Change for the factor r according to the gradient."""
    error: float
    """Standard error of `fine` that rounding causes."""


class SlopeCheck:
    """Compares a model's gradient with slopes of its log-probs in the first steps after a start."""

    def __init__(self, model: TrainingEngine):
        self._model, self._slopes = model, list[Slope]()

    @cached_property
    def _norm(self) -> Weight | None:
        """Weight of the norm that is changed; None if the model is not compared."""
        model = self._model
        vectors = [w for w in model.learned_map.weights if w.layer == 0 and len(w.shapes[0]) == 1]
        norms = [w for w in vectors if w.expert is None and "norm" in w.hf[0]]
        return norms[0] if norms and not count_experts(model.weight_map.weights) else None

    def check(self, batch: Batch, plan: MicroBatchPlan, *, noise: float | None = None) -> None:
        """Compare gradient and slopes on the first samples of a plan. Raises WrongBackward.

        Afterwards the weights are bitwise unchanged. Collective over the world.

        noise: measured noise of log-probs (`RoundingNoise`), in nats; None uses the bound of rounding.
        """
        missing = DIRECTIONS - len(self._slopes)
        if self._norm is None or not missing:
            return
        budget = int(COST * 4 * int(batch.lengths.sum()))
        tokens = min(max(budget // 7, TOKENS.start), TOKENS.stop)  # a gradient and four forward passes
        numbers = max(1, min(missing, (budget - 3 * tokens) // (4 * tokens)))
        batch, few = _first_tokens(batch, plan, tokens=tokens, multiple=self._model.grid.micro_batch_multiple)
        count = float((batch.mask[tokens_of(few, batch)] > 0).sum())
        if count:
            self._measure(batch, few, range(len(self._slopes), len(self._slopes) + numbers), count, noise)
            self._compare(count)

    def _measure(
        self, batch: Batch, few: MicroBatchPlan, directions: Sequence[int], count: float, noise: float | None
    ) -> None:
        """Measure the slopes along these directions and store them. count: number of counted tokens of the
        plan."""
        model, norm = self._model, self._norm
        assert norm is not None
        hf, dtype = model.weight_map.hf, model.weight_map.dtype
        centre = float(model.chunks[0].config.layernorm_zero_centered_gamma)  # then w is added to 1
        parameter, gradient = model.gradient(batch, few, partial(_mean, mask=batch.mask, count=count), norm)
        along = torch.zeros(len(directions), dtype=torch.float64)
        found: list[list[float]] = []
        size = 1.0  # the rounding error of log-probs is in proportion to their size
        for place, number in enumerate(directions):
            slopes = []
            for half in range(2):
                step, means, ends = STEP[dtype] / (1 + half), [], []
                for factor in (step, -step):
                    with _moved(parameter, number, factor, centre) as value:
                        means.append(_mean_logprob(model, batch, few, count))
                        ends.append(value)
                slopes.append((means[0] - means[1]) / 2 * (1 + half))
                size = max(size, *map(abs, means))
            found.append(slopes)
            if gradient is not None:
                along[place] = float((ends[0] - ends[1]).mul(gradient).sum())
        error = 2 * noise if noise else GAP * size * rounding_limit(hf, dtype)
        error *= math.sqrt(2 / min(count, INDEPENDENT))
        along = sum_over_world(along, model.device.torch)
        self._slopes += [
            Slope(coarse, fine, value, error)
            for (coarse, fine), value in zip(found, along.tolist(), strict=True)
        ]

    def _compare(self, count: float) -> None:
        """Compare all slopes that were measured so far. count: see `_measure`."""
        model, norm = self._model, self._norm
        assert norm is not None
        coarse, fine, along, errors = torch.tensor(
            [(s.coarse, s.fine, s.gradient, s.error) for s in self._slopes], dtype=torch.float64
        ).T
        curvature = float((coarse - fine).norm())
        if curvature > NONLINEAR * float(fine.norm()):
            return
        gap, slope = float((fine - along).norm()), max(float(fine.norm()), float(along.norm()))
        # The errors of n slopes have a norm of about sqrt(n) times one error. The bound is 4 standard errors
        # above it.
        rounding = (1 + 4 / math.sqrt(len(fine))) * float(errors.norm())
        if gap > TOLERANCE[model.weight_map.dtype] * slope + curvature + rounding:
            raise WrongBackward(
                f"the gradient of the model is not the slope of its log-probs: along {len(fine)} changes of "
                f"{norm.hf[0]} the mean log-prob of {count:.0f} tokens changes by {_listed(fine)}, but by "
                f"{_listed(along)} according to the gradient. The backward pass of a layer, of the head, or "
                "of the communication between the ranks that share a sample (tp, cp, pp) is wrong."
            )


def _first_tokens(
    batch: Batch, plan: MicroBatchPlan, *, tokens: int, multiple: int
) -> tuple[Batch, MicroBatchPlan]:
    """Return the first samples of a plan, shortened to CUT and with about `tokens` tokens in all, and their
    plan.

    Each sample stays on its data parallel rank. Samples with images are not shortened, because the model must
    find every token of an image. multiple: number whose multiple the number of micro-batches of a pass must
    be (`Grid.micro_batch_multiple`).
    """
    is_cut = not any(prompt.images for prompt in batch.prompts)
    limit = min(CUT, tokens // 2) if is_cut else int(batch.lengths.max())

    def size(sample: int) -> int:
        is_counted = batch.mask[batch.offsets[sample] : batch.offsets[sample + 1]][:limit] > 0
        whole = len(batch.prompt_ids[sample][-limit:]) + len(batch.response_ids[sample][:limit])
        return whole if is_counted.any() else 0

    few = first_samples(plan, size, enough=tokens)
    chosen = sorted(i for samples in few for i in samples)
    places = {sample: place for place, sample in enumerate(chosen)} if is_cut else {i: i for i in chosen}
    micros = [[[places[i] for i in samples]] + [[]] * (multiple - 1) for samples in few]
    if not is_cut:
        return batch, micros
    masks = [batch.mask[batch.offsets[i] : batch.offsets[i + 1]][:limit] for i in chosen]
    return Batch(
        prompt_ids=[batch.prompt_ids[i][-limit:] for i in chosen],
        response_ids=[batch.response_ids[i][:limit] for i in chosen],
        groups=batch.groups[chosen].unique(return_inverse=True)[1],
        truncated=batch.truncated[chosen],
        mask=torch.cat(masks) if masks else batch.mask[:0],
    ), micros


def _mean(micro: MicroBatch, *, mask: Tensor, count: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the contribution of this micro-batch to the mean log-prob. mask: mask of the whole batch."""
    counted = mask[micro.column_index.to(mask.device)].to(micro.logprobs.device) > 0
    return torch.where(counted, micro.logprobs, 0.0).sum() / count, {}


def _mean_logprob(model: TrainingEngine, batch: Batch, plan: MicroBatchPlan, count: float) -> float:
    (logprobs,) = model.forward(batch, [plan], ("logprobs",))
    return float(torch.where(batch.mask > 0, logprobs, 0.0).double().sum()) / count


@contextmanager
def _moved(parameter: Tensor | None, number: int, factor: float, centre: float) -> Iterator[Tensor]:
    """Move a parameter w along a direction in the `with` block, and yield the moved values.

    Each element changes by `factor` times the mean of |w + centre|, with the sign of the direction `number`.
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
