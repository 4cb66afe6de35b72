"""Checks the backward pass of the model: compares its gradient with differences of its log-probs.

A weight w is changed to w + h s and to w - h s. The difference of the two mean log-probs must be the one that
the gradient of w gives. A second difference, with h / 2, has a quarter of the error, so the distance between
the two differences is tolerated. If both disagree with the gradient, differences with h / 4, h / 8, ... count
instead until rounding dominates: with few tokens, whose rounding errors are large, h is large. Errors of all
layers reach the norms of a first layer (in a model with adapters B, or DoRA's magnitudes).

The signs s are those of the gradient, along which a factor shows even in bfloat16, or random, which shows a
part that the gradient lacks. In one more direction a weight of each kind is scaled by an amount for which its
gradient gives the same change for all kinds; a weight whose gradient is lost is scaled the most.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from rl.checks.cost import slope_passes
from rl.checks.few_samples import first_samples, shortened, tokens_of
from rl.checks.logprobs import rounding_limit
from rl.data.batch import Batch
from rl.models.layout import Weight
from rl.models.sizes import num_experts
from rl.runtime.collectives import gather_texts, sum_over_world
from rl.runtime.names import one_of_each_kind
from rl.training.engine import TrainingEngine
from rl.training.gradients import first_rows
from rl.training.micro_batch_plans import MicroBatchPlan, samples_of
from rl.training.model import Packed
from rl.training.packing import MicroBatch

DIRECTIONS: list[tuple[int, int] | None] = [(0, 0), None, (1, 0), (0, 1), (1, 1)]
"""Index of the weight, and seed of its random signs; 0: the gradient's. None: all kinds are scaled."""
STEP = {torch.float32: 2.0**-7, torch.bfloat16: 2.0**-3}
"""Largest step h by dtype, relative to the mean absolute weight of a norm."""
CHANGE = {torch.float32: 0.05, torch.bfloat16: 0.4}
"""Change of the mean log-prob above which the step is smaller, in nats; for a norm at least STEP / 2."""
SCALE = 0.01
"""Change of the mean log-prob when weights of all kinds are scaled, in nats; more if the noise is large."""
LOST = 0.125
"""Relative change of weights whose gradient is 0. They are scaled together: then nothing may change."""
ERRORS = 40
"""Number of standard errors that the change need not exceed: a smaller change is closer to linear."""
TOLERANCE = {torch.float32: (0.01, 0.05), torch.bfloat16: (0.12, 0.25)}
"""Maximum relative distance of measured and expected changes: along the gradient's signs, and random ones."""
NONLINEAR = 0.25
"""Maximum relative distance of the changes with h and with h / 2, above which nothing is compared."""
CLEAR = 20
"""Number of standard errors that a disagreement needs for smaller steps to be tried. Functions with kinks,
such as clamps, have equal changes with two steps by chance."""
GAP = 0.1
"""Difference of log-probs that rounding causes in right runs, as a share of its bound (`rounding_limit`)."""
INDEPENDENT = 256
"""Maximum number of tokens whose rounding errors count as independent: equal tokens are rounded equally."""
CUT = 160
"""Maximum number of tokens that are kept of a prompt (the last ones) and of a response (the first ones), so
large that attention divides the groups of samples that share a prompt (`rl.training.rows`)."""
SHORT = 64
"""Number of tokens up to which a sample with recorded experts is not shortened, also in a small step."""
NORMS = r"(input|post_attention|pre_feedforward)_layernorm"
"""Names of the norms before attention and before the MLP, without the norms of heads."""
SIGNS, RANDOM, SCALES = "the signs of its gradient", "random signs", "the scales"


class WrongBackward(RuntimeError):
    """Raised on every rank if the gradient of the model is not the slope of its log-probs."""


class Slope(NamedTuple):
    """Changes of the mean log-prob along one direction of some weights.

    along: SIGNS, RANDOM or SCALES. coarse: half of the change with h. fine: change with h / 2. expected:
    `fine` by the gradient. error: standard error of `fine` that rounding causes.
    """

    names: str
    along: str
    coarse: float
    fine: float
    expected: float
    error: float


class WeightMove(NamedTuple):
    """How a weight moves. path: the largest change of `first_rows`, float64. See
    `TrainingEngine.gradients`."""

    parameter: Any
    gradient: Any
    share: float
    path: Any


