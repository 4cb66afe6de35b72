"""Adds low-rank adapters to a training model: W x + scale * B A x, where only A and B learn.

A parameter of Megatron may hold several linear layers of the checkpoint, its parts. Each part has an adapter
of its own (`rl.models.adapters`). For example, linear_qkv holds q_proj, k_proj and v_proj.
`rl.features.adapters.layers` computes the outputs. `Adapters` creates and initialises the parameters, gives
their values to the engine and to checkpoints, and checks them.
"""

import hashlib
from collections import ChainMap, defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl.config.adapter import Adapter
from rl.config.run_models import RunModel
from rl.config.schema import Config
from rl.faults.agreement import fail_together
from rl.features.adapters.fp8_base import Fp8Base
from rl.features.adapters.layers import AdapterSum, add_parameters, hook_of
from rl.features.adapters.shared_base import SharedBase
from rl.models.adapters import LowRank, adapters
from rl.models.boxes import index
from rl.models.layout import Weight
from rl.runtime.checksum import placed_checksum
from rl.runtime.collectives import gather_objects, gather_texts
from rl.runtime.names import listed, one_of_each_kind
from rl.training.adapted_weight import AdaptedWeight
from rl.training.parts import TrainerPart
from rl.training.weights import WeightMap, full_weights, load_hf, mark_split_weights

if TYPE_CHECKING:
    from rl.training.engine import TrainingEngine

COMPARED_ROWS = 1024
"""Approximate maximum number of rows of one piece of a weight that `Adapters.wrong_values` computes again."""
SUM_ERROR = 2.0**-10
"""Maximum relative error of products in a float32 matrix multiplication with factors in TF32."""
DORA_ERROR = 1e-5
"""Maximum relative error of the length of a row in float32."""

EXACT, PISSA_ERROR = 2.0**-12, 2.0**-4
"""Maximum relative difference of a weight with its new adapter from the weight: B = 0 changes nothing, and
DoRA's magnitudes are float32. PiSSA rounds both of its parts."""


class WrongLearning(RuntimeError):
    """Raised on every rank if frozen weights have changed, or the optimizer does not own an adapter."""


