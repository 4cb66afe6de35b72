"""Megatron's layers with the arithmetic of `rl.features.bitwise`, for model.numerics=bitwise.

The forward pass is computed by functions that the engine calls too (`rl.features.bitwise.engine`). The
backward pass computes the ordinary layer again at the same inputs, and takes its gradient.
"""

from collections.abc import Callable
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from rl.config.run_models import RunModel
from rl.config.schema import Config
from rl.features.bitwise import layers
from rl.models import architecture, rope
from rl.training.adapted_weight import AdaptedWeight
from rl.training.attention import CoreAttention, PackedRow
from rl.training.extras import LogitsFilter
from rl.training.layer_spec import DuplicatedLinear
from rl.training.logprobs import OUTPUTS, Softmax, linear_logprobs
from rl.training.model import Policy
from rl.training.parts import TrainerPart
from rl.training.rotary import RowRotary, _Rotate

if TYPE_CHECKING:
    from rl.training.engine import TrainingEngine


class _Bitwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable, ordinary: Callable, *inputs: Tensor) -> Any:
        ctx.ordinary = ordinary
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.ordinary(*inputs)
        pairs = [
            pair
            for pair in zip(out if isinstance(out, tuple) else (out,), grads)
            if pair[0].requires_grad and pair[1] is not None
        ]
        needed = [x for x, is_needed in zip(inputs, ctx.needs_input_grad[2:]) if is_needed]
        outputs, upstream = zip(*pairs)
        found = iter(
            torch.autograd.grad(outputs, needed, upstream, allow_unused=True, materialize_grads=True)
        )
        return None, None, *(next(found) if is_needed else None for is_needed in ctx.needs_input_grad[2:])


def bitwise(function: Callable, ordinary: Callable, *inputs: Tensor) -> Any:
    """Return function(*inputs), with the gradient of ordinary(*inputs)."""
    return _Bitwise.apply(function, ordinary, *inputs)


class BitwiseLinear(AdaptedWeight):
    """A linear layer; with adapters it computes with the merged weight, as the engine does."""

    def product(
        self, x: Tensor, bias: Tensor | None = None, group: dist.ProcessGroup | None = None
    ) -> Tensor:
        """Return `layers.linear` of the layer's weight, with gradients."""
        first = (x,) if bias is None else (x, bias)

        def of(linear: Callable) -> Callable:
            return lambda x, *more: linear(x, self.merged(*more[len(first) - 1 :]), *more[: len(first) - 1])

        return bitwise(of(partial(layers.linear, group=group)), of(F.linear), *first, *self.weight_parts())


class BitwiseColumn(BitwiseLinear, ColumnParallelLinear):
    """The rank's output channels; the input is whole."""

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        assert not self.gather_output and self.weight is not None
        if self.sequence_parallel:
            x = gather_from_sequence_parallel_region(input_, group=self.tp_group)
        else:
            x = copy_to_tensor_model_parallel_region(input_, group=self.tp_group)
        assert self.bias is None or not self.skip_bias_add
        bias: Any = self.bias
        return self.product(x, bias), None


class BitwiseRow(BitwiseLinear, RowParallelLinear):
    """The rank's input channels; the output is the sum over all ranks."""

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        assert self.bias is None
        out = self.product(input_, group=self.tp_group)
        if self.sequence_parallel:
            out = scatter_to_sequence_parallel_region(out, group=self.tp_group)
        return out, None


class BitwiseDuplicated(BitwiseLinear, DuplicatedLinear):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.product(x), None


class BitwiseNorm(torch.nn.RMSNorm):
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        return bitwise(
            partial(layers.rms_norm, eps=self.eps),
            lambda x, weight: F.rms_norm(x, self.normalized_shape, weight, self.eps),
            x,
            self.weight,
        )


def silu(x: Tensor) -> Tensor:
    """Return `layers.silu` with gradients."""
    return bitwise(layers.silu, F.silu, x)


