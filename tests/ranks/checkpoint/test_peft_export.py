"""Exported adapters give the trainer's log-probs in peft, merged, and in a run that starts from them."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import bounds
from tests.checkpoints import SIZES, save_tiny
from tests.spawn import run_ranks
from tools.hf_reference import hf_logprobs, random_batch

WORKER = Path(__file__).parent / "peft_worker.py"
LORA = ("adapter.rank=4", "adapter.alpha=6")


def assert_same_answers(directory: Path, family: str, layouts: tuple[str, str], *overrides: str) -> None:
    peft = pytest.importorskip("peft")
    checkpoint = save_tiny(family, directory / "model", seed=1)
    run_ranks(2, WORKER, checkpoint, directory, *layouts, *LORA, *overrides, timeout=300)
    found = torch.load(directory / "logprobs.pt")
    bound = bounds.of_logits(layers=3, width=SIZES["hidden_size"])
    if "adapter.init=pissa" in overrides:  # B A - B0 A0 is added to W, not B A to what is left of W
        torch.testing.assert_close(found["same"], found["written"], rtol=bound, atol=bound)
    else:
        assert torch.equal(found["written"], found["same"])
    torch.testing.assert_close(found["other"], found["written"], rtol=bound, atol=bound)

    def load(path) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    models = {"base": load(checkpoint), "merged": load(directory / "hf")}
    batch = random_batch(models["base"].config.vocab_size)
    with torch.no_grad():
        given = {name: hf_logprobs(model, batch)[0] for name, model in models.items()}
        adapted = peft.PeftModel.from_pretrained(models["base"], directory / "adapter")
        given["peft"] = hf_logprobs(adapted, batch)[0]
    differences = {name: float((out - found["written"]).abs().max()) for name, out in given.items()}
    print(family, *overrides, differences)
    assert differences["base"] > 0.1
    for name in ("merged", "peft"):
        torch.testing.assert_close(given[name].float(), found["written"], rtol=bound, atol=bound)


def test_adapters_of_a_mixture_are_those_of_peft(tmp_path):
    assert_same_answers(tmp_path, "DeepseekV3ForCausalLM", ("2x1x2", "1x2x1"), "adapter.kind=rslora")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["adapter.kind=dora", "adapter.init=pissa"])
def test_other_kinds_are_those_of_peft(tmp_path, how):
    assert_same_answers(tmp_path, "Qwen2ForCausalLM", ("2x1x1", "1x2x1"), "adapter.kind=lora", how)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, layouts",
    [
        ("Qwen2ForCausalLM", ("2x1x1", "1x2x1")),
        ("LlamaForCausalLM", ("1x2x1", "1x1x1")),
        ("Qwen3MoeForCausalLM", ("1x1x2", "2x1x1")),
        ("MixtralForCausalLM", ("2x1x2", "1x2x1")),
        ("DeepseekV2ForCausalLM", ("1x2x1", "1x1x2")),
    ],
)
def test_adapters_of_a_family_are_those_of_peft(tmp_path, family, layouts):
    assert_same_answers(tmp_path, family, layouts, "adapter.kind=lora")
