"""Qwen2 and Qwen2.5: dense decoder, grouped-query attention with biases on query, key and value, RMSNorm, SwiGLU."""

from rl.models.layout import GATE_UP, REPLICATED, ROW, VOCAB, Weight, qkv

ARCHITECTURES = ("Qwen2ForCausalLM",)


def megatron_config(hf: dict) -> dict:
    """Fields of Megatron's TransformerConfig that follow from the Hugging Face config."""
    return dict(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=head_dim(hf),
        layernorm_epsilon=hf["rms_norm_eps"],
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=True,
    )


def head_dim(hf: dict) -> int:
    """Channels of one attention head."""
    return hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]


def rope_theta(hf: dict) -> float:
    """Base of the rotary embedding; transformers 5 moved it into `rope_parameters`."""
    parameters = hf.get("rope_parameters") or {}
    kind = parameters.get("rope_type", "default")
    if kind != "default" or hf.get("rope_scaling"):
        raise ValueError(f"Qwen2 with scaled rotary embeddings ({kind}) is not supported; use a config without rope scaling.")
    return float(parameters.get("rope_theta") or hf["rope_theta"])


def weights(hf: dict) -> list[Weight]:
    """Every parameter, in the order of the forward pass."""
    hidden, ffn, vocab_size = hf["hidden_size"], hf["intermediate_size"], hf["vocab_size"]
    heads, kv_heads, dim = hf["num_attention_heads"], hf["num_key_value_heads"], head_dim(hf)
    tied = hf.get("tie_word_embeddings", False)
    embedding = ((vocab_size, hidden),)
    out = [
        Weight(
            ("model.embed_tokens.weight",), embedding, "embedding.word_embeddings.weight", "model.embed_tokens.weight",
            VOCAB, first_stage=True, tied_to_head=tied,
        )
    ]  # fmt: skip
    for layer in range(hf["num_hidden_layers"]):
        out += _layer(layer, hidden, ffn, heads, kv_heads, dim)
    out.append(
        Weight(("model.norm.weight",), ((hidden,),), "decoder.final_layernorm.weight", "model.norm.weight", REPLICATED)
    )
    if not tied:
        out.append(Weight(("lm_head.weight",), embedding, "output_layer.weight", "lm_head.weight", VOCAB))
    return out


def _layer(layer: int, hidden: int, ffn: int, heads: int, kv_heads: int, dim: int) -> list[Weight]:
    prefix = f"model.layers.{layer}."

    def weight(hf_names, shapes, megatron, vllm, cut):
        names = tuple(prefix + name for name in hf_names)
        return Weight(names, shapes, "decoder.layers.{layer}." + megatron, prefix + vllm, cut, layer)

    q, kv = heads * dim, kv_heads * dim
    projections = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    attention = qkv(heads, kv_heads, dim)
    return [
        weight(("input_layernorm.weight",), ((hidden,),), "input_layernorm.weight", "input_layernorm.weight", REPLICATED),
        weight(
            tuple(f"{p}.weight" for p in projections), ((q, hidden), (kv, hidden), (kv, hidden)),
            "self_attention.linear_qkv.weight", "self_attn.qkv_proj.weight", attention,
        ),
        weight(
            tuple(f"{p}.bias" for p in projections), ((q,), (kv,), (kv,)),
            "self_attention.linear_qkv.bias", "self_attn.qkv_proj.bias", attention,
        ),
        weight(
            ("self_attn.o_proj.weight",), ((hidden, q),),
            "self_attention.linear_proj.weight", "self_attn.o_proj.weight", ROW,
        ),
        weight(
            ("post_attention_layernorm.weight",), ((hidden,),),
            "pre_mlp_layernorm.weight", "post_attention_layernorm.weight", REPLICATED,
        ),
        weight(
            ("mlp.gate_proj.weight", "mlp.up_proj.weight"), ((ffn, hidden), (ffn, hidden)),
            "mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", GATE_UP,
        ),
        weight(("mlp.down_proj.weight",), ((hidden, ffn),), "mlp.linear_fc2.weight", "mlp.down_proj.weight", ROW),
    ]  # fmt: skip