class SlopeCheck:
    """Compares a model's gradient with changes of its output, "logprobs" or "values", in the first steps."""

    def __init__(self, model: TrainingEngine, output: str = "logprobs"):
        self._model, self._output, self._slopes = model, output, list[Slope]()
        self._left = list(DIRECTIONS)

    @cached_property
    def _kinds(self) -> list[Weight]:
        """A weight of each kind (`one_of_each_kind`); none in a model with DoRA (`_weights`).

        No hook sees the gradients that Transformer Engine's products add to the buffers directly.
        """
        learned = self._model.learned_map
        own = [w.hf[0] for w, parameter in learned.local() if getattr(parameter, "adds_in_product", False)]
        hidden = set(gather_texts(own))
        if any(".lora_magnitude" in weight.megatron for weight in learned.weights):
            return []
        return one_of_each_kind([w for w in learned.weights if w.hf[0] not in hidden], lambda w: w.hf[0])

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

        Afterwards the weights are bitwise unchanged. noise: measured noise of log-probs (`RoundingNoise`), in
        nats; None uses the bound of rounding. Collective over the world.
        """
        if not self._left or not self._weights:
            return
        tokens, number = slope_passes(int(batch.lengths.sum()), len(self._left))
        batch, few = _first_tokens(batch, plan, tokens=tokens, multiple=self._model.grid.micro_batch_multiple)
        if count := float((batch.mask[tokens_of(few, batch)] > 0).sum()):
            with _fixed_routes(self._model):
                self._measure(batch, few, number, count, noise)
            self._compare(count)

    def _measure(
        self, batch: Batch, few: MicroBatchPlan, number: int, count: float, noise: float | None
    ) -> None:
        """Measure along the next directions. count: number of counted tokens of the plan."""
        model, dtype, output = self._model, self._model.weight_map.dtype, self._output

        def mean_output() -> float:
            (found,) = model.forward(batch, [few], (output,))
            return float(torch.where(batch.mask > 0, found, 0.0).double().sum()) / count

        def loss(micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            found = micro.output(output)
            counted = batch.mask[micro.column_index.to(batch.mask.device)].to(found.device) > 0
            return torch.where(counted, found, 0.0).sum() / count, {}

        mean = mean_output()  # and the routers choose
        # The rounding error of log-probs is in proportion to their size.
        error = 2 * noise if noise else GAP * max(1.0, abs(mean)) * rounding_limit(model.weight_map.hf, dtype)
        error *= math.sqrt(2 / min(count, INDEPENDENT))
        weights = [*self._weights, *self._kinds]
        parts = model.gradients(batch, few, loss, weights, output)
        sizes = [None if gradient is None else gradient.abs().sum() for _, gradient, _ in parts[:2]]
        if output == "values" and not any(self._summed(sizes)):
            return  # a new value head is 0

        def slope_of(names: str, along: str, moves: Sequence[WeightMove]) -> Slope:
            own = [move for move in moves if move.parameter is not None]

            def change(half: float) -> tuple[float, list[tuple[Tensor, ...]]]:
                """Return half of the change with 2 * half * h, and the values of each weight at both ends."""
                means, ends = [], []
                for step in (half, -half):
                    with ExitStack() as stack:
                        ends.append([stack.enter_context(_moved(move, step)) for move in own])
                        means.append(mean_output())
                return (means[0] - means[1]) / 2 / half, list(zip(*ends))

            def measured(half: float, coarse: float | None = None) -> Slope:
                fine, ends = change(half)
                terms = [move.share * ((u - d) * move.gradient).sum() for move, (u, d) in zip(own, ends)]
                expected = self._summed([sum(terms)])[0] / 2 / half
                coarse = fine if coarse is None else coarse
                return Slope(names, along, coarse, fine, expected, error / 2 / half)

            slope = measured(0.5)
            if along == RANDOM or self._is_wrong([slope]):  # curvature may explain it
                slope = slope._replace(coarse=change(1.0)[0])
            half = 0.5
            while self._is_wrong([slope]):  # steps may be too large, with equal changes by chance
                finer = measured(half := half / 2, slope.fine)
                is_equal = abs(finer.fine - slope.fine) <= 3 * finer.error
                is_last = CLEAR * finer.error > abs(slope.fine - slope.expected)
                if is_equal and is_last or not finer.expected:
                    break  # an even smaller step would show only rounding, or change no weight
                slope = finer
            return slope

        for direction in self._left[:number]:
            if direction is None:
                names = [weight.hf[0] for weight in self._kinds]
                moves, lost = self._scales(parts[2:], error)
                slope = slope_of(", ".join(names), SCALES, moves)
                if moves and not slope.expected and not slope.fine:
                    continue  # new adapters: B is 0 until the first update
                if self._is_wrong([slope]):  # find the weight
                    alone = (slope_of(name, SCALES, [move]) for name, move in zip(names, moves))
                    slope = next((each for each in alone if self._is_wrong([each])), slope)
                elif lost:
                    slope = slope_of(", ".join(names[n] for n in lost), SCALES, list(lost.values()))
            else:
                place, seed = direction
                along, move = RANDOM if seed else SIGNS, self._signed(*parts[place], seed, error)
                slope = slope_of(weights[place].hf[0], along, [move])
            self._left.remove(direction)
            self._slopes.append(slope)

    def _summed(self, own: Sequence[Tensor | float | None]) -> list[float]:
        """Return the sums over the world of this rank's numbers; None counts as 0. Collective."""
        mine = torch.tensor([0.0 if x is None else float(x) for x in own], dtype=torch.float64)
        return sum_over_world(mine, self._model.device.torch).tolist()

    def _scales(
        self, parts: list[tuple[Any, Any, float]], error: float
    ) -> tuple[list[WeightMove], dict[int, WeightMove]]:
        """Return moves that scale the weights of `_kinds`, and larger ones of those without a gradient.

        parts: result of `TrainingEngine.gradients`. error: of a change, in nats. Collective over the world.
        """
        rows = [None if part[0] is None else first_rows(part[0].detach()).double() for part in parts]
        terms = [
            (None, None) if own is None else (share * (own * gradient).sum(), gradient.abs().sum())
            for own, (_, gradient, share) in zip(rows, parts)
        ]
        slopes, sizes = (self._summed(column) for column in zip(*terms)) if terms else ([], [])
        most, step = max(SCALE, ERRORS * error) / max(1, len(parts)), STEP[self._model.weight_map.dtype]
        # With these signs the changes add up.
        scales = [min(step, most / max(abs(slope), 1e-9)) * (1 if slope < 0 else -1) for slope in slopes]

        def move(number: int, scale: float) -> WeightMove:
            own = rows[number]
            return WeightMove(*parts[number], None if own is None else scale * own)

        lost = {number: move(number, LOST) for number, size in enumerate(sizes) if not size}
        return [move(*pair) for pair in enumerate(scales)], lost

    def _signed(self, parameter: Any, gradient: Any, share: float, seed: int, error: float) -> WeightMove:
        """Return a move by the step h along signs, with h identical on all ranks. Collective over the world.

        seed: see DIRECTIONS. error: standard error of a change, in nats.
        """
        model, dtype, signs, slope, size = self._model, self._model.weight_map.dtype, None, None, None
        if parameter is not None:
            shape, generator = first_rows(parameter).shape, torch.Generator().manual_seed(seed)
            signs = (torch.randint(2, shape, generator=generator) * 2.0 - 1.0).to(parameter.device).double()
            signs = signs if seed else torch.where(gradient == 0, signs, gradient.sign())
            slope = share * (gradient.square() if seed else gradient * signs).sum()
            if parameter.dim() == 1:
                centre = float(model.chunks[0].config.layernorm_zero_centered_gamma)  # then w is added to 1
                size = (parameter.detach() + centre).abs().mean()
        sizes, holders, total = self._summed([size, None if size is None else 1.0, slope])
        change = min(CHANGE[dtype], max(CHANGE[torch.float32], ERRORS * error))
        step = change / max(1e-9, math.sqrt(total) if seed else total)
        if holders:
            largest = STEP[dtype] * sizes / holders
            step = min(largest, max(step, largest / 2))
        elif not total:  # no gradient reaches an adapter
            step = min(STEP[dtype], 2.0**-5)
        return WeightMove(parameter, gradient, share, None if signs is None else step * signs)

    def _compare(self, count: float) -> None:
        """Compare all changes that were measured so far. count: see `_measure`."""
        groups = [[slope] for slope in self._slopes if slope.along != RANDOM]
        linear = [s for s in self._slopes if abs(s.coarse - s.fine) <= NONLINEAR * abs(s.fine)]
        for group in [*groups, [slope for slope in linear if slope.along == RANDOM]]:
            if self._is_wrong(group):
                names = ", ".join(dict.fromkeys(slope.names for slope in group))
                found = ", ".join(f"{slope.fine:.3g}" for slope in group)
                expected = ", ".join(f"{slope.expected:.3g}" for slope in group)
                raise WrongBackward(
                    f"the gradient of the model is not the slope of its log-probs: along {group[0].along} "
                    f"in {names} the mean of the {self._output} of {count:.0f} tokens changes by {found}, "
                    f"but the gradient gives {expected}: wrong is {' or '.join(self._parts)}."
                )

    @property
    def _parts(self) -> list[str]:
        """Parts of this model that have a backward pass of their own."""
        found, sharing = ["the backward pass of a layer", "of the head"], self._model.grid.sharing
        found += ["of the experts"] * bool(num_experts(self._model.weight_map.hf))
        found += ["of an adapter"] * self._model.has_frozen_weights
        return found + [f"of communication between ranks that share a sample ({sharing})"] * bool(sharing)

    def _is_wrong(self, group: Sequence[Slope]) -> bool:
        """Return whether the measured changes of a group differ from the expected ones."""
        if not group:
            return False
        coarse, fine, expected, errors = torch.tensor([s[2:] for s in group], dtype=torch.float64).T
        curvature = float((coarse - fine).norm())
        if curvature > NONLINEAR * float(fine.norm()):
            return False
        tolerance = TOLERANCE[self._model.weight_map.dtype][group[0].along == RANDOM]
        size = max(float(fine.norm()), float(expected.norm()))
        # The errors of n changes have a norm of about sqrt(n) times one error.
        rounding = (1 + 2 / math.sqrt(len(group))) * float(errors.norm())
        return float((fine - expected).norm()) > tolerance * size + curvature + rounding


