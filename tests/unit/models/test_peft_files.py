"""The files of adapters: what is read, and how contradictions with the config are refused."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from rl.models import architecture
from rl.models.adapters import adapters
from rl.models.peft import CONFIG, TENSORS, check_peft, peft_config
from tools.tiny_models import tiny_config

RANK, SCALE = 4, 2.0
SETTINGS = dict(kind="lora", rank=RANK, scale=SCALE)


def weights_of(family):
    hf = json.loads(tiny_config(family).to_json_string(use_diff=False))
    return architecture(hf).weights(hf)


def save(directory, weights, **changes):
    """Write a directory of adapters for o_proj and down_proj; return its path and the adapters."""
    pairs = adapters(weights, rank=RANK, targets=["o_proj", "down_proj"])
    tensors = [weight for pair in pairs for weight in pair.weights]
    save_file({w.hf[0]: np.zeros(w.shapes[0], np.float32) for w in tensors}, directory / TENSORS)
    content = peft_config(pairs, weights, rank=RANK, scale=SCALE, source="base")
    (directory / CONFIG).write_text(json.dumps(content | changes))
    return str(directory), pairs


def test_written_files_are_accepted(tmp_path):
    for family in ("Qwen2ForCausalLM", "DeepseekV3ForCausalLM"):
        check_peft(*save(tmp_path, weights_of(family)), **SETTINGS)
    check_peft(*save(tmp_path, weights_of(family), lora_dropout=0.1), **SETTINGS)


@pytest.mark.parametrize(
    "changes, settings, remedy",
    [
        ({}, {"rank": 8}, "adapter.rank=8, .* has r=4; set adapter.rank=4"),
        ({}, {"kind": "dora"}, "adapter.kind=dora, .* set adapter.kind=lora"),
        ({}, {"scale": 1.0}, "with adapter.kind=lora set adapter.alpha=8"),
        ({"use_rslora": True}, {}, "use_rslora=True.* set adapter.alpha=16"),
        ({"bias": "all"}, {}, "bias=all.*merge_and_unload"),
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save"),
        ({"peft_type": "IA3"}, {}, "peft_type=IA3"),
        ({"init_lora_weights": "pissa"}, {}, "init_lora_weights=pissa"),
        ({"r": None}, {}, "adapter.rank=4, .* has r=None"),
        ({"r": "4"}, {}, f'{CONFIG}: r="4" must be an integer'),
        ({"lora_alpha": "8"}, {}, f'{CONFIG}: lora_alpha="8" must be a number'),
        ({"use_dora": "no"}, {}, f'{CONFIG}: use_dora="no" must be true or false'),
    ],
)
def test_contradictions_name_the_value_to_set(tmp_path, changes, settings, remedy):
    directory, pairs = save(tmp_path, weights_of("Qwen2ForCausalLM"), **changes)
    with pytest.raises(ValueError, match=remedy):
        check_peft(directory, pairs, **SETTINGS | settings)


@pytest.mark.parametrize("text", ["[1]", "[" * 100_000, "null", "{"])
def test_a_config_that_is_no_object_ends_in_a_traceback(tmp_path, text):
    directory, pairs = save(tmp_path, weights_of("Qwen2ForCausalLM"))
    (tmp_path / CONFIG).write_text(text)
    with pytest.raises(ValueError, match=f"{CONFIG} (is not valid JSON|holds)"):
        check_peft(directory, pairs, **SETTINGS)


def test_other_layers_are_refused(tmp_path):
    weights = weights_of("Qwen2ForCausalLM")
    directory, pairs = save(tmp_path, weights)
    with pytest.raises(ValueError, match="also has .*its adapters are of down_proj, o_proj"):
        check_peft(directory, adapters(weights, rank=RANK, targets=["o_proj"]), **SETTINGS)
    with pytest.raises(ValueError, match="lacks .*its adapters are of down_proj, o_proj"):
        check_peft(directory, adapters(weights, rank=RANK), **SETTINGS)
    save_file({"base_model.model.model.layers.1.mlp.experts.lora_A.weight": np.zeros(1)}, tmp_path / TENSORS)
    with pytest.raises(ValueError, match="holds the experts' adapters fused"):
        check_peft(directory, pairs, **SETTINGS)


def test_dense_layers_of_a_mixture_are_parameters():
    weights = weights_of("DeepseekV3ForCausalLM")
    content = peft_config(adapters(weights, rank=RANK), weights, rank=RANK, scale=SCALE, source="base")
    assert "gate_proj" in content["target_modules"] and content["lora_alpha"] == 8
    assert "model.layers.0.mlp.gate_proj.weight" in content["target_parameters"]
    assert "model.layers.2.mlp.shared_experts.up_proj.weight" in content["target_parameters"]
    assert not any(".experts." in name for name in content["target_parameters"])
