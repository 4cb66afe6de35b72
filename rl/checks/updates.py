"""Checks the updates of a step: their learning rate, tokens, gradient and effect."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl.checks.batches import CheckFailed, expect, refuse, token_place
from rl.checks.logprobs import NUM_EQUAL
from rl.config.needs import learns_from_samples
from rl.config.objective import Objective
from rl.config.schema import Config, Optimizer
from rl.data.batch import Batch
from rl.runtime.collectives import any_rank, gather_objects, gather_texts, sum_over_world
from rl.training.audit import is_sampled
from rl.training.engine import MicroBatchLoss, TrainingEngine, UpdateResult
from rl.training.loss import Totals
from rl.training.micro_batch_plans import MicroBatchPlan, samples_of
from rl.training.packing import MicroBatch

TOLERANCE = 1e-9
"""Maximum distance of the counted share from 1. Its terms are float64."""
SMALL_LR, SMALL_NORM = 0.01, 1e-6
"""Share of the peak learning rate, and gradient norm, above which an update must change weights."""
NUM_CODES, NUM_CONTENTS = 1021, 262139
"""Number of codes of positions (1 to NUM_CODES), and of codes of a token's content (0 to NUM_CONTENTS - 1).
Both are prime. The product of two codes is below 2**28, so float64 sums it exactly over 2**25 tokens."""
GRADIENT_TOLERANCE = 1e-5
"""Maximum relative difference between the gradient at the outputs and the gradient of the loss."""
OLD = {"logprobs": "old_logprobs", "values": "old_values"}
"""Output of a model -> column with the values of this output before the updates of the step."""
RATIO_ROUNDING = 1e-5
"""Maximum error of KTO's estimate, a mean in float32, relative to the mean absolute log-ratio."""
SMALL_STEP = 1e-4
"""Learning rate, in units of the eps of the dtype, above which an update must change outputs."""
SHARE = 0.1
"""Share of the selected tokens that may be wrong, because rounding may route them to other experts."""
TERMS = ("counted share", "product of counts", "codes", "distance from old outputs", "compared tokens")
"""Names of five sums over the micro-batches of an update: counted tokens / denominator of the loss; counted
tokens * denominator; codes of counted tokens, made from position, id and columns; |output - old output| /
denominator, for the output of OLD that the model has; and the number of these outputs."""


class WrongTokens(RuntimeError):
    """Raised on every rank if an update did not count each token of its mini-batch once."""


class WrongGradient(RuntimeError):
    """Raised on every rank if the gradient of the loss did not reach the model's outputs unchanged."""


class WrongLearningRate(RuntimeError):
    """Raised on every rank if a model learns with another rate than the config gives for the step."""


def expected_rate(optimizer: Optimizer, number: int, total: int) -> float:
    """Return the learning rate of step `number` of `total`, in closed form."""
    after, decay = number - optimizer.warmup_steps, max(1, total - optimizer.warmup_steps)
    if after <= 0:
        return optimizer.lr * number / optimizer.warmup_steps
    left = {
        "constant": 1.0,
        "linear": (decay - after + 1) / decay,
        "cosine": math.cos(math.pi / 2 * (after - 1) / decay) ** 2,
    }[optimizer.schedule]
    lowest = 0.0 if optimizer.schedule == "constant" else optimizer.min_lr
    return lowest * (1 - left) + optimizer.lr * left


def check_specs(config: Config, models: Mapping[str, TrainingEngine]) -> None:
    """Raise CheckFailed if a model computes with another temperature or dtype than the config gives it."""
    samples = config.rollout.temperature
    for name, model in models.items():
        own = learns_from_samples(config) if name == "policy" else name.startswith("teacher")
        expected = samples if own else 1.0, config.model.dtype, name in ("critic", "reward_model")
        found = model.spec.temperature, model.spec.dtype, model.spec.has_values
        if found != expected:
            raise CheckFailed(
                f"model check: (temperature, dtype, whether it has values) of the {name} are {found}, but "
                f"the config makes them {expected}: the model was built with the properties of another."
            )
        learning = model.chunks if model.optimizer is not None else ()
        for layer in (layer for chunk in learning for layer in chunk.modules()):
            if isinstance(layer, torch.nn.Embedding) and layer.padding_idx is not None:
                raise CheckFailed(
                    f"model check: row {layer.padding_idx} of an embedding of the {name} does not learn "
                    "(padding_idx), but a policy may sample this token."
                )


