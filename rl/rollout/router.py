"""Routers of mixtures of experts that compute in float32, as the trainer's do (`moe_router_dtype`)."""

import functools

import torch


@functools.cache
def install() -> None:
    """Make every router that vLLM builds from now on return float32 logits.

    With 16-bit weights vLLM's routers round the logits to 16 bits, unless DeepSeek's config has the key
    moe_router_dtype; Qwen3-MoE and Mixtral have no key. Near-equal experts then swap, and the trainer would
    score tokens by other experts than those that sampled them. `PluggableLayer.register_oot` is vLLM's public
    way to replace a layer; if routers are no longer GateLinear, tests/ranks/rollout/test_router.py fails.
    """
    from vllm.model_executor.custom_op import PluggableLayer
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    @PluggableLayer.register_oot(name="GateLinear")
    class Float32GateLinear(GateLinear):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            if self.out_dtype is None:
                self.set_out_dtype(torch.float32)

        def forward(self, x):
            # On CUDA, bfloat16 weights have kernels that accumulate and return float32.
            if not self.is_unquantized or self.allow_cublas_router_gemm:
                return super().forward(x)
            logits = torch.nn.functional.linear(x.float(), self.weight.float())
            return (logits, None) if self.return_bias else logits