class Adapters(TrainerPart):
    """Adds adapters to one model, and holds their parameters on this rank.

    Args:
        seed: seed of the adapters' initial values. The values do not depend on the layout.
        in_weights: whether the layers compute with the weight W + scale * B A (`AdaptedWeight`). Otherwise
            scale * B A x is added to the output of each layer.
    """

    fuses_norms = False
    freezes_model = True
    learned_map: WeightMap
    """The adapters and, in a value model, the value head."""

    def __init__(self, config: Adapter, *, seed: int, in_weights: bool = False):
        self.config, self._seed, self._in_weights = config, seed, in_weights
        self.start_error = PISSA_ERROR if config.init == "pissa" else EXACT

    def attach(self, engine: "TrainingEngine") -> None:
        """Freeze the model, except for a value head, and add the adapters. Collective over the world."""
        adapter, base, model = self.config, engine.weight_map, engine.model
        self.pairs = adapters(
            base.weights, rank=adapter.rank, targets=adapter.targets, dora=adapter.kind == "dora"
        )
        self._base, self._rank, self._scale = base, adapter.rank, adapter.scale
        head = [weight for weight in base.weights if weight.megatron == "value_head.weight"]
        learned = {base.local_name(weight, base.grid.pp_rank) for weight in head if base.holds(weight)}
        parameters = {name: base.parameters[name] for name in learned}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in learned)
        first = engine.chunks[0]
        # Recomputation needs an input with a gradient, but nothing before the first adapter learns.
        if first.pre_process:
            first.embedding.register_forward_hook(_require_gradient)
        in_parts: bool = first.config.sequence_parallel
        self._sums: dict[tuple[str, ...], AdapterSum] = {}
        self._gathered: dict[tuple[str, ...], Tensor] = {}
        """Whole matrices A of sharded layers, by their names, since the last call of `merging`."""
        of_module = defaultdict(list)
        for weight, pairs in self._held().items():
            name = base.local_name(weight, base.grid.pp_rank)
            module_name, _, leaf = name.rpartition(".")
            module, number = model.get_submodule(module_name), leaf.removeprefix("weight")
            own = add_parameters(module, number, pairs, base, in_parts)
            parameters |= {f"{module_name}.{kind}": parameter for kind, parameter in own.items()}
            found = self._sums[weight.hf] = AdapterSum(
                weight,
                pairs,
                module,
                number,
                base,
                scale=adapter.scale,
                sequence_parallel=in_parts,
                in_weight=self._in_weights,
            )
            of_module[module].append(found)
        for module, sums in of_module.items():
            if self._in_weights:
                assert isinstance(module, AdaptedWeight)
                (module.adapter,) = sums
                continue
            module.register_forward_hook(hook_of(module, sums))
        weights = [weight for pair in self.pairs for weight in pair.weights]
        self.learned_map = base.over([*weights, *head], parameters)
        mark_split_weights(self.learned_map)
        self.initial_map: WeightMap | None = None
        """The initial adapters, with PiSSA. The original W is the present W plus scale * B A of these
        adapters."""
        self._sums_of_frozen: dict[str, int] = {}
        """Checksums of the frozen weights at the first check, by name."""
        self.set_aside()
        self._start_random(self._seed)
        self._check_draws()
        if adapter.init == "pissa":
            self._start_principal()
            self._check_principal()
            copies = {name: parameter.detach().clone() for name, parameter in parameters.items()}
            self.initial_map = base.over(self.learned_map.weights, copies)
        if adapter.path:
            with fail_together():
                load_hf(adapter.path, self.learned_map)

    def check(self, engine: "TrainingEngine", name: str) -> None:
        """Raise WrongLearning if frozen weights have changed, or adapters have no gradient buffer."""
        learned = self.learned_map.parameters
        own = {id(parameter) for parameter in learned.values()}
        frozen = {w.hf[0]: (w, p) for w, p in self._base.local() if id(p) not in own}
        sums = {key: int(placed_checksum(engine.parts.value(*found))) for key, found in frozen.items()}
        self._sums_of_frozen = first = self._sums_of_frozen or sums
        moved = [key for key, value in sums.items() if value != first[key]]
        owned = {p for chunk in engine.wrapped for p in chunk.param_to_bucket_group}
        absent = [key for key, parameter in learned.items() if parameter not in owned]
        first_sums = [] if self._in_weights else [*self._sums.items()][:1]
        learning = [names[0] for names, own in first_sums if not own.has_constant_lengths()]
        kinds = {
            "frozen weights that have changed": moved,
            "adapters that the optimizer lacks": absent,
            "rows whose lengths DoRA's gradient does not treat as constants": learning,
        }
        where = f"rank {dist.get_rank()} of the {name} has"
        texts = [f"{where} {what}: {listed(names)}" for what, names in kinds.items() if names]
        if found := gather_texts(texts):
            raise WrongLearning(f"adapter check: {'; '.join(found[:4])}.")

    @torch.no_grad()
    def set_aside(self) -> None:
        """Set B to 0, and DoRA's magnitudes to the lengths of the weights' rows."""
        for weight, parameter in self.learned_map.local():
            if ".lora_B." in weight.megatron:
                parameter.zero_()
        for added in self._sums.values():
            added.start_magnitudes()

    def beside(self) -> tuple[WeightMap, Callable[[Weight, Tensor], Tensor]]:
        """Return the adapters with the values A and scale * B."""
        return self.learned_map, partial(_scaled, self.config.scale)

    @torch.no_grad()
    def wrong_values(
        self,
        engine: "TrainingEngine",
        of: Callable[[Weight, Tensor], Tensor],
        number: int,
        *,
        is_beside: bool,
    ) -> str:
        """Return a text about the error in one adapted layer's values on this rank; "" if they are right.

        Each element must equal W + scale * B A up to rounding. With DoRA, rows that are whole on this rank
        are compared. of: maps a weight and its parameter to the values for the engine. number: selects the
        layer. is_beside: whether the engine keeps adapters beside its weights; the values are then scale * B.
        """
        base, learned, scale = engine.weight_map, self.learned_map, self.config.scale
        pairs = [pair for pair in self.pairs if base.holds(pair.base)]
        if not pairs:
            return ""
        pair = pairs[number % len(pairs)]
        a, b = (_whole(learned, weight) for weight in (pair.a, pair.b))
        a = self._gathered.get(pair.a.hf, a).float()
        weights, weight = (learned, pair.b) if is_beside else (base, pair.base)
        parameter = weights.parameter(weight).detach()
        value = of(weight, parameter)
        start = torch.zeros_like(parameter) if is_beside else engine.parts.value(weight, parameter)
        for piece in weights.pieces(weight):
            if piece.hf != (weight.hf[0] if is_beside else weight.hf[pair.part]):
                continue
            (first, last), columns = piece.hf_box[0], a[:, slice(*piece.hf_box[1])]
            step = -(-(last - first) // COMPARED_ROWS) | 1
            found, before = (tensor[index(piece.local_box)][::step].float() for tensor in (value, start))
            rows = b[first:last:step]
            added, size = (rows, rows.abs()) if is_beside else (rows @ columns, rows.abs() @ columns.abs())
            expected, eps = before + scale * added, 0.51 * torch.finfo(value.dtype).eps
            if pair.magnitude is not None:
                if columns.shape[1] < a.shape[1]:  # several ranks hold a row, and its length
                    continue
                factors = _whole(learned, pair.magnitude)[first:last:step] / expected.norm(dim=1)
                expected, size = (x * factors[:, None] for x in (expected, size))
                eps += DORA_ERROR
            allowed = eps * expected.abs() + SUM_ERROR * scale * size
            if bool(((found - expected).abs() > allowed).any()):
                if pair.magnitude is not None:
                    error = float((found - expected).norm() / expected.norm())
                    return (
                        f"the values of {pair.module} for the engine differ by {error:.2g} of their size "
                        "from W + scale * B A with DoRA's magnitudes as the lengths of its rows"
                    )
                times = ((found - before) * added).sum() / (scale * added.square().sum()).clamp(min=1e-30)
                return (
                    f"the values of {pair.module} for the engine contain {float(times):.2f} times its "
                    f"adapter, scale * B A with the scale {scale:g}, instead of once"
                )
        return ""

    def properties(self) -> dict[str, Any]:
        """Return the keys of section `adapter` that determine A, B and their scale, with their values."""
        return {key: getattr(self.config, key) for key in ("kind", "rank", "alpha", "init")}

    def export(self, engine: "TrainingEngine", source: str, run_dir: Path, fence: Callable[[], None]) -> str:
        """Write the adapters in the format of the package peft; return a text for the log."""
        from rl.features.adapters.peft import export_peft

        target = str(run_dir / "adapter")
        export_peft(engine, source, target, fence=fence)
        return f"wrote {target}, the adapters in the format of peft"

    def replicas(self) -> list[tuple[dist.ProcessGroup, dict[str, Tensor]]]:
        """Return pairs of a tensor parallel group and the parameters that all of its ranks hold, by name.

        The second pair is for routed experts, which have a group of their own.
        """
        whole: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        for weight, parameter in self.learned_map.local():
            if not weight.cut.split:
                name = self.learned_map.local_name(weight, self._base.grid.pp_rank)
                whole[weight.expert is not None][name] = parameter
        groups = self._base.grid.groups
        return list(zip((groups.tp, groups.expt_tp), whole))

    def _held(self) -> dict[Weight, list[LowRank]]:
        """Return the adapters of each weight that this rank holds."""
        held = defaultdict(list)
        for pair in self.pairs:
            if self._base.holds(pair.base):
                held[pair.base].append(pair)
        return held

    @torch.no_grad()
    def _start_random(self, seed: int) -> None:
        """Set A to random values of Kaiming's initialisation."""
        for weight, _ in self.learned_map.local():
            if ".lora_A." in weight.megatron:
                self._set(weight, _kaiming(weight, seed))

    def _check_draws(self) -> None:
        """Raise WrongLearning if parts of new matrices A are equal, or a variance is wrong. Collective."""
        sums, wrong = dict[str, int](), list[str]()
        for weight, parameter in self.learned_map.local():
            if ".lora_A." in weight.megatron and parameter.numel():
                boxes = [piece.hf_box for piece in self.learned_map.pieces(weight)]
                sums[f"{weight.hf[0]} {boxes}"] = int(placed_checksum(parameter.detach()))
                size = 3 * weight.shapes[0][1] * float(parameter.detach().float().square().mean())
                # 8 standard deviations of the mean of squares of uniform numbers, and their rounding
                if abs(size - 1) > 8 * (0.8 / parameter.numel()) ** 0.5 + 2**-7:
                    wrong.append(f"the variance of {weight.hf[0]} is {size:.3g} times 1 / (3 columns)")
        parts = ChainMap(*gather_objects(sums, self._base.grid.groups.tp))
        first = {value: name for name, value in parts.items()}
        wrong += [f"{name} equals {first[own]}" for name, own in parts.items() if first[own] != name]
        if found := gather_texts(wrong[:1]):
            raise WrongLearning(f"adapter check: {found[0]}, but each new A must be a draw of its own.")

    def _set(self, weight: Weight, values: Tensor) -> None:
        """Set this rank's part of A or B. values: the whole tensor."""
        parameter = self.learned_map.parameter(weight)
        for piece in self.learned_map.pieces(weight):
            parameter[index(piece.local_box)] = values[index(piece.hf_box)].to(parameter)

    @torch.no_grad()
    def _start_principal(self) -> None:
        """Set scale * B A to the principal part of each W, and subtract it from W (PiSSA).

        Every rank that holds a part of W decomposes the whole W. The first rank then broadcasts its result,
        so that all ranks have the same A and B.
        """
        groups = self._base.grid.groups
        for base, pairs in self._held().items():
            of_expert = base.expert is not None
            replicas = groups.expt_dp if of_expert else groups.dp_cp
            split = (groups.expt_tp if of_expert else groups.tp) if base.cut.split else None
            parameter = self._base.parameter(base)
            for pair in pairs:
                whole = torch.zeros(base.shapes[pair.part], device=parameter.device)
                for piece in self._base.pieces(base):
                    if piece.hf == base.hf[pair.part]:
                        whole[index(piece.hf_box)] = parameter[index(piece.local_box)].float()
                if split is not None:
                    dist.all_reduce(whole, group=split)
                left, sizes, right = torch.linalg.svd(whole, full_matrices=False)
                roots = (sizes[: self._rank] / self._scale).sqrt()
                a, b = roots[:, None] * right[: self._rank], left[:, : self._rank] * roots
                for part, values in ((pair.a, a.contiguous()), (pair.b, b.contiguous())):
                    for group in (replicas, groups.expt_tp if of_expert else groups.tp):
                        dist.broadcast(values, group=group, group_src=0)
                    self._set(part, values)
            self._sums[base.hf].take_out(parameter)

    @torch.no_grad()
    def _check_principal(self) -> None:
        """Raise WrongLearning unless what PiSSA left of weights is orthogonal to A and B. Collective."""
        eps = torch.finfo(self._base.dtype).eps
        for pair in one_of_each_kind(self.pairs, lambda pair: pair.module):
            whole = dict(full_weights(self._base.over([pair.base], self._base.parameters)))
            whole |= full_weights(self.learned_map.over([pair.a, pair.b], self.learned_map.parameters))
            names = pair.base.hf[pair.part], pair.a.hf[0], pair.b.hf[0]
            left, a, b = (whole[name].double() for name in names)
            first, last = (self._scale * float(a[i].norm() * b[:, i].norm()) for i in (0, -1))
            allowed = max(4 * eps, SUM_ERROR) * (first + float(left.norm()) / min(left.shape) ** 0.5)
            along = max(float((left @ a.T).norm() / a.norm()), float((b.T @ left).norm() / b.norm()))
            largest = float(torch.linalg.svdvals(left.float())[0])
            if along > allowed or largest > last + allowed:
                raise WrongLearning(
                    f"adapter check: what adapter.init=pissa left of {pair.module} has the size {along:.3g} "
                    f"along A and B instead of 0, and {largest:.3g} in a direction where B A has at least "
                    f"{last:.3g}: B A is not the principal part of the whole weight, or W still contains it."
                )

    @torch.no_grad()
    def merging(self) -> Callable[[Weight, Tensor], Tensor]:
        """Return a function that maps a weight and its values W on this rank to W + scale * B A.

        The function computes in float32 and rounds once. It returns W itself if the weight has no adapter.
        Collective over the tensor parallel groups, because DoRA sums the squares of each row over the ranks.
        """
        factors = {name: added.factors() for name, added in self._sums.items()}
        sharded = [pair.a for pair in self.pairs if pair.a.cut.sharded]
        self._gathered = {
            (name,): a
            for name, a in full_weights(self.learned_map.over(sharded, self.learned_map.parameters))
        }

        @torch.no_grad()
        def merged(weight: Weight, value: Tensor) -> Tensor:
            found = self._sums.get(weight.hf)
            return value if found is None else found.merged(value, factors[weight.hf], self._gathered)

        return merged


def _require_gradient(module: torch.nn.Module, args: tuple, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _kaiming(weight: Weight, seed: int) -> Tensor:
    """Return a random A, float32 [r, in], uniform between -1 / sqrt(in) and 1 / sqrt(in) as in peft."""
    digest = hashlib.sha256(f"{seed} {weight.hf[0]}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    (shape,) = weight.shapes
    bound = shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _scaled(scale: float, weight: Weight, parameter: Tensor) -> Tensor:
    """Return the parameter if it is A, and scale * B if it is B."""
    return parameter * scale if ".lora_B." in weight.megatron else parameter


def _whole(weights: WeightMap, weight: Weight) -> Tensor:
    """Return the whole tensor, float32, with zeros where this rank has no part of it."""
    parameter = weights.parameter(weight).detach()
    full = torch.zeros(weight.shapes[0], device=parameter.device)
    for piece in weights.pieces(weight):
        full[index(piece.hf_box)] = parameter[index(piece.local_box)].float()
    return full


def parts(config: Config, model: RunModel, base_of: "TrainingEngine | None") -> list[TrainerPart]:
    """Return the trainer parts that a model needs for adapters.

    base_of: a model with the same frozen weights, or None. The new model uses its memory.
    """
    assert base_of is None or config.adapter.init != "pissa", "PiSSA changes the weights of another model"
    found: list[TrainerPart] = [] if base_of is None else [SharedBase(base_of)]
    if model.has_adapters:
        is_policy = model.name == "policy"
        adapter = config.adapter if is_policy else replace(config.adapter, path="")
        in_weights = config.model.numerics == "bitwise" and is_policy
        found.append(Adapters(adapter, seed=config.run.seed, in_weights=in_weights))
        if adapter.base == "fp8":
            found.append(Fp8Base())
    return found
