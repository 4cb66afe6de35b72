"""Adapters that cannot be trained, for example on qkv_proj, are refused before a model is built."""

import json

import pytest

from rl.config.adapter_checks import adapters_of, check_layers
from rl.config.options import ConfigError, load
from rl.config.schema import Config
from rl.models import architecture, merged
from tools.tiny_models import PUBLISHED, tiny_config


def config_of(*overrides: str) -> Config:
    return load(Config, None, ["adapter={kind: lora, rank: 4}", *overrides])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["adapter.targets=[qkv_proj]"], "adapter.targets=qkv_proj matches no linear layer"),
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


def test_a_layout_that_cuts_fp8_blocks_is_refused():
    sizes = dict(hidden_size=512, intermediate_size=768, num_attention_heads=8, num_key_value_heads=4)
    hf = json.loads(tiny_config("Qwen3MoeForCausalLM", **sizes).to_json_string(use_diff=False))
    weights, fp8 = architecture(hf).weights(hf), "adapter.base=fp8"
    adapters_of(config_of("training.tp=4"), weights)
    for fits in (["training.tp=2", "training.etp=1", "training.ep=2"], ["training.pp=2", "training.ep=2"]):
        adapters_of(config_of(fp8, *fits), weights)
    with pytest.raises(
        ConfigError, match=r"training.tp=4 cuts .*mlp.gate_proj.*; use training.tp=1 or 2, or"
    ):
        adapters_of(config_of(fp8, "training.tp=4", "training.ep=2"), weights)
    with pytest.raises(ConfigError, match=r"training.etp=2 cuts .*experts\..*use training.etp=1, or"):
        adapters_of(config_of(fp8, "training.tp=2", "training.ep=2", "training.etp=2"), weights)


def test_adapters_of_experts_of_one_rank():
    hf = json.loads(tiny_config("Qwen3MoeForCausalLM").to_json_string(use_diff=False))
    weights = architecture(hf).weights(hf)
    one = "adapter.targets=[experts.5.up_proj]"
    assert len(adapters_of(config_of(one), weights)) == 1
    with pytest.raises(ConfigError, match="training.ep=2: they would have nothing to learn"):
        adapters_of(config_of(one, "training.ep=2"), weights)
    both = "adapter.targets=[experts.5.up_proj, experts.0.up_proj]"
    assert len(adapters_of(config_of(both, "training.ep=2"), weights)) == 2


def beside(*overrides: str) -> Config:
    return config_of("adapter.in_engine=adapter", *overrides)


def tiny_hf(architecture: str) -> dict:
    return tiny_config(architecture).to_dict() | PUBLISHED.get(architecture, {})


def test_layers_without_vllm_adapters_are_refused():
    experts, latents = tiny_hf("Qwen3MoeForCausalLM"), tiny_hf("DeepseekV3ForCausalLM")
    with pytest.raises(ConfigError, match="experts.0.gate_proj is a routed expert"):
        check_layers(beside(), experts)
    with pytest.raises(
        ConfigError, match=r"self_attn.kv_b_proj is a projection.*choose adapter.targets from"
    ):
        check_layers(beside("adapter.targets=[kv_b_proj]"), latents)
    with pytest.raises(ConfigError, match="linear_attn.in_proj_qkv is a part of a projection"):
        check_layers(beside(), tiny_hf("Qwen3_5ForCausalLM"))
    sees = merged(tiny_config("Qwen3VLMoeForConditionalGeneration").to_dict())
    one = beside("adapter.targets=[layers.0.mlp.gate_proj]")
    for hf in (sees, experts | {"mlp_only_layers": [], "decoder_sparse_step": 2}):
        with pytest.raises(ConfigError, match="layers.0.mlp.gate_proj is in a dense layer.*=merged"):
            check_layers(one, hf)
    check_layers(one, experts | {"mlp_only_layers": [0]})
    check_layers(beside("adapter.targets=[q_proj, down_proj]"), sees)
    check_layers(beside("adapter.targets=[q_proj, o_proj]"), experts)
    check_layers(beside(), tiny_hf("Qwen2ForCausalLM"))
