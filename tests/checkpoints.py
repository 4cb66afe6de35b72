"""Tiny Hugging Face checkpoints for tests, and the comparison of two checkpoints."""

import json
from pathlib import Path

import torch
import transformers

from tools.tiny_models import PARTICULAR, PUBLISHED, SIZES, save_tiny, tiny_config  # noqa: F401


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


def assert_same_checkpoint(a: Path, b: Path) -> None:
    """Raise AssertionError unless two checkpoints of one layout are bitwise equal, but for measured times."""
    names = {path.name for path in a.iterdir() if path.suffix == ".safetensors"}
    assert names
    for name in names:
        assert (a / name).read_bytes() == (b / name).read_bytes(), name
    # Metrics contain times.
    states = [json.loads((path / "state.json").read_text()) | {"metrics": None} for path in (a, b)]
    assert states[0] == states[1]
