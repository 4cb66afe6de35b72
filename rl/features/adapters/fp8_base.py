"""Stores the frozen weights of linear layers in FP8, with one factor per block of 128 x 128 elements.

The format is the format of DeepSeek-V3 (`rl.models.fp8_blocks`). Each rank divides its own part of a
parameter into blocks. These blocks are also blocks of the whole parameter, because `rl.config.adapter_checks`
refuses other layouts. For example, it refuses a part of 192 rows, which would end in the middle of a block.
The dequantised values therefore do not depend on the layout.

Between two passes through its module, a parameter takes no memory. Each pass, forward or backward, fills the
parameter with the dequantised values and frees it again. The values are the same in every pass. Refit, export
and checksums read the same values through `value`.
"""

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl.checks.fp8 import check_fp8_blocks
from rl.models.adapters import adapters
from rl.models.boxes import whole
from rl.models.fp8_blocks import dequantised, quantised
from rl.models.layout import Weight
from rl.training.parts import TrainerPart

if TYPE_CHECKING:
    from rl.training.engine import TrainingEngine


class Fp8Base(TrainerPart):
    """Stores the frozen weights of a model's linear layers on this rank. Not collective.

    It must be the last part of the model, so that its hooks are registered after the hooks of all other
    parts.
    """

    start_error = 2.0**-4

    def attach(self, engine: "TrainingEngine") -> None:
        """Quantise the weights, free their memory, and register the hooks that fill them again."""
        check_fp8_blocks()
        base, model = engine.weight_map, engine.model
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}
        """Address of the parameter's storage object -> (values, factors)."""
        layers = {pair.base.hf for pair in adapters(base.weights, rank=1)}
        of_module: dict[str, list[Tensor]] = defaultdict(list)
        for weight, parameter in base.local():
            if weight.hf in layers:
                self._stored[_key(parameter)] = quantised(parameter.detach())
                of_module[base.local_name(weight, base.grid.pp_rank).rpartition(".")[0]].append(parameter)
        for name, parameters in of_module.items():
            self._free(parameters)
            module = model.get_submodule(name)
            # Autograd saves the parameter itself, so the parameter must be filled again in the backward pass.
            module.register_forward_pre_hook(lambda *_, own=parameters: self._fill(own))
            module.register_forward_hook(lambda *_, own=parameters: self._free(own))
            module.register_full_backward_pre_hook(lambda *_, own=parameters: self._fill(own))
            module.register_full_backward_hook(lambda *_, own=parameters: self._free(own))

    @property
    def tensors(self) -> list[Tensor]:
        """The quantised values and the factors of all stored weights."""
        return [tensor for pair in self._stored.values() for tensor in pair]

    def resident(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the given tensors, and the quantised values and factors."""
        return tensors + self.tensors

    def value(self, weight: Weight, parameter: Tensor) -> Tensor:
        """Return the dequantised values of a parameter, or the parameter itself if it is not quantised."""
        return self._value(parameter)

    @torch.no_grad()
    def _value(self, parameter: Tensor) -> Tensor:
        if (stored := self._stored.get(_key(parameter))) is None:
            return parameter
        values, factors = stored
        return dequantised(values, factors, whole(values.shape)).to(parameter.dtype)

    def _fill(self, parameters: list[Tensor]) -> None:
        for parameter in parameters:
            parameter.untyped_storage().resize_(parameter.numel() * parameter.element_size())
            parameter.data.copy_(self._value(parameter))

    def _free(self, parameters: list[Tensor]) -> None:
        for parameter in parameters:
            parameter.untyped_storage().resize_(0)


def _key(parameter: Tensor) -> int:
    return parameter.untyped_storage()._cdata
