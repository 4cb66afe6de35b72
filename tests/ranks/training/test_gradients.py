"""Outputs, loss and gradient of a policy and of a critic equal transformers', in every layout and packing."""

from pathlib import Path

import pytest
import torch

from tests import bounds
from tests.checkpoints import SIZES, save_qwen2, save_qwen2_classifier
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "gradient_worker.py"
# Tokens of the batch: 254 in eight sequences, 214 of them in one row. 4096: one micro-batch; 70: four or
# more; 1: one per sequence, unpacked.
CASES = {
    1: ["hf=hf", "one_pack=1x1:4096", "several_packs=1x1:70", "unpacked=1x1:1", "decay=decay"],
    2: [
        "cp2=1x1x2:4096",
        "cp2_several=1x1x2:35",
        "dp2=1x1:4096",
        "dp2_unpacked=1x1:1",
        "tp2=2x1:70",
        "pp2=1x2:4096",
        "pp2_unpacked=1x2:1",
    ],
    4: [
        "cp4=1x1x4:4096",
        "tp2_cp2=2x1x2:35",
        "pp2_cp2=1x2x2:35",
        "cp2_dp2=1x1x2:20",
        "tp2_pp2=2x2:70",
        "tp2_dp2=2x1:70",
        "pp2_dp2=1x2:70",
    ],
}
LAYOUTS = [case.partition("=")[0] for cases in CASES.values() for case in cases if ":" in case]
LAYERS, WIDTH, TOKENS = SIZES["num_hidden_layers"], SIZES["hidden_size"], 254
GRADIENT = bounds.of_gradient(LAYERS, max(WIDTH, TOKENS))  # a weight's gradient is a sum over tokens
TERM = bounds.of_logits(LAYERS, WIDTH)  # means of log-probs and their ratios, which are of order 1
READING = bounds.of_sum(1)  # relative to a weight, which is rounded after the step that shows its gradient


@pytest.fixture(scope="module", params=[pytest.param("untied", marks=pytest.mark.slow), "tied", "critic"])
def results(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("gradients")
    if request.param == "critic":
        checkpoint = save_qwen2_classifier(directory / "model", seed=8)
    else:
        checkpoint = save_qwen2(directory / "model", seed=2, tie=request.param == "tied")
    for world_size, cases in CASES.items():
        some = [case for case in cases if request.param != "critic" or case != "decay=decay"]
        run_ranks(world_size, WORKER, checkpoint, directory, *some, timeout=240)
    return {path.stem: torch.load(path) for path in directory.glob("*.pt")}


def assert_same_gradient(found: dict, expected: dict, weights: dict) -> None:
    """Compare each weight by itself, so that a large one does not hide a small one."""
    assert found.keys() == expected.keys() == weights.keys()
    for name, gradient in expected.items():
        difference = (found[name].double() - gradient.double()).norm()
        assert difference <= GRADIENT * gradient.double().norm() + READING * weights[name], name


def test_one_packed_row_is_as_in_transformers(results):
    found, expected = results["one_pack"], results["hf"]
    assert_same_gradient(found["gradient"], expected["gradient"], found["weights"])
    difference = (found["outputs"].double() - expected["outputs"]).abs().max()
    assert difference <= TERM * expected["outputs"].abs().max()  # of logits, or values
    for name in ("grad_norm", "loss"):
        if name in expected["terms"]:  # a critic's loss is a mean of squared differences
            assert found["terms"][name] == pytest.approx(expected["terms"][name], rel=2 * GRADIENT), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_do_not_depend_on_layout_or_packing(results, layout):
    reference, result = results["one_pack"], results[layout]
    assert_same_gradient(result["gradient"], reference["gradient"], reference["weights"])
    difference = (result["outputs"] - reference["outputs"]).abs().max()
    assert difference <= 2 * TERM * reference["outputs"].abs().max()
    assert result["terms"].keys() == reference["terms"].keys()
    for name, value in reference["terms"].items():
        bound = GRADIENT if name == "grad_norm" else 2 * TERM
        assert result["terms"][name] == pytest.approx(value, rel=bound, abs=bound), name


def test_weight_decay_spares_norms_and_biases(results):
    for name, left in results.get("decay", {}).items():
        spared = "norm" in name or name.endswith("bias")
        # A norm of at most 128 * 128 weights, each rounded once.
        assert left == pytest.approx(1.0 if spared else 0.5, rel=bounds.of_sum(WIDTH * WIDTH)), name


def test_the_compared_loss_clips_and_masks(results):
    terms = results["hf"]["terms"]
    if "loss" in terms:
        return  # a critic's
    assert 0.1 < terms["actor/pg_clipfrac"] < 0.9
    assert terms["actor/kl_loss"] > 0 and terms["grad_norm"] > 0
