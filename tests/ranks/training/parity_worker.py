"""One rank of the parity tests: the log-probs of Hugging Face, Megatron in several layouts and vLLM after a
refit.

    parity_worker.py CHECKPOINT_A CHECKPOINT_B OUT_DIR ROLLOUT LAYOUT [LAYOUT ...]

ROLLOUT is TP[xEP] of the engine, with data parallel attention if EP is larger than TP. LAYOUT is
TPxPPxEP[xETP[xCP]]; ETP 0 is its default.

Rank 0 writes the largest differences to OUT_DIR/out.json, and what the last layout exports after reading
checkpoint b to OUT_DIR/export. The gradients are compared through an optimizer step.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from megatron_groups import RANKS, new_grid  # isort: skip

import torch
from transformers import AutoModelForCausalLM

from rl.checkpoint.hf import export_hf
from rl.config.schema import Config, Data, Model, Optimizer, Rollout, Training, resolve
from rl.engines import rollout_engines
from rl.engines.engines import build_policy
from rl.models import architecture, read_hf_config
from rl.models.files import as_stored
from rl.refit.refit import check_refit, refit
from rl.rollout.batches import batch_of
from rl.rollout.engine import RolloutEngine
from rl.rollout.events import DummySteps
from rl.rollout.exchange import exchange
from rl.rollout.sampling import Sampling
from rl.rollout.vllm_model import ServedModel
from rl.runtime.collectives import gather_objects
from rl.runtime.session import session
from rl.training.micro_batch_plans import plan_minibatch
from rl.training.weights import load_hf
from tools.hf_reference import hf_gradient, hf_logprobs, random_batch

TEMPERATURE = 0.7
EPS = 1e7
"""Epsilon of Adam and learning rate: an epsilon so far above the gradients makes its step the gradient."""
SAMPLING = Sampling(1, 12, temperature=TEMPERATURE)


def config_of(
    checkpoint: str, tp: int, pp: int, ep: int, rollout: tuple[int, int], etp: int = 0, cp: int = 1
) -> Config:
    optimizer = Optimizer(lr=EPS, eps=EPS, clip_grad=0.0)
    return resolve(
        Config(
            model=Model(path=checkpoint, dtype="float32"),
            data=Data(max_prompt_tokens=64),
            training=Training(
                tp=tp,
                pp=pp,
                cp=cp,
                ep=ep,
                etp=etp,
                micro_batch_tokens=96,
                head_chunk_tokens=7,
                optimizer=optimizer,
            ),
            rollout=Rollout(
                tp=rollout[0],
                ep=rollout[1],
                dp_attention=rollout[1] > rollout[0],
                temperature=TEMPERATURE,
                max_response_tokens=24,
                max_concurrent_samples=4,
                cpu_kv_cache_mib=16,
            ),
        )
    )


def gradient_of(trainer, batch) -> tuple[dict[str, torch.Tensor], float]:
    """The same of Megatron, from an optimizer step that is gradient descent, and its norm as Megatron has it.
    Changes the trainer's weights."""
    before = {name: tensor.clone() for name, tensor in in_files(trainer)}
    plan = plan_minibatch(batch, list(range(len(batch))), dp=trainer.grid.dp, max_tokens=96)

    def minus_logprobs(micro):
        loss = -micro.logprobs.sum()
        return loss, {"loss": loss}

    norm = trainer.update(batch, plan, minus_logprobs, lr=EPS).grad_norm
    return {name: tensor - before[name] for name, tensor in in_files(trainer)}, norm


def in_files(trainer):
    return as_stored(trainer.weight_map.weights, trainer.full_weights())


def largest_difference(found: dict, expected: dict) -> tuple[float, str]:
    """|found - expected| / |expected| of the worst tensor; an expert that no token chose has no gradient."""
    return max((float((found[n] - e).norm() / (e.norm() + 1e-3)), n) for n, e in expected.items())


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


@torch.no_grad()
def differs_from_greedy(model, batch) -> int:
    """Return the number of tokens of the responses that are not the most probable ones by `model`."""
    wrong = 0
    for prompt, response in zip(batch.prompt_ids, batch.response_ids, strict=True):
        ids = torch.tensor([[*prompt.tolist(), *response.tolist()]])
        best = model(ids).logits[0, len(prompt) - 1 : -1].argmax(-1)
        wrong += int((best != torch.tensor(response.tolist())).sum())
    return wrong


