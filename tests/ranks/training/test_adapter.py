"""Adapters compute what peft's compute, in every layout, and only they learn."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl.models.adapters import PREFIX
from tests import bounds
from tests.checkpoints import SIZES, save_tiny
from tests.spawn import run_ranks
from tools.hf_reference import hf_gradient, hf_logprobs, random_batch

WORKER = Path(__file__).parent / "adapter_worker.py"
RANK, ALPHA = 4, 6.0
LOGPROB = bounds.of_logits(layers=3, width=SIZES["hidden_size"])
GRADIENT = bounds.of_gradient(3, SIZES["hidden_size"])
DENSE = {1: ["one=1x1x1"], 2: ["tp2=2x1x1", "pp2=1x2x1"]}


def results(directory: Path, family: str, cases: dict[int, list[str]]) -> tuple[str, dict[str, dict]]:
    """Return the checkpoint, and what the worker saves, by the name of the case."""
    checkpoint = save_tiny(family, directory / "model", seed=1)
    for world_size, some in cases.items():
        run_ranks(world_size, WORKER, checkpoint, directory, *some, timeout=600)
    names = [case.partition("=")[0] for some in cases.values() for case in some]
    return checkpoint, {name: torch.load(directory / f"{name}.pt") for name in names}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / (expected.double().norm() + 1e-3))


def by_the_chain_rule(checkpoint: str, found: dict, directory: Path, scale: float) -> tuple:
    """Return the log-probs of transformers' model with the merged weights in float64, and from its gradient
    those of A and B: s B' dW and s dW A'.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    batch = random_batch(model.config.vocab_size)
    adapters, base = found["adapters"], found["base"]
    modules = [name.removesuffix(".lora_A.weight") for name in adapters if name.endswith("lora_A.weight")]
    state = {name: tensor.double() for name, tensor in base.items()}
    for module in modules:
        a, b = (adapters[f"{module}.lora_{side}.weight"].double() for side in "AB")
        state[module.removeprefix(PREFIX) + ".weight"] += scale * b @ a
    model.load_state_dict(state)
    logprobs = hf_logprobs(model, batch)[0]
    of_weights = hf_gradient(model, -logprobs, directory / "gradient")
    gradient = {}
    for module in modules:
        a, b = (adapters[f"{module}.lora_{side}.weight"].double() for side in "AB")
        dw = of_weights[module.removeprefix(PREFIX) + ".weight"]
        gradient[f"{module}.lora_A.weight"] = scale * b.T @ dw
        gradient[f"{module}.lora_B.weight"] = scale * dw @ a.T
    return logprobs.detach(), gradient


def by_peft(checkpoint: str, found: dict) -> tuple:
    """Return the same by the package peft in float32."""
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    batch = random_batch(model.config.vocab_size)
    targets = sorted({name.split(".")[-3] for name in found["adapters"]})
    model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets))
    peft.set_peft_model_state_dict(model, found["adapters"])
    logprobs = hf_logprobs(model, batch)[0]
    (-logprobs.sum()).backward()
    names = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return logprobs.detach(), {name.replace(".default", ""): tensor for name, tensor in names.items()}


def assert_equal(found: dict, logprobs: torch.Tensor, gradient: dict) -> None:
    assert relative(found["logprobs"], logprobs) <= LOGPROB
    assert found["gradient"].keys() == gradient.keys()
    worst = max((relative(found["gradient"][name], expected), name) for name, expected in gradient.items())
    print("log-probs", relative(found["logprobs"], logprobs), "gradient", worst)
    assert worst[0] <= GRADIENT, worst
    norm = torch.stack([tensor.norm() for tensor in gradient.values()]).norm()
    assert found["norm"] == pytest.approx(float(norm), rel=GRADIENT)


@pytest.mark.parametrize("family", ["Qwen2ForCausalLM", "LlamaForCausalLM"])
def test_dense_models_are_peft(tmp_path, family):
    checkpoint, found = results(tmp_path, family, DENSE)
    logprobs, gradient = by_peft(checkpoint, found["one"])
    for case in found.values():
        assert_equal(case, logprobs, gradient)
