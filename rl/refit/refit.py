"""Write the trainer's weights into the engine, and check that they arrived.

The path of a weight, for example a fused qkv weight: the model's file (`rl.models.dense`) names its Hugging
Face tensors q_proj, k_proj and v_proj. `rl.models.layout` says which regions of these tensors Megatron and
vLLM hold on each rank. `rl.refit.plan` chooses the sender of every region that a rank needs.
`rl.refit.transfer` sends the regions.

Weights that the engine holds as plain tensors of the trainer's dtype are written in place. Their plan sends
each rank only its own shard (`rl.refit.plan`). For other weights (quantised, packed), the engine's own loader
reads its part of the whole tensors (`rl.refit.gather`). With `rollout.quantization` the values travel as
planned, in groups that the engine's part quantises where they arrive (`rl.refit.values.Groups`).

Low-rank adapters reach the engine in one of two forms (`adapter.in_engine`; `rl.refit.values`). Merged: the
values W + scale * B A travel. Adapter: the values of A and scale * B travel, and W unless the engine holds
it.
"""

import re
import socket
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rl.config.options import ConfigError
from rl.models import by_class
from rl.models.layout import VOCAB, Weight
from rl.models.placement import RolloutPlacement, TrainingPlacement
from rl.refit import gather
from rl.refit.equality import Equality, coverage, differing, plan_equality, uncompared
from rl.refit.gather import RefitMismatch
from rl.refit.plan import RefitPlan, Routing, cut_into_batches, plan_of
from rl.refit.transfer import BytesMoved, compare, transfer
from rl.refit.values import Groups, WeightGroup, values_of, wrong_values
from rl.rollout.engine import RolloutEngine
from rl.runtime import tracing
from rl.runtime.collectives import any_rank, gather_objects, gather_texts, sum_over_world
from rl.runtime.device import Device
from rl.runtime.names import one_of_each_kind
from rl.training.engine import TrainingEngine
from rl.training.weights import WeightMap

MAX_SHOWN = 8
"""Maximum number of differing weights that a check gathers to report their first differing element."""


@dataclass
class WeightPlan:
    """The plan of all refits from a trainer to an engine, on this rank."""

    plan: RefitPlan
    equality: Equality
    """Plan of the comparison, which is independent of the plan of the transfer."""
    in_place: list[Weight]
    """The weights of the plan, by index."""
    fallback: list[Weight]
    """Weights that the engine's loader reads."""
    empty: tuple[str, ...]
    """vLLM's names of parameters that hold no part of a weight on this rank: they are 0."""
    num_compared: int
    """Elements of all engines that the equality covers."""
    num_elements: int
    """Elements of all engines, without padding."""
    is_new: bool = True
    """Whether `_prove_description` is still to come, for a model that its class describes."""


_plans: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
"""Engine -> weight map -> (buffer in MiB, group) -> WeightPlan. The plan depends only on these."""
_moved: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
"""Weight map -> vLLM's modules with weights that only its loader can write, found by `_prove_description`."""
_compared: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
"""Trainer -> the last comparison of `check_weights`: version of the trainer's weights, what was compared,
number of elements of all engines that were compared, and number of all elements of all engines."""


class PlannedGroup(NamedTuple):
    """A group of weights on this rank, with its plan."""

    group: WeightGroup
    planned: WeightPlan
    sources: Mapping[int, Tensor]
    """The trainer's tensors, by the plan's indices."""
    destinations: Mapping[int, Tensor]
    """The engine's tensors, by the plan's indices."""


