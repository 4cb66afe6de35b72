"""With `training.vpp` the results equal the plain schedule's, and the pipeline waits less."""

from pathlib import Path

import pytest
import torch

from tests import bounds
from tests.checkpoints import SIZES, save_qwen2_classifier, save_tiny
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "interleaved_worker.py"
LAYERS = 9  # not a multiple of pp or of pp * vpp
# 70 tokens: four micro-batches, 35: eight. One that holds everything is divided.
CASES = {
    2: ["pp2=1x2x1x1:70", "pp2_vpp3=1x2x1x3:70", "pp2_vpp2_divided=1x2x1x2:4096"],
    4: ["pp4=1x4x1x1:70", "pp4_vpp2=1x4x1x2:70", "pp4_vpp2_more=1x4x1x2:35", "pp2_vpp2_cp2=1x2x2x2:35"],
}
WIDER = {4: [*CASES[4], "pp2_vpp2_tp2=2x2x1x2:70", "pp2_vpp4_dp2=1x2x1x4:70"]}
GRADIENT = bounds.of_gradient(LAYERS, max(SIZES["hidden_size"], 254))


def results_of(checkpoint: str, directory: Path, cases: dict[int, list[str]]) -> dict[str, dict]:
    for world_size, some in cases.items():
        run_ranks(world_size, WORKER, checkpoint, directory, *some, timeout=400)
    return {path.stem: torch.load(path) for path in directory.glob("*.pt")}


def assert_same(found: dict, expected: dict, *, exact: bool = False) -> None:
    if exact:
        assert torch.equal(found["outputs"], expected["outputs"])
    bound = bounds.of_logits(LAYERS, SIZES["hidden_size"])
    assert (found["outputs"] - expected["outputs"]).abs().max() <= 2 * bound * expected["outputs"].abs().max()
    for name, gradient in expected["gradient"].items():
        difference = (found["gradient"][name].double() - gradient.double()).norm()
        limit = GRADIENT * gradient.double().norm() + bounds.of_sum(1) * expected["weights"][name]
        assert difference <= limit, name


def test_chunks_give_the_results_of_whole_stages(tmp_path):
    checkpoint = save_tiny("Qwen2ForCausalLM", tmp_path / "model", seed=2, tie=True, num_hidden_layers=LAYERS)
    found = results_of(checkpoint, tmp_path, CASES)
    for name, result in found.items():
        assert_same(result, found["pp2"], exact=name in ("pp2_vpp3", "pp4", "pp4_vpp2"))
    # A rank waits for pp - 1 stages or chunks, and passes over m micro-batches: (pp - 1) / (vpp m).
    for name, share in (("pp4", 3 / 4), ("pp4_vpp2", 3 / 8), ("pp4_vpp2_more", 3 / 16)):
        assert found[name]["idle"] == pytest.approx([share, share]), name
    assert found["pp2_vpp3"]["idle"] == pytest.approx([1 / 12, 1 / 12])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "critic"])
def test_chunks_of_other_models(tmp_path, name):
    if name == "critic":
        checkpoint = save_qwen2_classifier(tmp_path / "model", seed=8, num_hidden_layers=LAYERS)
    else:
        checkpoint = save_tiny(name, tmp_path / "model", seed=3, num_hidden_layers=LAYERS)
    found = results_of(checkpoint, tmp_path, {2: CASES[2]} | WIDER)
    for result in found.values():
        assert_same(result, found["pp2"])
