"""One rank of test_bitwise_numerics.py: log-probs of the engine and of the trainer in several layouts.

    bitwise_numerics_worker.py CHECKPOINT OUT_FILE DTYPE SAMPLES ROLLOUT_TP LAYOUT [LAYOUT ...]

LAYOUT is TPxPP, with a suffix r for recompute or p for rows without shared prompts. Rank 0 writes, per
layout, the numbers of all tokens and of tokens with a differing bit in their log-prob. For the last layout it
also writes how the gradient differs from the fast mode's. For example, 2x1r is tp 2, pp 1 with recompute.
"""

import json
import sys
from pathlib import Path

from megatron_groups import RANKS, new_grid  # isort: skip

import numpy as np
import torch

from rl.config.schema import Config, Data, Model, Optimizer, Rollout, Training, resolve
from rl.engines.engines import build_policy
from rl.engines.rollout_engines import build_rollout
from rl.models import read_hf_config
from rl.refit.refit import refit
from rl.rollout.batches import batch_of
from rl.rollout.exchange import exchange
from rl.rollout.sampling import Sampling
from rl.runtime.session import session
from rl.training.micro_batch_plans import plan_minibatch

TEMPERATURE, SAMPLES_PER_PROMPT, MAX_TOKENS = 0.7, 4, 12
CHUNK = 24
"""Tokens that an engine step computes at most; longer prompts are computed in chunks."""
EPS = 1e7
"""Epsilon of Adam and learning rate: with an epsilon far above the gradients, a step is the gradient."""


def config_of(checkpoint: str, dtype: str, numerics: str, rollout_tp: int, layout: str) -> Config:
    tp, pp = map(int, layout.strip("rp").split("x"))
    return resolve(
        Config(
            model=Model(path=checkpoint, dtype=dtype, numerics=numerics),
            data=Data(max_prompt_tokens=64),
            training=Training(
                tp=tp,
                pp=pp,
                micro_batch_tokens=96,
                head_chunk_tokens=7,
                recompute="full" if "r" in layout else "none",
                shared_prefix="p" not in layout,
                optimizer=Optimizer(lr=EPS, eps=EPS, clip_grad=0.0),
            ),
            rollout=Rollout(
                tp=rollout_tp,
                temperature=TEMPERATURE,
                max_response_tokens=64,
                max_concurrent_samples=16,
                cpu_kv_cache_mib=16,
            ),
        )
    )


def prompts(vocab_size: int, count: int) -> list[np.ndarray]:
    """Return prompts of 1 to 40 tokens. Every second prompt begins like the prompt before it."""
    generator = np.random.default_rng(5)
    found: list[np.ndarray] = []
    for i in range(count):
        tokens = generator.integers(3, vocab_size, generator.integers(1, 41)).astype(np.int32)
        if i % 2:
            tokens[: len(found[-1]) // 2] = found[-1][: len(found[-1]) // 2][: len(tokens)]
        found.append(tokens)
    return found


def gradient_of(trainer, batch, plan) -> dict[str, torch.Tensor]:
    """Return the gradient of log-probs and entropies from a step that is gradient descent."""
    before = {name: tensor.clone() for name, tensor in trainer.full_weights()}

    def minus_logprobs(micro):
        loss = -micro.logprobs.sum() - 0.1 * micro.entropy.sum()
        return loss, {"loss": loss}

    trainer.update(batch, plan, minus_logprobs, lr=EPS)
    return {name: tensor.float() - before[name].float() for name, tensor in trainer.full_weights()}


def main(checkpoint: str, out: str, dtype: str, samples: str, rollout_tp: str, *layouts: str) -> None:
    results: dict = {}
    with session(RANKS) as device:
        hf = read_hf_config(checkpoint)
        config = config_of(checkpoint, dtype, "bitwise", int(rollout_tp), layouts[0])
        engine = build_rollout(config, device)
        if "kv_lora_rank" not in hf:  # vLLM's CPU build computes prompts of MLA models whole
            engine.scheduler.max_num_scheduled_tokens = CHUNK
        batch = None
        for layout in layouts:
            config = config_of(checkpoint, dtype, "bitwise", int(rollout_tp), layout)
            grid = new_grid(config.training.tp, config.training.pp)
            trainer = build_policy(config, hf, grid, device)
            if batch is None:
                refit(trainer, engine)
                sampling = Sampling(SAMPLES_PER_PROMPT, MAX_TOKENS, temperature=TEMPERATURE)
                asked = prompts(hf["vocab_size"], int(samples) // SAMPLES_PER_PROMPT)
                drawn = engine.generate(asked, sampling, list(range(len(asked))))
                mine = drawn if engine.rank_in_replica == 0 else []
                batch = batch_of(exchange(mine, device), asked, samples_per_prompt=SAMPLES_PER_PROMPT)
            plan = plan_minibatch(batch, list(range(len(batch))), dp=grid.dp, max_tokens=96)
            (found,) = trainer.forward(batch, [plan], ("logprobs",))
            differ = found.view(torch.int32) != batch.rollout_logprobs.view(torch.int32)
            results[layout] = {"samples": len(batch), "tokens": len(found), "differ": int(differ.sum())}
            if layout == layouts[-1]:
                exact = gradient_of(trainer, batch, plan)
                fast = build_policy(
                    config_of(checkpoint, dtype, "fast", int(rollout_tp), layout), hf, grid, device
                )
                ordinary = gradient_of(fast, batch, plan)
                results[layout]["gradient"] = max(
                    (float((exact[n] - g).norm() / (g.norm() + 1e-3)), n) for n, g in ordinary.items()
                )
    if RANKS.rank == 0:
        Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
