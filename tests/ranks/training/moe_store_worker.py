"""One rank of test_store_moe.py: two updates with a checkpoint between them, and the second one again after
loading it.

    moe_store_worker.py CHECKPOINT RUN_DIR LAYOUT [LAYOUT ...]       LAYOUT is TPxPPxEP

The first layout saves. For each of the others rank 0 writes the largest relative differences of weights after
loading and after the second update to RUN_DIR/out.json.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from parity_worker import (
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
from rl.config.schema import Config, Run


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


def main(checkpoint: str, directory: str, first: str, *layouts: str) -> None:
    with session(RANKS) as device:
        hf = read_hf_config(checkpoint)
        batch = random_batch(hf["vocab_size"])
        store = CheckpointStore(Config(run=Run(dir=directory)))
        trainer = trainer_of(checkpoint, hf, first, device)
        update(trainer, batch)
        store.save(1, {"policy": trainer}, {})
        expected_one = weights_of(trainer)
        update(trainer, batch)
        expected_two = weights_of(trainer)
        results = {}
        for layout in layouts:
            trainer = trainer_of(checkpoint, hf, layout, device)
            assert store.load(store.newest(), {"policy": trainer}, seed=0)["step"] == 1
            after_one = weights_of(trainer)
            update(trainer, batch)
            after_two = weights_of(trainer)
            results[layout] = [
                largest_difference(after_one, expected_one),
                largest_difference(after_two, expected_two),
            ]
        if RANKS.rank == 0:
            Path(directory, "out.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
