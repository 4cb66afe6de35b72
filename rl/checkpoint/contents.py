"""The contents of a checkpoint for one model: weights and optimizer states as boxes of Hugging Face tensors.

Exactly one rank writes each number. Several data parallel ranks hold a weight, and one of them writes it. The
choice of this rank gives all data parallel ranks about equal numbers of bytes: for example, each of 8 ranks
writes about an eighth. The distributed optimizer shards its states, so that one rank holds each number; this
rank writes it.
Nothing is sent between ranks. The state of the run, such as controllers and the prompt order, is in
`rl.run.checkpoints`.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from rl.checkpoint.regions import FlatRegion, regions
from rl.checkpoint.shards import Shard, ShardReader
from rl.models.layout import Weight
from rl.runtime.checksum import placed_checksum
from rl.runtime.collectives import gather_objects
from rl.runtime.names import listed
from rl.training.engine import TrainingEngine
from rl.training.optimizer import MASTER, optimizer_parts, release_masters, step_counters
from rl.training.weights import WeightMap

WEIGHT, REFERENCE, BASE = "weight", "reference", "base"
"""Parts of a tensor's name in the file, besides the optimizer's exp_avg, exp_avg_sq and MASTER.

Master weights are written only if they differ from the weights in dtype. A checkpoint has only the checksums
of the reference weights, and of the base weights of adapters.
"""


def describe(engine: TrainingEngine) -> dict:
    """Return the properties that must match before a checkpoint is loaded; identical on all ranks.

    dtype: dtype of the weights. moments: dtype of Adam's moments; "" for a frozen model. adapter: the keys of
    section `adapter` that determine A, B and their scale; {} without adapters. optimizer_step: number of
    steps taken.
    tensors: shape of every tensor that learns, by its name in the checkpoints of its format.
    """
    weights = engine.learned_map.weights
    return {
        "dtype": str(engine.weight_map.dtype).removeprefix("torch."),
        "moments": engine.spec.optimizer.moments if engine.spec.optimizer is not None else "",
        "adapter": {name: value for part in engine.parts for name, value in part.properties().items()},
        "optimizer_step": _step(engine),
        "tensors": {name: list(shape) for w in weights for name, shape in zip(w.hf, w.shapes)},
    }


def checksums(name: str, engine: TrainingEngine) -> dict[str, int]:
    """Return this rank's part of the checksum of each tensor that a checkpoint of the model describes.

    Summed over the ranks, the checksums do not depend on the layout (`rl.runtime.checksum`). They include the
    reference weights and the base weights of adapters, although a checkpoint does not hold these weights. Not
    collective.
    """
    shards = itertools.chain(model_shards(name, engine, with_reference=True), _base_shards(name, engine))
    return _added((shard.name, shard.box, shard.tensor) for shard in shards)


def _added(parts: Iterable[tuple[str, Sequence[tuple[int, int]], Tensor]]) -> dict[str, int]:
    """Return the checksum of the parts of each tensor, by its name.

    parts: (name of the tensor, box of the tensor, the elements in this box).
    """
    sums = Counter[str]()
    for name, box, tensor in parts:
        sums[name] += int(placed_checksum(tensor, [first for first, _ in box]))
    return dict(sums)


def exported_checksums(
    engine: TrainingEngine,
    weight_map: WeightMap,
    value: Callable[[Weight, Tensor], Tensor] = lambda weight, parameter: parameter,
    shift: Callable[[str], Sequence[int]] = lambda name: (),
) -> dict[str, int]:
    """Return the checksum of every Hugging Face tensor of the weights, as a part of an exported tensor.

    This function does not gather tensors. A comparison with exported files therefore also finds errors of
    gathering. Collective over the world.

    value: maps a weight and its parameter to the exported values. shift: maps the name of a Hugging Face
        tensor to the position of its first element in the exported tensor; () is the origin.
    """
    return summed(
        _added(
            (region.hf, [(first + more, stop + more) for (first, stop), more in zip(region.box, moves)], view)
            for weight, parameter, writes in _written_weights(engine, weight_map)
            if writes
            for region, view in _views(engine, weight, parameter, value(weight, parameter), 0)
            for moves in [shift(region.hf) or itertools.repeat(0)]
        )
    )


def weight_sums(engine: TrainingEngine) -> list[float]:
    """Return sum and norm of the weights that learn, equal in any layout up to float32's rounding.

    On a CPU, sums in float64 would take 7 times as long. Collective over the world.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=engine.device.torch)
    for _, parameter, writes in _written_weights(engine, engine.learned_map):
        if writes:
            values, wide = parameter.detach(), torch.float32
            norm = torch.linalg.vector_norm(values, dtype=wide)
            sums += torch.stack([values.sum(dtype=wide), norm.square()])
    dist.all_reduce(sums)
    return [float(sums[0]), float(sums[1].sqrt())]


