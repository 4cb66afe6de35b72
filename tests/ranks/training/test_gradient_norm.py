"""The gradient norm counts each weight once where Transformer Engine marks replicated weights as split."""

import importlib.metadata
import json
from pathlib import Path

import pytest
from packaging.version import Version

from tests import bounds
from tests.checkpoints import PARTICULAR, SIZES, save_tiny
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "norm_worker.py"
MEGATRON = Version(importlib.metadata.version("megatron-core"))
MODELS = PARTICULAR.keys() - {"GptOssForCausalLM"}
"""Biased experts cannot be split over tensor parallel ranks, as the worker's are."""
if MEGATRON >= Version("0.17"):
    MODELS -= {"DeepseekV2ForCausalLM"}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    directory = tmp_path_factory.mktemp("norms")
    models = [save_tiny(name, directory / name, seed=4, num_key_value_heads=4) for name in MODELS]
    run_ranks(2, WORKER, directory, *models, timeout=240)
    return json.loads((directory / "out.json").read_text())


def test_marks_of_split_weights_match_the_layout(results):
    assert results.keys() == MODELS
    for found in results.values():
        assert found["weights"] > 10 and found["wrong"] == []


def test_norm_at_tp_2_equals_that_at_tp_1(results):
    found = results["DeepseekV3ForCausalLM"]
    bound = bounds.of_gradient(SIZES["num_hidden_layers"] + 1, SIZES["hidden_size"])
    assert found["tp2"] == pytest.approx(found["tp1"], rel=bound)
    assert "found a gradient norm of" in found["tp2 unmended"]
