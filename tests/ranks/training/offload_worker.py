"""Train a small model with and without offload between its steps, and with overlapped reduction of gradients;
print the results as JSON."""

import json
import sys
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from rl.config.schema import Config, Optimizer
from rl.data.batch import Batch
from rl.models import read_hf_config
from rl.runtime.ranks import discover
from rl.runtime.session import session
from rl.training.engine import TrainingEngine
from rl.training.grid import build_grid
from rl.training.micro_batch_plans import plan_minibatch
from rl.training.optimizer import optimizer_tensors
from rl.training.spec import ModelSpec

RANKS = discover()


def storages(model: TrainingEngine) -> dict[str, int]:
    """Bytes on the device."""
    buffers = [b for c in model.wrapped for b in (*c.buffers, *c.expert_parallel_buffers)]

    def size(tensors) -> int:
        held = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(held.values())

    weights = {weight.untyped_storage()._cdata for weight in model.model.parameters()}
    state = [
        tensor
        for tensor in optimizer_tensors(model.optimizer)
        if tensor.untyped_storage()._cdata not in weights
    ]
    return {
        "weights": size(model.model.parameters()),
        "gradients": size(buffer.grad_data for buffer in buffers),
        "optimizer": size(state),
    }


def train(path: str, device, grid, dtype: str, mode: str) -> tuple[list, list, list]:
    overlap = "on" if mode == "all, overlapped" else "off"
    training = replace(Config().training, micro_batch_tokens=24, overlap_gradients=overlap)
    adam = Optimizer(lr=1e-3)
    spec = ModelSpec(path, read_hf_config(path), dtype, optimizer=adam, keeps_reference=True)
    model = TrainingEngine(spec, training, grid, device)
    rng, seen, sizes = np.random.default_rng(0), [], []
    first = None
    for _ in range(3):
        if mode != "none":
            model.offload(weights=mode != "optimizer")
            model.offload(weights=mode != "optimizer")  # a second time changes nothing
            sizes.append(storages(model))
            model.reload()
            model.reload()
        ids = [rng.integers(5, size=6).astype(np.int32) for _ in range(8)]
        batch = Batch(ids, ids, groups=torch.arange(8), truncated=torch.zeros(8, dtype=torch.bool))
        plan = plan_minibatch(batch, list(range(8)), dp=grid.dp, max_tokens=24)
        (logprobs,) = model.forward(batch, [plan], ("logprobs",))
        first = first or (batch, plan, logprobs)
        report = model.update(
            batch, plan, lambda micro: ((loss := -micro.logprobs.sum() / 48), {"loss": loss}), lr=1e-3
        )
        seen.append([report.grad_norm, logprobs.double().sum().item()])
    sizes.append(storages(model))
    seen.append([weight.double().sum().item() for weight in model.model.parameters()])
    return seen, sizes, reference_errors(model, *first)


def reference_errors(model: TrainingEngine, batch, plan, initial) -> list[float]:
    """Return differences of log-probs: the policy's after and before the reference pass; the reference's and
    the initial ones; the policy's and the initial ones."""

    def logprobs():
        return model.forward(batch, [plan], ("logprobs",))[0]

    before = logprobs()
    with model.reference_weights():
        reference = logprobs()
    pairs = ((logprobs(), before), (reference, initial), (before, initial))
    return [float((a - b).abs().max()) for a, b in pairs]


if __name__ == "__main__":
    with session(RANKS) as device:
        grid = build_grid(tp=1, pp=1, seed=1)
        results = {}
        for dtype in ("float32", "bfloat16"):
            for mode in ("none", "optimizer", "all", "all, overlapped"):
                results[f"{dtype} {mode}"] = train(sys.argv[1], device, grid, dtype, mode)
        dist.barrier()
    print(json.dumps(results))
