"""The seconds that the always-on checks take on a GPU, by count of operations and of bytes.

The backward pass is checked by small passes in the first steps, each of which reads all weights. In every
step the weights of engine and trainer are read twice for their checksums, and the reference computes a few
samples again. What runs on the host beside the GPU is left out.
"""

from rl.checks.cost import DIRECTIONS, slope_passes
from rl.config.needs import needs_reference
from rl.dry_run.estimate import Estimate
from rl.dry_run.parameters import ITEMSIZE
from rl.dry_run.timing import held_parameters

FEW_TOKENS = 256
"""Tokens of the reference's second pass."""


def check_seconds(estimate: Estimate) -> tuple[float, float]:
    """Return the seconds of the checks in the first step of a start, and in a later step."""
    config, layout, hardware = estimate.config, estimate.layout, estimate.hardware
    policy = estimate.models["policy"]
    held = held_parameters(policy.parts, layout) * ITEMSIZE[config.model.dtype]
    reading = held / (hardware.hbm_gb_s * 1e9 * hardware.hbm_share)

    def one_pass(tokens: float) -> float:
        operations = 2 * policy.multiplied * tokens / (layout.pp * layout.tp)
        arithmetic = operations / (hardware.tflops * 1e12 * hardware.train_share)
        launches = (policy.num_layers / layout.pp + 1) * hardware.layer_ms / 1e3
        return max(arithmetic, reading, launches) * layout.pp

    later = 0.0
    if memory := estimate.memory.engine:
        later += 2 * (held + memory.weights) / (hardware.hbm_gb_s * 1e9 * hardware.hbm_share)
    if needs_reference(config):
        later += one_pass(FEW_TOKENS)
    tokens, number = slope_passes(round(estimate.sequences * estimate.lengths.response), DIRECTIONS)
    return later + (3 + 1 + 3 * number) * one_pass(tokens), later