def refit(
    trainer: TrainingEngine, engine: RolloutEngine, *, buffer_mib: int = 512, adapter: int = 0
) -> BytesMoved:
    """Write the trainer's weights into the engine and clear the engine's caches. Collective over the world.

    Returns the bytes that this rank moved.

    buffer_mib: limit of the messages of one batch on any rank, in MiB. adapter: index of the trainer's
    adapter in an engine that has several.
    """
    slots, done, fallback, incomplete = engine.slots, BytesMoved(), False, list[str]()
    engine.device.synchronize()  # the engine may still be reading
    with_base = slots is None or not slots.has_base
    if trainer.weight_map.hf.get(by_class.MARK):
        for part in _parts(trainer, engine, buffer_mib, adapter):
            if part.planned.is_new:
                _prove_description(engine, part, buffer_mib)
    for part in _parts(trainer, engine, buffer_mib, adapter, with_base=with_base, staged=True):
        planned = part.planned
        if slots is not None and planned.fallback:
            raise ConfigError(
                f"adapter.in_engine=adapter, but vLLM holds {len(planned.fallback)} weights, such as "
                f"{planned.fallback[0].vllm}, in another dtype or layout than the trainer; only its own "
                "loader can write; use adapter.in_engine=merged."
            )
        done += transfer(planned.plan, part.sources, part.destinations, engine.device.torch)
        clear_padding(engine, planned.in_place, part.destinations)
        for name in planned.empty:
            part.group.held[name].detach().zero_()
        incomplete += part.group.store()
        if planned.fallback:
            itemsize = part.group.values.weight_map.dtype.itemsize
            done.fallback += sum(w.num_elements * w.bytes_per_element(itemsize) for w in planned.fallback)
            engine.load_weights(_for_loader(planned.fallback, part.group.values.gathered(planned.fallback)))
            fallback = True
    if _groups_of(engine) is not None:
        gather.raise_mismatches(incomplete)
    if slots is not None:
        slots.has_base, slots.versions[adapter] = True, trainer.version
    if not fallback:
        engine.weights_changed()
    return done


def _prove_description(engine: RolloutEngine, part: PlannedGroup, buffer_mib: int) -> None:
    """Compare the names and places of weights in `rl.models.by_class` with what vLLM's loader does.

    The loader writes all weights. It also writes in every refit the weights that it changes or moves, so that
    they are not where the description says. Raises RefitMismatch on every rank if it does not write a
    parameter of the engine that no comparison covers, or leaves out a weight. Collective over the world.
    """
    group, planned = part.group, part.planned
    values, held = group.values, group.held

    def sums() -> dict[str, float]:
        # vLLM does not initialise memory that no weight reaches: there may be NaN.
        tensors = {**dict(engine.model.named_buffers()), **held}
        return {name: float(tensor.detach().double().nansum()) for name, tensor in tensors.items()}

    before = sums()
    try:
        engine.load_weights((name, tensor + 1) for name, tensor in values.gathered(group.weights))
    except (AssertionError, AttributeError, KeyError, ValueError) as error:  # on every rank
        cause = str(error).partition(" The available parameters")[0].rstrip(".")
        names = re.findall(r"'([\w.]+)'", cause)[:1]  # of a weight, or of its module
        of_it = [w.hf[0] for w in group.weights for name in names if name in w.vllm or name in w.hf[0]]
        text = f"vLLM's loader refuses the weights ({type(error).__name__}: {cause})"
        raise _mismatch(part, text, of_it[0] if of_it else "") from error
    last = after = sums()
    changed = set[str]()
    unknown = [weight for weight in group.weights if weight.vllm not in held]
    for weight in one_of_each_kind(unknown, lambda weight: weight.hf[0]):
        changed.update(weight.hf)
        # All of its layer, because all tensors of a module of vLLM must be loaded together.
        layer = [own for own in group.weights if own.layer == weight.layer]
        engine.load_weights((name, tensor + 1 + (name in changed)) for name, tensor in values.gathered(layer))
        before_it, last = last, sums()
        if not any_rank(before_it != last):
            raise _mismatch(part, f"vLLM's model computes without {weight.hf[0]}", weight.hf[0])
    engine.load_weights(values.gathered(group.weights))
    numbers = differing(planned.equality, part.sources, part.destinations, engine.device.torch)
    found = set().union(*gather_objects(numbers))
    if found:
        _moved[values.weight_map] = {_module(planned.in_place[number].vllm) for number in found}
        del _plans[engine][values.weight_map][buffer_mib, group.number]
        planned = _planned(group, engine, buffer_mib)
    planned.is_new = False
    compared = {weight.vllm for weight in planned.in_place}
    same = [name for name in held if name not in compared and before[name] == after[name]]
    if names := sorted(set().union(*gather_objects(same))):
        text = f"vLLM's loader writes {len(names)} parameters, such as {names[0]}, from none of the trainer's"
        raise _mismatch(part, text)


def _mismatch(part: PlannedGroup, constraint: str, tensor: str = "") -> RefitMismatch:
    return RefitMismatch(str(by_class.refusal(part.group.values.weight_map.hf, constraint, tensor)))


