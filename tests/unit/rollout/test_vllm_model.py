"""vLLM's construction: its errors about a model are refusals, and classes of transformers remain usable."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.nn.functional import gelu
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.models.transformers.base import Base

from rl.config.options import ConfigError
from rl.rollout import cpu_support, vllm_model
from tests.checkpoints import tiny_config

MODEL = "DIR", {"architectures": ["Lfm2ForCausalLM"]}


def test_an_error_of_vllms_code_of_a_model_is_a_refusal():
    def initialize_model():
        raise AttributeError("'Lfm2Config' object has no attribute 'conv_dim'.")

    def execute_model():
        raise ValueError("too many values: 'conv_dim'")

    text = "architectures=Lfm2ForCausalLM in DIR/config.json: .*'conv_dim'.; .*use another device "
    for of_model in (initialize_model, execute_model):
        with pytest.raises(ConfigError, match=text), vllm_model.refusals(*MODEL):
            of_model()


def test_missing_memory_and_errors_elsewhere_stay_as_they_are():
    def initialize_model():
        raise torch.OutOfMemoryError("of 80 GiB")

    with pytest.raises(torch.OutOfMemoryError, match="80"), vllm_model.refusals(*MODEL):
        initialize_model()
    with pytest.raises(KeyError, match="elsewhere"), vllm_model.refusals(*MODEL):
        raise KeyError("elsewhere")


def test_a_class_that_vllm_decorated_is_built_outside_of_an_engine():
    class Served(transformers.Olmo2Model):
        pass

    vllm_model._keep_classes_of_transformers()
    own = Served.__init__
    options = dict(dynamic_arg_dims={"input_ids": 1}, enable_if=lambda config: True, is_encoder=False)
    Base._decorate_cls_for_torch_compile(SimpleNamespace(), Served, **options)
    assert Served.__init__ is not own
    with torch.device("meta"):
        assert Served(tiny_config("Olmo2ForCausalLM")).do_not_compile


@pytest.mark.parametrize("on_input", [False, True])
def test_experts_of_any_width_are_computed_with_each_activation(on_input):
    cpu_support.install()
    narrow = SimpleNamespace(hidden_dim=80, intermediate_size_per_partition=24, activation=None)
    assert CPUUnquantizedExperts._supports_grouped_gemm(narrow) == (True, None)
    x, w1, w2 = torch.randn(1, 80), torch.randn(1, 48, 80), torch.randn(1, 80, 24)
    found = torch.empty(1, 80)
    cpu_support.live_experts(
        SimpleNamespace(w1_bias=None, w2_bias=None),
        output=found,
        hidden_states=x,
        w1=w1,
        w2=w2,
        topk_weights=torch.tensor([[0.5]]),
        topk_ids=torch.tensor([[0]]),
        activation=SimpleNamespace(value="gelu_tanh"),
        expert_map=None,
        apply_router_weight_on_input=on_input,
    )
    before, after = (0.5, 1.0) if on_input else (1.0, 0.5)
    gate, up = (before * x @ w1[0].T).chunk(2, -1)
    torch.testing.assert_close(found, after * (gelu(gate, approximate="tanh") * up) @ w2[0].T)
