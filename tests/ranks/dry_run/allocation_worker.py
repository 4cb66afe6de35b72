"""One rank of test_allocation.py: what a model really allocates in several layouts.

    allocation_worker.py CHECKPOINT DTYPE LAYOUT [LAYOUT ...]       LAYOUT is TPxPPxEP[+lora]

Prints a JSON list with the bytes of this rank for each layout, after an optimizer step.
"""

import json
import sys

import torch

from rl.config.adapter import Adapter
from rl.config.schema import Optimizer, Training
from rl.engines.training_parts import adapter_parts
from rl.models import read_hf_config
from rl.runtime.ranks import discover
from rl.runtime.session import session
from rl.training.engine import TrainingEngine
from rl.training.optimizer import optimizer_parts
from rl.training.spec import ModelSpec
from tests.ranks.training.megatron_groups import new_grid


def allocated(checkpoint: str, dtype: str, layout: str, device) -> dict:
    sizes, _, adapters = layout.partition("+")
    tp, pp, ep = map(int, sizes.split("x"))
    training = Training(tp=tp, pp=pp, ep=ep)
    grid = new_grid(tp, pp, ep, training.expert_tp)
    spec = ModelSpec(checkpoint, read_hf_config(checkpoint), dtype, optimizer=Optimizer(lr=1e-3))
    parts = adapter_parts(Adapter(kind=adapters or "none", rank=4), seed=0)
    engine = TrainingEngine(spec, training, grid, device, parts)
    engine.wrapped.zero_grad_buffer()
    engine.optimizer.step()  # Adam's moments are made in the first step
    buffers = [*engine.wrapped.buffers, *engine.wrapped.expert_parallel_buffers]
    parameters = list(engine.model.parameters())
    weights = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in parameters}
    state = {
        t.untyped_storage()._cdata: t.numel() * t.element_size() for t in optimizer_tensors(engine.optimizer)
    }
    return dict(
        stage=grid.pp_rank,
        parameters=sum(p.numel() for p in parameters),
        weights=sum(weights.values()),
        gradients=sum(buffer.grad_data.nbytes for buffer in buffers),
        optimizer=sum(size for key, size in state.items() if key not in weights),
    )


def optimizer_tensors(optimizer):
    """Main weights and moments, without the step counters."""
    for part in optimizer_parts(optimizer):
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (tensor for tensor in state.values() if torch.is_tensor(tensor) and tensor.numel() > 1)


def main() -> None:
    checkpoint, dtype, *layouts = sys.argv[1:]
    ranks = discover()
    with session(ranks) as device:
        out = [allocated(checkpoint, dtype, layout, device) for layout in layouts]
        print(json.dumps(out))


if __name__ == "__main__":
    main()