def check_coverage(batch: Batch, plans: Sequence[MicroBatchPlan]) -> None:
    """Raise CheckFailed unless each sample of the batch is in exactly one mini-batch."""
    counts = np.bincount([sample for plan in plans for sample in samples_of(plan)], minlength=len(batch))
    if len(counts) > len(batch):
        raise CheckFailed(
            f"mini-batch check: a plan has sample {len(counts) - 1}, but the batch {len(batch)}."
        )
    wrong = (counts != 1).nonzero()[0].tolist()
    what = f"{{sample}} is in {counts[wrong[0]]} mini-batches instead of 1" if wrong else ""
    refuse("mini-batch", batch, wrong, what, "an epoch learns once from each sample")


def check_numbers(
    found: Mapping[str, float], expected: Mapping[str, float], slack: float | None = None
) -> None:
    """Raise CheckFailed on every rank if a loss gets other numbers than those of the samples of all ranks.

    expected: equal on all ranks. slack: absolute difference of rounding. Collective over the world.
    """

    def compare(rank: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            what, source = f"loss check: on rank {rank} the loss gets {name}", "samples of all ranks give"
            expect(what, number, source, expected[name], slack=slack)

    own, is_wrong = {name: found[name] for name in expected}, True
    with suppress(CheckFailed):
        compare(0, own)
        is_wrong = False
    if any_rank(is_wrong):
        for rank, numbers in enumerate(gather_objects(own)):
            compare(rank, numbers)


def expected_totals(batch: Batch, samples: list[int]) -> dict[str, float]:
    """Return the denominators of the loss for a mini-batch, except for the number of tokens."""
    rows = torch.arange(len(batch)) if batch.trajectories is None else batch.trajectories
    of_rows = [float(batch.mask[batch.offsets[i] : batch.offsets[i + 1]].sum()) for i in samples]
    counts = np.bincount(np.unique(rows[samples].numpy(), return_inverse=True)[1], of_rows)
    whole = (counts > 0).reshape(-1, batch.samples_per_unit).all(1)
    return dict(num_samples=max(1.0, float((counts > 0).sum())), num_units=max(1.0, float(whole.sum())))


def check_divergence(found: float, batch: Batch, samples: list[int], logprobs: Tensor) -> None:
    """Raise CheckFailed unless KTO's estimate of the divergence is that of mismatched samples. Collective.

    Its terms have both signs, so its error is relative to their size. logprobs: of the batch, float32 [T].
    """
    gaps = (logprobs - batch.column("ref_logprobs")).double()
    terms = torch.where(batch.mask > 0, gaps, 0.0).numpy()
    spans = [slice(*batch.offsets[i : i + 2].tolist()) for i in samples]
    ratios = np.array([terms[span].sum() for span in spans if batch.mask[span].any()] or [0.0])
    size = np.abs(ratios).mean()
    check_numbers({"kl": found}, {"kl": max(0.0, float(ratios.mean()))}, RATIO_ROUNDING * float(size))


def check_present(given: float, measured: Mapping[int, float], number: int) -> None:
    """Raise CheckFailed unless a loss gets the estimate that was measured after `number` updates."""
    if given != measured.get(number):
        raise CheckFailed(
            f"loss check: the loss gets kl={given:.6g}, an estimate that was not computed after "
            f"{number} updates but of older weights ({measured})."
        )


class UpdateChecks:
    """The checks of a model's updates in one step. Call `begin`, then `micro_batch` for each one, then `end`.

    lr: learning rate. is_first: whether the present weights computed the old outputs. config: for the policy.
    """

    def __init__(
        self, model: TrainingEngine, batch: Batch, lr: float, *, is_first: bool, config: Config | None = None
    ):
        self._model, self.batch, self._lr, self._is_first = model, batch, lr, is_first
        self._size, self._config, self.number = 1.0, config, 0
        self._old = OLD
        has_slack = config is not None and config.agreement.logprob_slack > 0
        if has_slack and batch.old_logprobs is None and batch.ref_logprobs is not None and not model.version:
            # A policy that has not learned is its reference.
            self._old, self._is_first = OLD | {"logprobs": "ref_logprobs"}, True
        if model.spec.has_values:
            values = torch.where(batch.mask > 0, batch.column("old_values").abs(), 0.0)
            self._size = float(values.double().sum() / batch.mask.sum().clamp(min=1))
        self.has_moved, self._num_equal = False, 0.0

    def begin(
        self, loss: MicroBatchLoss, totals: Totals, plan: MicroBatchPlan, reads: tuple[str, ...] | None
    ) -> tuple[str, ...] | None:
        """Check the denominators of an update's loss, and return the outputs that the update computes.

        totals: the denominators. reads: outputs that the loss reads; None: all. Collective over the world.
        """
        self._samples = samples_of(plan)
        check_numbers(vars(totals), expected_totals(self.batch, self._samples))
        self._loss, self._totals, self._plan = loss, totals, plan
        self._counted, self._arrived = list[Tensor](), list[Tensor]()
        self._read, self._is_watching = list[tuple[Tensor, Tensor]](), False
        self.number += 1
        self._selects = ""
        """Output by which tokens are selected; `_read` has indices of tokens and their outputs."""
        if self._config is not None and "selected_tokens" in self.batch.extra:
            selects = selects_by(self._config.objective)
            if reads is None or selects in reads or is_sampled(self._model.num_updates + 1):
                self._selects = selects
        if reads is None or not self._selects:
            return reads
        return tuple(dict.fromkeys((*reads, self._selects)))

    def micro_batch(self, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and its metrics, with TERMS, which `end` removes again."""
        value, metrics = self._loss(micro)
        if not self._is_watching and value.requires_grad:
            self._watch(micro, value)
        if self._selects:
            self._read.append((micro.column_index, micro.output(self._selects).detach()))
        return value, metrics | dict(zip(TERMS, self._terms(micro), strict=True))

    def end(self, result: UpdateResult) -> None:
        """Check an update, and remove TERMS from its metrics. Collective over the world.

        Raises WrongLearningRate, WrongGradient, WrongTokens or CheckFailed.
        """
        assert self._model.optimizer is not None, "the model learns"
        if other := {group["lr"] for group in self._model.optimizer.param_groups} - {self._lr}:
            raise WrongLearningRate(
                f"an update used the learning rate {min(other):g}, but its step has {self._lr:g}."
            )
        share, product, codes, gap, compared = (result.metrics.pop(name) for name in TERMS)
        self._check_gradient()
        self._check_tokens(share, product, codes)
        self._check_outputs(result, gap, compared)
        self._check_selection()

    def _check_selection(self) -> None:
        """Compare the selected tokens with this update's outputs. Collective over the world."""
        if not self._selects or self._config is None:
            return
        own = torch.zeros(len(self.batch.mask), dtype=torch.float64)
        if self._model.grid.reports_results:
            for index, values in self._read:
                own[index] = values.cpu().double()
        outputs = sum_over_world(own, self._model.device.torch).numpy()
        # The first update of a step reads the stored log-probs, which `_check_outputs` compares.
        if self._selects == "logprobs" and self.number == 1 and not self._config.rollout_correction.bypass:
            outputs = self.batch.column("old_logprobs").double().numpy()
        eps = torch.finfo(self._model.weight_map.dtype).eps
        check_selection(self.batch, self._samples, outputs, self._config.objective, eps)

    def _terms(self, micro: MicroBatch) -> tuple[Tensor, ...]:
        """Return the TERMS of a micro-batch, one float64 scalar each."""
        counted = micro.mask > 0
        count = micro.mask.sum(dtype=torch.float64)
        positions = _codes(micro.column_index).to(micro.targets.device, torch.float64)
        codes = torch.where(counted, positions * _contents(micro.targets, micro.columns), 0.0).sum()
        self._counted.append(torch.stack((count, codes)))
        gap, compared = torch.zeros_like(count), torch.zeros_like(count)
        for output, column in self._old.items():
            if (found := micro.outputs.get(output)) is not None and column in micro.columns:
                gaps = torch.where(counted, (found.detach() - micro.columns[column]).abs(), 0.0)
                gap = gaps.sum(dtype=torch.float64) / self._totals.num_tokens
                compared = counted.sum(dtype=torch.float64)
        denominator = self._totals.num_tokens
        return count / denominator, count * denominator, codes, gap, compared

    def _watch(self, micro: MicroBatch, value: Tensor) -> None:
        """Prepare the comparison of the gradient with this micro-batch, if it has outputs."""
        outputs = [x for x in micro.outputs.values() if x.requires_grad]
        if not outputs or not len(outputs[0]):
            return
        self._is_watching = True

        def arrive(slope: Tensor, gradient: Tensor) -> None:
            terms = ((gradient - slope).abs().sum(), slope.abs().sum())
            self._arrived.append(torch.stack(terms).double())

        slopes = torch.autograd.grad(value, outputs, retain_graph=True, allow_unused=True)
        for output, slope in zip(outputs, slopes):
            if slope is not None:
                output.register_hook(partial(arrive, slope))

    def _check_gradient(self) -> None:
        """Raise WrongGradient on every rank if a comparison fails. Collective over the world."""
        own = torch.zeros(2, dtype=torch.float64)
        if self._arrived and self._model.grid.reports_results:
            own = torch.stack(self._arrived).sum(0)
        difference, size = sum_over_world(own, self._model.device.torch).tolist()
        if difference > GRADIENT_TOLERANCE * size:
            raise WrongGradient(
                f"the gradient that arrived at the model's outputs differs from that of the loss by "
                f"{difference / size:.3g} of its size: the loss was changed on its way to the backward pass."
            )

    def _check_tokens(self, share: float, product: float, codes: float) -> None:
        """Raise WrongTokens unless every token of the mini-batch was counted once, with id and columns."""
        planned = [_planned(self.batch, samples_of([rank])) for rank in self._plan]
        total, code = (sum(numbers) for numbers in zip(*planned))
        # If the denominators of ranks differ, the shares may still add up to 1, but the products are larger.
        is_whole = max(abs(share - 1.0), abs(product / max(total, 1.0) ** 2 - 1.0)) <= TOLERANCE
        if not total or (is_whole and codes == code):
            return
        counted, found = torch.stack(self._counted).sum(0).tolist() if self._counted else (0.0, 0.0)
        number, own_code = planned[self._model.grid.dp_rank]
        is_other = ", not those of its samples," if found != own_code else ""
        text = f"rank {dist.get_rank()} counted {counted:g} of {number:g} tokens{is_other} and divided by"
        own = [f"{text} {self._totals.num_tokens:g}"]
        texts = gather_texts(own if self._model.grid.reports_results else [])
        raise WrongTokens(
            f"an update counted {share:.6g} times the {total:g} tokens of its mini-batch: "
            f"{'; '.join(texts)}. Each token counts once, with its own id and columns, and all ranks divide "
            "by their number."
        )

    def _check_outputs(self, result: UpdateResult, gap: float, compared: float) -> None:
        """Check the outputs of an update, and that it moved weights. Not collective."""
        adam, dtype, lr = self._model.spec.optimizer, self._model.weight_map.dtype, self._lr
        assert adam is not None
        eps = torch.finfo(dtype).eps
        if self._is_first and not gap <= math.sqrt(eps) * self._size:
            raise CheckFailed(
                f"first update check: |log pi - log pi_old|, or |value - old value|, is {gap:.3g} on average "
                f"before any update of the step, more than {math.sqrt(eps) * self._size:.2g} for {dtype}: "
                f"{self._old['logprobs']} or old_values are of other weights or tokens."
            )
        self._num_equal = self._num_equal + compared if self.has_moved and not gap else 0.0
        if self._num_equal > NUM_EQUAL:
            raise CheckFailed(
                f"ratio check: after an update that moved weights, {self._num_equal:g} outputs are "
                "exactly those before it: the old ones were computed again, or other weights are updated."
            )
        should_move = result.grad_norm > SMALL_NORM and lr > SMALL_LR * adam.lr
        if not result.has_moved and should_move:
            raise CheckFailed(
                f"movement check: the gradient norm is {result.grad_norm:.3g} and the learning rate "
                f"{lr:.3g}, but the update changed no weight."
            )
        self.has_moved |= result.has_moved and should_move and lr > SMALL_STEP * eps
        self._is_first = False


def _planned(batch: Batch, samples: list[int]) -> tuple[float, int]:
    """Return the number of counted tokens of the samples, and the sum of their codes."""
    if not samples:
        return 0.0, 0
    index = batch.tokens_of(samples)
    counted = batch.mask[index] > 0
    ids = torch.from_numpy(np.concatenate([batch.response_ids[i] for i in samples]))
    columns = {name: column[index] for name, column in batch.loss_columns().items()}
    return float(batch.mask[index].sum()), int((_codes(index) * _contents(ids, columns))[counted].sum())


def _codes(index: Tensor) -> Tensor:
    """Return a code for each position, from 1 to NUM_CODES, int64 [n]."""
    return index * 40503 % NUM_CODES + 1


def _contents(ids: Tensor, columns: dict[str, Tensor]) -> Tensor:
    """Return a code for the id and the columns of each token, from 0 to NUM_CONTENTS - 1, int64 [n]."""
    code = ids.long() + 1
    for number, name in enumerate(sorted(columns), start=1):
        code = code + columns[name].float().view(torch.int32).long() * (40503 * number)
    return code % NUM_CONTENTS


def selects_by(goal: Objective) -> str:
    """Return the output of the model by which tokens are selected; "" if there is no formula."""
    if goal.top_entropy < 1:
        return "entropy"
    return "logprobs" if goal.loss in ("kl-cov", "clip-cov") else ""


def check_selection(
    batch: Batch, samples: list[int], values: np.ndarray, goal: Objective, eps: float
) -> None:
    """Raise CheckFailed unless `selected_tokens` of a mini-batch are those of the config.

    values: output `selects_by` of the present weights, float64 [T]. eps: of the model's dtype.
    """
    index = batch.tokens_of(samples)
    index = index[batch.mask[index] > 0]
    if not len(index):
        return
    own, slack = values[index.numpy()], eps**0.5
    selected = batch.extra["selected_tokens"][index].numpy() > 0
    is_candidate, what, key = np.ones(len(own), bool), "entropy", f"top_entropy={goal.top_entropy:g}"
    fraction = goal.top_entropy
    if goal.top_entropy == 1:
        fraction, what, key = goal.option("cov_fraction"), "covariance", f"loss={goal.loss}"
        advantages = batch.column("advantages")[index].double().numpy()
        centred = advantages - advantages.mean()
        own, slack = (own - own.mean()) * centred, slack * float(np.abs(centred).max())
    number = max(1, int(fraction * len(own)))
    lowest = np.partition(own, -number)[-number] - slack
    if goal.loss == "clip-cov" and goal.top_entropy == 1:
        lowest, is_candidate = goal.option("cov_low") - slack, own <= goal.option("cov_high") + slack
    wrong = selected & ~(is_candidate & (own >= lowest))
    is_short = goal.loss != "clip-cov" and selected.sum() < number
    is_long = goal.top_entropy == 1 and selected.sum() > number
    if wrong.sum() > 1 + SHARE * selected.sum() or is_short or is_long:
        raise CheckFailed(
            f"selection check: {int(selected.sum())} tokens are selected by objective.{key}, which selects "
            f"{number} of {len(own)} by their {what}, and {int(wrong.sum())} of them are wrong: "
            f"{token_place(batch, int(index[wrong.argmax()]))} has the {what} {own[wrong.argmax()]:.4g}, "
            f"below {lowest:.4g}."
        )