class BitwiseAttention(CoreAttention):
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedRow,
        **_: Any,
    ) -> Tensor:
        """Compute the attention that the row's `attention` describes, as `CoreAttention`."""
        row = packed_seq_params.attention
        assert row is not None
        starts, bounds = row.cu_seqlens_kv[:-1, None].long(), row.cu_seqlens_q.long()
        slots = starts + torch.arange(row.max_seqlen_kv, device=starts.device)
        if row.kv_index is not None:
            slots = row.kv_index[slots.clamp(max=len(row.kv_index) - 1)]
        slots = slots.clamp(max=len(key) - 1)

        def reproducible(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return layers.packed_attention(
                query,
                bounds.diff(),
                slots,
                row.cu_seqlens_kv.long().diff(),
                lambda at: (key[at], value[at]),
                query.shape[-1] ** -0.5 if self.scale is None else self.scale,
            ).flatten(1)

        ordinary = partial(super().forward, packed_seq_params=packed_seq_params)
        return bitwise(reproducible, ordinary, query, key, value)


class BitwiseMoE(MoELayer):
    """Experts without a dispatch: every tensor parallel rank computes its channels of all experts."""

    routing: layers.RouterOptions

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Return (output, None) for hidden_states [T/tp, 1, H]."""
        shared = self.shared_experts_compute(hidden_states)
        x, router, group, routing = hidden_states[:, 0], self.router, self.tp_group, self.routing
        if router.expert_bias is not None:
            router._maintain_float32_expert_bias()
        in_float32 = partial(layers.linear, dtype=torch.float32)
        logits = bitwise(in_float32, lambda x, weight: F.linear(x.float(), weight.float()), x, router.weight)
        with torch.no_grad():
            ids = layers.route(logits, routing, router.expert_bias)[1]
        weights = bitwise(
            lambda logits: layers.route(logits, routing, router.expert_bias)[0],
            partial(_weights, ids=ids, routing=routing),
            logits,
        )
        of_all = ids
        if group.size() > 1:  # under sequence parallelism, which tensor parallelism requires here
            x = gather_from_sequence_parallel_region(x, group=group)
            weights = gather_from_sequence_parallel_region(weights, group=group)
            of_all = gather_from_sequence_parallel_region(ids, group=group)
        local = self.experts.local_experts
        own = [expert.linear_fc1 for expert in local] + [expert.linear_fc2 for expert in local]
        parts = [layer.weight_parts() for layer in own]

        def of(experts: Callable, *more: Any) -> Callable:
            def compute(x: Tensor, weights: Tensor, *flat: Tensor) -> Tensor:
                rest = iter(flat)
                merged = [layer.merged(*islice(rest, len(part))) for layer, part in zip(own, parts)]
                return experts(x, weights, of_all, merged[: len(local)], merged[len(local) :], *more)

            return compute

        out = bitwise(of(layers.experts, group), of(_experts), x, weights, *chain.from_iterable(parts))
        if group.size() > 1:
            out = scatter_to_sequence_parallel_region(out, group=group)
        out = out[:, None]
        return (out if shared is None else out + shared), None


def _weights(logits: Tensor, ids: Tensor, routing: layers.RouterOptions) -> Tensor:
    """Compute `layers.route` for the chosen experts, with gradients."""
    if routing.score_function == "sigmoid":
        weights = logits.sigmoid().gather(1, ids)
        if routing.topk > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    elif routing.pre_softmax:
        weights = logits.softmax(-1).gather(1, ids)
    else:
        weights = logits.gather(1, ids).softmax(-1)
    return weights * (routing.topk_scaling_factor or 1.0)


def _experts(x: Tensor, weights: Tensor, ids: Tensor, ups: list[Tensor], downs: list[Tensor]) -> Tensor:
    """Compute `layers.experts` of this rank's channels, with gradients."""
    total = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], ups[expert]).chunk(2, -1)
        inner = F.silu(gate) * up * weights[token, choice, None].to(x.dtype)
        total = total.index_add(0, token, F.linear(inner, downs[expert]))
    return total