@contextmanager
def _fixed_routes(model: TrainingEngine) -> Iterator[None]:
    """Let every router keep its first choice of experts in the block, also through its replay of experts."""
    modules = [module for chunk in model.chunks for module in chunk.modules()]
    routers: list[Any] = [module for module in modules if isinstance(module, TopKRouter)]
    kept = [(router.router_replay, router.config.moe_router_fusion) for router in routers]
    for router, (replay, _) in zip(routers, kept):
        router.config.moe_router_fusion = False
        router.router_replay = replay or SimpleNamespace(get_replay_topk=_own_choice)
        choose = router.router_replay.get_replay_topk
        router.router_replay.get_replay_topk = partial(_first_choice, {}, choose)
    try:
        yield
    finally:
        for router, (replay, is_fused) in reversed(list(zip(routers, kept))):
            del router.router_replay.get_replay_topk  # the class has its own
            router.router_replay, router.config.moe_router_fusion = replay, is_fused


def _own_choice(*given: Any) -> Any:
    *arguments, default = given
    return default(*arguments)


def _first_choice(chosen: dict, choose: Callable, *given: Any) -> tuple[Tensor, Tensor]:
    """Let `choose` see the experts of the first pass over as many tokens as the router's own choice.

    given: scores, numbers of experts and groups, and the function by which the router chooses.
    """
    *arguments, default = given

    def first(scores: Tensor, *options: int) -> tuple[Tensor, Tensor]:
        if scores.shape not in chosen:
            chosen[scores.shape] = default(scores, *options)[1]
        return scores.gather(1, chosen[scores.shape]), chosen[scores.shape]

    return choose(*arguments, first)


