"""vLLM's CPU kernel rotates queries that have heads in a dimension of their own, as LFM2's."""

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from rl.rollout import cpu_support


def test_heads_in_a_dimension_of_their_own_are_rotated():
    cpu_support.install()
    with set_current_vllm_config(VllmConfig()):
        rotary = RotaryEmbedding(32, 32, 64, 1e4, True, torch.float32)
    positions, query, key = torch.arange(7), torch.randn(7, 4, 32), torch.randn(7, 2, 32)
    expected = rotary.forward_native(positions, query, key)
    found = rotary.forward_cpu(positions, query.clone(), key.clone())
    torch.testing.assert_close(found, expected)
    assert rotary.forward_cpu(positions, query.clone())[1] is None
