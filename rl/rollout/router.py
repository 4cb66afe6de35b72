"""MoE routers of the engine that compute in float32, as in the trainer (`moe_router_dtype`)."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

SCORE_ERROR = 2.0**-12
"""Maximum error of a router's scores, relative to the largest. Rounding to bfloat16 gives 2^-9."""


class CoarseRouter(RuntimeError):
    """Raised if a router of an engine rounds its scores to the model's dtype."""


def probe(weight: Tensor) -> Tensor:
    """Return hidden states [8, H] in the dtype of a weight [..., H]."""
    x = torch.linspace(-2, 2, 8 * weight.shape[-1], dtype=torch.float64).sin()
    return x.view(8, -1).to(weight)


def is_coarse(scores: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether a router's scores [..., experts] of x [..., H] have a larger error than SCORE_ERROR."""
    exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    return float((scores - exact).abs().max() / exact.abs().max()) > SCORE_ERROR


@torch.no_grad()
def check(model: Module) -> None:
    """Raise CoarseRouter if a router of vLLM's model returns rounded scores. FP8 is not checked."""
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    gates: list[Any] = [module for module in model.modules() if isinstance(module, GateLinear)]
    for gate in (gate for gate in gates if gate.is_unquantized):
        found = gate(x := probe(gate.weight))
        if is_coarse(found[0] if isinstance(found, tuple) else found, x, gate.weight, gate.bias):
            raise CoarseRouter(
                "precision check: the scores of the routers of the engine must be float32, as in the "
                "trainer, but were rounded to its dtype, so that some tokens get other experts."
            )


@functools.cache
def install() -> None:
    """Make all routers that vLLM builds afterwards return float32 logits.

    With 16-bit weights vLLM's routers round the logits to 16 bits, unless DeepSeek's config has the key
    moe_router_dtype; Qwen3-MoE and Mixtral have no key. Rounding changes the order of nearly equal experts,
    and the trainer would then compute a token's log-prob with other experts than the engine.
    `PluggableLayer.register_oot` is vLLM's public way to replace a layer. If routers are no longer
    GateLinear, tests/ranks/rollout/test_router.py fails.
    """
    from vllm.model_executor.custom_op import PluggableLayer
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    @PluggableLayer.register_oot(name="GateLinear")
    class Float32GateLinear(GateLinear):
        weight: Parameter

        def __init__(self, *args: Any, **options: Any) -> None:
            # GLM and MiniMax hold the weight in float32. The trainer's dtype has the same values.
            super().__init__(*args, **options | {"params_dtype": None})
            if self.out_dtype is None:
                self.set_out_dtype(torch.float32)

        def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, Parameter | None]:
            # On CUDA, bfloat16 weights have kernels that accumulate and return float32.
            if not self.is_unquantized or self.allow_cublas_router_gemm:
                return super().forward(x)
            bias = None if self.bias is None else self.bias.float()
            logits = torch.nn.functional.linear(x.float(), self.weight.float(), bias)
            return (logits, None) if self.return_bias else logits
