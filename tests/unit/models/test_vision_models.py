"""Models with a vision tower have the weights and angles of transformers' models."""

import json
import math
import sys

import pytest
import torch
import transformers
from safetensors import safe_open

from rl.models import architecture, as_written, read_hf_config
from rl.models.files import stored_shapes
from rl.training.rotary import RowRotary
from tests.checkpoints import VISION, save_tiny, tiny_config

EACH = pytest.mark.parametrize("name", VISION)


@EACH
def test_weights_are_those_of_the_checkpoint(name, tmp_path):
    for tie in (False, True):
        directory = save_tiny(name, tmp_path / str(tie), seed=0, tie=tie)
        hf = read_hf_config(directory)
        architecture(hf).check(hf)
        with safe_open(f"{directory}/model.safetensors", framework="pt") as opened:
            expected = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}
        weights = architecture(hf).weights(hf)
        found = [pair for weight in weights for pair in stored_shapes(weight).items()]
        assert dict(found) == expected
        assert sum(weight.num_elements for weight in weights) == sum(map(math.prod, expected.values()))
        assert as_written(hf) == json.loads((tmp_path / str(tie) / "config.json").read_text())
        # Each rank of an engine holds the whole tower.
        tower = [weight for weight in weights if weight.first_stage and not weight.cut.split]
        assert len(tower) > 20
        for weight in tower:
            assert weight.vllm_pieces(2, 0) == weight.vllm_pieces(2, 1)


@EACH
def test_angles_are_those_of_transformers(name):
    config = tiny_config(name)
    hf = json.loads(config.to_json_string(use_diff=False))
    hf = {**hf["text_config"], **hf}
    module = sys.modules[getattr(transformers, name).__module__]
    kind = next(
        value
        for key, value in vars(module).items()
        if key.endswith("RotaryEmbedding") and "Vision" not in key and key.startswith("Qwen")
    )
    positions = torch.randint(0, 200, (3, 50), generator=torch.Generator().manual_seed(0))
    cos, sin = kind(config.text_config)(torch.zeros(1), positions[:, None])
    found = RowRotary(hf, fused=False).of(positions)
    half = cos.shape[-1] // 2
    torch.testing.assert_close(
        found[:, 0], torch.cat([cos[0, :, :half], sin[0, :, :half]], -1), rtol=0, atol=1e-6
    )
    # Text has equal positions on all axes, and bitwise the angles of a row without images.
    text = positions[:1]
    assert torch.equal(RowRotary(hf, fused=False).of(text.expand(3, -1)), RowRotary(hf, fused=False).of(text))


@pytest.mark.parametrize("wrong", [dict(rope_type="yarn", factor=2.0), dict(mrope_section=None)])
@EACH
def test_another_rotation_is_refused(name, wrong):
    hf = json.loads(tiny_config(name).to_json_string(use_diff=False))
    hf = {**hf["text_config"], **hf}
    hf["rope_parameters"] = hf["rope_parameters"] | wrong
    with pytest.raises(ValueError, match="is not supported; only the published default with three sections"):
        architecture(hf).check(hf)
