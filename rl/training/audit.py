"""The part of a learning model that checks each optimizer step against a second computation."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from rl.runtime.collectives import gather_texts
from rl.training.gradients import ReductionProbe, WrongReduction, check_clipped, clipped_norms, num_not_zero
from rl.training.optimizer import StateSample, WrongStep
from rl.training.parts import TrainerPart

if TYPE_CHECKING:
    from rl.training.engine import TrainingEngine


FIRST, EVERY = 2, 100
"""Costly comparisons run in the first updates of a start, and then in every 100th update."""


def is_sampled(number: int) -> bool:
    """Return whether update `number` of a start, from 1, is one with the costly comparisons."""
    return number <= FIRST or number % EVERY == 0


class StepAudit(TrainerPart):
    """Checks reduction and clipping of the gradient, and state and arithmetic of the optimizer.

    Raises WrongReduction, StateChanged and WrongStep on every rank.
    """

    has_moved = False
    """Whether the last update changed sampled weights of the last stage on any data parallel rank."""

    def optimizer_built(self, engine: "TrainingEngine") -> None:
        assert engine.spec.optimizer is not None
        names = {parameter: weight.hf[0] for weight, parameter in engine.learned_map.local()}
        self._engine, self._adam = engine, engine.spec.optimizer
        self._probe = ReductionProbe(engine.learned_map, engine.wrapped)
        self._state = StateSample(self._adam, names)

    def weights_loaded(self) -> None:
        self._state.forget()

    def before_update(self) -> None:
        self._probe.begin(self._engine.num_updates)
        self._num_not_zero = num_not_zero(self._engine.wrapped)

    def before_step(self) -> None:
        optimizer = self._engine.optimizer
        assert optimizer is not None
        self._reduced = self._probe.sums(optimizer)
        self._num_changed = self._state.num_changed(optimizer, self._engine.device.torch)

    def after_step(self, *, norm: float, lr: float) -> list[Tensor]:
        engine = self._engine
        assert engine.optimizer is not None
        compares = is_sampled(engine.num_updates)
        wrong, num_moved = self._state.changes(engine.optimizer, lr, compares=compares)
        clipped = clipped_norms(engine.optimizer, engine.learned_map, norm, self._num_changed)
        moved = num_moved if engine.grid.reports_results else torch.zeros_like(num_moved)
        return [self._reduced, moved.view(1), wrong.view(1), self._num_not_zero.view(1), clipped]

    def summed(self, numbers: list[float]) -> None:
        num_probed = self._probe.num_sums
        moved, num_wrong, not_zero, *clipped = numbers[num_probed:]
        if not_zero:
            raise WrongReduction(
                f"{not_zero:.0f} sampled elements of the gradient buffers were not 0 before the first "
                "micro-batch of an update, for example gradients of an earlier update."
            )
        self._probe.check(numbers[:num_probed])
        check_clipped(clipped, self._adam.clip_grad)
        if num_wrong:
            own = self._state.describe()
            texts = gather_texts([f"on rank {dist.get_rank()} {own}"] if own else [])
            raise WrongStep(
                "an update did not change sampled elements as AdamW with the keys of the config does: "
                f"{'; '.join(texts)}. Groups of the optimizer have another decay, rate, beta or step, or "
                "moments are rounded with a bias."
            )
        self.has_moved = moved > 0
