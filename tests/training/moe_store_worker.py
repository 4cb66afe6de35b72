"""One rank of test_store_moe.py: two updates with a checkpoint between them, or the second one continued from it.

    moe_store_worker.py CHECKPOINT RUN_DIR LAYOUT       LAYOUT is TPxPPxEP

The first call saves, and keeps the weights after both updates in RUN_DIR/reference.pt. A later one loads, in a process of its
own since Megatron keeps the groups of its first checkpoint, and rank 0 writes the largest relative differences of weights
after loading and after the second update to RUN_DIR/LAYOUT.json.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from moe_parity_worker import (
    RANKS,
    Optimizer,
    build_policy,
    config_of,
    largest_difference,
    new_grid,
    plan_minibatch,
    random_batch,
    read_hf_config,
    session,
)

from rl.checkpoint.store import CheckpointStore
from rl.config import Config, Run


def trainer_of(checkpoint: str, hf: dict, layout: str, device):
    tp, pp, ep = map(int, layout.split("x"))
    config = config_of(checkpoint, tp, pp, ep, 0)
    config = replace(config, training=replace(config.training, optimizer=Optimizer(lr=1e-3, eps=1e-2)))
    return build_policy(config, hf, new_grid(tp, pp, ep, config.training.expert_tp), device)


def update(trainer, batch) -> None:
    plan = plan_minibatch(batch, list(range(len(batch))), dp=trainer.grid.dp, max_tokens=96)

    def minus_logprobs(micro):
        loss = -micro.logprobs.sum() / len(batch)
        return loss, {"loss": loss}

    trainer.update(batch, plan, minus_logprobs, lr=1e-3)


def weights_of(trainer) -> dict:
    return {name: tensor.clone() for name, tensor in trainer.full_weights()}


def main(checkpoint: str, directory: str, layout: str) -> None:
    reference = Path(directory, "reference.pt")
    with session(RANKS) as device:
        hf = read_hf_config(checkpoint)
        batch = random_batch(hf["vocab_size"])
        store = CheckpointStore(Config(run=Run(dir=directory)))
        trainer = trainer_of(checkpoint, hf, layout, device)
        saved = store.newest()
        if saved is None:
            update(trainer, batch)
            store.save(1, {"policy": trainer}, {})
        else:
            assert store.load(saved, {"policy": trainer}, seed=0)["step"] == 1
        after_one = weights_of(trainer)
        update(trainer, batch)
        after_two = weights_of(trainer)
        if RANKS.rank == 0 and saved is None:
            torch.save((after_one, after_two), reference)
        elif RANKS.rank == 0:
            expected_one, expected_two = torch.load(reference)
            results = [largest_difference(after_one, expected_one), largest_difference(after_two, expected_two)]
            Path(directory, f"{layout}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
