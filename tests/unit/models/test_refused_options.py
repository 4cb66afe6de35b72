"""Configs that an architecture refuses, and those that it accepts."""

import pytest
import transformers

from rl.models import SUPPORTED, architecture, check_options
from tests.architectures import (
    DENSE,
    GEMMA,
    GLM,
    GLM_LITE,
    GRANITE,
    GRANITE4,
    LLAMA,
    MINIMAX,
    MISTRAL,
    NEXT,
    OSS,
    PHI,
    QWEN2,
    QWEN3,
    QWEN35,
    QWEN35_MOE,
    SEED,
    SMOL,
    V2,
    V3,
    YARN,
    config,
    published,
)
from tests.checkpoints import PARTICULAR, VISION


def test_every_architecture_accepts_its_tiny_model():
    assert set(SUPPORTED) == {*PARTICULAR, *VISION}
    for name in PARTICULAR:
        architecture(config(name)).check(config(name))
    with pytest.raises(ValueError, match="MambaForCausalLM is not supported; supported are Qwen2ForCausalLM"):
        architecture({"architectures": ["MambaForCausalLM"]})


@pytest.mark.parametrize(
    "name, part, change, words",
    [
        ("qwen3-vl-8b", "rope_scaling", {"mrope_interleaved": False}, "mrope_interleaved False"),
        ("qwen2.5-vl-7b", "rope_scaling", {"mrope_interleaved": True}, "mrope_interleaved True"),
        ("qwen3-vl-30b-a3b", "norm_topk_prob", False, "norm_topk_prob false is not supported"),
    ],
)
def test_other_models_with_a_vision_tower_are_refused(name, part, change, words):
    hf = published(name)
    hf[part] = hf[part] | change if isinstance(change, dict) else change
    with pytest.raises(ValueError, match=words):
        architecture(hf).check(hf)


