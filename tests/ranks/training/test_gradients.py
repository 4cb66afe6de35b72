"""Loss and gradient do not depend on the layout, the packing and the number of micro-batches."""

from pathlib import Path

import pytest
import torch

from tests.checkpoints import save_qwen2
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "gradient_worker.py"
# Tokens of the batch: 217 in eight sequences. 4096: one micro-batch; 70: four or more; 1: one per sequence,
# unpacked.
CASES = {
    1: ["hf=hf", "one_pack=1x1:4096", "several_packs=1x1:70", "unpacked=1x1:1", "decay=decay"],
    2: ["dp2=1x1:4096", "dp2_unpacked=1x1:1", "tp2=2x1:70", "pp2=1x2:4096", "pp2_unpacked=1x2:1"],
    4: ["tp2_pp2=2x2:70", "tp2_dp2=2x1:70", "pp2_dp2=1x2:70"],
}
LAYOUTS = [case.partition("=")[0] for cases in CASES.values() for case in cases if ":" in case]


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def results(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("gradients")
    checkpoint = save_qwen2(directory / "model", seed=2, tie=request.param)
    for world_size, cases in CASES.items():
        run_ranks(world_size, WORKER, checkpoint, directory, *cases, timeout=240)
    return {path.stem: torch.load(path) for path in directory.glob("*.pt")}


def relative_difference(result, reference) -> float:
    """|a - b| / |b| over all weights together."""
    a, b = result["gradient"], reference["gradient"]
    assert a.keys() == b.keys()
    squares = [
        ((a[name].double() - b[name].double()).square().sum(), b[name].double().square().sum()) for name in b
    ]
    return float((sum(s for s, _ in squares) / sum(s for _, s in squares)).sqrt())


def test_gradient_of_one_packed_row_is_that_of_transformers(results):
    assert relative_difference(results["one_pack"], results["hf"]) < 1e-5
    for name, expected in results["hf"][
        "gradient"
    ].items():  # a small weight must not hide behind a large one
        found = results["one_pack"]["gradient"][name].double()
        assert (found - expected).norm() <= 1e-4 * expected.norm() + 1e-7, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_and_loss_do_not_depend_on_layout_or_packing(results, layout):
    reference, result = results["one_pack"], results[layout]
    assert relative_difference(result, reference) < 1e-5
    assert result["terms"].keys() == reference["terms"].keys()
    for name, value in reference["terms"].items():
        assert result["terms"][name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


def test_weight_decay_spares_norms_and_biases(results):
    for name, left in results["decay"].items():
        spared = "norm" in name or name.endswith("bias")
        assert left == pytest.approx(1.0 if spared else 0.5, rel=1e-5), name


def test_the_compared_loss_clips_and_masks(results):
    terms = results["hf"]["terms"]
    assert 0.1 < terms["actor/pg_clipfrac"] < 0.9
    assert terms["actor/kl_loss"] > 0 and terms["grad_norm"] > 0
