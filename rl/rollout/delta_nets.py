"""Gated delta nets in the engine (Qwen3-Next): their computation on the CPU.

vLLM keeps two tensors per sequence and layer: the last inputs of the convolution and the recurrent state. Its
CPU kernels accept only bfloat16; the function here computes what the trainer computes, in every dtype.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import vllm.model_executor.layers.mamba.ops.cpu.gdn_attention as cpu_kernels
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

from rl.models.delta_rule import Chunks, causal_conv, gated_delta_rule, log_decay, normed
from rl.rollout.parts import EnginePart
from rl.rollout.vllm_model import allow_no_torchvision
from rl.runtime.replacement import replace_attribute

if TYPE_CHECKING:
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

    from rl.rollout.engine import RolloutEngine


class DeltaNets(EnginePart):
    """The part of an engine for a model with gated delta nets."""

    def options(self, engine: "RolloutEngine") -> dict:
        allow_no_torchvision()  # the file of Qwen3.5 has its vision models too
        _hold_decays_as_the_trainer()
        replace_attribute(cpu_kernels, "cpu_gdn_attention_core", compute)  # no other build calls it
        # On a GPU the kernels of the trainer; FlashInfer's are compiled at their first use.
        return {"additional_config": {"gdn_prefill_backend": "triton"}} if engine.device.is_cuda else {}


def _hold_decays_as_the_trainer() -> None:
    """Make the layers hold A_log in the model's dtype, as checkpoint and trainer do; kernels convert it."""
    build = QwenGatedDeltaNetAttention.__init__
    if build.__module__ == __name__:
        return

    def build_in_dtype(self: QwenGatedDeltaNetAttention, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        self.A_log.data = self.A_log.data.to(self.dt_bias.dtype)

    replace_attribute(QwenGatedDeltaNetAttention, "__init__", build_in_dtype)


@dataclass(frozen=True)
class EngineStep:
    """The sequences of an engine step: where each begins among the T tokens, and its place in the caches."""

    chunks: Chunks
    slots: Tensor
    """int64 [N]: index of each sequence in the caches."""
    begins: Tensor
    """bool [N]: whether a sequence has nothing in the caches yet."""
    old: Tensor
    """int64 [N, taps - 1]: places of a sequence's cached inputs, before the inputs of its tokens."""
    new: Tensor
    """int64 [T]: places of the tokens."""
    last: Tensor
    """int64 [N, taps - 1]: places of the inputs that the cache keeps."""

    @classmethod
    def of(cls, metadata: "GDNAttentionMetadata", taps: int) -> "EngineStep":
        """Return the step of the metadata; all layers share it."""
        if (known := vars(metadata).get("lockstep_step")) is not None:
            return known
        bounds, slots = metadata.non_spec_query_start_loc, metadata.non_spec_state_indices_tensor
        assert bounds is not None and slots is not None, "a step without drafts"
        count = metadata.num_decodes + metadata.num_prefills
        bounds = bounds[: count + 1].long()
        begins = torch.zeros(count, dtype=torch.bool)
        if metadata.num_prefills:
            assert metadata.has_initial_state is not None
            begins[metadata.num_decodes :] = ~metadata.has_initial_state[metadata.num_decodes : count]
        lengths, before, window = bounds.diff(), torch.arange(count) * (taps - 1), torch.arange(taps - 1)
        starts = bounds[:-1] + before
        sequence = torch.arange(count).repeat_interleave(lengths)
        step = cls(
            chunks=Chunks.of(lengths.tolist(), bounds.device),
            slots=slots[:count].long(),
            begins=begins,
            old=starts[:, None] + window,
            new=torch.arange(int(bounds[-1])) + (sequence + 1) * (taps - 1),
            last=(starts + lengths)[:, None] + window,
        )
        vars(metadata)["lockstep_step"] = step
        return step


def compute(
    mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: LayerNameType
) -> None:
    """Compute convolution and recurrence of a layer; replaces vLLM's cpu_gdn_attention_core.

    mixed_qkv: [T', channels]. a, b: [T', H]. core_attn_out: [T', H, V], the output. In all of them the first
    T rows are tokens.
    """
    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:
        return  # the first run measures memory
    taps = layer.conv1d.weight.shape[-1]
    metadata: Any = context.attn_metadata[layer.prefix]
    step = EngineStep.of(metadata, taps)
    conv_cache, states = layer.kv_cache[0], layer.kv_cache[1].transpose(-1, -2)
    tokens = len(step.new)
    inputs = mixed_qkv.new_empty(tokens + step.old.numel(), mixed_qkv.shape[1])
    inputs[step.new] = mixed_qkv[:tokens]
    inputs[step.old] = conv_cache[step.slots].masked_fill(step.begins[:, None, None], 0).to(inputs.dtype)
    conv_cache[step.slots] = inputs[step.last].to(conv_cache.dtype)
    windows = [inputs[step.new - lag] for lag in range(taps - 1, -1, -1)]
    q, k, v = (x[0] for x in layer.rearrange_mixed_qkv(causal_conv(windows, layer.conv1d.weight[:, 0])))
    repeats = v.shape[1] // q.shape[1]
    q, k = (normed(x).repeat_interleave(repeats, 1) for x in (q, k))
    initial = states[step.slots].masked_fill(step.begins[:, None, None, None], 0)
    decay = log_decay(a[:tokens], layer.A_log, layer.dt_bias)
    beta = b[:tokens].float().sigmoid()
    out, final = gated_delta_rule(q * q.shape[-1] ** -0.5, k, v, decay, beta, step.chunks, initial)
    states[step.slots] = final.to(states.dtype)
    core_attn_out[:tokens] = out