EVERY_DENSE = (
    (
        {"rope_scaling": {"rope_type": "longrope"}},
        "embeddings of type longrope is not supported; only default",
    ),
    (
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn"}},
        "embeddings of type yarn lacks factor in its rope_scaling",
    ),
    (
        {"rope_scaling": YARN | {"factor": 0.5}},
        "factor 0.5 in its rope_scaling is not supported; use 1 or more",
    ),
    (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}},
        "lacks low_freq_factor, original_max_position_embeddings in its rope_scaling",
    ),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 is not supported"),
    ({"hidden_act": "gelu"}, "hidden_act gelu is not supported"),
)
REFUSED = [
    *((name, changes, text) for name in DENSE for changes, text in EVERY_DENSE),
    (
        V3,
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "type linear is not supported; only default, yarn",
    ),
    (QWEN2, {"use_sliding_window": True}, "use_sliding_window is not supported"),
    (QWEN3, {"use_sliding_window": True}, "use_sliding_window is not supported"),
    (QWEN3, {"attention_bias": True}, "attention_bias is not supported"),
    (LLAMA, {"attention_bias": True}, "attention_bias is not supported"),
    (LLAMA, {"mlp_bias": True}, "mlp_bias is not supported"),
    (MISTRAL, {"sliding_window": 4096}, "sliding_window 4096 is not supported"),
    ("MixtralForCausalLM", {"sliding_window": 64}, "sliding_window 64 is not supported"),
    ("Qwen3MoeForCausalLM", {"mlp_only_layers": [0, 1]}, "without a layer of experts is not supported"),
    (V3, {"num_experts_per_tok": 6}, "two best experts"),
    (V3, {"norm_topk_prob": False}, "norm_topk_prob false is not supported"),
    (V3, {"scoring_func": "softmax"}, "scoring_func sigmoid"),
    (V3, {"topk_method": "greedy"}, "topk_method noaux_tc"),
    (V3, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "lacks .*mscale"),
    (V3, {"rope_interleave": False}, "rope_interleave false is not supported"),
    (V3, {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
    (GLM, {"norm_topk_prob": False}, "norm_topk_prob false is not supported"),
    (GLM, {"n_group": 2, "topk_group": 2}, "two best experts"),
    (GLM, {"hidden_act": "gelu"}, "hidden_act gelu is not supported"),
    (GLM, {"first_k_dense_replace": 2}, "without a layer of experts is not supported"),
    (GLM, {"partial_rotary_factor": None, "rope_parameters": None}, "requires partial_rotary_factor"),
    (GLM_LITE, {"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types .*'dense'. is not supported"),
    (GLM_LITE, {"attention_bias": True}, "attention_bias is not supported"),
    (GEMMA, {"hidden_activation": "gelu"}, "hidden_activation gelu is not supported"),
    (GEMMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supported"),
    (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
    (GEMMA, {"layer_types": ["chunked_attention"] * 4}, "chunked_attention in layer_types"),
    (GEMMA, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "type yarn is not supported"),
    (MINIMAX, {"scoring_func": "softmax"}, "scoring_func softmax is not supported; only sigmoid"),
    (MINIMAX, {"shared_intermediate_size": 64}, "shared_intermediate_size 64 is not supported"),
    (MINIMAX, {"attn_type_list": [0, 1]}, "attn_type_list .0, 1. is not supported"),
    (
        MINIMAX,
        {"rotary_dim": None, "rope_parameters": None, "partial_rotary_factor": None},
        "requires partial_rotary_factor",
    ),
    (NEXT, {"layer_types": ["sliding_attention"] * 4}, "sliding_attention in layer_types"),
    (NEXT, {"linear_num_value_heads": 3}, "linear_num_value_heads 3 is not supported: it must be a multiple"),
    (NEXT, {"mlp_only_layers": [0, 1, 2, 3]}, "without a layer of experts is not supported"),
    (NEXT, {"tie_word_embeddings": True}, "tie_word_embeddings is not supported: vLLM reads a head"),
    (QWEN35, {"layer_types": ["sliding_attention"] * 4}, "sliding_attention in layer_types"),
    (QWEN35_MOE, {"attn_output_gate": False}, "attn_output_gate False is not supported; only True"),
    (NEXT, {"attention_bias": True}, "attention_bias is not supported"),
    (OSS, {"swiglu_limit": 5.0}, "swiglu_limit 5.0 is not supported: vLLM computes only 7.0"),
    (OSS, {"sliding_window": None}, "sliding_window None is not supported"),
    (OSS, {"attention_bias": False}, "attention_bias False is not supported"),
    (OSS, {"layer_types": ["full_attention"] * 3}, "layer_types .*'full_attention'. is not supported"),
    (OSS, {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "lacks beta_fast in its rope_scaling"),
    (OSS, {"rope_parameters": {"rope_type": "default"}}, "type default is not supported; only yarn"),
    (OSS, {"quantization_config": {"quant_method": "quark"}}, "quant_method quark is not supported"),
    (GRANITE4, {"layer_types": ["mamba", "attention"]}, "layers of type mamba is not supported"),
    (GRANITE4, {"num_local_experts": 64}, "num_local_experts 64 is not supported; only 0 is"),
    (GRANITE4, {"position_embedding_type": "nope"}, "position_embedding_type nope is not supported"),
    (PHI, {"rope_scaling": {"type": "longrope"}}, "type longrope is not supported; only default"),
    (PHI, {"sliding_window": 2047}, "sliding_window 2047 is not supported"),
    (PHI, {"rope_parameters": None, "partial_rotary_factor": 0.75}, "partial_rotary_factor 0.75 is not"),
    (GRANITE, {"logits_scaling": 0}, "logits_scaling 0 is not supported; it must be positive"),
    (GRANITE, {"mlp_bias": True}, "mlp_bias is not supported"),
    (SEED, {"attention_out_bias": True}, "attention_out_bias is not supported"),
    (SMOL, {"use_sliding_window": True}, "use_sliding_window is not supported"),
    (V2, {"topk_method": "group_limited_greedy"}, "topk_method group_limited_greedy is not supported"),
    (V2, {"norm_topk_prob": True}, "norm_topk_prob false"),
    (V2, {"attention_bias": True}, "attention_bias is not supported"),
]
"""(architecture, changed keys, part of the error)."""


def test_unsupported_options_are_refused_by_name():
    for name, changes, text in REFUSED:
        hf = config(name) | changes
        with pytest.raises(ValueError, match=text) as caught:
            architecture(hf).check(hf)
        family = {V3: "DeepSeek-V3", V2: "DeepSeek-V2", "Qwen3MoeForCausalLM": "Qwen3-MoE"}
        family |= {
            GLM: "GLM-4.5",
            GLM_LITE: "GLM-4.7-Flash",
            GEMMA: "Gemma 3",
            PHI: "Phi-4",
            SEED: "Seed",
            GRANITE4: "Granite 4",
            OSS: "gpt-oss",
            MINIMAX: "MiniMax-M2",
            NEXT: "Qwen3-Next",
            QWEN35: "Qwen3.5",
            QWEN35_MOE: "Qwen3.5",
        }
        assert str(caught.value).startswith(family.get(name, name.removesuffix("ForCausalLM")))


def test_a_refusal_names_the_class_if_it_may_train():
    for hf, has_class in (
        (config(MISTRAL, sliding_window=4096), True),
        (config(PHI) | {"rope_scaling": {"type": "longrope"}}, False),
        (published("qwen3-vl-30b-a3b") | {"norm_topk_prob": False}, False),
    ):
        with pytest.raises(ValueError, match="is not supported") as caught:
            check_options(hf)
        assert str(caught.value).endswith("training.backend=transformers.") == has_class


def test_mistral_without_the_key_has_a_window():
    hf = {key: value for key, value in config(MISTRAL).items() if key != "sliding_window"}
    assert transformers.MistralConfig().sliding_window == 4096
    with pytest.raises(ValueError, match="sliding_window 4096"):
        architecture(hf).check(hf)
