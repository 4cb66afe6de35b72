"""A step without requests computes the same in every run, with vLLM's own attention for CPUs."""

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from rl.rollout.cpu_support import clear_attention_of_dummy_steps


def test_the_attention_of_a_step_without_requests_is_0():
    """Uninitialised memory would change the experts that its token chooses, and the rounding of others."""
    clear_attention_of_dummy_steps()
    attention = CPUAttentionBackendImpl.__new__(CPUAttentionBackendImpl)
    token, output = torch.ones(1, 1, 32), torch.full((1, 1, 32), torch.nan)
    found = attention.forward(None, token, token, token, torch.empty(0), None, output)
    assert found is output and not output.any()
