"""In bfloat16 the routers of the engine select the experts that the trainer's select."""

import json
from pathlib import Path

from tests.checkpoints import save_tiny
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "router_worker.py"
ARCHITECTURES = ("DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM")


def test_trainer_and_engine_select_the_same_experts(tmp_path):
    checkpoints = [save_tiny(name, tmp_path / name, seed=1) for name in ARCHITECTURES]
    (out,) = run_ranks(1, WORKER, *checkpoints, timeout=200)
    found = json.loads(out.splitlines()[-1])
    assert found.keys() == set(ARCHITECTURES)
    for name, layers in found.items():
        assert layers
        for rounded, float32 in layers:
            # Both products sum the same 128 products in float32; logits have to be within about 128 * 2^-24
            # of each other for experts to swap, which is less than 1e-4 of 4096 tokens.
            assert float32 == 0 < rounded, (name, rounded, float32)
    print(found)
