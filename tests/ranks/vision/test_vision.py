"""Models with a vision tower: transformers, Megatron in all layouts and vLLM after a refit agree."""

import json
from pathlib import Path

import pytest

from tests import bounds
from tests.checkpoints import SIZES, VISION, save_tiny
from tests.ranks.training.test_parity import assert_same_tensors
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "vision_worker.py"
LAYERS = 4  # of the text model and the tower
LOGPROB = bounds.of_logits(LAYERS, SIZES["hidden_size"])
GRADIENT = bounds.of_gradient(LAYERS, SIZES["hidden_size"])
EACH = pytest.mark.parametrize("architecture", VISION)


def run_vision(directory: Path, architecture: str, world_size: int, vision: str, *layouts: str, engine="2x1"):
    checkpoints = [save_tiny(architecture, directory / name, seed=seed) for seed, name in enumerate("ab")]
    run_ranks(world_size, WORKER, *checkpoints, directory, engine, vision, *layouts, timeout=500)
    results = json.loads((directory / "out.json").read_text())
    for case, found in results.items():
        assert found["sampled_tokens"] > 50
        for side in ("megatron", "vllm", "gap"):
            assert found[side] <= LOGPROB * found["largest"], (case, side, found[side])
        received, planned = found["bytes"]
        # Of two ranks that share a replica, the first generates, and it is the first stage.
        assert received == planned and (received > 0) == (world_size > 2)
        assert found.get("gradient", 0.0) <= GRADIENT, case
        if "tower_moved" in found:
            assert (found["tower_moved"] > 0) == (vision == "train")


@pytest.mark.slow
@EACH
def test_every_layout_serves_replicas_of_tp_2(tmp_path, architecture):
    run_vision(tmp_path, architecture, 4, "train", "1x1x1", "2x1x1", "1x2x1", "2x2x1")
    assert_same_tensors(tmp_path / "export", tmp_path / "b")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["2x2", "1x2"])
def test_ranks_with_whole_experts_serve_such_replicas(tmp_path, engine):
    layouts = ("1x1x2", "2x1x2", "1x2x2")
    run_vision(tmp_path, "Qwen3VLMoeForConditionalGeneration", 4, "train", *layouts, engine=engine)


def test_a_frozen_tower_gets_no_gradient(tmp_path):
    """Weights a overwrite the tower of weights b: a stale cache of images would be seen."""
    run_vision(tmp_path, "Qwen2_5_VLForConditionalGeneration", 2, "frozen", "1x2x1")
