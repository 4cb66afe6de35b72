"""The layer specs of the training model: Transformer Engine's (TE) if installed, else this module's.

Megatron's local spec can neither pack sequences, nor shard norms under sequence parallelism, nor run without
materialising [heads, S, S] scores. With `Norm` and `CoreAttention` it can do all three, on CPU and on CUDA;
`block_spec` puts the two classes into the local spec. Parameters have the names of the local spec; `te_name`
returns TE's names, for example for the weight of a norm that TE fuses.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from rl.training import permutation
from rl.training.attention import CoreAttention, te_attention


def use_te(dtype: torch.dtype) -> bool:
    """Return whether to use Transformer Engine's layers: on CUDA with a 16-bit dtype, if it is installed.

    Transformer Engine's attention over packed sequences requires 16 bits.
    """
    if not torch.cuda.is_available() or dtype is torch.float32:
        return False
    return importlib.util.find_spec("transformer_engine") is not None


def name_of_layers(config: TransformerConfig) -> str:
    """Return the kind of layers that a model on CUDA has, and the reason if they are not the fast ones.

    Returns "" on CPUs, which have one kind.
    """
    if not torch.cuda.is_available():
        return ""
    if config.transformer_impl == "transformer_engine":
        return "Transformer Engine's layers"
    is_float32 = config.params_dtype is torch.float32
    reason = "is for model.dtype=bfloat16" if is_float32 else "is not installed or not used by an option"
    return f"Megatron's local layers and torch's attention; transformer-engine {reason} (docs/gpu.md)"


def block_spec(config: TransformerConfig, *, fuses_norms: bool = True, vp_stage: int | None = None) -> Any:
    """Return the spec of the transformer layers of a pipeline stage's chunk for a TransformerConfig.

    vp_stage: number of the chunk; None if the stage is not divided.
    fuses_norms: let TE compute a norm and the linear layer after it in one layer. An adapter cannot read the
    normed input of such a layer.
    """
    own_mixers: dict[type, type] = {}
    if config.multi_latent_attention:
        own_mixers[multi_latent_attention.MLASelfAttention] = LatentAttention
    if config.linear_attention_freq:
        from rl.training.delta_net import Mixer

        own_mixers[SelfAttention] = Mixer
    if config.transformer_impl == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
        if not fuses_norms or config.linear_attention_freq:  # two layers of a delta net read the normed input
            for layer in spec.layer_specs:
                _separate_norms(layer.submodules)
        # TE's attention has no sinks for packed rows.
        own = CoreAttention if config.softmax_type == "learnable" else te_attention(TEDotProductAttention)
        return replace_classes(spec, {TEDotProductAttention: own} | own_mixers)
    permutation.install()
    kind = config.normalization
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=kind, vp_stage=vp_stage
    )
    return replace_classes(spec, LOCAL_CLASSES | own_mixers, latents=DuplicatedLinear)


@contextlib.contextmanager
def megatrons_names(config: TransformerConfig) -> Iterator[None]:
    """Provide the names that Megatron needs to build `block_spec(config)`, for the duration of the block.

    Megatron 0.16.1 uses two names that it imports only with TE. Without the first, its float32 router raises
    NameError. The second is the only class that MLA accepts for its projections down to the latents; it is
    restored afterwards, because a process may build a model with TE's layers too.
    """
    vars(moe_utils).setdefault("te_general_gemm", None)
    before = vars(multi_latent_attention).get("TELinear")
    if config.transformer_impl == "local":
        multi_latent_attention.TELinear = DuplicatedLinear
    try:
        yield
    finally:
        multi_latent_attention.TELinear = before


def _separate_norms(layer: Any) -> None:
    """Replace each layer of TE that fuses a norm with a linear layer by a norm and a linear layer."""
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TELayerNormColumnParallelLinear,
        TENorm,
    )

    attention, mlp = layer.self_attention.submodules, layer.mlp
    # Megatron 0.19 has a partial call in place of the MLP's spec.
    mlp = mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules
    for owner, norm, part, linear in (
        (layer, "input_layernorm", attention, "linear_qkv"),
        (layer, "pre_mlp_layernorm", mlp, "linear_fc1"),
        (attention, "q_layernorm", attention, "linear_q_up_proj"),
        (attention, "kv_layernorm", attention, "linear_kv_up_proj"),
    ):
        if getattr(part, linear, None) is TELayerNormColumnParallelLinear:
            setattr(part, linear, TEColumnParallelLinear)
            setattr(owner, norm, TENorm)


def te_name(name: str) -> str:
    """Return the name in TE's spec of the parameter `name` of the local spec.

    TE fuses a norm with the linear layer after it, and the experts of a rank into one grouped layer.
    """
    for local, fused in _FUSED_NORMS.items():
        name = name.replace(local, fused)
    return re.sub(r"\.local_experts\.(\d+)\.(linear_fc.)\.(weight|bias|lora_\w+\.\w+)$", r".\2.\3\1", name)


# Used only where the model has no parameter of the local name; the norm before experts, for example, is not
# fused.
_FUSED_NORMS = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
    ".self_attention.q_layernorm.": ".self_attention.linear_q_up_proj.layer_norm_",
    ".self_attention.kv_layernorm.": ".self_attention.linear_kv_up_proj.layer_norm_",
}


def replace_classes(spec: Any, classes: dict[type, type], *, latents: type | None = None) -> Any:
    """Return a copy of the spec with each class that is a key of `classes` replaced by its value.

    spec: nested dataclasses, lists and tuples with classes. latents: class for MLA's down-projections to the
    latents; None keeps Megatron's class.
    """
    if isinstance(spec, (list, tuple)):
        return type(spec)(replace_classes(part, classes, latents=latents) for part in spec)
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        fields = {
            field.name: replace_classes(getattr(spec, field.name), classes, latents=latents)
            for field in dataclasses.fields(spec)
        }
        if latents and isinstance(spec, multi_latent_attention.MLASelfAttentionSubmodules):
            fields |= dict(linear_q_down_proj=latents, linear_kv_down_proj=latents)
        return dataclasses.replace(spec, **fields)
    return classes.get(spec, spec) if isinstance(spec, type) else spec


class Norm:
    """torch's RMSNorm or LayerNorm with parameters marked for sequence parallelism.

    Because of the mark, finalize_model_grads sums their gradients over the tensor parallel group. Megatron's
    WrappedTorchNorm does not set it.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        if config.layernorm_zero_centered_gamma:
            kind = ZeroCenteredNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        parameters: Iterator[Any] = norm.parameters()
        for param in parameters:
            param.sequence_parallel = config.sequence_parallel
        return norm


