"""Turns with a KV cache from host memory have bitwise the tokens and log-probs of turns without offloading.

The worker runs vLLM's CPU engine. That CUDA's copies are complete is not covered.
"""

from pathlib import Path

import pytest

from tests.checkpoints import save_tiny
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "kv_offload_worker.py"


@pytest.mark.parametrize(
    "tp, gib", [(1, 0.1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 0.1), (1, 0.002)))]
)
def test_turns_read_their_cache_from_the_host(tmp_path, tp, gib):
    """With 0.002 GiB only some blocks find room, which others displace."""
    checkpoint = save_tiny("Qwen2ForCausalLM", tmp_path / "model", seed=4, max_position_embeddings=1024)
    for text in run_ranks(tp, WORKER, checkpoint, tp, gib, timeout=300):
        print(text)
        assert text.strip().endswith("offloading is right")
