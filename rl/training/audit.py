"""The part of a learning model that checks each optimizer step against a second computation."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl.runtime.collectives import gather_objects
from rl.training.gradients import ReductionProbe, check_clipped, clipped_norms
from rl.training.optimizer import StateSample, WrongStep
from rl.training.parts import TrainerPart

if TYPE_CHECKING:
    from rl.training.engine import TrainingEngine

PROBED = 4
"""Number of elements of `ReductionProbe.sums`."""


class StepAudit(TrainerPart):
    """Checks the reduction and clipping of the gradient, and the state of the optimizer, in every update.

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

    def before_step(self) -> None:
        optimizer = self._engine.optimizer
        assert optimizer is not None
        self._reduced = self._probe.sums(optimizer)
        self._num_changed = self._state.num_changed(optimizer, self._engine.device.torch)

    def after_step(self, *, norm: float, lr: float) -> list[Tensor]:
        engine = self._engine
        assert engine.optimizer is not None
        wrong, num_moved = self._state.changes(engine.optimizer, lr)
        clipped = clipped_norms(engine.optimizer, engine.learned_map, norm, self._num_changed)
        moved = num_moved if engine.grid.reports_results else torch.zeros_like(num_moved)
        return [self._reduced, moved.view(1), wrong.view(1), clipped]

    def summed(self, numbers: list[float]) -> None:
        moved, num_wrong, *clipped = numbers[PROBED:]
        self._probe.check(numbers[:PROBED])
        check_clipped(clipped, self._adam.clip_grad)
        if num_wrong:
            raise WrongStep.of(gather_objects(self._state.describe()))
        self.has_moved = moved > 0
