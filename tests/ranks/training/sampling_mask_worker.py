"""One rank of test_sampling_masks.py: log-probs of engine and trainer for tokens of a truncated distribution.

    sampling_mask_worker.py CHECKPOINT LAYOUT [LAYOUT ...]

LAYOUT is TPxPP. Prints for each layout, as JSON, the largest difference between the trainer's log-probs and
the engine's with and without the sampling masks, their sizes, and the bytes of them that the ranks received.
"""

import json
import sys
from dataclasses import replace

from megatron_groups import RANKS, new_grid  # isort: skip

import numpy as np

from rl.config.schema import Config, Data, Model, Rollout, Training, resolve
from rl.engines.engines import build_policy
from rl.engines.rollout_engines import build_rollout
from rl.models import read_hf_config
from rl.refit.refit import refit
from rl.rollout.batches import batch_of
from rl.rollout.exchange import exchange
from rl.rollout.sampling import train_sampling
from rl.runtime.collectives import gather_objects
from rl.runtime.session import session
from rl.training.micro_batch_plans import plan_minibatch
from rl.training.parts import TrainerParts
from tools.hf_reference import random_batch

OUTPUTS = ("logprobs", "entropy", "sum_p_squared")


def main(checkpoint: str, *layouts: str) -> None:
    rollout = Rollout(
        temperature=0.7,
        top_p=0.9,
        top_k=20,
        samples_per_prompt=4,
        max_response_tokens=32,
        max_concurrent_samples=8,
        cpu_kv_cache_mib=16,
    )
    config = Config(
        model=Model(path=checkpoint, dtype="float32"), data=Data(max_prompt_tokens=64), rollout=rollout
    )
    config, engine, found = resolve(config), None, {}
    with session(RANKS) as device:
        hf = read_hf_config(checkpoint)
        prompts = random_batch(hf["vocab_size"]).prompt_ids
        for layout in layouts:
            tp, pp = map(int, layout.split("x"))
            training = Training(tp=tp, pp=pp, micro_batch_tokens=96, head_chunk_tokens=7)
            trainer = build_policy(replace(config, training=training), hf, new_grid(tp, pp, 1, tp), device)
            if engine is None:
                engine = build_rollout(config, device)
                refit(trainer, engine)
                own = engine.generate(prompts, train_sampling(config), list(range(len(prompts))))
            batch = batch_of(exchange(own, device), prompts, samples_per_prompt=rollout.samples_per_prompt)
            plans = [plan_minibatch(batch, list(range(len(batch))), dp=trainer.grid.dp, max_tokens=96)]
            logprobs, entropy, squares = trainer.forward(batch, plans, OUTPUTS)
            moved, trainer.parts = trainer.parts.metrics(device.torch), TrainerParts()
            whole = trainer.forward(batch, plans, ("logprobs",))[0]
            sizes = np.concatenate([sample.held("kept_counts") for sample in own])
            found[layout] = {
                "tokens": int(batch.lengths.sum()),
                "logprob": float(batch.rollout_logprobs.abs().max()),
                "with": float((logprobs - batch.rollout_logprobs).abs().max()),
                "without": float((whole - batch.rollout_logprobs).abs().max()),
                "mean without": float((whole - batch.rollout_logprobs).mean()),
                "entropy": float(entropy.max()),
                "sum_p_squared": float(squares.min()),
                "sizes": gather_objects([int(sizes.min()), float(sizes.mean()), int(sizes.max())]),
                **moved,
            }
    if RANKS.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
