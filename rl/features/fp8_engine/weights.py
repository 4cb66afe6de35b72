"""Weights of linear layers in FP8 (`rollout.quantization: fp8`), in the format of DeepSeek-V3's checkpoints.

vLLM is told that the checkpoint is in this format, with dynamic factors of activations. A refit delivers the
trainer's bfloat16 values into a staging tensor; `store` quantises them by `rl.models.fp8_blocks` and gives
values and factors to vLLM's layer-wise reload, which lets the layer's kernel process them and copies the
result into the memory that CUDA graphs know. Routers, embeddings, norms, heads and the projection from
latents (`kv_b_proj`) stay as they are, and so does a vision tower.

The staging tensors are filled with bits that no training computes (a NaN), so that an element that did not
arrive is found before the engine computes with it.
"""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl.checks.fp8 import check_fp8_blocks
from rl.models import architecture
from rl.models.boxes import whole
from rl.models.fp8_blocks import dequantised, quantised, quantised_weights
from rl.models.layout import FP8_BLOCK, Weight
from rl.rollout import cpu_support
from rl.rollout.parts import EnginePart

if TYPE_CHECKING:
    from rl.rollout.engine import RolloutEngine

UNWRITTEN = -1
"""Bits of an element of a staging tensor that has not arrived, as int16."""
FACTOR = "_scale_inv"
"""End of the name of the factors of a weight in vLLM."""


class Fp8Weights(EnginePart):
    """The quantised weights of an engine."""

    def options(self, engine: "RolloutEngine") -> dict:
        weights = architecture(engine.hf).weights(engine.hf)
        self.names = list(dict.fromkeys(weight.vllm for weight in quantised_weights(weights)))
        """vLLM's names of the quantised parameters."""
        matrices = [weight.vllm for weight in weights if len(weight.shapes[0]) == 2]
        others = {name.rpartition(".")[0] for name in matrices if name not in self.names}
        os.environ["VLLM_USE_DEEP_GEMM"] = "0"  # it packs the factors, so that they could not be compared
        cpu_support.add_fp8_layers()
        quantization = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "modules_to_not_convert": sorted(others),
        }
        return {"hf_overrides": {"quantization_config": quantization}}

    def built(self, engine: "RolloutEngine") -> None:
        check_fp8_blocks()
        self._model = engine.model
        parameters = dict(engine.model.named_parameters())
        for name in self.names:
            values, factors = parameters[name], parameters[name + FACTOR]
            blocks = [-(-size // FP8_BLOCK) for size in values.shape[-2:]]
            assert values.dtype is torch.float8_e4m3fn and factors.dtype is torch.float32, name
            assert list(factors.shape[-2:]) == blocks, f"{name} has factors {tuple(factors.shape)}"

    def weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        held = {name + end for name in self.names for end in ("", FACTOR)}
        return {name: weight for name, weight in weights.items() if name not in held}

    def staging(self, weights: Sequence[Weight], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return tensors for values of some weights, by vLLM's name, filled with UNWRITTEN."""
        out = {}
        for name in dict.fromkeys(weight.vllm for weight in weights):
            parameter = self._model.get_parameter(name)
            out[name] = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
            out[name].view(torch.int16).fill_(UNWRITTEN)
        return out

    def values(self, weights: Sequence[Weight], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the dequantised values of some weights, by vLLM's name."""
        out = {}
        for name in dict.fromkeys(weight.vllm for weight in weights):
            parameter = self._model.get_parameter(name)
            rows = parameter.flatten(0, -2)
            factors = self._model.get_parameter(name + FACTOR).flatten(0, -2)
            out[name] = dequantised(rows, factors, whole(rows.shape)).to(dtype).view(parameter.shape)
        return out

    @torch.no_grad()
    def store(self, staged: Mapping[str, Tensor]) -> list[str]:
        """Quantise staged values and load them; return a message for each parameter that is incomplete."""
        incomplete = []
        loaded: dict[str, dict[str, Tensor]] = {}
        for name, values in staged.items():
            if missing := int((values.view(torch.int16) == UNWRITTEN).sum()):
                incomplete.append(f"{name}: {missing} of {values.numel()} elements did not arrive")
            in_fp8, factors = quantised(values.flatten(0, -2))
            module, _, parameter = name.rpartition(".")
            factors = factors.view(*values.shape[:-2], -1, factors.shape[1])
            loaded.setdefault(module, {}).update(
                {parameter: in_fp8.view(values.shape), parameter + FACTOR: factors}
            )
        for module, tensors in loaded.items():
            _reload(self._model.get_submodule(module), tensors)
        return incomplete


def _reload(layer: torch.nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load this rank's part of a layer in the format of a checkpoint, by the steps of vLLM's own reload."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.model_loader.reload import layerwise, meta

    info = layerwise.get_layerwise_info(layer)
    info.kernel_tensors = layerwise.get_layer_params_buffers(layer)
    info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
    meta.restore_layer_on_meta(layer, info)
    meta.materialize_layer(layer, info)
    for name, tensor in tensors.items():
        layer.get_parameter(name).copy_(tensor)
    assert isinstance(layer.quant_method, QuantizeMethodBase)
    layer.quant_method.process_weights_after_loading(layer)
    layerwise._copy_and_restore_kernel_tensors(layer, info)
    info.reset()
