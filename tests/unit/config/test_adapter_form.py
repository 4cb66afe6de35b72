"""Refusals of adapters beside the engine's weights, where vLLM cannot apply them."""

import pytest

from rl.config.adapter_form_checks import check_form, check_layers
from rl.config.options import ConfigError, load
from rl.config.schema import Config
from tools.tiny_models import PUBLISHED, tiny_config

BESIDE = ("adapter.kind=lora", "adapter.in_engine=adapter")


def config_of(*overrides: str) -> Config:
    return load(Config, None, [*BESIDE, *overrides])


def tiny_hf(architecture: str) -> dict:
    return tiny_config(architecture).to_dict() | PUBLISHED.get(architecture, {})


@pytest.mark.parametrize(
    "overrides, reason",
    [
        (["adapter.kind=dora"], "adapter.kind=dora"),
        (["adapter.rank=1024"], "vLLM's largest rank is 512"),
        (["model.numerics=bitwise"], "model.numerics=bitwise"),
        (["roles.train=0-0", "roles.rollout=1-1"], "roles.rollout=1-1"),
        (["rollout.carry_over=true", "rollout.carry_over_cache=keep"], "rollout.carry_over_cache=keep"),
    ],
)
def test_what_vllm_cannot_apply_is_refused(overrides, reason):
    config = config_of(*overrides)
    with pytest.raises(ConfigError) as refused:
        check_form(config)
    assert reason in str(refused.value) and "use adapter.in_engine=merged" in str(refused.value)
    config.adapter.in_engine = "merged"
    check_form(config)


def test_layers_without_vllm_adapters_are_refused():
    experts, latents = tiny_hf("Qwen3MoeForCausalLM"), tiny_hf("DeepseekV3ForCausalLM")
    with pytest.raises(ConfigError, match="experts.0.gate_proj is a routed expert"):
        check_layers(config_of(), experts)
    with pytest.raises(
        ConfigError, match=r"self_attn.kv_b_proj is a projection.*choose adapter.targets from"
    ):
        check_layers(config_of("adapter.targets=[kv_b_proj]"), latents)
    check_layers(config_of("adapter.targets=[q_proj, o_proj]"), experts)
    check_layers(config_of(), tiny_hf("Qwen2ForCausalLM"))
