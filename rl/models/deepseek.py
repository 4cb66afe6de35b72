"""DeepSeek-V2-Lite, V3 and R1: latent attention (MLA), dense first layers, shared and routed experts.

Kimi-K2 and Moonlight are DeepSeek-V3 without groups of experts; Moonlight also has no latent of the query.
GLM-4.7-Flash has the architecture of DeepSeek-V3 under its own name.

MLA (DeepSeek-V2, arXiv:2405.04434, section 2.1) projects keys and values through a latent of kv_lora_rank
channels; all heads share one rotary key. V3 (arXiv:2412.19437, section 2.1.2) scores experts by a sigmoid and
restricts the selection to the best groups of experts. Only for the selection, it adds a bias per expert to
the scores. Megatron holds this bias as a buffer without gradient. The bias keeps the checkpoint's values,
because an update by the balancing rule would change the policy outside the optimizer.

The layer for multi-token prediction at the end of V3's checkpoints is described by `rl.models.mtp`.
"""

from rl.models import dense, experts
from rl.models.dense import in_layer
from rl.models.layout import COLUMN, REPLICATED, ROW, Cut, Weight, rows_from
from rl.models.rope import rope_parameters, rope_theta

ARCHITECTURES = ("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM", "Glm4MoeLiteForCausalLM")
_FAMILIES = dict(zip(ARCHITECTURES, ("DeepSeek-V3", "DeepSeek-V2", "GLM-4.7-Flash")))


def megatron_config(hf: dict) -> dict:
    """Return the fields of Megatron's MLATransformerConfig that follow from the Hugging Face config."""
    fields = dense.megatron_config(hf) | _rope_fields(hf)
    fields |= dict(
        multi_latent_attention=True,
        q_lora_rank=hf.get("q_lora_rank"),
        kv_lora_rank=hf["kv_lora_rank"],
        qk_head_dim=hf["qk_nope_head_dim"],
        qk_pos_emb_head_dim=hf["qk_rope_head_dim"],
        v_head_dim=hf["v_head_dim"],
        kv_channels=hf["v_head_dim"],
        num_query_groups=hf["num_attention_heads"],
        qk_layernorm=True,  # the norms of the two latents
    )
    if _is_v3(hf):
        return fields | experts.sigmoid_fields(hf, first_dense=_first_dense(hf))
    fields |= experts.megatron_fields(hf, renormalise=False, moe_layers=moe_layers(hf))
    fields["moe_router_topk_scaling_factor"] = float(hf.get("routed_scaling_factor", 1.0))
    return fields | experts.shared_fields(hf)


def _is_v3(hf: dict) -> bool:
    return hf["architectures"][0] != "DeepseekV2ForCausalLM"


def _rope_fields(hf: dict) -> dict:
    """Return the fields of the rotary embedding.

    With YaRN, mscale and mscale_all_dim each give a factor. The ratio of the two factors scales cos and sin;
    the square of the second scales the softmax.
    """
    rope = rope_parameters(hf)
    if rope["rope_type"] != "yarn":
        return dict(
            rope_type="rope", rotary_base=rope_theta(hf), rotary_scaling_factor=1.0, mscale_all_dim=0.0
        )
    return dict(
        rope_type="yarn",
        rotary_base=rope_theta(hf),
        rotary_scaling_factor=float(rope["factor"]),
        original_max_position_embeddings=rope["original_max_position_embeddings"],
        beta_fast=float(rope.get("beta_fast", 32)),
        beta_slow=float(rope.get("beta_slow", 1)),
        mscale=float(rope["mscale"]),
        mscale_all_dim=float(rope["mscale_all_dim"]),
    )


def moe_layers(hf: dict) -> list[bool]:
    """Return for each layer whether it is a mixture: all but the first `first_k_dense_replace`."""
    return experts.after_dense(hf, _first_dense(hf))


def _first_dense(hf: dict) -> int:
    return hf.get("first_k_dense_replace", 0)


