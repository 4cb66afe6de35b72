"""Writing the trainer's weights into the engine, and checking that they arrived.

What the engine holds as plain tensors of the trainer's dtype is written in place, by a plan in which each rank receives its
own shard and no more (`rl.refit.plan`). For the rest (quantised, packed) the engine's own loader takes its part of the whole
tensors (`rl.refit.gather`).
"""

import socket
import weakref
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rl.models.layout import VOCAB, Weight
from rl.models.placement import RolloutPlacement
from rl.refit import gather
from rl.refit.gather import RefitMismatch
from rl.refit.plan import Plan, plan_refit
from rl.refit.transfer import Traffic, compare, transfer
from rl.rollout.engine import RolloutEngine
from rl.runtime.collectives import gather_objects, sum_over_world
from rl.runtime.device import Device
from rl.training.engine import TrainingEngine
from rl.training.weights import WeightMap

__all__ = ["RefitMismatch", "check_refit", "refit", "traffic_metrics"]

MAX_SHOWN = 8
"""Differing weights that a check transfers again, to find their first differing element."""


@dataclass(frozen=True)
class Link:
    """What a trainer and an engine do at each refit."""

    plan: Plan
    in_place: list[Weight]
    """The weights of the plan, by its numbers."""
    fallback: list[Weight]
    """Those that go through the engine's loader."""


_links: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
"""Engine -> weight map -> buffer in MiB -> Link; the plan depends on nothing else."""


def refit(trainer: TrainingEngine, engine: RolloutEngine, *, buffer_mib: int = 512) -> Traffic:
    """Write the trainer's weights into the engine; what the engine computed with the old ones is forgotten. Returns what
    moved on this rank. Collective over the world.

    buffer_mib: what messages may take at a time, on any rank.
    """
    link = _link(trainer, engine, buffer_mib)
    sources, destinations = _parameters(trainer, engine, link)
    engine.device.synchronize()  # the engine may still read
    traffic = transfer(link.plan, sources, destinations, engine.device.torch)
    _clear_padding(engine, link.in_place, destinations)
    if link.fallback:
        traffic.fallback = sum(
            _num_bytes(weight, trainer.weight_map.dtype.itemsize) for weight in link.fallback
        )
        engine.load_weights(gather.gathered(trainer, link.fallback))
    else:
        engine.weights_changed()
    return traffic


def check_refit(trainer: TrainingEngine, engine: RolloutEngine, *, buffer_mib: int = 512) -> None:
    """Compare every element of this rank's engine weights with the trainer's: the two ends of each message by checksums,
    copies within a rank bit by bit, and what went through the engine's loader, where it can be compared, by gathering.
    Collective over the world.

    Raises RefitMismatch on every rank, naming weights, ranks and the first element that differs.
    """
    link = _link(trainer, engine, buffer_mib)
    sources, destinations = _parameters(trainer, engine, link)
    wrong = compare(link.plan, sources, destinations, engine.device.torch)
    again = sorted({number for found in gather_objects(wrong) for number, _ in found})[:MAX_SHOWN]
    weights = [link.in_place[number] for number in again]
    texts = gather.unknown(trainer, engine) + gather.differences(trainer, engine, weights)
    looked_at = [(number, source) for number, source in wrong if number in again]
    if looked_at and not texts:  # the whole tensor comes from another replica than the message did
        number, source = looked_at[0]
        texts = [
            f"{link.in_place[number].hf[0]} on rank {dist.get_rank()} is not what rank {source} trains, but what another "
            f"training replica does: the replicas' weights differ"
        ]
    texts += gather.differences(trainer, engine, _comparable(engine, link.fallback))
    gather.raise_mismatches(texts)


def traffic_metrics(traffic: Traffic, device: Device) -> dict[str, float]:
    """The bytes of a refit, summed over all ranks: received through the transport, copied within a rank, and, of weights
    that go through the engine's loader, gathered whole. Collective over the world."""
    names = ("received", "local", "fallback")
    sums = sum_over_world(
        torch.tensor([asdict(traffic)[name] for name in names], dtype=torch.float64), device.torch
    )
    return {f"perf/refit_bytes_{name}": value for name, value in zip(names, sums.tolist())}


def _link(trainer: TrainingEngine, engine: RolloutEngine, buffer_mib: int) -> Link:
    of_engine = _links.setdefault(engine, weakref.WeakKeyDictionary())
    by_buffer = of_engine.setdefault(trainer.weight_map, {})
    if buffer_mib not in by_buffer:
        by_buffer[buffer_mib] = _make_link(trainer, engine, buffer_mib)
    return by_buffer[buffer_mib]