class ZeroCenteredNorm(torch.nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight, in float32 (Gemma)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of x [..., H] in its dtype."""
        weight = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, weight, self.eps).to(x.dtype)


class LatentAttention(multi_latent_attention.MLASelfAttention):
    """Megatron's latent attention. If the model has no query latent, there is no norm before the queries."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Return the classes to build. Without a query latent Megatron 0.19 would add a norm."""
        if self.config.q_lora_rank is not None:
            return super()._resolve_qk_norm_config(submodules)
        names = "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm"
        return {name: getattr(submodules, name) for name in names}


class DuplicatedLinear(torch.nn.Module):
    """A linear layer replicated on every tensor parallel rank, for MLA's projections down to the latents.

    Under sequence parallelism each rank applies it to its own part of the tokens.

    Megatron's local spec splits these projections by columns. This split loses a part of the rotary key's
    gradient (NVIDIA/Megatron-LM#1699) and differs from TE's layout.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str,
        config: TransformerConfig,
        init_method: Callable[[torch.Tensor], torch.Tensor],
        bias: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        assert parallel_mode == "duplicated" and not bias
        self.weight = torch.nn.Parameter(
            init_method(torch.empty(output_size, input_size, dtype=config.params_dtype))
        )
        marked: Any = self.weight
        marked.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return ([T/tp, 1, output_size], None) for x [T/tp, 1, input_size]; there is no bias."""
        return F.linear(x, self.weight), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """Return the weight as a replicated one."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, None, sharded_offsets)


LOCAL_CLASSES = {WrappedTorchNorm: Norm, FusedLayerNorm: Norm, DotProductAttention: CoreAttention}
"""Class of Megatron's local spec -> its replacement in this project."""