def main(checkpoint_a: str, checkpoint_b: str, out_dir: str, rollout: str, *layouts: str) -> None:
    results: dict = {}
    rollout_tp, rollout_ep = map(int, f"{rollout}x1".split("x")[:2])
    sizes = rollout_tp, rollout_ep
    with session(RANKS) as device:
        hf = read_hf_config(checkpoint_a)
        architecture(hf).check(hf)
        batch = random_batch(hf["vocab_size"])
        references, columns = {}, {}
        if RANKS.rank == 0:  # which alone compares
            for name, checkpoint in (("a", checkpoint_a), ("b", checkpoint_b)):
                model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
                references[name] = model.eval()
                model.model.do_not_compile = True  # vLLM decorates classes of transformers that it uses
                columns[name] = hf_logprobs(model, batch, temperature=TEMPERATURE)
            gradient = hf_gradient(references["b"], columns["b"][0], Path(out_dir, "gradient"))
        config = config_of(checkpoint_a, 1, 1, 1, sizes)
        served = ServedModel(checkpoint_a, "float32", max_tokens=128)
        parts = rollout_engines.model_parts(config.rollout, hf)
        engine = RolloutEngine(served, config.rollout, seed=1, device=device, parts=parts)

        def samples_of(sampling: Sampling, num_prompts: int = len(batch)):
            """The engine's samples of the batch's first prompts, on every rank."""
            prompts = batch.prompt_ids[:num_prompts]
            drawn = engine.generate(prompts, sampling, list(range(num_prompts)))
            mine = drawn if engine.rank_in_replica == 0 else []
            return batch_of(exchange(mine, device), prompts, samples_per_prompt=1)

        for layout in layouts:
            tp, pp, ep, *more = map(int, layout.split("x"))
            etp, cp = [*more, *(0, 1)[len(more) :]]
            config = config_of(checkpoint_a, tp, pp, ep, sizes, etp, cp)
            trainer = build_policy(config, hf, new_grid(tp, pp, ep, config.training.expert_tp, cp), device)
            for name, checkpoint in (("a", checkpoint_a), ("b", checkpoint_b)):
                load_hf(checkpoint, trainer.weight_map)
                halves = ([0, 1, 2, 3], [4, 5, 6, 7])
                plans = [plan_minibatch(batch, half, dp=trainer.grid.dp, max_tokens=96) for half in halves]
                found = trainer.forward(batch, plans, ("logprobs", "entropy", "sum_p_squared"))
                traffic = refit(trainer, engine)
                check_refit(trainer, engine)
                sampled = samples_of(SAMPLING)
                greedy = samples_of(replace(SAMPLING, temperature=0.0)) if rollout_ep > 1 else None
                if rollout_ep > 1:
                    # One prompt for all replicas: one draws it, and replicas that share its experts wait.
                    lone = samples_of(SAMPLING, 1)
                    noted = [event for _, events in engine.events.records for event in events]
                    own = sum(event.num_steps for event in noted if isinstance(event, DummySteps))
                    dummy_steps = gather_objects(own)
                if RANKS.rank > 0:
                    continue
                kinds = ("megatron", "entropy", "sum_p_squared")
                sides: dict = {k: difference(f, e) for k, f, e in zip(kinds, found, columns[name])}
                with torch.no_grad():
                    expected = hf_logprobs(references[name], sampled, temperature=TEMPERATURE)[0]
                sides["largest"] = float(columns[name][0].abs().max())  # log-prob: rounding is relative to it
                sides["vllm"] = difference(sampled.rollout_logprobs, expected)
                if greedy is not None:
                    with torch.no_grad():
                        expected = hf_logprobs(references[name], lone, temperature=TEMPERATURE)[0]
                    sides["lone"] = difference(lone.rollout_logprobs, expected)
                    sides["not_greedy"] = differs_from_greedy(references[name], greedy)
                    sides["dummy_steps"] = dummy_steps
                sides |= {"sampled_tokens": int(sampled.lengths.sum()), "fallback": traffic.fallback}
                results[f"{layout} {name}"] = sides
            if layout == layouts[-1]:
                export_hf(trainer, checkpoint_b, f"{out_dir}/export")
            found, norm = gradient_of(trainer, batch)
            if RANKS.rank == 0:
                largest, of = largest_difference(found, gradient)
                whole = float(torch.stack([tensor.norm() for tensor in gradient.values()]).norm())
                results[f"{layout} b"] |= {
                    "gradient": largest,
                    "worst_gradient": of,
                    "norm": abs(norm / whole - 1),
                }
    if RANKS.rank == 0:
        Path(out_dir, "out.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
