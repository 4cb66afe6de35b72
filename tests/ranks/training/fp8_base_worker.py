"""One rank of test_fp8_base.py: a base in FP8, and the same values in the model's dtype.

    fp8_base_worker.py CHECKPOINT OUT_DIR TPxPPxEP [KEY=VALUE ...]

Rank 0 saves to OUT_DIR/found.pt for both: log-probs, gradient of the adapters, checksums of the base, bytes
of the linear layers. The gradient is read off an optimizer step that is gradient descent.
"""

import sys

from megatron_groups import RANKS, new_grid  # isort: skip

import torch
from adapter_worker import EPS, OPTIONS, fill, whole

from rl.checkpoint.contents import checksums
from rl.checkpoint.hf import export_hf
from rl.config.options import load
from rl.config.schema import Config, resolve
from rl.engines.engines import build_policy
from rl.features.adapters.fp8_base import Fp8Base
from rl.models import read_hf_config
from rl.runtime.session import session
from rl.training.micro_batch_plans import plan_minibatch
from rl.training.weights import full_weights
from tools.hf_reference import random_batch


def results(trainer) -> dict:
    fill(trainer)
    trainer.offload(weights=True)
    trainer.reload()
    batch = random_batch(trainer.weight_map.hf["vocab_size"])
    plan = plan_minibatch(batch, list(range(len(batch))), dp=trainer.grid.dp, max_tokens=96)
    (logprobs,) = trainer.forward(batch, [plan], ("logprobs",))

    def minus_logprobs(micro):
        loss = -micro.logprobs.sum()
        return loss, {"loss": loss}

    before = whole(full_weights(trainer.learned_map))
    trainer.update(batch, plan, minus_logprobs, lr=EPS)
    after = whole(full_weights(trainer.learned_map))
    linear = [p for w, p in trainer.weight_map.local() if w.layer is not None and p.dim() == 2]
    fp8_base = trainer.parts.get(Fp8Base)
    stored = [] if fp8_base is None else fp8_base.tensors
    return {
        "logprobs": logprobs,
        "gradient": {name: before[name] - tensor for name, tensor in after.items()},
        "checksums": {name: sum_ for name, sum_ in checksums("policy", trainer).items() if "/base/" in name},
        "bytes": sum(p.untyped_storage().nbytes() for p in linear) + sum(t.nbytes for t in stored),
    }


def main(checkpoint: str, out: str, layout: str, *overrides: str) -> None:
    tp, pp, ep = map(int, layout.split("x"))
    sizes = [f"training.{key}={size}" for key, size in (("tp", tp), ("pp", pp), ("ep", ep))]
    with session(RANKS) as device:
        hf, found = read_hf_config(checkpoint), {}
        for base, path in (("fp8", checkpoint), ("model", f"{out}/hf")):
            keys = [*OPTIONS, f"model.path={path}", f"adapter.base={base}", *sizes, *overrides]
            config = resolve(load(Config, None, keys))
            trainer = build_policy(config, hf, new_grid(tp, pp, ep, config.training.expert_tp), device)
            if base == "fp8":
                export_hf(trainer, checkpoint, f"{out}/hf")  # B is 0
            found[base] = results(trainer)
        if RANKS.rank == 0:
            torch.save(found, f"{out}/found.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
