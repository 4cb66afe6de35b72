"""One rank of test_backends.py: log-probs and gradients of one checkpoint by Megatron and by its class.

    backends_worker.py CHECKPOINT OUT_DIR

Both compute the same batch with the same loss. Rank 0 saves {comparison: differences} to OUT_DIR/out.json.
"""

import json
import sys
from pathlib import Path

from megatron_groups import RANKS, new_grid  # isort: skip

from dataclasses import replace

import torch
import torch.distributed as dist
from gradient_worker import config_of
from prefix_worker import batch_of

from rl.data.batch import Batch
from rl.engines.engines import build_policy
from rl.models import by_class, read_hf_config
from rl.models.files import as_stored
from rl.runtime.session import session
from rl.training.engine import TrainingEngine
from rl.training.logprobs import OUTPUTS
from rl.training.weights import load_hf

GROUPS = [(1, (6, 17)), (30, (5, 9, 0, 12)), (70, (20, 31, 31)), (7, (20,)), (40, (3, 90))]
"""Tokens of each prompt, and of its responses."""
PLAN = [[[0, 1, 2, 3, 4, 5], [10, 11]], [[6, 7, 8], [9]]]
ALONE = [[[0], [1], [2], [3], [4], [5]], [[6], [7], [8], [9], [10], [11]]]
"""The samples of each micro-batch of each rank."""


def results(trainer: TrainingEngine, batch: Batch, plan, *, share: bool) -> tuple[torch.Tensor, dict]:
    """Return the outputs [3, T], and the whole gradient by name in the checkpoint.

    The gradient is gathered in place of the weights.
    """
    trainer.shares_prompts = share
    [chunk] = trainer.wrapped
    chunk.zero_grad_buffer()
    trainer.model.config.finalize_model_grads_func = lambda *_, **__: None
    outputs = torch.zeros(len(OUTPUTS), len(batch.mask))

    def loss(micro):
        found = [micro.output(name) for name in OUTPUTS]
        outputs[:, micro.column_index] = torch.stack(found).detach()
        advantages = micro.column("advantages")
        return -(found[0] * advantages).sum() - 0.05 * found[1].sum(), {}

    trainer._run(batch, plan, loss, forward_only=False, progress=None)
    dist.all_reduce(outputs)
    with torch.no_grad():
        for group, weights in trainer.weight_map.replicas():
            for weight in weights.values():
                if weight.requires_grad:
                    dist.all_reduce(weight.main_grad, group=group)
                    weight.copy_(weight.main_grad)
                else:
                    weight.zero_()
    gradient = {
        name: tensor.clone() for name, tensor in as_stored(trainer.weight_map.weights, trainer.full_weights())
    }
    load_hf(trainer.spec.path, trainer.weight_map)
    return outputs, gradient


def differences(found, expected) -> dict:
    """Largest difference of an output; of the gradient, and of its worst tensor, relative in the 2-norm."""
    (outputs, gradient), (own, expected) = found, expected
    assert gradient.keys() == expected.keys()
    gaps = {name: (gradient[name].double() - e.double()).norm() for name, e in expected.items()}
    sizes = {name: e.double().norm() for name, e in expected.items()}
    whole = torch.stack([*sizes.values()]).norm()
    worst = max((float(gap / (sizes[name] + 1e-3 * whole)), name) for name, gap in gaps.items())
    return dict(
        outputs=float((outputs.double() - own.double()).abs().max()),
        gradient=float(torch.stack([*gaps.values()]).norm() / whole),
        tensor=worst,
        norm=float(whole),
    )


def main(checkpoint: str, out_dir: str) -> None:
    with session(RANKS) as device:
        config, hf = config_of(checkpoint, 1, 1, 4096), read_hf_config(checkpoint)
        batch = batch_of(GROUPS, hf["vocab_size"])
        megatron = build_policy(config, hf, new_grid(1, 1), device)
        expected = results(megatron, batch, PLAN, share=True)
        found = {"packed otherwise": results(megatron, batch, ALONE, share=False)}
        config = replace(config, training=replace(config.training, backend="transformers"))
        own = build_policy(config, by_class.described(hf), new_grid(1, 1, 1, RANKS.world_size), device)
        shares = own.shares_prompts
        found["whole sequences"] = results(own, batch, PLAN, share=False)
        if shares:
            found["shared prompts"] = results(own, batch, PLAN, share=True)
        if RANKS.rank == 0:
            compared = {name: differences(each, expected) for name, each in found.items()}
            Path(out_dir, "out.json").write_text(json.dumps(compared))


if __name__ == "__main__":
    main(*sys.argv[1:])
