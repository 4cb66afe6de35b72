"""The section of the configuration for low-rank adapters."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from rl.config.ranges import AT_LEAST_ONE, POSITIVE, ZERO


@dataclass
class Adapter:
    """Low-rank adapters (LoRA, arXiv:2106.09685): a linear layer computes W x + scale * B A x, and only A and
    B learn (docs/adapters.md). The reference policy is the initial policy of the run."""

    kind: Literal["none", "lora", "rslora", "dora"] = "none"
    """lora: scale = alpha / rank. rslora (arXiv:2312.03732): alpha / sqrt(rank). dora (arXiv:2402.09353): as
    lora, and the norm of every row of the sum (its magnitude) is a parameter. none: all weights learn."""
    rank: Annotated[int, AT_LEAST_ONE] = 16
    """Rows of A and columns of B."""
    alpha: Annotated[float, POSITIVE] = 32.0
    """Numerator of the scale."""
    targets: list[str] = field(default_factory=list)
    """Linear layers that get an adapter, by the last part or parts of their names in the checkpoint, such as
    q_proj or mlp.down_proj. Empty: every linear layer except routers and the head."""
    dropout: Annotated[float, ZERO] = 0.0
    """Must be 0. With dropout the trainer's probabilities would differ from the engine's."""
    init: Literal["zero", "pissa"] = "zero"
    """zero: A is random (Kaiming) and B is 0. pissa (arXiv:2404.02948): B A starts as the principal part of
    W, and this part is subtracted from W."""
    path: str = ""
    """Directory of an adapter in the format of peft from which A and B start. Empty: `init`."""
    base: Literal["model", "fp8"] = "model"
    """Type of the frozen weights in the trainer. model: model.dtype. fp8: linear layers are in FP8 with a
    factor per block of 128 x 128. They need about half of the memory of bfloat16, and each pass dequantises
    them layer by layer. The engine gets the dequantised values. training.tp and training.etp must not cut
    blocks."""
    in_engine: Literal["merged", "adapter"] = "merged"
    """How the engine holds the policy. merged: W + scale * B A. adapter: W, and A and B beside it; a refit
    then moves only A and B, unless the engine lost W in its sleep on a GPU."""

    @property
    def is_on(self) -> bool:
        return self.kind != "none"

    @property
    def scale(self) -> float:
        """Return the factor of B A."""
        return self.alpha / (self.rank**0.5 if self.kind == "rslora" else self.rank)
