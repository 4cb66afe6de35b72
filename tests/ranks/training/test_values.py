"""Value models: values and gradients equal those of transformers, in every layout and packing."""

from pathlib import Path

import pytest
import torch

from rl.models import value_model, value_weights
from tests import bounds
from tests.checkpoints import SIZES, save_qwen2_classifier
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "value_worker.py"
CASES = {
    1: ["hf=hf", "one_pack=1x1:4096", "unpacked=1x1:1"],
    2: ["tp2=2x1:70", "pp2=1x2:70", "dp2=1x1:70"],
    4: ["tp2_pp2=2x2:70"],
}
LAYOUTS = [case.partition("=")[0] for cases in CASES.values() for case in cases if ":" in case]
LAYERS, WIDTH, TOKENS = SIZES["num_hidden_layers"], SIZES["hidden_size"], 217
VALUE = bounds.of_logits(LAYERS, WIDTH)  # a value is a logit
GRADIENT = bounds.of_gradient(LAYERS, max(WIDTH, TOKENS))  # a weight's gradient is a sum over tokens
READING = bounds.of_sum(1)  # relative to a weight, which is rounded after the step that shows its gradient


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    directory = tmp_path_factory.mktemp("values")
    checkpoint = save_qwen2_classifier(directory / "model", seed=8)
    for world_size, cases in CASES.items():
        run_ranks(world_size, WORKER, checkpoint, directory, *cases, timeout=240)
    return {path.stem: torch.load(path) for path in directory.glob("*.pt")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients_are_those_of_transformers(results, layout):
    expected, found = results["hf"], results[layout]
    difference = (found["values"].double() - expected["values"]).abs().max()
    assert difference <= VALUE * expected["values"].abs().max()
    assert found["gradient"].keys() == expected["gradient"].keys() and "score.weight" in found["gradient"]
    for name, gradient in expected["gradient"].items():
        difference = (found["gradient"][name].double() - gradient).norm()
        assert difference <= GRADIENT * gradient.norm() + READING * found["weights"][name], name
    for name, value in expected["terms"].items():
        # The loss is a mean of squared differences.
        bound = GRADIENT if name == "grad_norm" else 2 * VALUE
        assert found["terms"][name] == pytest.approx(value, rel=bound), name


HF = {"architectures": ["Qwen2ForSequenceClassification"], "tie_word_embeddings": True}


def test_only_classifiers_with_one_label_are_value_models():
    assert value_model(HF | {"id2label": {"0": "LABEL_0"}})["architectures"] == ["Qwen2ForCausalLM"]
    assert value_model(HF | {"num_labels": 1})["tie_word_embeddings"] is False
    for labels in ({}, {"num_labels": 3}, {"id2label": {"0": "a", "1": "b"}}):
        with pytest.raises(ValueError, match="is no reward model; it must have num_labels 1"):
            value_model(HF | labels)


def test_a_value_model_has_all_weights_but_the_head():
    sizes = dict(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=9,
    )
    weights = value_weights(value_model({"architectures": ["Qwen2ForCausalLM"]} | sizes), needs_head=False)
    names = [name for weight in weights for name in weight.hf]
    assert "lm_head.weight" not in names and names[-1] == "score.weight" and weights[-1].optional
    assert not value_weights(value_model(HF | {"num_labels": 1} | sizes), needs_head=True)[-1].optional
