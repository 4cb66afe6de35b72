"""Tiny models of tools/gpu_acceptance.py run on Hopper: vLLM's own selectors find kernels for them."""

import sys
from types import ModuleType

import pytest
import torch
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions
from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig
from vllm.v1.attention.selector import AttentionSelectorConfig

from tests.checkpoints import tiny_config
from tools.acceptance.stages import ARCHITECTURES

HOPPER = DeviceCapability(9, 0)


@pytest.fixture
def hopper(monkeypatch):
    """Return vLLM's CUDA platform at capability 9.0; kernels that the CPU build lacks count as present."""
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("kernels"))
    monkeypatch.setattr(fa_utils, "compile_flash_attn_varlen_func_from_specs", None, raising=False)
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.v1.attention.backends.mla.prefill.flash_attn import FlashAttnPrefillBackend

    monkeypatch.setattr(CudaPlatformBase, "get_device_capability", lambda device_id=0: HOPPER)
    monkeypatch.setattr(FlashAttnPrefillBackend, "is_available", lambda: True)
    return CudaPlatformBase


def prefill(*widths: int) -> MLAPrefillSelectorConfig:
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return MLAPrefillSelectorConfig(torch.bfloat16, MLADimensions(**dict(zip(names, widths))))


@pytest.mark.parametrize("name", ARCHITECTURES.values())
def test_hopper_has_attention_kernels_for_every_tiny_model(hopper, name):
    hf = tiny_config(name)
    is_latent = hasattr(hf, "kv_lora_rank")
    width = hf.kv_lora_rank + hf.qk_rope_head_dim if is_latent else 0
    config = AttentionSelectorConfig(
        head_size=width or getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        dtype=torch.bfloat16,
        kv_cache_dtype=None,
        block_size=None,
        use_mla=is_latent,
        has_sink=name == "GptOssForCausalLM",
        has_sliding_window=bool(getattr(hf, "sliding_window", None)),
    )
    found, reasons = hopper.get_valid_backends(HOPPER, config, hf.num_attention_heads)
    assert found, reasons
    if is_latent:
        assert hopper.get_mla_prefill_backend_cls(
            prefill(hf.qk_nope_head_dim, hf.qk_rope_head_dim, hf.v_head_dim)
        )


def test_hopper_refuses_other_widths_of_latent_attention(hopper):
    with pytest.raises(ValueError, match="No valid MLA prefill backend"):
        hopper.get_mla_prefill_backend_cls(prefill(32, 64, 32))
