"""Checkpoints of a mixture of experts: weights, the router's bias and the optimizer come back, in another layout too."""

import json
from pathlib import Path

from tests.checkpoints import save_tiny
from tests.ranks import run_ranks

WORKER = Path(__file__).parent.parent / "training" / "moe_store_worker.py"


def test_a_run_with_expert_parallelism_continues_in_its_own_and_in_another_layout(tmp_path):
    checkpoint = save_tiny("DeepseekV3ForCausalLM", tmp_path / "model", seed=0)
    for layout in ("1x1x2", "1x1x2", "2x1x2"):
        run_ranks(2, WORKER, checkpoint, tmp_path, layout, timeout=240)
    for layout in ("1x1x2", "2x1x2"):
        (loaded, where), (continued, after) = json.loads((tmp_path / f"{layout}.json").read_text())
        assert loaded == 0.0, (layout, where)
        assert continued < 1e-4, (layout, after)
