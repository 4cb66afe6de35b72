"""Weights in FP8 with one factor per block of 128 x 128 elements, the format of DeepSeek-V3's checkpoints.

This file says which weights an engine holds in this format (`rollout.quantization`), and has the arithmetic
of the format. It imports torch only where tensors are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl.models.boxes import Box, volume
from rl.models.layout import FP8_BLOCK, Piece, Weight

if TYPE_CHECKING:
    from torch import Tensor

REFIT_GROUPS = 4
"""Maximum number of groups of quantised weights. A refit stages one group after another, which takes half a
byte of memory per quantised parameter."""
NEGATIVE_ZERO = 0x80
"""Bits of -0 in FP8."""
ABSORBED = ".kv_b_proj."
"""Name of the projection from latents. vLLM multiplies it into other weights, in the model's dtype."""


def quantised_weights(weights: Sequence[Weight]) -> list[Weight]:
    """Return the weights of linear layers, without routers, embedding, head and projections from latents.

    A vision tower has no layers in this sense.
    """
    linear = [w for w in weights if w.layer is not None and len(w.shapes[0]) == 2]
    return [w for w in linear if ".router." not in w.megatron and ABSORBED not in w.vllm]


def box_of(pieces: Sequence[Piece], name: str) -> Box:
    """Return the box of the tensor `name` that the pieces fill together; their boxes are adjacent."""
    boxes = [piece.hf_box for piece in pieces if piece.hf == name]
    box = tuple((min(start for start, _ in dim), max(stop for _, stop in dim)) for dim in zip(*boxes))
    assert sum(map(volume, boxes)) == volume(box), f"{name} is held in parts that are not adjacent: {boxes}"
    return box


def cut_blocks(weight: Weight, pieces: Sequence[Piece], *, in_engine: bool) -> str | None:
    """Return the first tensor with a block that is divided between ranks; None if there is none.

    in_engine: also require that the tensor's blocks are blocks of vLLM's parameter. This parameter is one
    matrix, or holds the matrices of all experts.
    """
    for name in dict.fromkeys(piece.hf for piece in pieces):
        sizes = weight.shapes[weight.hf.index(name)]
        for (start, stop), size in zip(box_of(pieces, name), sizes):
            ends = stop == size and not (in_engine and weight.expert is not None)
            if start % FP8_BLOCK or stop % FP8_BLOCK and not ends:
                return name
    rows = [piece.local_box[-2][0] for piece in pieces if in_engine]
    return next((p.hf for p, row in zip(pieces, rows) if row % FP8_BLOCK), None)


def quantised(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return (values float8 [r, c], factors float32 of each block) of a matrix [r, c].

    The largest element of a block becomes the largest number of float8. If a matrix was dequantised from such
    values and factors, this function returns the same values and factors again.
    """
    import torch

    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix.float(), (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))  # [i, 128, j, 128]
    factors = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    divisors = factors.masked_fill(factors == 0, 1.0)[:, None, :, None]
    values = (blocks / divisors).to(torch.float8_e4m3fn).flatten(2, 3).flatten(0, 1)
    bits = values.view(torch.uint8)
    # A sum over ranks turns -0 into 0. Without this line, an exported base would have other bits.
    bits[bits == NEGATIVE_ZERO] = 0
    return values[:rows, :columns].contiguous(), factors


def dequantised(values: Tensor, factors: Tensor, box: Box) -> Tensor:
    """Return the dequantised values float32 [r, c] of a box of an FP8 matrix with one factor per block.

    The format is DeepSeek-V3's (arXiv:2412.19437, section 3.3; `weight_scale_inv` in its checkpoints).

    values: float8 [r, c], the elements of the box. factors: float32, the factors of all blocks that overlap
    the box.
    """
    for dim, (start, stop) in enumerate(box):
        factors = factors.repeat_interleave(FP8_BLOCK, dim).narrow(dim, start % FP8_BLOCK, stop - start)
    return values.float() * factors
