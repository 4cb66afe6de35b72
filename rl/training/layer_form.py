"""Subclasses of Megatron's attention and MLP for models with a `LayerForm` (`rl.models.layer_form`)."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from rl.models.layer_form import LayerForm
from rl.training.attention import PackedRow
from rl.training.layer_spec import Norm

ACTIVATIONS = {
    "silu": nn.functional.silu,
    "gelu_tanh": functools.partial(nn.functional.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
}
"""Name of an activation in a form -> function."""


class FormedAttention(SelfAttention):
    """Attention with a normed or scaled output. Layers with a window use the row's `local_rotation`."""

    output_scale: float
    rotates_locally: bool

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedRow,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Return (output [T, 1, H] or [T/tp, 1, H] under sequence parallelism, None)."""
        if self.rotates_locally:
            options["rotary_pos_emb"] = packed_seq_params.local_rotation
        out, bias = super().forward(
            hidden_states, attention_mask, packed_seq_params=packed_seq_params, **options
        )
        return _formed(self, out, bias)


class FormedMLP(MLP):
    """MLP with a normed or scaled output."""

    output_scale: float

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
        """Return (output, None) of the shape of hidden_states."""
        return _formed(self, *super().forward(hidden_states, *args, **options))


class AllHeadsNorm(nn.Module):
    """RMSNorm over all heads of a token; each tensor parallel rank holds some of the heads."""

    def __init__(self, attention: SelfAttention, heads: int) -> None:
        super().__init__()
        config = attention.config
        self.eps, self.group = config.layernorm_epsilon, attention.pg_collection.tp
        self.weight = nn.Parameter(torch.ones(heads * config.kv_channels, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x [..., heads/tp, channels] in its dtype.

        Collective over the tensor parallel group: a sum of 1 float32 per token, forward and backward.
        """
        flat = x.flatten(-2).float()
        square = _MeanOverRanks.apply(flat.square().mean(-1, keepdim=True), self.group)
        out = flat * torch.rsqrt(square + self.eps) * self.weight.float()
        return out.to(x.dtype).view_as(x)


class _MeanOverRanks(torch.autograd.Function):
    """The mean over a group's ranks.

    All ranks use the mean, so the gradient of its input is the mean of the ranks' gradients.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _mean_over_ranks(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _mean_over_ranks(grad, ctx.group), None


def _mean_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone()
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total / group.size()


def _formed(module: Any, out: Tensor, bias: Tensor | None) -> tuple[Tensor, None]:
    assert bias is None, "a bias would be added after the norm"
    if module.output_scale != 1.0:
        out = out * module.output_scale
    return module.post_norm(out), None


def give_form(model: Any, form: LayerForm) -> None:
    """Turn the layers of a stage of Megatron's GPTModel into the layers of the form. Not collective.

    The function replaces the classes of the model's existing layers. It does not put the subclasses into
    Megatron's specs, because Megatron compares the classes of its specs by identity.
    """
    if form.embedding_scale != 1.0 and model.pre_process:
        model.embedding.register_forward_hook(functools.partial(_scale_embedding, form.embedding_scale))
    if form.norms_all_heads:
        for layer in model.decoder.layers:
            attention = layer.self_attention
            attention.q_layernorm = AllHeadsNorm(attention, attention.num_attention_heads_per_partition)
            attention.k_layernorm = AllHeadsNorm(attention, attention.num_query_groups_per_partition)
    if form.rows_alternate:
        for layer in model.modules():
            if isinstance(layer, MoELayer):
                _let_rows_alternate(layer.experts)
    if not form.post_norms and form.output_scale == 1.0 and not any(form.windowed):
        return
    for layer in model.decoder.layers:
        for module, kind in ((layer.self_attention, FormedAttention), (layer.mlp, FormedMLP)):
            assert type(module) is kind.__base__, type(module)
            module.__class__ = kind
            module.output_scale = form.output_scale
            module.post_norm = norm(module.config) if form.post_norms else nn.Identity()
        windowed = form.windowed or (False,) * layer.layer_number
        layer.self_attention.rotates_locally = windowed[layer.layer_number - 1]


def _let_rows_alternate(experts: nn.Module) -> None:
    # With Transformer Engine, one module holds all experts.
    for mlp in getattr(experts, "local_experts", [experts]):
        mlp.linear_fc1.register_forward_hook(_gate_before_up)
        # For an expert on one rank Megatron's layer returns a view, and its MLP cannot add a bias to a view.
        mlp.linear_fc2.explicit_expert_comm = True


def _gate_before_up(module: nn.Module, args: Any, out: tuple) -> tuple:
    """Return output and bias [..., 2F] with all gate elements before all up elements.

    In `out`, gate and up elements alternate.
    """
    return tuple(x if x is None else x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in out)


def norm(config: TransformerConfig) -> nn.Module:
    """Return a norm over the hidden states."""
    if config.transformer_impl == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm(config, config.hidden_size, config.layernorm_epsilon)
    return Norm(config, config.hidden_size, config.layernorm_epsilon)


def _scale_embedding(scale: float, module: nn.Module, args: Any, out: Tensor) -> Tensor:
    """Return the embeddings times the scale, which is rounded to their dtype first, as in Gemma."""
    return out * torch.tensor(scale, dtype=out.dtype, device=out.device)
