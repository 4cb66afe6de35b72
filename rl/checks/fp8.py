"""Checks the arithmetic of FP8 blocks, which the frozen base and the engine's weights share."""

import torch

from rl.checks.batches import CheckFailed
from rl.models.boxes import whole
from rl.models.fp8_blocks import dequantised, quantised

BLOCK, LARGEST, STEP = 128, 448.0, 2.0**-9
"""Side of a block; largest number of float8 e4m3 and its smallest one, the distance of subnormal numbers."""


def check_fp8_blocks() -> None:
    """Raise CheckFailed unless factors of a random matrix are max |w| / 448 of their block in float32, and
    each value is the nearest number of float8 (DeepSeek-V3, arXiv:2412.19437, section 3.3)."""
    generator = torch.Generator().manual_seed(8)
    matrix = torch.randn(2 * BLOCK, 3 * BLOCK, generator=generator) * torch.linspace(0.01, 1, 3 * BLOCK)
    matrix = matrix.bfloat16()  # as most models are
    values, factors = quantised(matrix)
    matrix = matrix.double()
    largest = matrix.unflatten(1, (3, BLOCK)).unflatten(0, (2, BLOCK)).abs().amax((1, 3))
    of_factors = float((factors.double() * LARGEST / largest - 1).abs().max())
    scale = (largest / LARGEST).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    error = (dequantised(values, factors, whole(matrix.shape)) - matrix).abs()
    of_values = float((error / torch.maximum(2**-4 * matrix.abs(), STEP / 2 * scale)).max())
    if not of_factors <= 1e-6 or not of_values <= 1 + 1e-4:
        raise CheckFailed(
            f"precision check: the factors of FP8 blocks differ by {of_factors:.2g} from max |w| / "
            f"{LARGEST:g}, and values by {of_values:.3g} times the rounding of float8."
        )
