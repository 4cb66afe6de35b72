"""The head for multi-token prediction has the weights of the published files; other checkpoints are
refused."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rl.models import architecture, mtp, read_hf_config
from rl.models.files import tensor_files
from tests.checkpoints import save_tiny

CONFIGS = Path(__file__).parents[3] / "configs" / "models"


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("deepseek-v3", 3_918_786_560 + 680_571_043_840 + 59 * 256),  # BF16, FP8 and the routers' biases
        ("glm-4.5-air", 110_468_824_832),
    ],
)
def test_the_published_files_have_as_many_elements(name, elements):
    hf = json.loads((CONFIGS / name / "config.json").read_text())
    every = [*architecture(hf).weights(hf), *mtp.weights(hf), *mtp.copies(hf)]
    assert sum(weight.num_elements for weight in every) == elements
    mtp.check(hf, key="training.mtp.head_lr=1", path=name)


def test_every_tensor_of_the_files_has_a_weight(tmp_path):
    path = save_tiny("Glm4MoeForCausalLM", tmp_path, seed=1)
    hf = read_hf_config(path)
    with pytest.raises(
        ValueError, match="rollout.draft.method=mtp requires .* num_nextn_predict_layers is 0"
    ):
        mtp.check(hf | {"num_nextn_predict_layers": 0}, key="rollout.draft.method=mtp", path=path)
    with pytest.raises(ValueError, match="lacks .* model.layers.2.enorm.weight"):
        tensor_files(path, mtp.weights(hf))
    path = save_tiny("Glm4MoeForCausalLM", tmp_path, seed=1, num_nextn_predict_layers=1)
    every = [*architecture(hf).weights(hf), *mtp.weights(hf), *mtp.copies(hf)]
    assert {name for weight in every for name in weight.hf} == set(load_file(tmp_path / "model.safetensors"))
    tensor_files(path, every)
    dense = save_tiny("Qwen2ForCausalLM", tmp_path / "dense", seed=1)
    with pytest.raises(ValueError, match="not for Qwen2ForCausalLM .*leave out training.mtp.head_lr=1"):
        mtp.check(read_hf_config(dense), key="training.mtp.head_lr=1", path=dense)