def total_checksums(models: Mapping[str, TrainingEngine]) -> dict[str, int]:
    """Return the checksums of all tensors of the models, equal in any layout. Collective over the world."""
    mine: dict[str, int] = {}
    for name, model in models.items():
        mine |= checksums(name, model)
    return summed(mine)


def summed(mine: Mapping[str, int]) -> dict[str, int]:
    """Return the sums over the ranks of checksums, modulo 2**64. Collective over the world."""
    total: dict[str, int] = {}
    for theirs in gather_objects(dict(mine)):
        for name, value in theirs.items():
            total[name] = (total.get(name, 0) + value) % 2**64
    return total


def in_words(tensors: Sequence[str], models: Mapping[str, TrainingEngine]) -> tuple[str, str]:
    """Return two texts for a message: the first four names of tensors, and the ranks that hold any of them.

    tensors: keys of `total_checksums`, not empty. Collective over the world.
    """
    holders = gather_objects({part for name, model in models.items() for part in checksums(name, model)})
    ranks = [str(rank) for rank, names in enumerate(holders) if names & set(tensors)]
    where = f"rank {', '.join(ranks)}" if ranks else "any rank, because none holds them"
    return listed(tensors), where


def model_shards(name: str, engine: TrainingEngine, *, with_reference: bool = False) -> Iterator[Shard]:
    """Yield this rank's shards of the model `name`: views of weights and optimizer states. Not collective.

    with_reference: also yield the tensors of the reference weights.
    """
    weight_map, optimizers = engine.learned_map, _optimizers(engine)
    references: dict[int, Tensor] = {}
    if with_reference and engine.reference is not None:
        references = {id(own): kept for own, kept in zip(engine.learned, engine.reference.weights)}
    for weight, parameter, writes in _written_weights(engine, weight_map):
        start, tensors = _optimizer_tensors(optimizers, parameter)
        parts = [(part, tensor, start) for part, tensor in tensors.items()]
        if writes:
            parts.insert(0, (WEIGHT, parameter, 0))
            if id(parameter) in references:
                parts.append((REFERENCE, references[id(parameter)], 0))
        for part, tensor, first in parts:
            for region, view in _views(engine, weight, parameter, tensor, first):
                yield Shard(f"{name}/{part}/{region.hf}", region.box, view)


def _base_shards(name: str, engine: TrainingEngine) -> Iterator[Shard]:
    """Yield this rank's shards of the weights that do not learn."""
    for weight, parameter, writes in _written_weights(engine, engine.weight_map):
        if writes and engine.has_frozen_weights and not parameter.requires_grad:
            value = engine.parts.value(weight, parameter)
            for region, view in _views(engine, weight, parameter, value, 0):
                yield Shard(f"{name}/{BASE}/{region.hf}", region.box, view)


def _written_weights(engine: TrainingEngine, weight_map: WeightMap) -> Iterator[tuple[Weight, Tensor, bool]]:
    """Yield (weight, parameter, whether this rank writes it) of weights that this rank may write.

    Data parallel ranks write about equal numbers of bytes.
    """
    grid = weight_map.grid
    loads = {False: [0] * grid.replicas, True: [0] * dist.get_world_size(grid.groups.expt_dp)}
    for weight, parameter in weight_map.local():
        if not weight_map.is_counted(weight):
            continue  # another rank of this replica writes it
        of_expert = weight.expert is not None
        replica = grid.replica if not of_expert else dist.get_rank(grid.groups.expt_dp)
        writer = loads[of_expert].index(min(loads[of_expert]))
        loads[of_expert][writer] += parameter.nbytes
        yield weight, parameter, writer == replica


