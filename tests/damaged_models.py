"""Damages of the toy's model directory: what happens to directories between a hub and a cluster.

DAMAGES maps a name to a function of the directory and to a pattern of the sentence that refuses it; an empty
pattern: the directory works.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rl.models.json_files import POINTER

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
VOCABULARY, WEIGHTS, INDEX = "tokenizer.json", "model.safetensors", "model.safetensors.index.json"
SECOND = "model-00002-of-00002.safetensors"
DEEP = "[" * 100_000
ABSENT = object()

Damage = Callable[[Path], object]


def content(file: str, text: str | bytes) -> Damage:
    return lambda d: (d / file).write_bytes(text if isinstance(text, bytes) else text.encode())


def cut(file: str) -> Damage:
    return lambda d: (d / file).write_bytes((d / file).read_bytes()[:100])


def no_file(file: str, target: str | None = None) -> Damage:
    """Put a directory in the place of a file, or a link to the target."""

    def damage(d: Path) -> None:
        (d / file).unlink(missing_ok=True)
        (d / file).symlink_to(target) if target else (d / file).mkdir()

    return damage


def fifo(file: str) -> Damage:
    return lambda d: ((d / file).unlink(), os.mkfifo(d / file))


def edit(file: str, **changes) -> Damage:
    def damage(d: Path) -> None:
        values = json.loads((d / file).read_text()) | changes
        (d / file).write_text(json.dumps({k: v for k, v in values.items() if v is not ABSENT}))

    return damage


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(d: Path) -> None:
        change(found := load_file(d / WEIGHTS))
        save_file({name: t.contiguous() for name, t in found.items()}, d / WEIGHTS, metadata={"format": "pt"})

    return damage


def cast(name: str, dtype: torch.dtype) -> Damage:
    return tensors(lambda found: found.update({name: (found[name] * 10).to(dtype)}))


def extra(name: str, tensor: torch.Tensor | None = None) -> Damage:
    return tensors(lambda found: found.update({name: torch.zeros(2, 2) if tensor is None else tensor}))


def token(text: str, id: int) -> Damage:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)

    def damage(d: Path) -> None:
        values = json.loads((d / VOCABULARY).read_text())
        values["added_tokens"].append({"id": id, "content": text, "special": True, **flags})
        (d / VOCABULARY).write_text(json.dumps(values))

    return damage


def shards(*after: Damage, **places: object) -> Damage:
    """Divide the weights into two files with an index, change places in its map, and damage the result."""

    def damage(d: Path) -> None:
        found, files = load_file(d / WEIGHTS), ("model-00001-of-00002.safetensors", SECOND)
        names = sorted(found)
        (d / WEIGHTS).unlink()
        parts = dict(zip(files, (names[: len(names) // 2], names[len(names) // 2 :])))
        for file, own in parts.items():
            save_file({name: found[name] for name in own}, d / file, metadata={"format": "pt"})
        named = {name: file for file, own in parts.items() for name in own} | places
        (d / INDEX).write_text(json.dumps({"weight_map": named}))
        for one in after:
            one(d)

    return damage


def all_of(*damages: Damage) -> Damage:
    return lambda d: [damage(d) for damage in damages]


NORM, DOWN = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
INV_FREQ = "model.layers.0.self_attn.rotary_emb.inv_freq"

DAMAGES: dict[str, tuple[Damage, str]] = {"none": (lambda d: None, "")}
for file in (CONFIG, GENERATION, TOKENIZER):
    for name, text in {"empty": "", "list": "[1]", "null": "null", "deep": DEEP, "latin": b"\xff"}.items():
        DAMAGES[f"{file} {name}"] = content(file, text), f"{file} (is not valid JSON|holds)"
    DAMAGES[f"{file} BOM"] = content(file, "\ufeff{}"), f"{file} is not valid JSON: Unexpected UTF-8 BOM"
    DAMAGES[f"{file} cut"] = cut(file), f"{file} is not valid JSON"
for file in (CONFIG, GENERATION, TOKENIZER, VOCABULARY, "chat_template.jinja"):
    DAMAGES[f"{file} directory"] = no_file(file), f"{file} cannot be read: Is a directory"
    DAMAGES[f"{file} dangling"] = no_file(file, "/nowhere"), f"{file} cannot be read: No such file"
    DAMAGES[f"{file} FIFO"] = fifo(file), f"{file} is not a file but a FIFO"
    DAMAGES[f"{file} device"] = (
        no_file(file, "/dev/zero"),
        f"{file} is not a file but a FIFO, socket or device",
    )
    DAMAGES[f"{file} loop"] = no_file(file, file), f"{file} cannot be read: Too many levels"
DAMAGES |= {
    "vocabulary cut": (cut(VOCABULARY), "no usable tokenizer"),
    "vocabulary missing": (lambda d: (d / VOCABULARY).unlink(), "no usable tokenizer.*no file with a vocab"),
    "vocabulary wrong": (
        edit(VOCABULARY, model={"type": "BPE", "vocab": 5, "merges": []}),
        "no usable token",
    ),
    "generation missing": (lambda d: (d / GENERATION).unlink(), ""),
    "config missing": (lambda d: (d / CONFIG).unlink(), "has no config.json"),
    "weights of Git LFS": (
        lambda d: (d / WEIGHTS).write_text(POINTER.decode() + "v1\noid sha256:0\nsize 9\n"),
        "model.safetensors is a Git LFS pointer .*git lfs pull",
    ),
    "weights missing": (lambda d: (d / WEIGHTS).unlink(), "holds no .*safetensors"),
    "weights cut": (cut(WEIGHTS), f"{WEIGHTS} is damaged"),
    "weights empty": (content(WEIGHTS, ""), f"{WEIGHTS} is damaged"),
    "weights pointer": (content(WEIGHTS, "version https://git-lfs"), f"{WEIGHTS} is damaged"),
    "weights directory": (no_file(WEIGHTS), f"{WEIGHTS} is not a file"),
    "weights dangling": (no_file(WEIGHTS, "/nowhere"), f"lacks {WEIGHTS}"),
    "a file": (lambda d: (shutil.rmtree(d), d.write_text("")), "model is a file, but"),
}
for key in ("hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "vocab_size"):
    for value in ("64", -2, 0, 1.5, [3], {}, True, float("nan"), 10**30):
        DAMAGES[f"{key}={value}"] = edit(CONFIG, **{key: value}), f"{CONFIG}: {key}=.* must be an integer"
    if key != "num_key_value_heads":
        DAMAGES[f"{key} missing"] = edit(CONFIG, **{key: ABSENT}), key
for key, value in {
    "rms_norm_eps": "x",
    "max_position_embeddings": "1024",
    "intermediate_size": 0,
    "architectures": "Qwen2ForCausalLM",
    "architectures ": [5],
    "model_type": 5,
    "hidden_act": 3,
    "tie_word_embeddings": "yes",
    "rope_parameters": "x",
    "rope_scaling": [1],
    "rope_theta": "abc",
    "layer_types": "full_attention",
    "head_dim": "32",
    "use_sliding_window": "no",
    "quantization_config": "fp8",
    "num_nextn_predict_layers": "1",
    "dtype": "int8",
    "vision_config": "x",
    "eos_token_id": "1",
}.items():
    DAMAGES[f"{key}={value}"] = edit(CONFIG, **{key.strip(): value}), f"{CONFIG}: {key.strip()}=.* must be"
DAMAGES |= {
    "rope theta": (
        edit(CONFIG, rope_parameters={"rope_theta": "y"}),
        "rope_parameters.rope_theta=.* must be",
    ),
    "layer types": (edit(CONFIG, layer_types=["full_attention"]), "1 layer_types .* num_hidden_layers=2"),
    "a window": (edit(CONFIG, layer_types=["full_attention", "sliding_attention"]), "sliding_attention in"),
    "another class": (
        edit(CONFIG, model_type="llama"),
        "architectures=Qwen2ForCausalLM, but model_type=llama",
    ),
    "fewer layers": (edit(CONFIG, num_hidden_layers=1, layer_types=ABSENT), "not have: model.layers.1"),
    "more layers": (edit(CONFIG, num_hidden_layers=3, layer_types=ABSENT), "lacks 12 tensors"),
    "larger vocabulary": (edit(CONFIG, vocab_size=103), rf"{EMBEDDING} has \(102, 192\), not \(103, 192\)"),
    "tied": (edit(CONFIG, tie_word_embeddings=True), "lm_head.weight that differs from model.embed_tokens"),
    "tied and equal": (
        all_of(
            edit(CONFIG, tie_word_embeddings=True),
            tensors(lambda found: found.update({HEAD: found[EMBEDDING].clone()})),
        ),
        "",
    ),
    "no head": (tensors(lambda found: found.pop(HEAD)), "lacks 1 tensors .*lm_head.weight"),
    "quantised": (edit(CONFIG, quantization_config={"quant_method": "fp8"}), "but no tensor is quantised"),
    "gptq": (edit(CONFIG, quantization_config={"quant_method": "gptq"}), "quant_method=gptq; only fp8 and"),
    "a bias": (
        extra("model.layers.0.self_attn.o_proj.bias"),
        "does not have: model.layers.0.self_attn.o_proj",
    ),
    "an adapter": (extra("base_model.lora_A.weight"), "does not have: base_model.lora_A"),
    "a scale": (extra(DOWN + "_scale_inv", torch.ones(2, 1)), f"{DOWN} in F32, not F8_E4M3"),
    "frequencies": (extra(INV_FREQ, torch.ones(16)), "differ from the rotary frequencies"),
    "right frequencies": (extra(INV_FREQ, 1e4 ** (-torch.arange(0, 32, 2) / 32)), ""),
    "shape": (tensors(lambda found: found.update({NORM: found[NORM][:-1]})), f"{NORM} has"),
    "missing tensor": (tensors(lambda found: found.pop(NORM)), f"lacks 1 tensors .*{NORM}"),
    "half": (cast(DOWN, torch.float16), ""),
}
for dtype in ("int8", "int64", "uint8", "bool", "float8_e5m2", "float8_e4m3fn"):
    DAMAGES[dtype] = cast(DOWN, getattr(torch, dtype)), f"{WEIGHTS} has {DOWN} in [A-Z]"
DAMAGES |= {
    "shards": (shards(), ""),
    "shards without index": (shards(lambda d: (d / INDEX).unlink()), ""),
    "shard missing": (shards(lambda d: (d / SECOND).unlink()), f"lacks {SECOND}, which {INDEX} names"),
    "shard cut": (shards(cut(SECOND)), f"{SECOND} is damaged"),
    "shard directory": (shards(no_file(SECOND)), f"{SECOND} is not a file"),
    "index elsewhere": (shards(**{NORM: "../a.safetensors"}), f"{INDEX}: weight_map.{NORM}=.* beside the"),
    "index of a number": (shards(**{NORM: 5}), f"{INDEX}: weight_map.{NORM}=5 must be a file"),
    "index of nothing": (shards(**{NORM: "x.safetensors"}), "lacks x.safetensors"),
    "index of another file": (shards(**{NORM: "model-00001-of-00002.safetensors"}), f"{INDEX} places {NORM}"),
    "index of no tensor": (shards(**{"a.b": SECOND}), f"{INDEX} places a.b"),
    "index dangling": (shards(no_file(INDEX, "/nowhere")), f"{INDEX} cannot be read"),
    "index directory": (shards(no_file(INDEX)), f"{INDEX} cannot be read"),
    "old index": (
        lambda d: (shutil.copy(d / WEIGHTS, d / "old"), shards()(d), (d / "old").rename(d / WEIGHTS)),
        f"{WEIGHTS} beside {INDEX}, which names other files",
    ),
}
for name, text in {"null": "null", "deep": DEEP, "cut": '{"weight_map": {"a', "list": "[]"}.items():
    DAMAGES[f"index {name}"] = shards(content(INDEX, text)), f"{INDEX} (is not valid|holds)"
for name, text in {"no map": "{}", "null map": '{"weight_map": null}', "map": '{"weight_map": {}}'}.items():
    DAMAGES[f"index {name}"] = shards(content(INDEX, text)), f"{INDEX} has no weight_map"
for value in ("1", [1, "2"], {}, -1, 1.5, True):
    DAMAGES[f"eos {value}"] = edit(GENERATION, eos_token_id=value), f"{GENERATION}: eos_token_id=.* must be"
for value in (102, [1, 5000]):
    DAMAGES[f"eos {value}"] = (
        edit(GENERATION, eos_token_id=value),
        f"{GENERATION}: eos_token_id=.*vocab_size=102",
    )
    DAMAGES[f"model's eos {value}"] = edit(CONFIG, eos_token_id=value), f"{CONFIG}: eos_token_id=.*vocab_size"
DAMAGES |= {
    "pad": (edit(CONFIG, pad_token_id=102), f"{CONFIG}: pad_token_id=102 is not below vocab_size=102"),
    "temperature": (edit(GENERATION, temperature="hot"), f"{GENERATION}: temperature=.* must be a number"),
    "eos number": (edit(TOKENIZER, eos_token=5), f"{TOKENIZER}: eos_token=5 must be a text"),
    "eos unknown": (edit(TOKENIZER, eos_token="<no>"), f"{TOKENIZER} has the token '<no>' with id 102"),
    "spaces": (
        edit(TOKENIZER, clean_up_tokenization_spaces="no"),
        f"{TOKENIZER}: clean_up.* must be true or",
    ),
    "states": (edit(GENERATION, output_hidden_states="False"), f"{GENERATION}: output_hid.* must be true or"),
    "version": (edit(CONFIG, transformers_version={}), f"{CONFIG}: transformers_version=.* must be a text"),
    "length": (edit(TOKENIZER, model_max_length="x"), f"{TOKENIZER}: model_max_length=.* must be a positive"),
    "side": (edit(TOKENIZER, padding_side="up"), f"{TOKENIZER}: padding_side=.* must be left or right"),
    "template": (
        all_of(lambda d: (d / "chat_template.jinja").unlink(), edit(TOKENIZER, chat_template=5)),
        f"{TOKENIZER}: chat_template=5 must be a text",
    ),
    "token": (token("<more>", 102), f"{VOCABULARY} has the token '<more>' with id 102"),
    "map of tokens": (content("special_tokens_map.json", "[1]"), "special_tokens_map.json holds"),
    "processor": (content("preprocessor_config.json", "[1]"), "preprocessor_config.json holds"),
}
