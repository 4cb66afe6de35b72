"""Turns whose KV cache was in host memory have bitwise the tokens and log-probs of turns without offloading.

The worker runs vLLM's CPU engine. That CUDA's copies are complete is not covered.
"""

from pathlib import Path

import pytest

from tests.checkpoints import save_tiny
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "kv_offload_worker.py"


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_turns_read_their_cache_from_the_host(tmp_path, tp):
    checkpoint = save_tiny("Qwen2ForCausalLM", tmp_path / "model", seed=4, max_position_embeddings=1024)
    for text in run_ranks(tp, WORKER, checkpoint, tp, timeout=300):
        print(text)
        assert text.strip().endswith("offloading is right")
