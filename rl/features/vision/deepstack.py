"""Adds inner outputs of the vision tower to the hidden states of the first layers, as some models require.

For example, in Qwen3-VL layers 0 to 2 add one inner output each.

The inner outputs travel with the row, because a layer that is recomputed in the backward pass needs the inner
outputs of its own micro-batch. Layers see the inner outputs as leaves of the graph. The leaves collect the
gradients, which return to the tower together with the gradient of its last output. The tower's backward pass
therefore runs once, even if layers are recomputed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rl.features.vision.row_images import RowImages
from rl.models.sizes import num_deep_layers


def extend(hf: dict, chunk: nn.Module) -> None:
    """Let the first layers of a model's first chunk add the inner outputs of their row.

    The chunk has at least one layer per inner output (`rl.config.layout_checks`).
    """
    layers = chunk.get_submodule("decoder.layers")
    assert isinstance(layers, nn.ModuleList)
    for number, layer in enumerate(layers[: num_deep_layers(hf)]):
        layer.register_forward_hook(lambda *call, n=number: _add(n, *call), with_kwargs=True)


def _add(number: int, layer: nn.Module, args: tuple, options: dict[str, Any], out: tuple) -> tuple:
    row = options["packed_seq_params"].extras.get(RowImages)
    if row is None:
        return out
    hidden, *rest = out
    return (hidden + row.inner[number], *rest)


def take(row: RowImages, outputs: Any, length: int, divided: Callable[[Tensor], Tensor]) -> Tensor:
    """Store the inner outputs of a row of `length` tokens; return the tower's last outputs [n, H].

    outputs: result of transformers' tower. divided: returns a rank's part of [T, 1, H].
    """
    last = outputs.pooler_output
    inner = getattr(outputs, "deepstack_features", None) or []
    places = row.places.to(last.device)
    whole = [divided(x.new_zeros(length, 1, x.shape[-1]).index_copy(0, places, x[:, None])) for x in inner]
    row.inner = [x.detach().requires_grad_(x.requires_grad) for x in whole]
    return _Return.apply(last, row, *whole) if last.requires_grad and whole else last


class _Return(torch.autograd.Function):
    """Gives the inner outputs the gradients of the layers, when the gradient of the last output arrives.

    All layers come after the embedding, so their backward passes have ended by then.
    """

    @staticmethod
    def forward(ctx: Any, last: Tensor, row: RowImages, *inner: Tensor) -> Tensor:
        ctx.row = row
        return last.view_as(last)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, *(x.grad for x in ctx.row.inner)
