"""A copy of a model's initial weights, for passes with the model as it was before it learned."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from rl.runtime.checksum import bit_sum
from rl.runtime.device import aligned, host_memory

SAMPLED_ELEMENTS = 1024
"""Number of elements of each reference weight that are compared before a pass with the reference."""


class Reference:
    """The initial values of the parameters that learn, in one block of host memory, page-locked on CUDA.

    With adapters only the adapters learn, so only their initial values are kept. Not collective.
    """

    def __init__(self, learned: Sequence[Parameter]):
        self._learned = learned
        self.is_applied = False
        """Whether the model computes with the reference weights now."""
        self.take()

    def take(self) -> None:
        """Make the present weights the reference."""
        own = [parameter.detach() for parameter in self._learned]
        sizes = [aligned(weight.nbytes) for weight in own]
        parts = host_memory(sum(sizes)).split(sizes)
        self.weights: list[Tensor] = [
            part[: weight.nbytes].view(weight.dtype).view(weight.shape).copy_(weight)
            for part, weight in zip(parts, own)
        ]
        self._sum = _sampled(self.weights)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use the reference weights inside the context.

        They are copied into the memory of the gradient buffers; the trained weights stay in their own memory.
        Raises RuntimeError if the reference has changed.
        """
        if _sampled(self.weights) != self._sum:
            raise RuntimeError(
                f"the reference weights of rank {dist.get_rank()} have changed since the run started: "
                "something trains them or writes into their memory."
            )
        own = [parameter.data for parameter in self._learned]
        self.is_applied = True
        try:
            parameter: Any  # Megatron adds main_grad
            for parameter, weight in zip(self._learned, self.weights):
                unused = parameter.main_grad.view(-1).view(weight.dtype)[: weight.numel()]
                parameter.data = unused.view(weight.shape).copy_(weight, non_blocking=True)
            yield
        finally:
            self.is_applied = False
            for parameter, data in zip(self._learned, own):
                parameter.data = data


def _sampled(weights: list[Tensor]) -> int:
    """Return the sum of the bits of about 1,000 elements of each weight."""
    parts = [weight.view(-1)[:: weight.numel() // SAMPLED_ELEMENTS | 1] for weight in weights]
    return sum(int(bit_sum(part)) for part in parts)
