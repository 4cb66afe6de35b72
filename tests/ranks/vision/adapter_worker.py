"""One rank of test_vision_adapters.py: adapters of a model with a vision tower, in trainer and engine.

    adapter_worker.py CHECKPOINT OUT_DIR ENGINE IN_ENGINE KIND TARGETS LAYOUT [LAYOUT ...]

ENGINE is TPxEP of generation, LAYOUT is TPxPPxEP of training, TARGETS is separated by commas. The first
layout writes OUT_DIR/adapter and OUT_DIR/hf. Rank 0 writes the largest differences from peft and transformers
to OUT_DIR/out.json.
"""

import json
import sys
from pathlib import Path

from tests.ranks.vision.vision_worker import (  # isort: skip
    EPS,
    RANKS,
    batch_of_prompts,
    build_trainer,
    config_of,
    hf_logprobs,
    logprobs_of,
    prompts_of,
    sampled_by,
)

import torch
import transformers

from rl.checkpoint.hf import export_hf
from rl.config.adapter import Adapter
from rl.engines.rollout_engines import build_rollout
from rl.features.adapters.peft import export_peft
from rl.models import read_hf_config
from rl.refit.refit import check_refit, check_weights, refit
from rl.runtime.session import session
from rl.training.micro_batch_plans import plan_minibatch
from rl.training.weights import full_weights
from tests.ranks.checkpoint.peft_worker import fill


def gradient_of(trainer, batch) -> dict[str, torch.Tensor]:
    """Return the gradient of the sum of log-probs, from an optimizer step that is gradient descent."""
    trainer.optimizer.reload_model_params()
    before = {name: tensor.clone() for name, tensor in full_weights(trainer.learned_map)}
    plan = plan_minibatch(batch, list(range(len(batch))), dp=trainer.grid.dp, max_tokens=96)
    trainer.update(batch, plan, lambda micro: (-micro.logprobs.sum(), {}), lr=EPS)
    return {name: tensor - before[name] for name, tensor in full_weights(trainer.learned_map)}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm()) / (float(expected.norm()) + 1e-3)


def expected_of(checkpoint: str, out: str, architecture: str, batch) -> tuple[dict, dict]:
    """Return log-probs by transformers of the base, with the adapter in peft and merged; peft's gradient."""
    import peft

    def load(path):
        return getattr(transformers, architecture).from_pretrained(path, dtype=torch.float32).eval()

    model = load(checkpoint)
    with torch.no_grad():
        found = {"base": hf_logprobs(model, batch), "merged": hf_logprobs(load(f"{out}/hf"), batch)}
    model = peft.PeftModel.from_pretrained(model, f"{out}/adapter", is_trainable=True)
    found["peft"] = hf_logprobs(model.base_model.model, batch)
    learned = {
        name.replace(".default", "").replace("vector.weight", "vector"): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    gradient = torch.autograd.grad(found["peft"].sum(), list(learned.values()))
    return {name: values.detach() for name, values in found.items()}, dict(zip(learned, gradient))


def main(checkpoint, out, generates, in_engine, kind, targets, *layouts) -> None:
    adapter = Adapter(kind=kind, rank=4, alpha=6.0, in_engine=in_engine, targets=targets.split(","))
    results: dict = {}
    with session(RANKS) as device:
        hf = read_hf_config(checkpoint)
        prompts = prompts_of(checkpoint, Path(out))
        batch = batch_of_prompts(prompts, hf["vocab_size"])
        engine = build_rollout(config_of(checkpoint, "1x1x1", generates, adapter=adapter), device)
        if in_engine == "adapter":
            adapted = engine.runner.lora_manager._adapter_manager.modules
            assert adapted and all(name.startswith("language_model.") for name in adapted)
        for layout in layouts:
            trainer = build_trainer(config_of(checkpoint, layout, generates, adapter=adapter), hf, device)
            fill(trainer)
            if layout == layouts[0]:
                export_peft(trainer, checkpoint, f"{out}/adapter")
                export_hf(trainer, checkpoint, f"{out}/hf")
                if RANKS.rank == 0:
                    expected, gradient = expected_of(checkpoint, out, hf["architectures"][0], batch)
                    largest = float(expected["peft"].abs().max())
                    for name in ("base", "merged"):
                        results[name] = float((expected[name] - expected["peft"]).abs().max()) / largest
            refit(trainer, engine)
            check_refit(trainer, engine)
            check_weights(trainer, engine)
            sampled = sampled_by(engine, prompts, device)
            again = logprobs_of(trainer, sampled, list(range(len(sampled))))
            logprobs = logprobs_of(trainer, batch, list(range(len(batch))))
            found = gradient_of(trainer, batch)
            if RANKS.rank == 0:
                assert found.keys() == gradient.keys()
                results[layout] = {
                    "megatron": float((logprobs - expected["peft"]).abs().max()) / largest,
                    "gap": float((again - sampled.rollout_logprobs).abs().max()) / largest,
                    "gradient": max(relative(found[name], each) for name, each in gradient.items()),
                }
    if RANKS.rank == 0:
        Path(out, "out.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
