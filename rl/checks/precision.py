"""Finds values that must be float32, but were rounded to the model's dtype.

If the lower 16 bits of all numbers of a float32 tensor are 0, it was rounded to bfloat16.
"""

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rl.checks.batches import CheckFailed
from rl.checks.few_samples import random_output
from rl.data.batch import Batch
from rl.rollout.router import is_coarse, probe
from rl.runtime.collectives import gather_texts
from rl.runtime.names import listed
from rl.training.engine import TrainingEngine
from rl.training.gradients import gradient_buffers
from rl.training.layer_spec import ZeroCenteredNorm
from rl.training.model import Packed

NUM_VALUES = 4
"""Number of values that are no powers of two, below which lower bits of 0 may be chance (2^-16 each)."""
NUM_UNEQUAL = 0.1
"""Share of the results of a norm that may differ from the rounded result of float64."""


def is_rounded(values: Tensor) -> bool:
    """Return whether a floating tensor was rounded to 8 bits of precision. Powers of two do not count."""
    bits = values.detach().float().contiguous().view(torch.int32)
    bits = bits[(bits & 0x7FFFFF) != 0]
    return len(bits) >= NUM_VALUES and not bool((bits & 0xFFFF).any())


def check_columns(batch: Batch) -> None:
    """Raise CheckFailed if a column of log-probs was rounded. Not collective."""
    for name, column in batch.columns().items():
        if name.endswith("logprobs") and is_rounded(column[batch.mask > 0]):
            raise CheckFailed(
                f"precision check: all values of the column {name} have the precision of bfloat16, but must "
                "be float32."
            )


@torch.no_grad()
def _is_coarse(module: ZeroCenteredNorm | TopKRouter) -> bool:
    """Return whether a norm rounds more than its result, or a router the scores of its experts."""
    x, weight = probe(module.weight)[:, None], module.weight.double()
    if isinstance(module, TopKRouter):
        return is_coarse(module.gating(x), x, module.weight, module.bias)
    scale = (x.double().square().mean(-1, keepdim=True) + (module.eps or 0.0)).rsqrt()
    exact = (x.double() * scale * (1 + weight)).to(x.dtype)
    return x.dtype is torch.bfloat16 and float((module(x) != exact).double().mean()) > NUM_UNEQUAL


class CoarseFunctions(TorchDispatchMode):
    """Notes functions of torch that get 16 bits although a small error of x is a large one of f(x), and gates
    whose results of 16 bits become float32 too late. Kernels of their own are not seen."""

    NAMES = frozenset("exp exp2 log softplus rsqrt sin cos _softmax _log_softmax logsumexp cumsum".split())
    GATES = frozenset(("sigmoid", "tanh", "silu"))

    def __init__(self) -> None:
        super().__init__()
        self.found = set[str]()
        self._gates: dict[int, tuple[str, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        if name in self.NAMES and isinstance(args[0], Tensor) and args[0].dtype is torch.bfloat16:
            self.found.add(f"the argument of {name}")
        if name == "_to_copy" and id(args[0]) in self._gates and (kwargs or {}).get("dtype") is torch.float32:
            self.found.add(f"the result of {self._gates[id(args[0])][0]}")
        out = func(*args, **(kwargs or {}))
        if name in self.GATES and isinstance(out, Tensor) and out.dtype is torch.bfloat16:
            self._gates[id(out)] = name, out
        return out


def check_precision(name: str, model: TrainingEngine) -> None:
    """Raise CheckFailed on every rank if float32 values of a model are coarser. Collective over the world."""
    found = [
        weight.hf[0]
        for each in (model.weight_map, model.learned_map)
        for weight, parameter in each.local()
        if weight.float32 and parameter.dtype is not torch.float32
    ]
    for chunk in model.chunks:
        for kind in ("frequencies", "local"):
            values = getattr(getattr(chunk, "rotary", None), kind, None)
            if values is not None and (values.dtype is not torch.float32 or is_rounded(values)):
                found.append(f"the rotary {kind}")
        for module in chunk.modules():
            if isinstance(module, ZeroCenteredNorm | TopKRouter) and _is_coarse(module):
                is_router = isinstance(module, TopKRouter)
                found.append("the scores of the routers" if is_router else "1 + w of a norm")
    if any(buffer.dtype is not torch.float32 for buffer in gradient_buffers(model.wrapped)):
        found.append("the gradient buffers")
    if model.weight_map.dtype is torch.bfloat16 and isinstance(model.chunks[0], Packed) and not model.layers:
        with CoarseFunctions() as functions:
            random_output(model, "values" if model.spec.has_values else "logprobs", number=2)
        found += sorted(functions.found)
    if wrong := gather_texts(found):
        raise CheckFailed(
            f"precision check: {listed(wrong)} of the {name} must be float32, but were rounded to its dtype."
        )