class BitwiseRotary(RowRotary):
    table: Tensor

    def of(self, position_ids: Tensor) -> Tensor:
        self.table = self.table.to(position_ids.device)
        return self.table[position_ids.flatten()][:, None]


class BitwisePolicy(Policy):
    @staticmethod
    def head(
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        softmax: Softmax,
        *,
        outputs: tuple[str, ...] = OUTPUTS,
        logits_filter: LogitsFilter | None = None,
        cap: float | None = None,
    ) -> tuple[Tensor, ...]:
        """Compute `rl.training.logprobs.linear_logprobs`; `logprobs` are bitwise equal to the engine's."""
        assert logits_filter is None, "the bitwise log-softmax is over the whole vocabulary"
        assert cap is None, "no model with Megatron's layers caps its logits"
        options: dict[str, Any] = dict(targets=targets, softmax=softmax, outputs=outputs)
        return bitwise(partial(_logprobs, **options), partial(linear_logprobs, **options), hidden, weight)


def _logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, softmax: Softmax, outputs: tuple[str, ...]
) -> tuple[Tensor, ...]:
    first, rows = softmax.own_rows(weight)
    local = torch.where((targets >= first) & (targets < first + rows), targets - first, -1)
    sliced = layers.SlicedWeight.of(weight[:rows]) if rows else None
    found: list[Tensor] = []
    for part, at in zip(hidden.split(softmax.chunk), local.split(softmax.chunk)):
        logits = part.new_empty(len(part), 0) if sliced is None else layers.linear(part, sliced)
        logits = logits.float() / torch.tensor(softmax.temperature, dtype=torch.float32, device=hidden.device)
        logprobs, log_p = layers.target_logprobs(logits, at, softmax.group)
        p = log_p.exp()
        more = layers.sum_over([-(p * log_p).sum(-1), p.square().sum(-1)], softmax.group)
        found.append(torch.stack([logprobs, *(x.float() for x in more)]))
    columns = dict(zip(OUTPUTS, torch.cat(found, 1) if found else hidden.new_zeros(3, 0).float()))
    return tuple(columns[name] for name in outputs)


CLASSES = {
    ColumnParallelLinear: BitwiseColumn,
    RowParallelLinear: BitwiseRow,
    DuplicatedLinear: BitwiseDuplicated,
    torch.nn.RMSNorm: BitwiseNorm,
    CoreAttention: BitwiseAttention,
    MoELayer: BitwiseMoE,
    Policy: BitwisePolicy,
    RowRotary: BitwiseRotary,
}


class BitwiseTrainer(TrainerPart):
    """Computes a policy's log-probs bitwise as an engine in the same mode does.

    A value model computes its values as without this part, but with Megatron's own layers.
    """

    uses_te = False

    def attach(self, engine: "TrainingEngine") -> None:
        for chunk in engine.chunks:
            if isinstance(chunk, Policy):
                make_bitwise(chunk, engine.weight_map.hf)


def make_bitwise(model: Policy, hf: dict) -> None:
    """Give the modules of a model the classes above. Not collective.

    The classes are replaced in the built model, because Megatron compares classes of its specs by identity.
    """
    for module in model.modules():
        module.__class__ = CLASSES.get(type(module), type(module))
        if isinstance(module, MLP):
            module.config.activation_func = module.activation_func = silu
        if isinstance(module, BitwiseMoE):
            module.routing = layers.RouterOptions.of(architecture(hf).megatron_config(hf))
    rotary = model.rotary
    table = layers.rotary_table(rotary.frequencies, rope.positions(hf), rotary.scale)
    rotary.table = table.double()
    model.config.rotate = rotate


def rotate(x: Tensor, rotation: Tensor, adjacent: bool) -> Tensor:
    """Return `layers.rotate` with gradients."""
    return bitwise(
        lambda x: layers.rotate(x, rotation, adjacent), lambda x: _Rotate.apply(x, rotation, adjacent), x
    )


def parts(config: Config, model: RunModel, base_of: "TrainingEngine | None") -> list[TrainerPart]:
    """Return the parts of a model in training."""
    return [BitwiseTrainer()]