@contextmanager
def _moved(move: WeightMove, step: float) -> Iterator[Tensor]:
    """Add `step * move.path` to a weight in the `with` block, and yield the moved values, float64."""
    own = first_rows(move.parameter.detach())
    kept = own.clone()
    own.copy_(kept.double() + step * move.path)
    yield own.double()
    own.copy_(kept)


def _first_tokens(
    batch: Batch, plan: MicroBatchPlan, *, tokens: int, multiple: int
) -> tuple[Batch, MicroBatchPlan]:
    """Return the first samples of a plan, shortened to CUT, with about `tokens` tokens, and their plan.

    Each sample stays on its data parallel rank. Samples with images stay whole, and so do samples with
    recorded experts, if some are short enough. multiple: `Grid.micro_batch_multiple`.
    """
    whole = (batch.prompt_lengths + batch.lengths).tolist()
    most = math.inf if any(prompt.images for prompt in batch.prompts) else max(tokens, SHORT)
    is_whole = most == math.inf or bool(batch.held) and any(whole[i] <= most for i in samples_of(plan))
    limit = max(whole) if is_whole else min(CUT, tokens // 2)

    def size(sample: int) -> int:
        is_counted = batch.mask[batch.offsets[sample] : batch.offsets[sample + 1]][:limit] > 0
        own = len(batch.prompt_ids[sample][-limit:]) + len(batch.response_ids[sample][:limit])
        return own if is_counted.any() and not (is_whole and own > most) else 0

    few = first_samples(plan, size, enough=tokens)
    chosen = sorted(i for samples in few for i in samples)
    places = {i: i if is_whole else place for place, i in enumerate(chosen)}
    micros = [[[places[i] for i in samples]] + [[]] * (multiple - 1) for samples in few]
    return (batch if is_whole else shortened(batch, chosen, limit)), micros