def check_refit(
    trainer: TrainingEngine, engine: RolloutEngine, *, buffer_mib: int = 512, adapter: int = 0
) -> None:
    """Raise RefitMismatch on every rank if any element of the engine's weights differs from the trainer's.

    Weights that the engine's loader wrote are compared if the engine holds them in the layout's shape, and
    the loader does not change or move them. Collective over the world.
    """
    texts, device = list[str](), engine.device.torch
    for part in _parts(trainer, engine, buffer_mib, adapter):
        planned, values, held = part.planned, part.group.values, part.group.held
        sent = compare(planned.plan, part.sources, part.destinations, device)
        numbers = {number for number, _ in sent}
        numbers.update(differing(planned.equality, part.sources, part.destinations, device))
        again = sorted(set().union(*gather_objects(numbers)))[:MAX_SHOWN]
        found = gather.differences(values, engine, held, [planned.in_place[number] for number in again])
        for number, source in [pair for pair in sent if pair[0] in again][:1] if not found else ():
            texts.append(  # the message came from another replica than the gathered weights
                f"{planned.in_place[number].hf[0]} on rank {dist.get_rank()} differs from that of rank "
                f"{source}, but equals that of another training replica: the weights of the replicas differ"
            )
        moved = _moved.get(values.weight_map, ())
        same = [weight for weight in planned.fallback if _module(weight.vllm) not in moved]
        comparable = _comparable(engine, held, same)
        texts += found + gather.differences(values, engine, held, comparable)
    gather.raise_mismatches(texts)


def check_weights(
    trainer: TrainingEngine,
    engine: RolloutEngine,
    *,
    buffer_mib: int = 512,
    adapter: int = 0,
    with_base: bool = True,
) -> None:
    """Compare the engine's weights with the trainer's by checksums; if they differ, call `check_refit`.

    with_base: compare also the base, which several adapters share. Collective over the world.
    """
    wrong, compared, total, device, problem = False, 0, 0, engine.device.torch, ""
    with tracing.span("compare weights"):
        for part in _parts(trainer, engine, buffer_mib, adapter, with_base=with_base):
            planned = part.planned
            wrong |= bool(differing(planned.equality, part.sources, part.destinations, device))
            compared, total = compared + planned.num_compared, total + planned.num_elements
        for values in values_of(trainer, in_parts=engine.slots is not None):  # before they are quantised
            if engine.slots is None or values.is_beside:
                problem = wrong_values(trainer, values)
        differ = any_rank(wrong or bool(problem))
    subject = "weights" if with_base else "weights of the adapter"
    _compared[trainer] = trainer.version, subject, compared, total
    if differ:
        check_refit(trainer, engine, buffer_mib=buffer_mib, adapter=adapter)
        if found := gather_texts([f"on rank {dist.get_rank()}, {problem}"] if problem else []):
            raise RefitMismatch(found[0])
        raise RefitMismatch("the weights of engine and trainer differed, and were equal when compared again")


def what_is_equal(trainer: TrainingEngine) -> str:
    """Return a sentence on how many elements of the engines equal the trainer's. Not collective."""
    version, subject, compared, total = _compared.get(trainer, (None, "", 0, 0))
    if version != trainer.version or not compared:
        return "The weights of this version were not all compared, so they may differ"
    if compared == total:
        return f"The {subject} are equal (all {total} elements in the engines were compared)"
    return (
        f"Only {compared} of the {total} elements of the {subject} in the engines were compared and are equal"
    )


def _parts(
    trainer: TrainingEngine,
    engine: RolloutEngine,
    buffer_mib: int,
    adapter: int,
    *,
    with_base: bool = True,
    staged: bool = False,
) -> Iterator[PlannedGroup]:
    """Yield the parts of a refit. Collective over the world.

    One part has all weights; for an engine with adapters one part has the base weights, and a second one the
    adapter. Quantised weights are in several parts.

    staged: hold quantised weights in tensors that the refit writes, not in tensors for the comparison.
    """
    every, own = values_of(trainer, in_parts=engine.slots is not None), _groups_of(engine)
    if own is not None:
        found = own.groups(engine, *every, staged=staged)
    else:
        found = (
            WeightGroup(0, values.weight_map.weights, values, held | _buffers(engine, values.weight_map))
            for values, held in zip(every, held_by(engine, adapter), strict=True)
            if with_base or values.is_beside
        )
    for group in found:
        planned = _planned(group, engine, buffer_mib)
        sources = group.values.by_number(planned.in_place)
        yield PlannedGroup(group, planned, sources, engine_parameters(group.held, planned))


