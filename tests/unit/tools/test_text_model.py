"""The text model of a checkpoint with a vision tower: transformers computes the same logits with it."""

import json

import pytest
import torch
import transformers
from safetensors import safe_open

from rl.models import architecture
from rl.models.files import refuse_extra, tensor_files
from tools import text_model
from tools.tiny_models import PARTICULAR, SIZES

ROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3], mrope_interleaved=True)
TOWER = dict(
    depth=1,
    hidden_size=32,
    intermediate_size=64,
    num_heads=2,
    out_hidden_size=128,
    num_position_embeddings=16,
)


@pytest.mark.parametrize("kind, tie", [("", True), ("Moe", False)])
def test_the_text_model_is_that_of_the_whole(tmp_path, monkeypatch, kind, tie):
    name = f"Qwen3_5{kind}"
    text = SIZES | PARTICULAR[f"{name}ForCausalLM"] | dict(vocab_size=102, rope_parameters=ROPE)
    config = getattr(transformers, f"{name}Config")(
        text_config=text | dict(tie_word_embeddings=tie), vision_config=TOWER, tie_word_embeddings=tie
    )
    torch.manual_seed(0)
    whole = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    whole.save_pretrained(tmp_path / "whole")
    monkeypatch.setattr(text_model, "MAX_FILE_BYTES", 100_000)
    assert text_model.main([str(tmp_path / "whole"), "--out", str(tmp_path / "text")]) == 0
    hf = json.loads((tmp_path / "text" / "config.json").read_text())
    weights = architecture(hf).weights(hf)
    architecture(hf).check(hf)
    files = tensor_files(str(tmp_path / "text"), weights)
    refuse_extra(str(tmp_path / "text"), files, weights, hf)
    assert len(set(files.values())) > 3
    with safe_open(files["model.norm.weight"], framework="pt") as opened:
        assert torch.equal(opened.get_tensor("model.norm.weight"), whole.model.language_model.norm.weight)
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()
    tokens = torch.randint(3, 102, (1, 20))
    with torch.no_grad():
        assert torch.equal(alone(tokens).logits, whole(input_ids=tokens).logits)
    assert text_model.main([str(tmp_path / "text"), "--out", str(tmp_path / "again")]) == 2
