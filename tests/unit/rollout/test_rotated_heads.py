"""vLLM's CPU kernel rotates queries that have heads, or sequences, in a dimension of their own."""

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from rl.rollout import cpu_support


@pytest.mark.parametrize(
    "tokens, queries, keys",
    [((7,), (4, 32), (2, 32)), ((2, 5), (4 * 32,), (2 * 32,))],
    ids=["heads, as LFM2's", "a batch"],
)
def test_every_token_is_rotated_by_its_position(tokens, queries, keys):
    cpu_support.install()
    with set_current_vllm_config(VllmConfig()):
        rotary = RotaryEmbedding(32, 32, 64, 1e4, True, torch.float32)
    positions = torch.randint(64, tokens)
    query, key = torch.randn(*tokens, *queries), torch.randn(*tokens, *keys)
    expected = rotary.forward_native(positions, query, key)
    found = rotary.forward_cpu(positions, query.clone(), key.clone())
    torch.testing.assert_close(found, expected)
    assert rotary.forward_cpu(positions, query.clone())[1] is None
