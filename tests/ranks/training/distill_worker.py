"""One rank of test_distillation.py: divergence and gradient of a step of distill, in several layouts.

    distill_worker.py MODELS OUT_DIR NAME=TPxPP:KIND [...]       or NAME=hf:KIND

MODELS holds the checkpoints policy, teacher and larger, a teacher with more rows in its head. KINDS are
settings of the section teacher. The gradient is read off an optimizer step as in gradient_worker.py. Rank 0
saves gradient, norms of the weights and divergence to OUT_DIR/NAME.pt.
"""

import sys

from megatron_groups import RANKS, new_grid, run_cases  # isort: skip

import os
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gradient_worker import config_of, fixed_batch
from transformers import AutoModelForCausalLM

from rl.algorithms import distill
from rl.config.objective import Objective
from rl.config.schema import Config
from rl.config.teachers import Teacher
from rl.data.batch import Batch
from rl.data.prompts import Prompt
from rl.engines.engines import Engines, build_policy
from rl.engines.memory import MemorySharing
from rl.faults.agreement import PhaseAgreement
from rl.faults.phase_tracker import PhaseTracker
from rl.features.teachers.teaching import Teaching  # noqa: E402
from rl.models import read_hf_config
from rl.phases.phases import Phases
from rl.phases.step_record import StepRecord
from rl.run_directory.progress import Progress
from rl.runtime.session import control_group
from rl.training.engine import TrainingEngine
from rl.training.spec import ModelSpec
from tools.make_toy import build_tokenizer

ANSWERS = ("abc", "de", "fghi", "j")
"""Ground truth of each prompt."""
KINDS = {
    "whole": dict(path="teacher", divergence="jensen_shannon", beta=0.3),
    "top_k": dict(path="teacher", divergence="reverse_kl", top_k=5),
    "two": dict(path="teacher", sources={"odd": "larger"}, divergence="forward_kl"),
    "self": dict(self_taught="present", template="{ground_truth}{prompt}", divergence="forward_kl"),
}


def config_for(models: str, kind: str, tp: int, pp: int) -> Config:
    keys = dict(KINDS[kind])
    if "path" in keys:
        keys["path"] = f"{models}/{keys['path']}"
        keys["sources"] = {name: f"{models}/{path}" for name, path in keys.get("sources", {}).items()}
    config = config_of(f"{models}/policy", tp, pp, 70)
    return replace(config, algorithm="distill", teacher=Teacher(**keys), objective=Objective())


def batch_of(vocab_size: int) -> Batch:
    """The samples of gradient_worker.py, with sources and answers of their prompts."""
    batch = fixed_batch(vocab_size)
    firsts = [batch.prompt_ids[2 * group] for group in range(4)]
    batch.prompt_ids = [firsts[int(group)] for group in batch.groups]
    sources = ("even", "odd", "even", "odd")
    batch.prompts = [
        Prompt(k, ids, "q" * (k + 1), source, answer, {})
        for k, (ids, source, answer) in enumerate(zip(firsts, sources, ANSWERS))
    ]
    return batch


def megatron(config: Config, device, tp: int, pp: int) -> dict:
    grid, hf = new_grid(tp, pp), read_hf_config(config.model.path)
    engines = Engines({"policy": build_policy(config, hf, grid, device)})
    for path in config.teacher.paths:
        spec = ModelSpec(path, read_hf_config(path), "float32", temperature=config.rollout.temperature)
        model = TrainingEngine(spec, config.training, grid, device)
        engines.teachers[path] = model
    tracker = PhaseTracker(config.watchdog.limits, open(os.devnull, "w"))
    step = StepRecord(
        device=device,
        progress=Progress(enabled=False),
        watchdog=SimpleNamespace(tracker=tracker),
        agreement=PhaseAgreement(config, "", control_group()),
    )
    phases = Phases(
        config,
        step=step,
        engines=engines,
        memory=MemorySharing(config, device, engines),
        draw=None,
        sampler=None,
        scorer=None,
        make_teachers=partial(Teaching, tokenizer=build_tokenizer(), others={}),
    )
    step.begin(1)
    before = {name: tensor.clone() for name, tensor in engines.policy.full_weights()}
    weights = {name: tensor.double().norm() for name, tensor in before.items()}
    batch = batch_of(hf["vocab_size"])
    with pytest.raises(
        ValueError, match="reads the output divergence, but the model computes logprobs.*path"
    ):
        engines.policy.forward(batch, [[]], ("divergence",))
    distill.learn(phases, batch)
    gradient = {name: before[name] - tensor for name, tensor in engines.policy.full_weights()}
    return {"gradient": gradient, "weights": weights, "divergence": step.metrics["distill/divergence"]}


def hugging_face(config: Config) -> dict:
    """The same from transformers' models, one sequence after the other, in float64."""
    models = {
        path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        for path in (config.model.path, *config.teacher.paths)
    }
    policy, teacher = models[config.model.path], config.teacher
    vocab_size = policy.config.vocab_size
    batch = batch_of(vocab_size)

    def log_probs(model, prompt, response):
        ids = torch.tensor([*prompt.tolist(), *response.tolist()])
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1, :vocab_size]
        return (logits / config.rollout.temperature).log_softmax(-1)

    found = []
    for prompt, response, group in zip(batch.prompt_ids, batch.response_ids, batch.groups):
        owner, model, read = batch.prompts[int(group)], policy, prompt
        if teacher.self_taught != "none":
            text = teacher.template.format(prompt=owner.text, ground_truth=owner.ground_truth)
            read = np.array(build_tokenizer()(text)["input_ids"])
        else:
            model = models[teacher.sources.get(owner.data_source, teacher.path)]
        with torch.no_grad():
            q = log_probs(model, read, response).exp()
        p = log_probs(policy, prompt, response).exp()
        if teacher.top_k:
            ids = q.topk(teacher.top_k).indices
            chosen = (x.gather(1, ids) for x in (p, q))
            p, q = (torch.cat([x, 1 - x.sum(1, keepdim=True)], 1) for x in chosen)

        def kl(a, b):
            return (a * (a / b).log()).sum(-1)

        m = teacher.beta * q + (1 - teacher.beta) * p
        mixed = teacher.beta * kl(q, m) + (1 - teacher.beta) * kl(p, m)
        found.append(
            {"reverse_kl": kl(p, q), "forward_kl": kl(q, p), "jensen_shannon": mixed}[teacher.divergence]
        )
    # config_of has seq-mean-token-mean for GRPO; distill's default is the mean over tokens.
    loss = (torch.cat(found) * batch.mask).sum() / batch.mask.sum()
    loss.backward()
    gradient = {name: parameter.grad for name, parameter in policy.named_parameters()}
    return {"gradient": gradient, "divergence": float(loss.detach())}


def main(models: str, out_dir: str, *cases: str) -> None:
    def results(how: str, device) -> dict:
        layout, _, kind = how.partition(":")
        if layout == "hf":
            return hugging_face(config_for(models, kind, 1, 1)) if RANKS.rank == 0 else {}
        tp, pp = map(int, layout.split("x"))
        return megatron(config_for(models, kind, tp, pp), device, tp, pp)

    run_cases(out_dir, cases, results)


if __name__ == "__main__":
    main(*sys.argv[1:])