def _make_link(trainer: TrainingEngine, engine: RolloutEngine, buffer_mib: int) -> Link:
    """Collective over the world: all ranks must take the same weights as writable, and know who shares a node."""
    weight_map = trainer.weight_map
    everyone = gather_objects((socket.gethostname(), _not_writable(weight_map, engine)))
    nodes = [host for host, _ in everyone]
    left_out = set().union(*(numbers for _, numbers in everyone))
    in_place = [weight for number, weight in enumerate(weight_map.weights) if number not in left_out]
    plan = plan_refit(
        in_place,
        weight_map.placement,
        RolloutPlacement(dist.get_world_size(), engine.tp, weight_map.placement.num_layers),
        node_of=lambda rank: nodes.index(nodes[rank]),
        itemsize=weight_map.dtype.itemsize,
        buffer_bytes=buffer_mib << 20,
        rank=dist.get_rank(),
    )
    if engine.device.is_cuda:
        dist.all_reduce(
            torch.zeros(1, device=engine.device.torch)
        )  # NCCL's first call in a group must be one of all ranks
    return Link(plan, in_place, [weight_map.weights[number] for number in sorted(left_out)])


def _not_writable(weight_map: WeightMap, engine: RolloutEngine) -> set[int]:
    """Numbers of the weights that this rank's engine does not hold as the layout says, in the trainer's dtype, and of all
    others of their modules: vLLM loads modules whole."""
    held = engine.weights()
    local = {weight.hf: parameter for weight, parameter in weight_map.local()}
    extents = _extents(weight_map.weights, engine)
    out = set()
    for number, weight in enumerate(weight_map.weights):
        parameter = held.get(weight.vllm)
        dtype = torch.float32 if weight.float32 else weight_map.dtype
        here = (
            parameter is not None
            and parameter.dtype == dtype
            and _fits(parameter, extents.get(weight.vllm), weight)
        )
        if not here or (weight.hf in local and local[weight.hf].dtype != dtype):
            out.add(number)
    modules = {_module(weight_map.weights[number]) for number in out}
    return {number for number, weight in enumerate(weight_map.weights) if _module(weight) in modules}


def _module(weight: Weight) -> str:
    return weight.vllm.rpartition(".")[0]


def _comparable(engine: RolloutEngine, weights: list[Weight]) -> list[Weight]:
    """Weights that every rank's engine holds in the layout's shape, if in another dtype. Collective over the world."""
    held, extents = engine.weights(), _extents(weights, engine)
    mine = [w.vllm in held and _fits(held[w.vllm], extents.get(w.vllm), w) for w in weights]
    return [weight for weight, *fits in zip(weights, *gather_objects(mine)) if all(fits)]


def _extents(weights: list[Weight], engine: RolloutEngine) -> dict[str, tuple[int, ...]]:
    """Shape of each engine parameter as far as weights fill it, by name."""
    out: dict[str, tuple[int, ...]] = {}
    for weight in weights:
        for piece in weight.vllm_pieces(engine.tp, engine.rank_in_replica):
            stops = tuple(stop for _, stop in piece.local_box)
            out[weight.vllm] = tuple(map(max, stops, out.get(weight.vllm, stops)))
    return out


def _fits(parameter: Tensor, extent: tuple[int, ...] | None, weight: Weight) -> bool:
    if weight.cut is VOCAB:  # a rank may have rows that only pad, or nothing else
        rows, *rest = extent or (0, *weight.shapes[0][1:])
        return rows <= parameter.shape[0] and list(parameter.shape[1:]) == rest
    return tuple(parameter.shape) == extent


def _parameters(
    trainer: TrainingEngine, engine: RolloutEngine, link: Link
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """This rank's parameters on both sides, by the plan's numbers."""
    held = engine.weights()
    numbers = {weight.hf: number for number, weight in enumerate(link.in_place)}
    sources = {
        numbers[w.hf]: parameter.detach() for w, parameter in trainer.weight_map.local() if w.hf in numbers
    }
    return sources, {number: held[weight.vllm].detach() for number, weight in enumerate(link.in_place)}


def _clear_padding(engine: RolloutEngine, weights: list[Weight], destinations: dict[int, Tensor]) -> None:
    """Rows of a vocabulary that only pad become 0, as vLLM's loader has them."""
    for number, weight in enumerate(weights):
        if weight.cut is VOCAB:
            pieces = weight.vllm_pieces(engine.tp, engine.rank_in_replica)
            destinations[number][max((piece.local_box[0][1] for piece in pieces), default=0) :].zero_()


def _num_bytes(weight: Weight, itemsize: int) -> int:
    elements = sum(torch.Size(shape).numel() for shape in weight.shapes)
    return elements * (4 if weight.float32 else itemsize)
