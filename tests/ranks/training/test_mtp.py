"""The head for multi-token prediction learns what autograd computes in transformers' layers, in every layout,
and the policy's update is bitwise that without it."""

from pathlib import Path

import pytest
import torch

from tests import bounds
from tests.checkpoints import SIZES, save_tiny
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "mtp_worker.py"
CASES = ["hf=hf", "dp2=1x1:70", "tp2=2x1:70", "pp2=1x2:4096", "ep2=1x1x2:70"]
LAYOUTS = [case.partition("=")[0] for case in CASES[1:]]
GRADIENT = bounds.of_gradient(SIZES["num_hidden_layers"] + 2, 256)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mtp")
    checkpoint = save_tiny("DeepseekV3ForCausalLM", directory / "model", seed=3, num_nextn_predict_layers=1)
    run_ranks(2, WORKER, checkpoint, directory, *CASES, timeout=240)
    return {path.stem: torch.load(path) for path in directory.glob("*.pt")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_policy_learns_bitwise_as_without_a_head(results, layout):
    assert results[layout]["differing"] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_head_learns_as_in_transformers(results, layout):
    found, expected = results[layout], results["hf"]
    for name, value in expected["metrics"].items():
        assert found["metrics"][name] == pytest.approx(float(value), rel=1e-4), name
    biases = {name for name in found["gradient"] if name.endswith("e_score_correction_bias")}
    copies = {name for name in found["gradient"] if "embed_tokens" in name or "shared_head.head" in name}
    assert found["gradient"].keys() - biases - copies == expected["gradient"].keys()
    for name, gradient in expected["gradient"].items():
        difference = (found["gradient"][name] - gradient).norm()
        assert difference <= GRADIENT * gradient.norm() + 1e-6, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_update_without_tokens_reports_nothing_of_the_head(results, layout):
    assert "mtp/acceptance" in results[layout]["metrics"]
    assert not results[layout]["of_none"]
