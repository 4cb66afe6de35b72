"""Checks the backward pass of the model: compares its gradient with differences of its log-probs.

A layer that has its own backward pass may have wrong gradients although its outputs are right. Examples are
attention over context parallel ranks, a fused kernel, the experts, and the head. All other comparisons of an
update start from these gradients, so they do not see the error.

After each start of a run, a weight w is changed to w + h s and to w - h s. The difference of the two mean
log-probs must be the one that the gradient of w gives. A second difference, with h / 2, has a quarter of the
error, so the distance between the two differences is tolerated. The weights are the norms of a first layer
before attention and before the MLP or the experts: errors of this and of all later layers reach them. In a
model with adapters they are B of the adapters there, or DoRA's magnitudes. Routers keep the experts that they
chose first.

The signs s are those of the gradient, or random. Along its own signs the change is the largest, so a factor
in the gradient shows even in bfloat16. Random signs show a part that the gradient lacks. In one more
direction, a weight of each kind is scaled, by an amount for which its gradient gives the same change for all
kinds. A weight whose gradient is lost is then scaled the most. If the passes cost less than a share of the
first step (`rl.checks.cost`), all DIRECTIONS are compared in this step, otherwise in the first few steps. The
model is compared with itself, so the choice of tokens does not matter.
"""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from rl.checks.cost import slope_passes
from rl.checks.few_samples import first_samples, shortened, tokens_of
from rl.checks.logprobs import rounding_limit
from rl.data.batch import Batch
from rl.models.layout import Weight
from rl.models.sizes import num_experts
from rl.runtime.collectives import gather_objects, sum_over_world
from rl.training.engine import TrainingEngine
from rl.training.gradients import first_rows
from rl.training.micro_batch_plans import MicroBatchPlan
from rl.training.model import Packed
from rl.training.packing import MicroBatch

DIRECTIONS: list[tuple[int, int] | None] = [(0, 0), None, (1, 0), (0, 1), (1, 1)]
"""Index of the weight, and seed of its random signs; 0: the signs of the gradient. None: weights of all kinds
are scaled."""
STEP = {torch.float32: 2.0**-7, torch.bfloat16: 2.0**-3}
"""Largest step h by dtype, relative to the mean absolute weight of a norm, far above the distance of two
neighbouring numbers."""
CHANGE = {torch.float32: 0.05, torch.bfloat16: 0.4}
"""Change of the mean log-prob above which the step is smaller, in nats; for a norm at least STEP / 2."""
ERRORS = 40
"""Number of standard errors that the change need not exceed: a smaller change is closer to linear."""
TOLERANCE = {torch.float32: (0.01, 0.05), torch.bfloat16: (0.12, 0.25)}
"""Maximum distance of the measured from the expected changes, relative to their size: along the signs of the
gradient, and along random signs."""
NONLINEAR = 0.25
"""Maximum distance between the changes with h and with h / 2, relative to their size. Above it nothing is
compared. For example, with a low temperature log-probs are far from linear in a change of this size."""
GAP = 0.1
"""Difference of log-probs that rounding causes, as a share of its bound (`rounding_limit`). Right runs stay
below it."""
INDEPENDENT = 256
"""Maximum number of tokens whose rounding errors count as independent. There is a maximum because equal
tokens are rounded equally."""
CUT = 64
"""Maximum number of tokens that are kept of a prompt (the last ones) and of a response (the first ones)."""
NORMS = r"(input|post_attention|pre_feedforward)_layernorm"
"""Names of the norms before attention and before the MLP, without the norms of heads."""


SIGNS, RANDOM, SCALES = "the signs of its gradient", "random signs", "the scales"
SCALE = 0.01
"""Change of the mean log-prob when weights of all kinds are scaled, in nats; more if the noise is large."""


class WrongBackward(RuntimeError):
    """Raised on every rank if the gradient of the model is not the slope of its log-probs."""


@dataclass(frozen=True)
class Slope:
    """Changes of the mean log-prob along one direction."""

    names: list[str]
    """Names of the weights."""
    along: str
    """The direction: SIGNS, RANDOM or SCALES."""
    coarse: float
    """Half of the change from w - h s to w + h s."""
    fine: float
    """Change from w - h s / 2 to w + h s / 2."""
    expected: float
    """`fine` according to the gradient."""
    error: float
    """Standard error of `fine` that rounding causes."""


