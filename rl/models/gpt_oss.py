"""gpt-oss: attention with sinks, every other layer with a window; experts with biases and a clamped SwiGLU.

A head's sink is a learned logit that enters the softmax's denominator but adds no value. The rows of an
expert's gate and up alternate. Checkpoints hold the experts of a layer in one tensor: bfloat16 with rows and
columns exchanged (Transformers writes it), or MXFP4 (as published), which is dequantised when it is read.
Exports are bfloat16.
"""

from dataclasses import replace

from rl.models import dense, experts
from rl.models.dense import in_layer
from rl.models.layer_form import LayerForm
from rl.models.layout import COLUMN, REPLICATED, Stored, Weight, expert_down, expert_down_bias, expert_gate_up
from rl.models.rope import rope_parameters
from rl.models.sizes import num_experts

ARCHITECTURES = ("GptOssForCausalLM",)
FIXED = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "attention_bias": True}
"""Key of config.json -> the only value that vLLM computes, with or without the key."""


def megatron_config(hf: dict) -> dict:
    """Return the fields of Megatron's TransformerConfig that follow from the Hugging Face config."""
    mixture = experts.megatron_fields(hf, renormalise=True, moe_layers=[True] * hf["num_hidden_layers"])
    return (
        dense.megatron_config(hf)
        | mixture
        | dict(
            add_bias_linear=True,
            softmax_type="learnable",
            window_size=(hf["sliding_window"] - 1, 0),
            window_attn_skip_freq=[int(kind == "sliding_attention") for kind in layer_types(hf)],
            activation_func_clamp_value=FIXED["swiglu_limit"],
            glu_linear_offset=1.0,
        )
    )


def form(hf: dict) -> LayerForm:
    """Return what sets the layers apart from Megatron's."""
    return LayerForm(activation="quick_gelu", rows_alternate=True)


def layer_types(hf: dict) -> list[str]:
    """Return sliding_attention or full_attention for each layer: they alternate."""
    return [("sliding_attention", "full_attention")[layer % 2] for layer in range(hf["num_hidden_layers"])]


def check(hf: dict) -> None:
    """Raise ValueError for a config with an unsupported option."""
    dense.check_decoder(hf, "gpt-oss", rope_kinds=("yarn",))
    for key, value in FIXED.items():
        if hf.get(key, value) != value:
            raise ValueError(f"gpt-oss with {key} {hf[key]} is not supported: vLLM computes only {value}.")
    if hf.get("layer_types", layer_types(hf)) != layer_types(hf):
        raise ValueError(
            f"gpt-oss with layer_types {hf['layer_types']} is not supported: in vLLM layers with and without "
            "a window alternate, beginning with one."
        )
    if not hf["sliding_window"]:
        raise ValueError(
            f"gpt-oss with sliding_window {hf['sliding_window']} is not supported; give a number."
        )
    rope = rope_parameters(hf)
    if absent := [key for key in ("beta_fast", "beta_slow") if rope.get(key) is None]:
        raise ValueError(f"gpt-oss lacks {absent[0]} in its rope_scaling, which vLLM requires.")
    if given := [key for key in ("attention_factor", "mscale") if rope.get(key) is not None]:
        raise ValueError(f"gpt-oss with {given[0]} in its rope_scaling is not supported; remove it.")
    if (kind := (hf.get("quantization_config") or {}).get("quant_method", "mxfp4")) != "mxfp4":
        raise ValueError(f"gpt-oss with quant_method {kind} is not supported; use mxfp4 or bfloat16 files.")


def weights(hf: dict) -> list[Weight]:
    """Return every parameter, in the order of the forward pass.

    The weights of a layer's experts are ordered by kind: for example, all gates and ups before all downs.
    """
    out = [replace(dense.embedding(hf), vllm="model.embedding.weight")]
    for layer in range(hf["num_hidden_layers"]):
        norm, *_ = dense.mlp(hf, layer)
        out += [*_attention(hf, layer), norm, *_mixture(hf, layer)]
    return [*out, *dense.head(hf)]


def _attention(hf: dict, layer: int) -> list[Weight]:
    heads, hidden = hf["num_attention_heads"], hf["hidden_size"]
    proj, core = "self_attention.linear_proj", "self_attention.core_attention.softmax_offset"
    both = [
        *dense.attention(hf, layer, qkv_bias=True),
        in_layer(layer, "self_attn.o_proj", proj, REPLICATED, (hidden,), suffix=".bias"),
        in_layer(layer, "self_attn.sinks", core, COLUMN, (heads,), suffix=""),
    ]
    return [replace(weight, vllm=weight.vllm.replace(".self_attn.", ".attn.")) for weight in both]


def _mixture(hf: dict, layer: int) -> list[Weight]:
    """Return router and experts: gate and up [2F, H], alternating, down [H, F], and their biases."""
    hidden, ffn, count = hf["hidden_size"], hf["intermediate_size"], num_experts(hf)
    out = [
        in_layer(layer, "mlp.router", "mlp.router", REPLICATED, (count, hidden)),
        in_layer(layer, "mlp.router", "mlp.router", REPLICATED, (count,), suffix=".bias"),
    ]
    for kind, linear, w, cut, shape in (
        ("gate_up_proj", "linear_fc1.weight", "w13_weight", expert_gate_up, (2 * ffn, hidden)),
        ("gate_up_proj_bias", "linear_fc1.bias", "w13_bias", expert_gate_up, (2 * ffn,)),
        ("down_proj", "linear_fc2.weight", "w2_weight", expert_down, (hidden, ffn)),
        ("down_proj_bias", "linear_fc2.bias", "w2_bias", expert_down_bias, (hidden,)),
    ):
        name = f"model.layers.{layer}.mlp.experts.{kind}"
        for expert in range(count):
            weight = in_layer(
                layer,
                f"mlp.experts.{expert}.{kind}",
                f"mlp.experts.local_experts.{{expert}}.{linear}",
                cut(expert),
                shape,
                suffix="",
                vllm=f"mlp.experts.routed_experts.{w}",
                expert=expert,
            )
            out.append(replace(weight, stored=Stored(name, expert, count, transposed=len(shape) == 2)))
    return out
