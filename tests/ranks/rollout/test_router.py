"""In bfloat16, the routers of engine and trainer select the same experts."""

import json
from pathlib import Path

from tests.checkpoints import save_tiny
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "router_worker.py"
ARCHITECTURES = ("DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM", "Glm4MoeForCausalLM")


def test_trainer_and_engine_select_the_same_experts(tmp_path):
    checkpoints = [save_tiny(name, tmp_path / name, seed=1) for name in ARCHITECTURES]
    (out,) = run_ranks(1, WORKER, *checkpoints, timeout=200)
    found = json.loads(out.splitlines()[-1])
    assert found.keys() == set(ARCHITECTURES)
    for name, layers in found.items():
        assert layers
        for rounded, float32 in layers:
            # Both routers sum the same 128 products in float32. Experts can only swap if their logits differ
            # by less than about 128 * 2^-24, which is less than 1e-4 of 4096 tokens.
            assert float32 == 0 < rounded, (name, rounded, float32)
    print(found)
