"""Log-probs and gradients by transformers, one sequence at a time: the reference of parity checks."""

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rl.checks.transformers_pass import LENGTHS, hf_logprobs, random_batch

__all__ = ["LENGTHS", "hf_gradient", "hf_logprobs", "random_batch"]


def hf_gradient(model: Any, logprobs: Tensor, directory: Path) -> dict[str, Tensor]:
    """Return the gradient of the sum of the log-probs by name in the checkpoint.

    transformers holds all experts in one tensor and splits it in `save_pretrained`, which writes to
    `directory`.
    """
    options: Any = dict(allow_unused=True, materialize_grads=True)  # biases of routers
    gradients = torch.autograd.grad(logprobs.sum(), list(model.parameters()), **options)
    buffers = {
        name.rpartition(".")[2] for name, _ in model.named_buffers()
    }  # files may name the block otherwise
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients):
            parameter.copy_(gradient)
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] not in buffers}
