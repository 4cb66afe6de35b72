"""The part of a learning model that checks each optimizer step against a second computation."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from rl.runtime.collectives import gather_texts
from rl.runtime.names import listed
from rl.training.gradients import (
    ReductionProbe,
    StateChanged,
    WrongReduction,
    check_clipped,
    clipped_norms,
    num_not_zero,
)
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
        self._fixed: dict[str, Tensor] = {}
        """Values of the weights that are buffers, at the first update, by name."""

    def weights_loaded(self) -> None:
        self._state.forget()
        self._fixed = {}

    def check(self, engine: "TrainingEngine", name: str) -> None:
        """Note the state of the optimizer, which has just been compared with the start of the run."""
        assert engine.optimizer is not None
        self._state.note(engine.optimizer, engine.device.torch)

    def _buffers(self) -> dict[str, Tensor]:
        """Return the weights that are buffers and never learn, such as a router's bias, by name."""
        found = self._engine.weight_map.local()
        return {weight.hf[0]: x for weight, x in found if not isinstance(x, torch.nn.Parameter)}

    def before_update(self) -> None:
        self._fixed = self._fixed or {name: x.clone() for name, x in self._buffers().items()}
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
        changed = sum(((x != self._fixed[name]).sum() for name, x in self._buffers().items()), moved * 0)
        counts = torch.stack([moved, wrong, self._num_not_zero, changed])
        return [self._reduced, counts, clipped]

    def summed(self, numbers: list[float]) -> None:
        num_probed = self._probe.num_sums
        moved, num_wrong, not_zero, changed, *clipped = numbers[num_probed:]
        if changed:
            names = [name for name, x in self._buffers().items() if not x.equal(self._fixed[name])]
            where = f"rank {dist.get_rank()}"
            texts = gather_texts([f"{listed(names)} on {where}"] if names else [])
            raise StateChanged(
                f"{'; '.join(texts)} changed during or before an update, but must not learn: the backend "
                "(such as Megatron's rate for the biases of routers) or a part of the program wrote to them."
            )
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
