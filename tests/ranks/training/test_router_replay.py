"""Experts of the engine, or of an earlier pass, are replayed by the trainer in every layout."""

import json
from pathlib import Path

import pytest

from tests import bounds
from tests.checkpoints import SIZES, save_tiny
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "replay_worker.py"
LAYERS = 3
CASES = [
    ("Qwen3MoeForCausalLM", "2x1", ["2x2x2"]),
    pytest.param("Qwen3MoeForCausalLM", "2x1", ["1x2x2"], marks=pytest.mark.slow),
    pytest.param("Qwen3MoeForCausalLM", "1x4", ["2x2x2"], marks=pytest.mark.slow),
    pytest.param("DeepseekV3ForCausalLM", "2x1", ["2x2x2", "1x2x2"], marks=pytest.mark.slow),
    pytest.param("DeepseekV3ForCausalLM", "4x4", ["2x2x2"], marks=pytest.mark.slow),
]
"""Architecture, TP x EP of the engine (with data parallel attention if EP is larger), layouts of training."""


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "engine", "layouts"), CASES)
def test_trainer_uses_the_experts_of_the_engine(tmp_path, name, engine, layouts, dtype):
    sizes = dict(num_hidden_layers=LAYERS, mlp_only_layers=[0]) if "Qwen3" in name else {}
    checkpoint = save_tiny(name, tmp_path / name, seed=1, **sizes)
    run_ranks(4, WORKER, checkpoint, dtype, tmp_path, engine, *layouts, timeout=300)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    for layout in layouts:
        found = [rank[layout] for rank in ranks]
        print(name, dtype, layout, found)
        for own in found:
            assert own["received"] == own["planned"] == own["expected"]
            assert own["with"] == 0
            # Tokens of another position or sample would mostly have other experts.
            assert own["without"] < 0.2 if dtype == "bfloat16" else own["without"] < 0.01
        if dtype == "bfloat16":
            continue
        assert sum(own["calls"] for own in found) > 0
        for own in found:
            assert own["with others"] == 0
            assert own["gradient"] <= 1e-6
            assert own["shared"] <= bounds.of_gradient(LAYERS, SIZES["hidden_size"])
            assert own["old_policy"]["replayed"]
        assert max(own["without replay"] for own in found) > 1e-2
        assert sum(own["old_policy"]["micro-batches that would differ"] for own in found) > 0
