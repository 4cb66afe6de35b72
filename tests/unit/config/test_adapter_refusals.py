"""Adapters that cannot be trained are refused before a model is built, with the remedy."""

import json

import pytest

from rl.config.adapter_checks import adapters_of, check_adapter
from rl.config.options import ConfigError, load
from rl.config.schema import Config
from rl.models import architecture
from tools.tiny_models import tiny_config


def config_of(*overrides: str) -> Config:
    return load(Config, None, ["adapter={kind: lora, rank: 4}", *overrides])


def test_bitwise_numerics_have_no_adapters():
    with pytest.raises(ConfigError, match="model.numerics=bitwise does not support adapter.kind=lora"):
        check_adapter(config_of("model.numerics=bitwise"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["adapter.targets=[qkv_proj]"], "adapter.targets: qkv_proj matches no linear layer"),
        (
            ["adapter.targets=[layers.0.mlp.down_proj]", "training.pp=2"],
            "gives no adapter to ranks of pipeline stage 1 .layers 1 to 1. with training.pp=2",
        ),
        (
            ["adapter.init=pissa", "adapter.rank=65"],
            "adapter.rank=65 with adapter.init=pissa exceeds the rank",
        ),
    ],
)
def test_adapters_that_the_model_cannot_have(overrides, message):
    hf = json.loads(tiny_config("Qwen2ForCausalLM").to_json_string(use_diff=False))
    weights = architecture(hf).weights(hf)
    assert len(adapters_of(config_of(), weights)) == 14  # seven layers of two blocks
    with pytest.raises(ConfigError, match=message):
        adapters_of(config_of(*overrides), weights)


def test_adapters_of_experts_of_one_rank():
    hf = json.loads(tiny_config("Qwen3MoeForCausalLM").to_json_string(use_diff=False))
    weights = architecture(hf).weights(hf)
    one = "adapter.targets=[experts.5.up_proj]"
    assert len(adapters_of(config_of(one), weights)) == 1
    with pytest.raises(ConfigError, match="training.ep=2: they would have nothing to learn"):
        adapters_of(config_of(one, "training.ep=2"), weights)
    both = "adapter.targets=[experts.5.up_proj, experts.0.up_proj]"
    assert len(adapters_of(config_of(both, "training.ep=2"), weights)) == 2
