"""What a checkpoint holds of a model: each weight, and the optimizer's numbers for it, as boxes of Hugging Face tensors.

Every number is written by exactly one rank: a weight by one of the ranks that hold it alike, in turn, so that data parallel
ranks share the work; the optimizer's numbers by the rank that has them, since the distributed optimizer holds each once.
Nothing travels between ranks.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from rl.checkpoint.boxes import regions
from rl.checkpoint.shards import Shard, ShardReader
from rl.models.layout import Weight
from rl.training.engine import TrainingEngine

WEIGHT, MASTER = "weight", "master"
"""Parts of a tensor's name in the file, beside those that the optimizer calls exp_avg and exp_avg_sq. Master weights are
written where they are not the weights themselves."""


def describe(engine: TrainingEngine) -> dict:
    """Of the whole model, alike on every rank: dtype, the number of optimizer steps, and the shape of every tensor."""
    shapes = {
        name: list(shape)
        for weight in engine.weight_map.weights
        for name, shape in zip(weight.hf, weight.shapes)
    }
    return {
        "dtype": str(engine.weight_map.dtype).removeprefix("torch."),
        "optimizer_step": _step(engine),
        "tensors": shapes,
    }


def model_shards(name: str, engine: TrainingEngine) -> Iterator[Shard]:
    """What this rank writes of a model called `name`: views of its weights and its optimizer's tensors. Not collective."""
    weight_map, optimizers = engine.weight_map, optimizers_of(engine)
    loads = {False: [0] * engine.grid.dp, True: [0] * dist.get_world_size(engine.grid.groups.expt_dp)}
    for weight, parameter in weight_map.local():
        if weight_map.place(weight).stages[0] != engine.grid.pp_rank:
            continue  # a tied embedding on the last stage
        of_expert = weight.expert is not None
        tp_rank = weight_map.tensor_split(weight)[1]
        if not weight.cut.split and tp_rank > 0:
            continue  # whole on every tensor parallel rank
        replica = engine.grid.dp_rank if not of_expert else dist.get_rank(engine.grid.groups.expt_dp)
        writer = loads[of_expert].index(min(loads[of_expert]))
        loads[of_expert][writer] += parameter.nbytes
        if writer == replica:
            yield from _shards(f"{name}/{WEIGHT}", engine, weight, parameter, parameter.detach().view(-1), 0)
        start, tensors = _optimizer_tensors(optimizers, parameter)
        for part, tensor in tensors.items():
            yield from _shards(f"{name}/{part}", engine, weight, parameter, tensor.detach().view(-1), start)


def load_weights(name: str, engine: TrainingEngine, reader: ShardReader) -> None:
    """Fill this rank's weights; those that a checkpoint's model may lack stay as they are. Not collective.

    Raises ValueError if the checkpoint lacks any other.
    """
    for weight, parameter in engine.weight_map.local():
        _fill(f"{name}/{WEIGHT}", engine, weight, parameter, parameter.detach().view(-1), 0, reader)


def load_optimizer(name: str, engine: TrainingEngine, reader: ShardReader, step: int) -> None:
    """Fill this rank's part of the optimizer, which has made `step` steps. Changes the weights: load them afterwards.
    Not collective. Raises ValueError for what is not there."""
    if step == 0:
        return  # it had no state yet
    optimizers = optimizers_of(engine)
    for optimizer in optimizers:
        optimizer._init_optimizer_states_with_dummy_values()
        for counter in _counters(optimizer):
            counter["step"] = (
                torch.full_like(counter["step"], step) if isinstance(counter["step"], Tensor) else step
            )
    for weight, parameter in engine.weight_map.local():
        start, tensors = _optimizer_tensors(optimizers, parameter)
        for part, tensor in tensors.items():
            _fill(f"{name}/{part}", engine, weight, parameter, tensor.detach().view(-1), start, reader)


def _shards(
    prefix: str, engine: TrainingEngine, weight: Weight, parameter: Tensor, run: Tensor, start: int
) -> Iterator[Shard]:
    """Of the run of elements of a parameter that begins with element `start`."""
    pieces = weight.megatron_pieces(*engine.weight_map.tensor_split(weight))
    for region in regions(pieces, tuple(parameter.shape), start, start + run.numel()):
        yield Shard(f"{prefix}/{region.hf}", region.box, region.view(run))


@torch.no_grad()
def _fill(
    prefix: str,
    engine: TrainingEngine,
    weight: Weight,
    parameter: Tensor,
    run: Tensor,
    start: int,
    reader: ShardReader,
) -> None:
    run.zero_()  # rows that pad the vocabulary are in no checkpoint
    pieces = weight.megatron_pieces(*engine.weight_map.tensor_split(weight))
    for region in regions(pieces, tuple(parameter.shape), start, start + run.numel()):
        reader.fill(f"{prefix}/{region.hf}", region.box, region.view(run))


def optimizers_of(engine: TrainingEngine) -> list[DistributedOptimizer]:
    """Megatron's optimizers with something to update on this rank: one for routed experts, one for all else."""
    whole = engine.optimizer
    parts = whole.chained_optimizers if isinstance(whole, ChainedOptimizer) else [whole]
    return [part for part in parts if not part.is_stub_optimizer]


def _optimizer_tensors(
    optimizers: list[DistributedOptimizer], parameter: Tensor
) -> tuple[int, dict[str, Tensor]]:
    """The first element of the flattened parameter that this rank's optimizer updates, and its tensors for those from there
    on; none for a buffer, or for a parameter that other ranks update."""
    for optimizer in optimizers:
        if parameter in optimizer.model_param_gbuf_map:
            start = optimizer._get_model_param_range_map(parameter)["param"].start
            tensors = dict(optimizer._get_main_param_and_optimizer_states(parameter))
            tensors.pop("step", None)
            main = tensors.pop("param")
            if main.dtype is not parameter.dtype:  # else it is a view of the parameter
                tensors[MASTER] = main
            return start, tensors
    return 0, {}


def _step(engine: TrainingEngine) -> int:
    """Steps that the optimizer has made; its parameters all make the same."""
    steps = {int(counter["step"]) for optimizer in optimizers_of(engine) for counter in _counters(optimizer)}
    assert len(steps) <= 1, steps
    return steps.pop() if steps else 0


def _counters(optimizer: DistributedOptimizer) -> Iterator[dict]:
    """The dictionaries that hold a count of steps: Transformer Engine's and our Adam count by group, torch's by parameter. None
    before the first step."""
    for group in optimizer.param_groups:
        states = [optimizer.optimizer.state.get(parameter, {}) for parameter in group["params"]]
        yield from (holder for holder in (group, *states) if "step" in holder)