def _groups_of(engine: RolloutEngine) -> Groups | None:
    """Return the part of the engine that receives refits in groups of its own, if it has one."""
    return next((part for part in engine.parts if isinstance(part, Groups)), None)


def _buffers(engine: RolloutEngine, weight_map: WeightMap) -> dict[str, Tensor]:
    """Return the weights that vLLM's classes of transformers hold as buffers, such as a router's biases."""
    if not weight_map.hf.get(by_class.MARK):
        return {}
    found = dict(engine.model.named_buffers())
    return {weight.vllm: found[weight.vllm] for weight in weight_map.weights if weight.vllm in found}


def held_by(engine: RolloutEngine, adapter: int = 0) -> list[dict[str, Tensor]]:
    """Return the engine's tensors by vLLM's name: the weights, and an adapter's tensors beside them."""
    weights = engine.weights()
    return [weights] if engine.slots is None else [weights, engine.slots.buffers(adapter)]


def traffic_metrics(moved: BytesMoved, device: Device) -> dict[str, float]:
    """Return the bytes of a refit, summed over all ranks. Collective over the world.

    Bytes are received, copied within a rank, or gathered for the engine's loader.
    """
    names = ("received", "local", "fallback")
    mine = torch.tensor([getattr(moved, name) for name in names], dtype=torch.float64)
    sums = sum_over_world(mine, device.torch)
    return {f"perf/refit_bytes_{name}": value for name, value in zip(names, sums.tolist())}


def _planned(group: WeightGroup, engine: RolloutEngine, buffer_mib: int) -> WeightPlan:
    """Return the plan of a group of weights. Collective over the world."""
    weight_map = group.values.weight_map
    of_engine = _plans.setdefault(engine, weakref.WeakKeyDictionary())
    known, key = of_engine.setdefault(weight_map, {}), (buffer_mib, group.number)
    if key not in known:
        known[key] = plan_weights(
            group.weights,
            weight_map.placement,
            engine.placement,
            dtype=weight_map.dtype,
            weight_map=weight_map,
            engine=engine,
            held=group.held,
            buffer_mib=buffer_mib,
        )
        if engine.device.is_cuda:  # the first NCCL call in a group must include all its ranks
            dist.all_reduce(torch.zeros(1, device=engine.device.torch))
    return known[key]


def plan_weights(
    weights: list[Weight],
    training: TrainingPlacement,
    rollout: RolloutPlacement,
    *,
    dtype: torch.dtype,
    weight_map: WeightMap | None,
    engine: RolloutEngine | None,
    held: Mapping[str, Tensor],
    buffer_mib: int,
    group: dist.ProcessGroup | None = None,
) -> WeightPlan:
    """Plan the refits. Collective over the group, by default the world; the placements name its ranks.

    All ranks agree on the nodes and on the weights that are written in place.

    weight_map, engine: None on a rank that does not train or does not generate. held: the engine's tensors by
    vLLM's name.
    """
    unwritable = _not_writable(weights, dtype, weight_map, engine, held)
    everyone = gather_objects((socket.gethostname(), unwritable), group)
    nodes = [host for host, _ in everyone]
    left_out = set().union(*(numbers for _, numbers in everyone))
    in_place = [weight for number, weight in enumerate(weights) if number not in left_out]
    routing = Routing(
        in_place, training, rollout, node_of=lambda rank: nodes.index(nodes[rank]), itemsize=dtype.itemsize
    )
    rank = dist.get_rank() if group is None else group.rank()
    plan = plan_of(routing, cut_into_batches(routing, buffer_mib << 20), rank)
    fallback = [weights[number] for number in sorted(left_out)]
    equality = plan_equality(in_place, training, rollout, rank)
    modules = {_module(weight.vllm) for weight in fallback}
    filled = {w.vllm for w in in_place} if engine is None else _extents(in_place, engine).keys()
    empty = tuple(sorted({w.vllm for w in in_place if w.expert is not None} - filled))
    modules.update(empty)
    covered = coverage(equality, in_place)
    texts = uncompared(
        covered, in_place, {n: t for n, t in held.items() if modules.isdisjoint((n, _module(n)))}
    )
    padded = {weight.vllm: prod(weight.shapes[0]) for weight in in_place if weight.cut is VOCAB}
    own = {name: covered[name] for name in padded}, sum(covered.values())
    without = {*padded, *empty}
    elements = own[1] + sum(t.numel() - covered[n] for n, t in held.items() if n not in without)
    reports = gather_objects((texts, *own, elements), group)
    found = [text for texts, *_ in reports for text in texts]
    for name, size in padded.items():  # padding hides what is missing on one rank, but not in the sum
        if more := sum(counts[name] for _, counts, *_ in reports) % size:
            found.append(f"{name}: {more} elements of it are not in whole copies of {size} on the ranks")
    if found and not any(weight.cut.sharded for weight in weights):  # `_prove_description` follows for these
        raise RefitMismatch(f"{len(found)} weights cannot be compared: " + "; ".join(found[:MAX_SHOWN]))
    compared, total = sum(report[2] for report in reports), sum(report[3] for report in reports)
    return WeightPlan(plan, equality, in_place, fallback, empty, compared, total)


