"""A step of distill has the divergence and the gradient of transformers' models in float64, in any layout."""

from pathlib import Path

import pytest
import torch
import transformers

from tests import bounds
from tests.checkpoints import SIZES, save_qwen2
from tests.ranks.training.test_gradients import GRADIENT, READING
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "distill_worker.py"
KINDS = ("whole", "top_k", "two", "self")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("teachers")
    save_qwen2(directory / "policy", seed=2)
    save_qwen2(directory / "teacher", seed=3, num_hidden_layers=2)
    larger = transformers.AutoModelForCausalLM.from_pretrained(save_qwen2(directory / "larger", seed=4))
    larger.resize_token_embeddings(larger.config.vocab_size + 200)
    larger.save_pretrained(directory / "larger")
    return directory


def assert_as_transformers(models, cases, world_size, out_dir):
    """cases: name=LAYOUT:KIND."""
    references = [f"hf_{kind}=hf:{kind}" for kind in {case.partition(":")[2] for case in cases}]
    run_ranks(world_size, WORKER, models, out_dir, *references, *cases, timeout=240)
    for case in cases:
        name, kind = case.partition("=")[0], case.partition(":")[2]
        found, expected = (torch.load(out_dir / f"{stem}.pt") for stem in (name, f"hf_{kind}"))
        error = bounds.of_logits(SIZES["num_hidden_layers"], SIZES["hidden_size"])
        assert expected["divergence"] > 1e-3, name
        assert found["divergence"] == pytest.approx(expected["divergence"], abs=10 * error), name
        for weight, gradient in expected["gradient"].items():
            difference = (found["gradient"][weight].double() - gradient).norm()
            bound = GRADIENT * gradient.norm() + READING * found["weights"][weight]
            assert difference <= bound, (name, weight)


def test_gradient_of_distill_is_that_of_transformers(models, tmp_path):
    cases = ["dp2=1x1:whole", "tp2=2x1:two", "pp2=1x2:top_k", "dp2_self=1x1:self"]
    assert_as_transformers(models, cases, 2, tmp_path)


@pytest.mark.slow
def test_gradient_of_distill_in_layouts_of_four_ranks(models, tmp_path):
    layouts = {"tp2_pp2": "2x2", "tp2_dp2": "2x1", "pp2_dp2": "1x2"}
    cases = [f"{name}_{kind}={layout}:{kind}" for name, layout in layouts.items() for kind in KINDS]
    assert_as_transformers(models, cases, 4, tmp_path)