def load_weights(name: str, engine: TrainingEngine, reader: ShardReader) -> None:
    """Fill this rank's weights. Not collective. Raises ValueError if the checkpoint lacks a weight."""
    for weight, parameter in engine.learned_map.local():
        _fill(reader, f"{name}/{WEIGHT}", parameter, _views(engine, weight, parameter, parameter, 0))


def load_optimizer(name: str, engine: TrainingEngine, reader: ShardReader, step: int) -> None:
    """Fill this rank's part of the optimizer, which has taken `step` steps. Not collective.

    It also changes the weights, so call `load_weights` afterwards. Raises ValueError if the checkpoint lacks
    any number.
    """
    engine.num_restored_steps = step
    if step == 0 or engine.optimizer is None:
        return  # the optimizer had no state yet, or the model is frozen
    optimizers = _optimizers(engine)
    for optimizer in optimizers:
        optimizer._init_optimizer_states_with_dummy_values()
    for counter in step_counters(engine.optimizer):
        is_tensor = isinstance(counter["step"], Tensor)
        counter["step"] = torch.full_like(counter["step"], step) if is_tensor else step
    for weight, parameter in engine.learned_map.local():
        start, tensors = _optimizer_tensors(optimizers, parameter)
        for part, tensor in tensors.items():
            _fill(reader, f"{name}/{part}", tensor, _views(engine, weight, parameter, tensor, start))
    release_masters(engine.optimizer)  # the step with dummy values took memory for them


def _views(
    engine: TrainingEngine, weight: Weight, parameter: Tensor, tensor: Tensor, start: int
) -> Iterator[tuple[FlatRegion, Tensor]]:
    """Yield the regions of a parameter's elements from `start` on, with their views of `tensor`.

    tensor: holds one number for each of these elements, and is flattened.
    """
    flat, pieces = tensor.detach().view(-1), engine.weight_map.pieces(weight)
    for region in regions(pieces, tuple(parameter.shape), start, start + flat.numel()):
        yield region, region.view(flat)


@torch.no_grad()
def _fill(
    reader: ShardReader, prefix: str, tensor: Tensor, views: Iterator[tuple[FlatRegion, Tensor]]
) -> None:
    tensor.detach().zero_()  # checkpoints hold no padding rows of the vocabulary
    for region, view in views:
        reader.fill(f"{prefix}/{region.hf}", region.box, view)


def _optimizers(engine: TrainingEngine) -> list[DistributedOptimizer]:
    return [] if engine.optimizer is None else optimizer_parts(engine.optimizer)


def _optimizer_tensors(
    optimizers: list[DistributedOptimizer], parameter: Tensor
) -> tuple[int, dict[str, Tensor]]:
    """Return (start, tensors) of the elements of a parameter that this rank's optimizer updates.

    `start` is the index of the first such element in the flattened parameter. `tensors` are the optimizer's
    tensors for the elements from `start` on. `tensors` is empty for a buffer, and for a parameter that other
    ranks update.
    """
    for optimizer in optimizers:
        if parameter in optimizer.model_param_gbuf_map:
            start = optimizer._get_model_param_range_map(parameter)["param"].start
            tensors = dict(optimizer._get_main_param_and_optimizer_states(parameter))
            tensors.pop("step", None)
            main = tensors.pop("param")
            if main.dtype is not parameter.dtype:  # else it is a view of the parameter
                tensors.setdefault(MASTER, main)
            return start, tensors
    return 0, {}


def _step(engine: TrainingEngine) -> int:
    """Return the number of optimizer steps taken; it is equal for all parameters."""
    counters = [] if engine.optimizer is None else step_counters(engine.optimizer)
    steps = {int(counter["step"]) for counter in counters}
    assert len(steps) <= 1, steps
    # A stage without parameters of the model has no optimizer that counts.
    return steps.pop() if steps else engine.num_restored_steps + engine.num_updates
