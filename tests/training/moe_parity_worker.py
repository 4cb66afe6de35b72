"""One rank of test_parity_moe.py: what parity_worker.py does, for layouts with expert parallelism.

    moe_parity_worker.py CHECKPOINT_A CHECKPOINT_B OUT_DIR ROLLOUT_TP LAYOUT [LAYOUT ...]       LAYOUT is TPxPPxEP

Rank 0 writes the largest differences to OUT_DIR/out.json. ROLLOUT_TP 0: no vLLM.
"""

import copy
import json
import sys
from pathlib import Path

import torch
from parity_worker import (
    EPS,
    RANKS,
    SAMPLING,
    TEMPERATURE,
    AutoModelForCausalLM,
    difference,
    hf_logprobs,
    new_grid,
    random_batch,
)
from safetensors.torch import load_file

from rl.checkpoint.hf import export_hf
from rl.config import Config, Data, Model, Optimizer, Rollout, Training, resolve
from rl.engines import build_policy
from rl.models import architecture, read_hf_config
from rl.refit.refit import check_refit, refit
from rl.rollout.engine import RolloutEngine
from rl.rollout.exchange import exchange
from rl.runtime.session import session
from rl.training.packing import plan_minibatch
from rl.training.weights import load_hf


def config_of(checkpoint: str, tp: int, pp: int, ep: int, rollout_tp: int) -> Config:
    optimizer = Optimizer(lr=EPS, eps=EPS, clip_grad=0.0)
    return resolve(
        Config(
            model=Model(path=checkpoint, dtype="float32"),
            data=Data(max_prompt_tokens=64),
            training=Training(tp=tp, pp=pp, ep=ep, micro_batch_tokens=96, head_chunk_tokens=7, optimizer=optimizer),
            rollout=Rollout(
                tp=max(1, rollout_tp), temperature=TEMPERATURE, max_response_tokens=64, max_concurrent_samples=4,
                cpu_kv_cache_mib=16,
            ),  # fmt: skip
        )
    )


def hf_gradient(model, logprobs, directory: Path) -> dict[str, torch.Tensor]:
    """Of the sum of the log-probs, under the names of a checkpoint: transformers holds all experts in one tensor, and splits
    them when it saves."""
    gradients = torch.autograd.grad(logprobs.sum(), list(model.parameters()))
    named = {name for name, _ in model.named_buffers()}
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients):
            parameter.copy_(gradient)
    model.save_pretrained(directory)
    return {name: tensor for name, tensor in load_file(directory / "model.safetensors").items() if name not in named}


def gradient_of(trainer, batch) -> dict[str, torch.Tensor]:
    """The same of Megatron, from an optimizer step that is gradient descent. Changes the trainer's weights."""
    before = {name: tensor.clone() for name, tensor in trainer.full_weights()}
    plan = plan_minibatch(batch, list(range(len(batch))), dp=trainer.grid.dp, max_tokens=96)

    def minus_logprobs(micro):
        loss = -micro.logprobs.sum()
        return loss, {"loss": loss}

    trainer.update(batch, plan, minus_logprobs, lr=EPS)
    return {name: tensor - before[name] for name, tensor in trainer.full_weights()}


def largest_difference(found: dict, expected: dict) -> tuple[float, str]:
    """|found - expected| / |expected| of the worst tensor; an expert that no token chose has no gradient."""
    return max((float((found[n] - e).norm() / (e.norm() + 1e-3)), n) for n, e in expected.items())


def main(checkpoint_a: str, checkpoint_b: str, out_dir: str, rollout_tp: str, *layouts: str) -> None:
    results: dict = {}
    tp_of_rollout = int(rollout_tp)
    with session(RANKS) as device:
        hf = read_hf_config(checkpoint_a)
        architecture(hf).check(hf)
        batch = random_batch(hf["vocab_size"])
        references = [AutoModelForCausalLM.from_pretrained(c, dtype=torch.float32).eval() for c in (checkpoint_a, checkpoint_b)]
        columns = [hf_logprobs(reference, batch) for reference in references]
        if RANKS.rank == 0:
            gradient = hf_gradient(references[1], columns[1][0], Path(out_dir, "gradient"))
        engine = None
        if tp_of_rollout:
            config = config_of(checkpoint_a, 1, 1, 1, tp_of_rollout)
            engine = RolloutEngine(checkpoint_a, config.rollout, dtype="float32", max_tokens=128, seed=1, device=device)
        for layout in layouts:
            tp, pp, ep = map(int, layout.split("x"))
            config = config_of(checkpoint_a, tp, pp, ep, tp_of_rollout)
            trainer = build_policy(config, hf, new_grid(tp, pp, ep, config.training.expert_tp), device)
            for name, checkpoint, reference, expected in zip("ab", (checkpoint_a, checkpoint_b), references, columns):
                load_hf(checkpoint, trainer.weight_map)
                plans = [plan_minibatch(batch, list(range(len(batch))), dp=trainer.grid.dp, max_tokens=96)]
                found = trainer.forward(batch, plans, ("logprobs", "entropy", "sum_p_squared"))
                sides = {k: difference(f, e) for k, f, e in zip(("megatron", "entropy", "sum_p_squared"), found, expected)}
                if engine is not None:
                    refit(trainer, engine)
                    check_refit(trainer, engine)
                    drawn = engine.generate(batch.prompt_ids, SAMPLING, list(range(len(batch))))
                    mine = drawn if engine.rank_in_replica == 0 else []
                    sampled = exchange(batch.prompt_ids, mine, SAMPLING.samples_per_prompt, device)
                    with torch.no_grad():
                        sides["vllm"] = difference(sampled.rollout_logprobs, hf_logprobs(reference, sampled)[0])
                    sides["sampled_tokens"] = int(sampled.lengths.sum())
                results[f"{layout} {name}"] = sides
            if layout == layouts[-1]:
                export_hf(trainer, checkpoint_b, f"{out_dir}/export")
            found = gradient_of(trainer, batch)
            if RANKS.rank == 0:
                results[f"{layout} b"]["gradient"], results[f"{layout} b"]["worst_gradient"] = largest_difference(found, gradient)
                print(layout, results[f"{layout} a"], results[f"{layout} b"], flush=True)
    if RANKS.rank == 0:
        Path(out_dir, "out.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
