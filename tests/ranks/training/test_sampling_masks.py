"""Tokens sampled with top_p 0.9 and top_k 20 have the engine's log-probs in the trainer."""

import json
import math
from pathlib import Path

from tests import bounds
from tests.checkpoints import SIZES, save_tiny
from tests.spawn import run_ranks

WORKER = Path(__file__).with_name("sampling_mask_worker.py")
LAYOUTS = ["1x1", "2x1", "1x2"]


def test_the_mask_removes_the_bias_of_truncation(tmp_path):
    checkpoint = save_tiny("Qwen2ForCausalLM", tmp_path, seed=0)
    results = json.loads(run_ranks(2, WORKER, checkpoint, *LAYOUTS)[0])
    print(json.dumps(results, indent=1))
    error = bounds.of_logits(SIZES["num_hidden_layers"], SIZES["hidden_size"])
    assert results.keys() == set(LAYOUTS)
    for found in results.values():
        assert found["tokens"] > 500
        assert found["with"] <= error * found["logprob"] and found["with"] <= 1e-5
        # Each token's probability is lower by the factor that the kept ones had in total.
        assert found["without"] > 0.1 and found["mean without"] < -0.1
        assert 0 < found["entropy"] <= math.log(20) * (1 + error)
        assert found["sum_p_squared"] >= (1 - error) / 20
        assert found["perf/held_bytes_received"] == found["perf/held_bytes_planned"] > 0
