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
        num_query_groups=num_kv_heads(hf),
        kv_channels=head_dim(hf),
        layernorm_epsilon=hf["rms_norm_eps"],
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=True,
    )


def num_kv_heads(hf: dict) -> int:
    """Heads of keys and values; a config from before grouped-query attention does not name them."""
    return hf.get("num_key_value_heads") or hf["num_attention_heads"]


def head_dim(hf: dict) -> int:
    """Channels of one attention head."""
    return hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]


def check(hf: dict) -> None:
    """Raise ValueError for a config that asks for what is not built here."""
    rope = _rope(hf)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise ValueError(f"Qwen2 with rotary embeddings of type {kind} is not supported; only the default ones are.")
    if hf.get("use_sliding_window"):
        raise ValueError("Qwen2 with use_sliding_window is not supported; set it to false if the context is shorter anyway.")
    if hf.get("hidden_act", "silu") != "silu":
        raise ValueError(f"Qwen2 with hidden_act {hf['hidden_act']} is not supported; only silu is.")


def rope_theta(hf: dict) -> float:
    """Base of the rotary embedding."""
    return float(_rope(hf)["rope_theta"])


def _rope(hf: dict) -> dict:
    """Rotary parameters as transformers 5 reads them: `rope_scaling` of older configs wins over `rope_parameters`."""
    return {"rope_theta": hf.get("rope_theta", 10000.0)} | (hf.get("rope_scaling") or hf.get("rope_parameters") or {})


def weights(hf: dict) -> list[Weight]:
    """Every parameter, in the order of the forward pass."""
    hidden, ffn, vocab_size = hf["hidden_size"], hf["intermediate_size"], hf["vocab_size"]
    heads, kv_heads, dim = hf["num_attention_heads"], num_kv_heads(hf), head_dim(hf)
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