@dataclass(frozen=True)
class WeightMove:
    """How a weight moves, as this rank sees it."""

    parameter: Any
    """None on a rank that learns no part of the weight."""
    gradient: Tensor | None
    share: float
    """The gradient of the weight is the sum of share * gradient over all ranks."""
    path: Tensor | None
    """The largest change of the weight's `first_rows`, float64."""


class SlopeCheck:
    """Compares a model's gradient with changes of its log-probs or values in the first steps after a start.

    output: "logprobs", or "values" of a critic.
    """

    def __init__(self, model: TrainingEngine, output: str = "logprobs"):
        self._model, self._output, self._slopes = model, output, list[Slope]()
        self._left = list(DIRECTIONS)

    @cached_property
    def _kinds(self) -> list[Weight]:
        """A weight of each kind: a name without the numbers of layer and expert.

        No hook sees the gradients that Transformer Engine's products add to the buffers directly.
        """
        learned, kinds = self._model.learned_map, dict[str, list[Weight]]()
        own = [w.hf[0] for w, parameter in learned.local() if getattr(parameter, "adds_in_product", False)]
        hidden = set().union(*gather_objects(own))
        for weight in learned.weights:
            if ".lora_magnitude" in weight.megatron:
                return []  # see `_weights`
            if weight.hf[0] in hidden:
                continue
            kinds.setdefault(re.sub(r"\d+", "*", weight.hf[0]), []).append(weight)
        return [members[7 * place % len(members)] for place, members in enumerate(kinds.values())]

    @cached_property
    def _weights(self) -> list[Weight]:
        """The weights that are changed: in the layer with the first attention, and with the first experts.

        A mixture that is a class of transformers has none, because its routers cannot keep their experts.
        """
        if num_experts(self._model.weight_map.hf) and not isinstance(self._model.chunks[0], Packed):
            return []
        learned = [w for w in self._model.learned_map.weights if w.layer is not None and w.expert is None]
        if self._model.has_frozen_weights:
            # DoRA's gradient of B treats the length of a row as a constant, so that it is not the slope.
            kind = ".lora_magnitude" if any(".lora_magnitude" in w.megatron for w in learned) else ".lora_B."
            own = [w for w in learned if w.layer == 0 and kind in w.megatron]
        else:
            layers = [w.layer for w in self._model.weight_map.weights if w.expert is not None]
            deep = min((layer for layer in layers if layer is not None), default=0)
            norms = [w for w in learned if len(w.shapes[0]) == 1 and re.search(NORMS, w.hf[0])]
            own = [w for w in norms if w.layer == 0][:1] + [w for w in norms if w.layer == deep][-1:]
        return [own[0], own[-1]] if own else []

    def check(self, batch: Batch, plan: MicroBatchPlan, *, noise: float | None = None) -> None:
        """Compare gradient and changes on the first samples of a plan. Raises WrongBackward.

        Afterwards the weights are bitwise unchanged. Collective over the world.

        noise: measured noise of log-probs (`RoundingNoise`), in nats; None uses the bound of rounding.
        """
        missing = len(self._left)
        if not self._weights or not missing:
            return
        tokens, number = slope_passes(int(batch.lengths.sum()), missing)
        batch, few = _first_tokens(batch, plan, tokens=tokens, multiple=self._model.grid.micro_batch_multiple)
        count = float((batch.mask[tokens_of(few, batch)] > 0).sum())
        if count:
            with _fixed_routes(self._model):
                self._measure(batch, few, number, count, noise)
            self._compare(count)

    def _measure(
        self, batch: Batch, few: MicroBatchPlan, number: int, count: float, noise: float | None
    ) -> None:
        """Measure along the next directions. count: number of counted tokens of the plan."""
        model, dtype = self._model, self._model.weight_map.dtype
        output = self._output
        mean = _mean_output(model, batch, few, count, output)  # and the routers choose
        # The rounding error of log-probs is in proportion to their size.
        error = 2 * noise if noise else GAP * max(1.0, abs(mean)) * rounding_limit(model.weight_map.hf, dtype)
        error *= math.sqrt(2 / min(count, INDEPENDENT))
        loss = partial(_mean, mask=batch.mask, count=count, output=output)
        weights = [*self._weights, *self._kinds]
        parts = model.gradients(batch, few, loss, weights, output)
        own = torch.zeros(1, dtype=torch.float64)
        own[0] = sum(float(part[1].abs().sum()) for part in parts[:2] if part[1] is not None)
        if not sum_over_world(own, model.device.torch):  # for example, a new value head is 0
            return

        def slope_of(of: Sequence[Weight], along: str, moves: Sequence[WeightMove]) -> Slope:
            changes, by_gradient = [], torch.zeros(1, dtype=torch.float64)
            for half in (1.0, 0.5):
                means, ends = [], []
                for step in (half, -half):
                    with ExitStack() as stack:
                        ends.append([stack.enter_context(_moved(move, step)) for move in moves])
                        means.append(_mean_output(model, batch, few, count, output))
                changes.append((means[0] - means[1]) / 2 / half)
            for move, up, down in zip(moves, *ends):
                if move.gradient is not None:
                    by_gradient[0] += move.share * float(((up - down) * move.gradient).sum())
            (expected,) = sum_over_world(by_gradient, model.device.torch).tolist()
            return Slope([w.hf[0] for w in of], along, changes[0], changes[1], expected, error)

        for direction in self._left[:number]:
            if direction is None:
                moves = self._scales(parts[2:], error)
                slope = slope_of(weights[2:], SCALES, moves)
                if moves and not slope.expected and not slope.fine:
                    continue  # new adapters: B is 0 until the first update
                if self._is_wrong([slope]):  # find the weight
                    alone = (slope_of([weight], SCALES, [move]) for weight, move in zip(weights[2:], moves))
                    slope = next((each for each in alone if self._is_wrong([each])), slope)
            else:
                (parameter, gradient, share), seed = parts[direction[0]], direction[1]
                path = None if parameter is None else _signs(first_rows(parameter), gradient, seed)
                step = self._step_of(parameter, gradient, path, share, error=error, is_random=seed > 0)
                move = WeightMove(parameter, gradient, share, None if path is None else step * path)
                slope = slope_of([weights[direction[0]]], RANDOM if seed else SIGNS, [move])
            self._left.remove(direction)
            self._slopes.append(slope)

    def _scales(self, parts: list[tuple[Any, Tensor | None, float]], error: float) -> list[WeightMove]:
        """Return moves that scale the weights of `_kinds`. Collective over the world.

        parts: result of `TrainingEngine.gradients`. error: standard error of a change, in nats.
        """
        if not parts:
            return []
        slopes, dtype = torch.zeros(len(parts), dtype=torch.float64), self._model.weight_map.dtype
        for place, (parameter, gradient, share) in enumerate(parts):
            if gradient is not None:
                slopes[place] = share * float((first_rows(parameter.detach()) * gradient).sum())
        slopes = sum_over_world(slopes, self._model.device.torch)
        most = max(SCALE, ERRORS * error) / len(parts)
        scales = [min(STEP[dtype], most / max(abs(slope), 1e-9)) for slope in slopes.tolist()]
        signs = [1.0 if slope < 0 else -1.0 for slope in slopes.tolist()]  # the changes add up
        return [
            WeightMove(
                *part, None if part[0] is None else sign * scale * first_rows(part[0].detach()).double()
            )
            for part, sign, scale in zip(parts, signs, scales)
        ]

    def _step_of(
        self,
        parameter: Any,
        gradient: Tensor | None,
        signs: Tensor | None,
        share: float,
        *,
        error: float,
        is_random: bool,
    ) -> float:
        """Return the step h, identical on all ranks. Collective over the world.

        error: standard error of a change, in nats.
        """
        model, dtype = self._model, self._model.weight_map.dtype
        found = torch.zeros(3, dtype=torch.float64)
        if parameter is not None and parameter.dim() == 1:
            centre = float(model.chunks[0].config.layernorm_zero_centered_gamma)  # then w is added to 1
            found[:2] = torch.tensor([float((parameter.detach() + centre).abs().mean()), 1.0])
        if gradient is not None and signs is not None:
            found[2] = share * float(gradient.square().sum() if is_random else (gradient * signs).sum())
        size, holders, slope = sum_over_world(found, model.device.torch).tolist()
        change = min(CHANGE[dtype], max(CHANGE[torch.float32], ERRORS * error))
        step = change / max(1e-9, math.sqrt(slope) if is_random else slope)
        largest = STEP[dtype] * size / holders if holders else math.inf
        return min(largest, max(step, largest / 2)) if holders else step

    def _compare(self, count: float) -> None:
        """Compare all changes that were measured so far. count: see `_measure`."""
        groups = [[slope] for slope in self._slopes if slope.along != RANDOM]
        groups.append([slope for slope in self._slopes if slope.along == RANDOM])
        for group in groups:
            if self._is_wrong(group):
                names = ", ".join(dict.fromkeys(name for slope in group for name in slope.names))
                measured, expected = ([getattr(s, key) for s in group] for key in ("fine", "expected"))
                raise WrongBackward(
                    f"the gradient of the model is not the slope of its log-probs: along {group[0].along} "
                    f"in {names} the mean of the {self._output} of {count:.0f} tokens changes by "
                    f"{_listed(measured)}, but by {_listed(expected)} according to the gradient. The "
                    "backward pass of a layer, of the experts, of an adapter, of the head, or of the "
                    "communication between the ranks that share a sample (tp, cp, pp) is wrong."
                )

    def _is_wrong(self, group: Sequence[Slope]) -> bool:
        """Return whether the measured changes of a group differ from the expected ones."""
        otherwise, of_random = TOLERANCE[self._model.weight_map.dtype]
        coarse, fine, expected, errors = (
            torch.tensor([(s.coarse, s.fine, s.expected, s.error) for s in group], dtype=torch.float64)
            .view(-1, 4)
            .T
        )
        curvature = float((coarse - fine).norm())
        if not group or curvature > NONLINEAR * float(fine.norm()):
            return False
        tolerance = of_random if group[0].along == RANDOM else otherwise
        size = max(float(fine.norm()), float(expected.norm()))
        # The errors of n changes have a norm of about sqrt(n) times one error.
        rounding = (1 + 2 / math.sqrt(len(group))) * float(errors.norm())
        return float((fine - expected).norm()) > tolerance * size + curvature + rounding


