"""Tiny Hugging Face checkpoints for tests, and the comparison of two checkpoints."""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from rl.models.fp8_blocks import quantised
from tools.tiny_models import PARTICULAR, PUBLISHED, SIZES, VISION, save_tiny, tiny_config  # noqa: F401


def save_qwen2(directory: Path, *, seed: int, tie: bool = False, **sizes: int) -> str:
    """Save a random Qwen2, for tests where the architecture does not matter; return the directory."""
    return save_tiny("Qwen2ForCausalLM", directory, seed=seed, tie=tie, **sizes)


def save_qwen2_classifier(directory: Path, *, seed: int, **options) -> str:
    """Save a random Qwen2 classifier with one label, as reward models are; return the directory."""
    language_model = transformers.AutoModelForCausalLM.from_pretrained(
        save_qwen2(directory, seed=seed, **options)
    )
    config = transformers.AutoConfig.from_pretrained(directory, num_labels=1)
    model = transformers.Qwen2ForSequenceClassification(config)
    model.model.load_state_dict(language_model.model.state_dict())
    with torch.no_grad():
        model.score.weight.copy_(torch.randn_like(model.score.weight) * 0.3)
    model.save_pretrained(directory)
    return str(directory)


def quantise_experts(directory: Path) -> None:
    """Replace the experts of a gpt-oss checkpoint by random ones in MXFP4, the published format."""
    file, config = directory / "model.safetensors", directory / "config.json"
    tensors, generator = load_file(file), torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, columns, rows = tensors.pop(name).shape
        shape = experts, rows, columns // 32
        for suffix, low, high, size in (("blocks", 0, 256, (*shape, 16)), ("scales", 122, 126, shape)):
            values = torch.randint(low, high, size, generator=generator, dtype=torch.uint8)
            tensors[f"{name}_{suffix}"] = values
    save_file(tensors, file, metadata={"format": "pt"})
    quantised = {"quantization_config": {"quant_method": "mxfp4"}}
    config.write_text(json.dumps(json.loads(config.read_text()) | quantised))


def quantise_layers(directory: str) -> None:
    """Replace the matrices of a checkpoint's layers by FP8 values and factors of blocks, which differ."""
    file, config = Path(directory, "model.safetensors"), Path(directory, "config.json")
    tensors = load_file(file)
    for name in [name for name, tensor in tensors.items() if ".layers." in name and tensor.ndim == 2]:
        rows, columns = tensors[name].shape
        matrix = tensors[name] * torch.linspace(1, 2, rows)[:, None] * torch.linspace(1, 2, columns)
        tensors[name], tensors[f"{name}_scale_inv"] = quantised(matrix)
    save_file(tensors, file, metadata={"format": "pt"})
    key = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    config.write_text(json.dumps(json.loads(config.read_text()) | key))


def assert_same_checkpoint(a: Path, b: Path) -> None:
    """Raise AssertionError unless two checkpoints of one layout are bitwise equal, but for measured times."""
    names = {path.name for path in a.iterdir() if path.suffix == ".safetensors"}
    assert names
    for name in names:
        assert (a / name).read_bytes() == (b / name).read_bytes(), name
    # Metrics contain times.
    states = [json.loads((path / "state.json").read_text()) | {"metrics": None} for path in (a, b)]
    assert states[0] == states[1]
