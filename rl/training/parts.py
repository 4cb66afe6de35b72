"""Parts of a training engine: the hooks through which a feature takes part in a model's passes.

Each feature is a subclass of `TrainerPart` in its own file. For example, the vision tower overrides `extend`
to add its module. The engine calls the hooks of its parts in their order and does not know which features
they are; `rl.engines.training_parts` chooses them from the config.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rl.config.schema import Training
from rl.data.batch import Batch
from rl.data.held import ColumnBytes
from rl.models.layout import Weight
from rl.runtime.collectives import sum_over_world
from rl.training.extras import LogitsFilter
from rl.training.grid import Grid
from rl.training.held_transfer import Need, fetch
from rl.training.micro_batch_plans import MicroBatchPlan
from rl.training.packing import MicroBatch
from rl.training.spec import ModelSpec
from rl.training.weights import WeightMap

if TYPE_CHECKING:
    from rl.training.engine import TrainingEngine
    from rl.training.model import Packed


class WrongInputs(RuntimeError):
    """Raised on every rank if a part gives the passes inputs that are not from the engine's samples."""


class TrainerPart:
    """One feature of one model. A hook that a part does not override has no effect."""

    needs: dict[str, Need] = {}
    """Held columns that the passes read -> the part of them that a stage needs."""
    moved = ColumnBytes()
    """Bytes of held columns that were moved for this part since the last call of `TrainerParts.metrics`."""
    fuses_norms = True
    """Whether a layer may fuse its norm with the linear layer after it."""
    uses_te = True
    """False if this part cannot run with Transformer Engine's layers."""
    freezes_model = False
    """Whether the model's own weights do not learn, so that a backward pass needs no gradients of them."""
    logits_filter: type[LogitsFilter] | None = None
    """The filter of the policy's distributions, by the ids of all sets of tokens and the sets' sizes."""
    start_error = 0.0
    """Maximum difference that the part makes at the start between a weight and the files, relative to its
    size."""
    learned_map: WeightMap | None = None
    """The weights that learn; None: the model's own weights."""

    # Construction

    def build(self, spec: ModelSpec, training: Training, dtype: torch.dtype, grid: Grid) -> list[Any] | None:
        """Return this rank's chunks of the model in place of Megatron's; None: Megatron's.

        Collective over the world.
        """
        return None

    def weight_grid(self, grid: Grid) -> Grid:
        """Return the grid of the ranks that hold the model's weights. grid: that of their samples."""
        return grid

    def extend(self, hf: dict, chunks: list["Packed"]) -> None:
        """Add modules to this rank's chunks of the model, before its weights are read. Not collective.

        hf: the model's config.json.
        """

    def load(self, weight_map: WeightMap) -> bool:
        """Fill the model's weights instead of its checkpoint; return whether this was done."""
        return False

    def attach(self, engine: "TrainingEngine") -> None:
        """Change the model after its weights are loaded, before gradients are allocated.

        Collective over the world.
        """

    def optimizer_built(self, engine: "TrainingEngine") -> None:
        """Prepare for updates, after gradients and optimizer are allocated. Collective over the world."""

    def weights_loaded(self) -> None:
        """Discard what the part knows of the old weights: weights and optimizer state were loaded.

        Not collective.
        """

    # Weights

    def value(self, weight: Weight, parameter: Tensor) -> Tensor:
        """Return the values of a weight on this rank, from its parameter."""
        return parameter

    def merging(self) -> Callable[[Weight, Tensor], Tensor] | None:
        """Return a function that maps a weight and its values to the values that the passes use.

        None if the passes use the values unchanged. Collective over the tensor parallel groups; the function
        is not.
        """
        return None

    def set_aside(self) -> None:
        """Change what the part learns so that the passes use the weights alone. Collective over the world."""

    def replicas(self) -> list[tuple[dist.ProcessGroup, dict[str, Tensor]]]:
        """Return pairs (group, further weights by Megatron's name); a group's ranks hold equal copies."""
        return []

    def models(self) -> dict[str, "TrainingEngine"]:
        """Return models that belong to this model, by their name in checkpoints."""
        return {}

    def served_map(self, weight_map: WeightMap) -> WeightMap:
        """Return the weights that a generation engine holds. weight_map: the model's weights."""
        return weight_map

    def beside(self) -> tuple[WeightMap, Callable[[Weight, Tensor], Tensor]] | None:
        """Return weights that an engine may hold beside the model's, and a function of (weight, parameter)
        that gives their values. None: there are none."""
        return None

    def wrong_values(
        self,
        engine: "TrainingEngine",
        of: Callable[[Weight, Tensor], Tensor],
        number: int,
        *,
        is_beside: bool,
    ) -> str:
        """Compare values that a refit sends with a second computation; return the error, "" if they agree.

        of: computes the values from (weight, parameter). number: selects the values that are computed a
        second time. is_beside: whether the values belong to the weights of `beside`. Not collective.
        """
        return ""

    def properties(self) -> dict[str, Any]:
        """Return settings on which the learned weights depend; a checkpoint must have the same ones."""
        return {}

    def export(self, engine: "TrainingEngine", source: str, run_dir: Path, fence: Callable[[], None]) -> str:
        """Write the part's own weights into a directory of the run. Collective over the world.

        Returns a line for the log; "" if nothing is written. source: the checkpoint of the model. fence: see
        `rl.checkpoint.hf.export_hf`.
        """
        return ""

    def exported_map(self, weight_map: WeightMap) -> WeightMap:
        """Return the weights of a Hugging Face checkpoint. weight_map: the model's weights."""
        return weight_map

    def check(self, engine: "TrainingEngine", name: str) -> None:
        """Raise on every rank if the part finds an error between updates of the model `name`. Collective."""

    # Memory

    def resident(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensors that leave the device with the weights. tensors: the result of earlier parts."""
        return tensors

    @property
    def has_weights(self) -> bool:
        """Whether the weights of other models that this model uses are on the device."""
        return True

    # Passes

    def before_update(self) -> None:
        """Prepare the passes of an update of the model. Collective over the world."""

    def before_step(self) -> None:
        """Read reduced gradients and the optimizer's state, before the optimizer's step. Not collective."""

    def after_step(self, *, norm: float, lr: float) -> list[Tensor]:
        """Return numbers of this rank after the optimizer's step, which the engine sums over the world.

        Every rank returns the same number of elements at every step. Not collective. norm: norm of the
        gradient before clipping.
        """
        return []

    def summed(self, numbers: list[float]) -> None:
        """Check the sums of the numbers that `after_step` returned; raise on every rank if they are wrong.

        Collective over the world.
        """

    def after_update(self) -> None:
        """Finish an update, after the step of the model's optimizer. Collective over the world."""

    def row(self, batch: Batch, row: MicroBatch, *, is_reference: bool) -> MicroBatch:
        """Return the row of a micro-batch with the changes of this part.

        The engine calls it on every stage, before the row has columns. is_reference: whether the pass uses
        the reference weights.
        """
        return row

    def outputs(self, batch: Batch) -> tuple[str, ...]:
        """Return the names of further outputs of the head for a batch. Equal on every rank."""
        return ()

    def micro_batch(self, batch: Batch, micro: MicroBatch) -> None:
        """Add the head's inputs to a micro-batch on the last stage, for example sampling masks."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of the passes since the last call. Collective over the world."""
        return {}


P = TypeVar("P", bound=TrainerPart)


class TrainerParts(tuple[TrainerPart, ...]):
    """The parts of one model, in the order of their hooks."""

    def get(self, kind: type[P]) -> P | None:
        """Return the part of this class, None if the model has none."""
        return next((part for part in self if isinstance(part, kind)), None)

    def learned_map(self, weight_map: WeightMap) -> WeightMap:
        """Return the weights that learn. weight_map: the model's weights."""
        return next((part.learned_map for part in self if part.learned_map is not None), weight_map)

    def models(self) -> dict[str, "TrainingEngine"]:
        """Return the models that belong to this model, by their name in checkpoints."""
        return {name: model for part in self for name, model in part.models().items()}

    def weight_grid(self, grid: Grid) -> Grid:
        """Return the grid of the ranks that hold the model's weights. grid: that of their samples."""
        for part in self:
            grid = part.weight_grid(grid)
        return grid

    def served_map(self, weight_map: WeightMap) -> WeightMap:
        """Return the weights that a generation engine holds. weight_map: the model's weights."""
        for part in self:
            weight_map = part.served_map(weight_map)
        return weight_map

    def exported_map(self, weight_map: WeightMap) -> WeightMap:
        """Return the weights of a Hugging Face checkpoint. weight_map: the model's weights."""
        for part in self:
            weight_map = part.exported_map(weight_map)
        return weight_map

    def value(self, weight: Weight, parameter: Tensor) -> Tensor:
        """Return the values of a weight on this rank, from its parameter. Not collective."""
        for part in self:
            parameter = part.value(weight, parameter)
        return parameter

    def merging(self) -> Callable[[Weight, Tensor], Tensor]:
        """Return a function that maps a weight and its parameter to the values that the passes use.

        Collective over the tensor parallel groups. The function is not collective. Until the weights change,
        you may call it for any weight, in any order.
        """
        merges = [merge for part in self if (merge := part.merging()) is not None]

        def merged(weight: Weight, parameter: Tensor) -> Tensor:
            value = self.value(weight, parameter)
            for merge in merges:
                value = merge(weight, value)
            return value

        return merged

    def resident(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensors that leave the device with the weights. tensors: the model's parameters."""
        for part in self:
            tensors = part.resident(tensors)
        return tensors

    def fetch(self, batch: Batch, plan: MicroBatchPlan, grid: Grid, device: torch.device) -> None:
        """Move the held columns that the parts need to the ranks of the plan. Collective over the world."""
        for part in self if batch.expects_held else ():
            part.moved += fetch(batch, plan, part.needs, grid, device)

    def rows(self, batch: Batch, rows: list[MicroBatch], *, is_reference: bool) -> list[MicroBatch]:
        """Return the rows of micro-batches as the parts change them."""
        for part in self:
            rows = [part.row(batch, row, is_reference=is_reference) for row in rows]
        return rows

    def metrics(self, device: torch.device) -> dict[str, float]:
        """Return metrics of the passes since the last call. Collective over the world.

        They are the parts' own metrics, the bytes of held columns that all ranks received, and the bytes that
        the plans predicted.
        """
        metrics: dict[str, float] = {}
        if any(part.needs for part in self):
            moved = sum((part.moved for part in self), ColumnBytes())
            total = sum_over_world(torch.tensor([moved.received, moved.planned]), device).tolist()
            metrics |= zip(("perf/held_bytes_received", "perf/held_bytes_planned"), total)
        for part in self:
            part.moved = ColumnBytes()
            metrics |= part.metrics()
        return metrics