class _KeptRoutes:
    """Gives a router the experts that it chose in the first pass over as many tokens."""

    def __init__(self) -> None:
        self._chosen: dict[torch.Size, Tensor] = {}

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default: Any
    ) -> tuple[Tensor, Tensor]:
        if scores.shape not in self._chosen:
            self._chosen[scores.shape] = default(scores, topk, num_groups, group_topk)[1]
        chosen = self._chosen[scores.shape]
        return scores.gather(1, chosen), chosen


@contextmanager
def _fixed_routes(model: TrainingEngine) -> Iterator[None]:
    """Let every router of this rank keep its first choice of experts in the `with` block."""
    routers: list[Any] = [
        module for chunk in model.chunks for module in chunk.modules() if isinstance(module, TopKRouter)
    ]
    kept = [(router.router_replay, router.config.moe_router_fusion) for router in routers]
    for router in routers:
        router.router_replay, router.config.moe_router_fusion = _KeptRoutes(), False
    try:
        yield
    finally:
        for router, (replay, is_fused) in reversed(list(zip(routers, kept))):
            router.router_replay, router.config.moe_router_fusion = replay, is_fused


def _signs(parameter: Tensor, gradient: Tensor | None, seed: int) -> Tensor:
    """Return the direction of a parameter, float64 of its shape. seed: see DIRECTIONS."""
    generator = torch.Generator().manual_seed(seed)
    signs = (torch.randint(2, parameter.shape, generator=generator) * 2.0 - 1.0).to(parameter.device).double()
    if seed or gradient is None:
        return signs
    return torch.where(gradient == 0, signs, gradient.sign())


@contextmanager
def _moved(move: WeightMove, step: float) -> Iterator[Tensor]:
    """Add `step * move.path` to a weight in the `with` block, and yield the moved values, float64."""
    if move.parameter is None or move.path is None:
        yield torch.zeros(0)
        return
    own = first_rows(move.parameter.detach())
    kept = own.clone()
    own.copy_(kept.double() + step * move.path)
    yield own.double()
    own.copy_(kept)


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
    return (shortened(batch, chosen, limit) if is_cut else batch), micros


def _mean(micro: MicroBatch, *, mask: Tensor, count: float, output: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the contribution of this micro-batch to the mean output. mask: mask of the whole batch."""
    found = micro.output(output)
    counted = mask[micro.column_index.to(mask.device)].to(found.device) > 0
    return torch.where(counted, found, 0.0).sum() / count, {}


def _mean_output(
    model: TrainingEngine, batch: Batch, plan: MicroBatchPlan, count: float, output: str
) -> float:
    (found,) = model.forward(batch, [plan], (output,))
    return float(torch.where(batch.mask > 0, found, 0.0).double().sum()) / count


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)
