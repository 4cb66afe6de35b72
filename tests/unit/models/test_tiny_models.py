"""Tiny models of tools/gpu_acceptance.py run on the GPUs that it is for."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.checkpoints import tiny_config

BACKEND = "v1/attention/backends/mla/prefill/flash_attn.py"
"""In vLLM; it cannot be imported without a GPU."""
WIDTHS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@pytest.mark.parametrize("name", ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"])
def test_hopper_has_kernels_for_the_latent_attention_of_tiny_models(name):
    source = Path(find_spec("vllm").origin).parent.joinpath(BACKEND).read_text()
    supported = re.findall(
        r"MLADimensions\(\s*" + r",\s*".join(rf"{width}=(\d+)" for width in WIDTHS), source
    )
    assert len(supported) > 2
    hf = tiny_config(name)
    assert tuple(str(getattr(hf, width)) for width in WIDTHS) in supported