def check(hf: dict) -> None:
    """Raise ValueError for a config with an unsupported option."""
    family = _FAMILIES[hf["architectures"][0]]
    dense.check_decoder(hf, family, rope_kinds=("default", "yarn"))
    dense.refuse_biases(hf, family, "attention_bias", "mlp_bias")
    rope = rope_parameters(hf)
    if rope["rope_type"] == "yarn":
        needed = ("factor", "original_max_position_embeddings", "mscale", "mscale_all_dim")
        if absent := [key for key in needed if not rope.get(key)]:
            raise ValueError(
                f"{family} with rotary embeddings of type yarn lacks {', '.join(absent)} in its rope_scaling."
            )
    if not hf.get("rope_interleave", True):
        raise ValueError(
            f"{family} with rope_interleave false is not supported: its rotary channels have another order."
        )
    if given := [key for key in ("attention_factor", "truncate") if rope.get(key) is not None]:
        raise ValueError(f"{family} with {given[0]} in its rope_scaling is not supported; remove it.")
    if hf.get("moe_layer_freq", 1) != 1:
        raise ValueError(f"{family} with moe_layer_freq {hf['moe_layer_freq']} is not supported; only 1 is.")
    kinds = ["sparse" if is_moe else "dense" for is_moe in moe_layers(hf)]
    if hf.get("mlp_layer_types", kinds) != kinds:
        raise ValueError(
            f"{family} with mlp_layer_types {hf['mlp_layer_types']} is not supported: the dense layers must "
            f"be the first {_first_dense(hf)} (first_k_dense_replace)."
        )
    if not any(moe_layers(hf)):
        raise ValueError(f"{family} without a layer of experts is not supported.")
    if _is_v3(hf):
        experts.check_sigmoid(hf, family)
    else:
        _check_v2(hf)


def _check_v2(hf: dict) -> None:
    if hf.get("topk_method", "greedy") != "greedy":
        raise ValueError(
            f"DeepSeek-V2 with topk_method {hf['topk_method']} is not supported: the model ranks a group of "
            "experts by its best one, Megatron by the sum of several; use a model with topk_method greedy, "
            "such as DeepSeek-V2-Lite."
        )
    if hf.get("norm_topk_prob") or hf.get("scoring_func", "softmax") != "softmax":
        raise ValueError(
            "DeepSeek-V2 is supported with norm_topk_prob false and scoring_func softmax; other values are "
            "not supported."
        )


def weights(hf: dict) -> list[Weight]:
    """Return every parameter and the routers' biases, in the order of the forward pass."""
    layers = [weight for number in range(hf["num_hidden_layers"]) for weight in layer(hf, number)]
    return [dense.embedding(hf), *layers, *dense.head(hf)]


def layer(hf: dict, number: int) -> list[Weight]:
    """Return the weights of a layer."""
    norm, *mlp = dense.mlp(hf, number)
    is_moe = number >= _first_dense(hf)
    block = experts.mixture(hf, number, biased=_is_v3(hf)) if is_moe else mlp
    return [*_attention(hf, number), norm, *block]


def _attention(hf: dict, layer: int) -> list[Weight]:
    """Return the norm before the attention and MLA's projections.

    A tensor parallel rank holds whole heads. Every rank holds the projections down to the latents, which vLLM
    computes in one product.
    """
    hidden, heads, latent = hf["hidden_size"], hf["num_attention_heads"], hf["kv_lora_rank"]
    nope, rope, v = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"], hf["v_head_dim"]
    q_rank = hf.get("q_lora_rank")
    down: Cut = REPLICATED if q_rank is None else rows_from(q_rank)
    down_name = "kv_a_proj_with_mqa" if q_rank is None else "fused_qkv_a_proj"

    def weight(name: str, megatron: str, cut: Cut, *shape: int, vllm: str = "") -> Weight:
        return in_layer(
            layer,
            f"self_attn.{name}",
            f"self_attention.{megatron}",
            cut,
            shape,
            vllm=f"self_attn.{vllm or name}.weight",
        )

    out = [in_layer(layer, "input_layernorm", "input_layernorm", REPLICATED, (hidden,))]
    if q_rank is None:
        out.append(weight("q_proj", "linear_q_proj", COLUMN, heads * (nope + rope), hidden))
    else:
        out += [
            weight("q_a_proj", "linear_q_down_proj", rows_from(0), q_rank, hidden, vllm=down_name),
            weight("q_a_layernorm", "q_layernorm", REPLICATED, q_rank),
            weight("q_b_proj", "linear_q_up_proj", COLUMN, heads * (nope + rope), q_rank),
        ]
    return [
        *out,
        weight("kv_a_proj_with_mqa", "linear_kv_down_proj", down, latent + rope, hidden, vllm=down_name),
        weight("kv_a_layernorm", "kv_layernorm", REPLICATED, latent),
        weight("kv_b_proj", "linear_kv_up_proj", COLUMN, heads * (nope + v), latent),
        weight("o_proj", "linear_proj", ROW, hidden, heads * v),
    ]
