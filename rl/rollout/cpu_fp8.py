"""vLLM's layers in FP8 on the CPU: they dequantise their weights and compute in the model's dtype."""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.quantization import fp8

from rl.models.boxes import whole
from rl.models.fp8_blocks import dequantised
from rl.rollout.cpu_support import live_experts
from rl.runtime.replacement import replace_attribute


class DequantisingKernel:
    """Computes a linear layer in FP8."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Keep the format of the checkpoint."""

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight = dequantised(layer.weight, layer.weight_scale_inv, whole(layer.weight.shape))
        return torch.nn.functional.linear(x, weight.to(x.dtype), bias)


class DequantisedExperts:
    """The dequantised matrices of experts; one exists at a time."""

    def __init__(self, values: Tensor, factors: Tensor, dtype: torch.dtype) -> None:
        self.values, self.factors, self.dtype = values, factors, dtype

    def __getitem__(self, expert: int) -> Tensor:
        values, factors = self.values[expert], self.factors[expert]
        return dequantised(values, factors, whole(values.shape)).to(self.dtype)


class DequantisingMoEMethod(fp8.Fp8MoEMethod):
    """Computes routed experts in FP8."""

    is_monolithic = False
    w1_bias = w2_bias = None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Keep the format of the checkpoint."""

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        assert self.moe_kernel is None  # vLLM's layer therefore computes the shared experts itself
        output = torch.empty_like(x)
        live_experts(
            self,
            output=output,
            hidden_states=x,
            w1=DequantisedExperts(layer.w13_weight, layer.w13_weight_scale_inv, x.dtype),
            w2=DequantisedExperts(layer.w2_weight, layer.w2_weight_scale_inv, x.dtype),
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.activation,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
        )
        return output


def install() -> None:
    """Replace the kernels."""
    replace_attribute(fp8, "init_fp8_linear_kernel", lambda **_: DequantisingKernel())
    replace_attribute(fp8, "select_fp8_moe_backend", lambda **_: (None, None))
    replace_attribute(fp8, "Fp8MoEMethod", DequantisingMoEMethod)
