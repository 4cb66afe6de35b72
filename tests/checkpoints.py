"""Tiny Hugging Face checkpoints for tests, with weights that show a wrong layout: biases and norms are random too."""

from pathlib import Path

import torch
import transformers

from tools.make_toy import build_tokenizer


def save_qwen2(directory: Path, *, seed: int, tie: bool = False, **sizes: int) -> str:
    """A random Qwen2 of 2 layers, 4 heads of 32 channels, 2 KV heads, with the toy's tokenizer; returns the directory.

    vLLM's CPU attention wants heads of a multiple of 32 channels.
    """
    tokenizer = build_tokenizer()
    options = dict(
        hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, initializer_range=0.1,
    )  # fmt: skip
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer), tie_word_embeddings=tie, bos_token_id=2, eos_token_id=1, pad_token_id=0, **options | sizes
    )
    torch.manual_seed(seed)
    model = transformers.Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def save_qwen2_classifier(directory: Path, *, seed: int) -> str:
    """A random Qwen2 sequence classifier with one label, as reward models are; returns the directory."""
    language_model = transformers.AutoModelForCausalLM.from_pretrained(save_qwen2(directory, seed=seed))
    config = transformers.AutoConfig.from_pretrained(directory, num_labels=1)
    model = transformers.Qwen2ForSequenceClassification(config)
    model.model.load_state_dict(language_model.model.state_dict())
    with torch.no_grad():
        model.score.weight.copy_(torch.randn_like(model.score.weight) * 0.3)
    model.save_pretrained(directory)
    return str(directory)
