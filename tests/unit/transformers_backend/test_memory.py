"""The dry run's pass on the meta device counts the bytes of a pass that computes."""

import json

import pytest
import torch

import rl.training  # noqa: F401  (before megatron.core)
from rl.features.transformers_backend import memory
from rl.models import by_class
from tests.checkpoints import tiny_config


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", ["LlamaForCausalLM", "OlmoeForCausalLM", "Gemma2ForCausalLM"])
def test_a_pass_without_values_allocates_the_same(monkeypatch, family, recompute):
    hf = json.dumps(by_class.described(tiny_config(family, tie=True).to_dict()))
    options = dict(values=False, rank=0, shard=1, tokens=200, length=64, is_cpu=True)
    counted = memory.pass_bytes(hf, recompute, "float32", **options)
    monkeypatch.setattr(memory, "META", torch.device("cpu"))
    assert counted == memory.pass_bytes.__wrapped__(hf, recompute, "float32", **options)
    assert min(counted) > 0


def test_ranks_of_a_copy_allocate_whole_layers():
    hf = json.dumps(by_class.described(tiny_config("LlamaForCausalLM").to_dict()))
    options = dict(values=False, rank=0, tokens=64, length=64, is_cpu=False)
    (kept, alone), (same, shared) = (
        memory.pass_bytes(hf, "full", "float32", shard=shard, **options) for shard in (1, 4)
    )
    assert same == kept and shared > alone


@pytest.mark.parametrize(("targets", "names"), [((), set()), (("q_proj",), {"q_proj"})])
def test_each_target_has_one_adapter(monkeypatch, targets, names):
    monkeypatch.setattr(memory, "_forward_and_backward", lambda model, *_: model)
    hf = json.dumps(by_class.described(tiny_config("Zamba2ForCausalLM").to_dict()))
    options = dict(values=False, rank=2, shard=1, tokens=64, length=64, is_cpu=False, targets=targets)
    model = memory.pass_bytes.__wrapped__(hf, "none", "float32", **options)
    linear = {name: part for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    adapted = {name: len(part._forward_hooks) for name, part in linear.items() if part._forward_hooks}
    assert set(adapted.values()) == {1}
    assert {name.rpartition(".")[2] for name in adapted} == names or not names
