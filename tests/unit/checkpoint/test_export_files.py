"""An export has every file of its source but the weights, and a config of the weights that it holds."""

import json
from types import SimpleNamespace

import torch

from rl.checkpoint.hf import _copy_config

COPIED = (
    *("generation_config.json", "tokenizer.json", "chat_template.json", "chat_template.jinja", "tekken.json"),
    *("preprocessor_config.json", "special_tokens_map.json", "own_tokenizer.py", "LICENSE"),
    "additional_chat_templates/tool_use.jinja",
)
LEFT = (
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "README.md",
    ".git",
)


def test_files_that_change_what_is_read_stay_behind(tmp_path):
    source, target = tmp_path / "source", tmp_path / "export"
    for name in (*COPIED, *LEFT):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    target.mkdir()
    hf = {
        "torch_dtype": "float32",
        "quantization_config": {},
        "text_config": {"dtype": "float32", "a": 1},
        "b": 2,
    }
    _copy_config(SimpleNamespace(hf=hf, dtype=torch.bfloat16, weights=[]), source, target)
    found = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert found == {*COPIED, "config.json"}
    written = json.loads((target / "config.json").read_text())
    assert written == {"dtype": "bfloat16", "text_config": {"dtype": "bfloat16", "a": 1}, "b": 2}
    assert hf["text_config"]["dtype"] == "float32"