def _for_loader(weights: list[Weight], tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors with rows and columns exchanged where the checkpoint's files have them so."""
    transposed = {weight.hf[0] for weight in weights if weight.stored and weight.stored.transposed}
    for name, tensor in tensors:
        yield name, tensor.t() if name in transposed else tensor


def _not_writable(
    weights: list[Weight],
    model_dtype: torch.dtype,
    weight_map: WeightMap | None,
    engine: RolloutEngine | None,
    held: Mapping[str, Tensor],
) -> set[int]:
    """Return the indices of the weights that cannot be written in place on this rank.

    The engine holds these weights in another layout than `rl.models.layout` describes, or in another dtype
    than the trainer. The other weights of the same modules are included, because vLLM loads whole modules.
    """
    extents = {} if engine is None else _extents(weights, engine)
    local = {} if weight_map is None else {weight.hf: parameter for weight, parameter in weight_map.local()}
    out = set()
    for number, weight in enumerate(weights):
        parameter = held.get(weight.vllm)
        dtype = torch.float32 if weight.float32 else model_dtype
        here = engine is None or (
            parameter is not None
            and parameter.dtype == dtype
            and _fits(parameter, extents.get(weight.vllm), weight)
        )
        if not here or (weight.hf in local and local[weight.hf].dtype != dtype):
            out.add(number)
    modules = {_module(weights[number].vllm) for number in out}
    if weight_map is not None:
        modules |= _moved.get(weight_map, set())
    return {number for number, weight in enumerate(weights) if _module(weight.vllm) in modules}


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _comparable(engine: RolloutEngine, held: Mapping[str, Tensor], weights: list[Weight]) -> list[Weight]:
    """Return the weights that every rank's engine holds in the layout's shape, in any dtype. Collective."""
    extents = _extents(weights, engine)
    mine = [w.vllm in held and _fits(held[w.vllm], extents.get(w.vllm), w) for w in weights]
    return [weight for weight, *fits in zip(weights, *gather_objects(mine)) if all(fits)]


def _extents(weights: list[Weight], engine: RolloutEngine) -> dict[str, tuple[int, ...]]:
    """Return the shape of the part that weights fill, for each engine parameter by name."""
    out: dict[str, tuple[int, ...]] = {}
    for weight in weights:
        for piece in engine.pieces(weight):
            stops = tuple(stop for _, stop in piece.local_box)
            out[weight.vllm] = tuple(map(max, stops, out.get(weight.vllm, stops)))
    return out


def _fits(parameter: Tensor, extent: tuple[int, ...] | None, weight: Weight) -> bool:
    if weight.cut is VOCAB:  # a rank may hold padding rows, even only padding rows
        rows, *rest = extent or (0, *weight.shapes[0][1:])
        return rows <= parameter.shape[0] and list(parameter.shape[1:]) == rest
    if extent is None:  # this rank holds no part of it: a bias that only the first rank adds
        return weight.expert is not None and not weight.cut.split
    return tuple(parameter.shape) == extent


def engine_parameters(held: Mapping[str, Tensor], planned: WeightPlan) -> dict[int, Tensor]:
    """Return this rank's engine parameters by the plan's indices. held: by vLLM's name."""
    return {number: held[weight.vllm].detach() for number, weight in enumerate(planned.in_place)}


def clear_padding(engine: RolloutEngine, weights: list[Weight], destinations: Mapping[int, Tensor]) -> None:
    """Set padding rows of a vocabulary to 0, as vLLM's loader does."""
    for number, weight in enumerate(weights):
        if weight.cut is VOCAB:
            pieces = engine.pieces(weight)
            destinations[number][max((piece.local_box[0][1] for piece in pieces), default=0) :].zero_()
