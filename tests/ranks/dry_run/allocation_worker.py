"""One rank of test_allocation.py: what a model really allocates in several layouts.

    allocation_worker.py CHECKPOINT DTYPE LAYOUT [LAYOUT ...]   LAYOUT is TPxPPxEP[+lora], [+mtp] or [+tower],
                                                               or TPxPPxEP+MOMENTS[+HOST_SHARE]
                                                               or TPxPPxEP+shardN, a class of transformers

With mtp the head for multi-token prediction is measured instead of the model; tower is a frozen one.

Prints a JSON list with the bytes of this rank for each layout, after an optimizer step.
"""

import json
import sys

from rl.config.adapter import Adapter
from rl.config.schema import Optimizer, Training
from rl.features.adapters.trainer import Adapters
from rl.features.drafts.mtp import MtpPart
from rl.features.transformers_backend.part import ByClass
from rl.features.vision.tower import VisionTower
from rl.models import by_class, read_hf_config
from rl.runtime.ranks import discover
from rl.runtime.session import session
from rl.training.engine import TrainingEngine
from rl.training.optimizer import clip_and_step, optimizer_tensors
from rl.training.spec import ModelSpec
from tests.ranks.training.megatron_groups import new_grid


def optimizer_of(moments: str = "float32", share: str = "0") -> Optimizer:
    return Optimizer(lr=1e-3, moments=moments, host_share=float(share))


def allocated(checkpoint: str, dtype: str, layout: str, device) -> dict:
    sizes, *options = layout.split("+")
    has_adapters, is_head, sees = (options == [name] for name in ("lora", "mtp", "tower"))
    shard = int(options.pop().removeprefix("shard")) if "shard" in layout else 0
    adam = Optimizer(lr=1e-3) if has_adapters or is_head or sees else optimizer_of(*options)
    tp, pp, ep = map(int, sizes.split("x"))
    training = Training(tp=tp, pp=pp, ep=ep)
    grid = new_grid(tp, pp, ep, shard or training.expert_tp)
    hf = read_hf_config(checkpoint)
    spec = ModelSpec(checkpoint, by_class.described(hf) if shard else hf, dtype, optimizer=adam)
    parts = [Adapters(Adapter(kind="lora", rank=4), seed=0)] if has_adapters else []
    parts += [ByClass()] if shard else []
    parts += [MtpPart(training, lr=1e-3, is_served=False)] if is_head else []
    parts += [VisionTower(learns=False)] if sees else []
    engine = TrainingEngine(spec, training, grid, device, parts)
    engine = engine.parts.models()["mtp"] if is_head else engine
    for chunk in engine.wrapped:
        chunk.zero_grad_buffer()
    engine.optimizer.prepare_grads()
    clip_and_step(engine.optimizer, 1.0)  # Adam's moments are made in the first step
    buffers = [b for c in engine.wrapped for b in (*c.buffers, *c.expert_parallel_buffers)]
    parameters = list(engine.model.parameters())
    weights = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in parameters}
    stays = optimizer_bytes(engine.optimizer, weights, in_host=False)
    return dict(
        stage=grid.pp_rank,
        parameters=sum(p.numel() for p in parameters),
        weights=sum(weights.values()),
        gradients=sum(buffer.grad_data.nbytes for buffer in buffers),
        optimizer=stays,
        **{"in host": optimizer_bytes(engine.optimizer, weights) - stays},
    )


def optimizer_bytes(optimizer, weights: dict, **which) -> int:
    """Main weights and moments, without step counters, and without what is in the storage of the weights."""
    tensors = [tensor for tensor in optimizer_tensors(optimizer, **which) if tensor.numel() > 1]
    return sum(t.nbytes for t in tensors if t.untyped_storage()._cdata not in weights)


def main() -> None:
    checkpoint, dtype, *layouts = sys.argv[1:]
    ranks = discover()
    with session(ranks) as device:
        out = [allocated(checkpoint, dtype, layout, device) for layout in layouts]
        print(json.dumps(out))


if __name__ == "__main__":
    main()
