"""Sizes that Hugging Face configs name in several ways."""

PREDICTING = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")
"""Keys of config.json for the number of layers for multi-token prediction."""

CPU_ROW_BYTES = 2 << 20
"""Bytes of a row's hidden states in float32 that suit the caches of a CPU. With larger rows an update of a
21M model takes a fifth more CPU time and 2.8 times the memory (docs/performance.md)."""


def cpu_row_tokens(hf: dict) -> int:
    """Return the preferred tokens of a micro-batch on a CPU. hf: the model's config.json."""
    return max(256, CPU_ROW_BYTES // (4 * int(hf["hidden_size"])))


def num_kv_heads(hf: dict) -> int:
    """Return the number of key/value heads.

    Configs older than grouped-query attention have no key for it.
    """
    return hf.get("num_key_value_heads") or hf["num_attention_heads"]


def head_dim(hf: dict) -> int:
    """Return the number of channels of one attention head."""
    return hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]


def is_tied(hf: dict) -> bool:
    """Return whether the embedding is also the head; for Gemma 3 and SmolLM3 this is the default."""
    default = {"Gemma3ForCausalLM", "SmolLM3ForCausalLM"}
    return hf.get("tie_word_embeddings", not default.isdisjoint(hf.get("architectures", ())))


def attention_widths(hf: dict) -> tuple[int, int]:
    """Return the numbers of channels (of queries or keys, of values), each summed over all query heads."""
    heads = hf["num_attention_heads"]
    if hf.get("kv_lora_rank"):
        return heads * (hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"]), heads * hf["v_head_dim"]
    return heads * head_dim(hf), heads * head_dim(hf)


def layer_kinds(hf: dict) -> list[str]:
    """Return for each layer of a model with gated delta nets linear_attention or full_attention."""
    every, layers = hf.get("full_attention_interval", 4), range(hf["num_hidden_layers"])
    kinds = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in layers]
    return hf.get("layer_types") or kinds


def has_delta_nets(hf: dict) -> bool:
    """Return whether layers have gated delta nets in place of attention."""
    return bool(hf.get("linear_num_value_heads"))


def attention_layers(hf: dict) -> int:
    """Return the number of layers with attention, which keep keys and values of every token."""
    return layer_kinds(hf).count("full_attention") if has_delta_nets(hf) else hf["num_hidden_layers"]


def num_experts(hf: dict) -> int:
    """Return the number of routed experts of a layer, by the key of each family; 0 for a dense model."""
    return next(
        (hf[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if hf.get(key)), 0
    )


def ffn_width(hf: dict) -> int:
    """Return the intermediate size of a dense layer, or of an expert if no layer is dense."""
    keys = ("shared_intermediate_size", "intermediate_size", "moe_intermediate_size")  # the first: Granite 4
    return next(hf[key] for key in keys if hf.get(key))


def expert_width(hf: dict) -> int:
    """Return the intermediate size of one routed expert."""
    return hf.get("moe_intermediate_size") or hf["intermediate_size"]


def has_expert_biases(hf: dict) -> bool:
    """Return whether the linear layers of the routed experts have biases."""
    return "GptOssForCausalLM" in hf["architectures"]


def num_deep_layers(hf: dict) -> int:
    """Return the number of first layers that add inner outputs of the vision tower to their hidden states."""
    return len(hf.get("vision_config", {}).get("deepstack_visual_indexes") or ())
