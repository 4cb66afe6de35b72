"""Checkpoints of a mixture of experts: weights, the router's bias and the optimizer are restored, also in
another layout and with another ep."""

import json
from pathlib import Path

from tests import bounds
from tests.checkpoints import SIZES, save_tiny
from tests.spawn import run_ranks

WORKER = Path(__file__).parent.parent / "training" / "moe_store_worker.py"
GRADIENT = bounds.of_gradient(layers=3, width=SIZES["hidden_size"])
STEP = bounds.of_adam_step(lr=1e-3, eps=1e-2, gradient=GRADIENT)  # gradients are clipped to a norm of 1
SMALLEST_NORM = 0.2  # of a weight: 8 biases of a router, of standard deviation 0.2


def test_a_run_with_experts_continues_in_any_layout(tmp_path):
    checkpoint = save_tiny("DeepseekV3ForCausalLM", tmp_path / "model", seed=0)
    layouts = ("1x1x2", "2x1x2", "1x1x1", "1x2x1")
    run_ranks(2, WORKER, checkpoint, tmp_path, "1x1x2", *layouts, timeout=400)
    found = json.loads((tmp_path / "out.json").read_text())
    for layout, ((loaded, where), (continued, after)) in found.items():
        assert loaded == 0.0, (layout, where)
        assert continued <= STEP / SMALLEST_NORM, (layout, after)
