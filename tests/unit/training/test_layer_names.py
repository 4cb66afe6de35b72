"""Names in Transformer Engine's layers of Megatron-core 0.16.1, and names that Megatron reads.

For example, input_layernorm.weight is self_attention.linear_qkv.layer_norm_weight in Transformer Engine.
"""

from types import SimpleNamespace

import pytest

from rl.training import cpu_support

cpu_support.install()

from megatron.core.fusions.fused_layer_norm import FusedLayerNorm  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402

from rl.training.layer_spec import (  # noqa: E402
    LOCAL_CLASSES,
    DuplicatedLinear,
    Norm,
    megatrons_names,
    multi_latent_attention,
    replace_classes,
    te_name,
)

LAYER = "decoder.layers.3."


@pytest.mark.parametrize(
    ("local", "fused"),
    [
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight"),
        ("self_attention.kv_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight"),
        ("mlp.experts.local_experts.12.linear_fc1.weight", "mlp.experts.linear_fc1.weight12"),
        ("mlp.experts.local_experts.0.linear_fc2.weight", "mlp.experts.linear_fc2.weight0"),
        ("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc1.weight"),
        ("self_attention.linear_proj.weight", "self_attention.linear_proj.weight"),
    ],
)
def test_names_of_fused_norms_and_experts(local, fused):
    assert te_name(LAYER + local) == LAYER + fused


def test_norms_are_replaced_where_apex_is_installed():
    """Check FusedLayerNorm, which local specs name with apex; it rejects RMSNorm (gpt_layer_specs.LNImpl)."""
    assert replace_classes([FusedLayerNorm, WrappedTorchNorm], LOCAL_CLASSES) == [Norm, Norm]


def test_a_model_without_te_leaves_the_layers_of_later_models_alone(monkeypatch):
    """Both kinds may be built in one process: TE's attention supports no float32."""
    te_linear = type("TELinear", (), {})
    monkeypatch.setattr(multi_latent_attention, "TELinear", te_linear, raising=False)
    with pytest.raises(RuntimeError), megatrons_names(SimpleNamespace(transformer_impl="local")):
        assert multi_latent_attention.TELinear is DuplicatedLinear
        raise RuntimeError
    with megatrons_names(SimpleNamespace(transformer_impl="transformer_engine")):
        assert multi_latent_attention.TELinear is te_linear
