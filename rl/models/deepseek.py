"""DeepSeek-V2-Lite, V3 and R1: multi-head latent attention (MLA), dense first layers, then shared and routed experts.

MLA (DeepSeek-V2, arXiv:2405.04434, section 2.1) passes keys and values through a latent of `R` = kv_lora_rank channels; all
heads share one rotary key. V3 (arXiv:2412.19437, section 2.1.2) scores experts by a sigmoid, adds a bias per expert to the
scores for the choice alone, and limits the choice to the best groups of experts. The bias is no parameter of the gradient
but a buffer; here it keeps the checkpoint's values, since a step of the balancing rule changes what the policy computes
without the optimizer knowing.

The layers for multi-token prediction at the end of V3's checkpoints (`num_nextn_predict_layers`) are neither trained nor
served nor exported.
"""

from dataclasses import replace

from rl.models import dense, experts
from rl.models.dense import in_layer, rope_theta
from rl.models.layout import COLUMN, GATE_UP, REPLICATED, ROW, Weight, rows_from

ARCHITECTURES = ("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM")


def megatron_config(hf: dict) -> dict:
    """Fields of Megatron's MLATransformerConfig that follow from the Hugging Face config."""
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
    fields |= experts.megatron_fields(
        num_experts=hf["n_routed_experts"],
        per_token=hf["num_experts_per_tok"],
        ffn=hf["moe_intermediate_size"],
        renormalise=False,
        moe_layers=moe_layers(hf),
    )
    fields["moe_router_topk_scaling_factor"] = float(hf.get("routed_scaling_factor", 1.0))
    if hf.get("n_shared_experts"):
        fields["moe_shared_expert_intermediate_size"] = hf["n_shared_experts"] * hf["moe_intermediate_size"]
    if _is_v3(hf):
        fields |= dict(
            moe_router_score_function="sigmoid",  # Megatron divides a token's weights by their sum
            moe_router_enable_expert_bias=True,
            moe_router_bias_update_rate=0.0,
        )
        if (hf.get("n_group") or 1) > 1:
            fields |= dict(moe_router_num_groups=hf["n_group"], moe_router_group_topk=hf["topk_group"])
    return fields


def _is_v3(hf: dict) -> bool:
    return hf["architectures"][0] == "DeepseekV3ForCausalLM"


def _rope_fields(hf: dict) -> dict:
    """The rotary embedding; with YaRN both mscales reach the scores: their ratio scales cos and sin, the second squared the
    softmax."""
    rope = dense.rope_parameters(hf)
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
    """Which layers are mixtures: all but the first `first_k_dense_replace`."""
    return [layer >= hf.get("first_k_dense_replace", 0) for layer in range(hf["num_hidden_layers"])]


def check(hf: dict) -> None:
    """Raise ValueError for a config that asks for what is not built here."""
    family = "DeepSeek-V3" if _is_v3(hf) else "DeepSeek-V2"
    dense.check_decoder(hf, family, rope_kinds=("default", "yarn"))
    dense.refuse_biases(hf, family, "attention_bias", "mlp_bias")
    rope = dense.rope_parameters(hf)
    wanted = (
        ("factor", "original_max_position_embeddings", "mscale", "mscale_all_dim")
        if rope["rope_type"] == "yarn"
        else ()
    )
    if absent := [key for key in wanted if not rope.get(key)]:
        raise ValueError(
            f"{family} with rotary embeddings of type yarn lacks {', '.join(absent)} in its rope_scaling."
        )
    if not hf.get("rope_interleave", True):
        raise ValueError(
            f"{family} with rope_interleave false is not supported: its rotary channels lie in another order."
        )
    if given := [key for key in ("attention_factor", "truncate") if rope.get(key) is not None]:
        raise ValueError(f"{family} with {given[0]} in its rope_scaling is not supported; leave it out.")
    if hf.get("moe_layer_freq", 1) != 1:
        raise ValueError(f"{family} with moe_layer_freq {hf['moe_layer_freq']} is not supported; only 1 is.")
    if not any(moe_layers(hf)):
        raise ValueError(f"{family} without a layer of experts is not supported.")
    chosen, groups = hf["num_experts_per_tok"], hf.get("topk_group") or 1
    if _is_v3(hf):
        if not hf.get("norm_topk_prob", True):
            raise ValueError(
                "DeepSeek-V3 with norm_topk_prob false is not supported: Megatron always divides by the sum."
            )
        if hf.get("scoring_func", "sigmoid") != "sigmoid" or hf.get("topk_method", "noaux_tc") != "noaux_tc":
            raise ValueError(
                "DeepSeek-V3 with another scoring_func than sigmoid or topk_method than noaux_tc is not supported."
            )
        if (hf.get("n_group") or 1) > 1 and chosen // groups != 2:
            raise ValueError(
                f"DeepSeek-V3 with num_experts_per_tok {chosen} and topk_group {groups} is not supported: the model ranks a "
                "group by its two best experts, Megatron by its num_experts_per_tok // topk_group best."
            )
        return
    if hf.get("topk_method", "greedy") != "greedy":
        raise ValueError(
            f"DeepSeek-V2 with topk_method {hf['topk_method']} is not supported: the model ranks a group of experts by its best "
            "one, Megatron by the sum of several. DeepSeek-V2-Lite (greedy) is."
        )
    if hf.get("norm_topk_prob") or hf.get("scoring_func", "softmax") != "softmax":
        raise ValueError(
            "DeepSeek-V2 with norm_topk_prob or another scoring_func than softmax is not supported."
        )


def weights(hf: dict) -> list[Weight]:
    """Every parameter and the routers' biases, in the order of the forward pass."""
    out = [dense.embedding(hf)]
    for layer, is_moe in enumerate(moe_layers(hf)):
        norm, *mlp = dense.mlp(hf, layer)
        out += [*_attention(hf, layer), norm]
        out += _mixture(hf, layer) if is_moe else mlp
    return [*out, *dense.head(hf)]


def _attention(hf: dict, layer: int) -> list[Weight]:
    """The norm before the attention and MLA's projections. A tensor parallel rank has whole heads; the projections down to
    the latents are on every rank, and vLLM computes both in one."""
    hidden, heads, latent = hf["hidden_size"], hf["num_attention_heads"], hf["kv_lora_rank"]
    nope, rope, v = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"], hf["v_head_dim"]
    q_rank = hf.get("q_lora_rank")

    def weight(hf_name, shape, megatron, vllm, cut):
        return in_layer(layer, (f"{hf_name}.weight",), (shape,), f"{megatron}.weight", f"{vllm}.weight", cut)

    out = [weight("input_layernorm", (hidden,), "input_layernorm", "input_layernorm", REPLICATED)]
    ours, theirs = "self_attention.", "self_attn."
    kv_down, kv_down_cut = theirs + "kv_a_proj_with_mqa", REPLICATED
    if q_rank is None:
        out.append(
            weight(
                theirs + "q_proj",
                (heads * (nope + rope), hidden),
                ours + "linear_q_proj",
                theirs + "q_proj",
                COLUMN,
            )
        )
    else:
        kv_down, kv_down_cut = theirs + "fused_qkv_a_proj", rows_from(q_rank)
        q_norm = theirs + "q_a_layernorm"
        out += [
            weight(
                theirs + "q_a_proj",
                (q_rank, hidden),
                ours + "linear_q_down_proj",
                theirs + "fused_qkv_a_proj",
                rows_from(0),
            ),
            weight(q_norm, (q_rank,), ours + "q_layernorm", q_norm, REPLICATED),
            weight(
                theirs + "q_b_proj",
                (heads * (nope + rope), q_rank),
                ours + "linear_q_up_proj",
                theirs + "q_b_proj",
                COLUMN,
            ),
        ]
    kv_norm, kv_up = theirs + "kv_a_layernorm", theirs + "kv_b_proj"
    return [
        *out,
        weight(
            theirs + "kv_a_proj_with_mqa",
            (latent + rope, hidden),
            ours + "linear_kv_down_proj",
            kv_down,
            kv_down_cut,
        ),
        weight(kv_norm, (latent,), ours + "kv_layernorm", kv_norm, REPLICATED),
        weight(kv_up, (heads * (nope + v), latent), ours + "linear_kv_up_proj", kv_up, COLUMN),
        weight(theirs + "o_proj", (hidden, heads * v), ours + "linear_proj", theirs + "o_proj", ROW),
    ]


def _mixture(hf: dict, layer: int) -> list[Weight]:
    """The router and its bias [E], the routed experts, and the shared ones: one MLP of their widths together."""
    hidden, shared = hf["hidden_size"], hf["moe_intermediate_size"] * (hf.get("n_shared_experts") or 0)
    num_experts = hf["n_routed_experts"]
    router, *routed = experts.routed(
        hf,
        layer,
        block="mlp",
        num_experts=num_experts,
        ffn=hf["moe_intermediate_size"],
        names=("gate_proj", "up_proj", "down_proj"),
    )
    out = [router]
    if _is_v3(hf):
        name = "mlp.gate.e_score_correction_bias"
        bias = in_layer(layer, (name,), ((num_experts,),), "mlp.router.expert_bias", name, REPLICATED)
        out.append(replace(bias, float32=True))
    out += routed
    if shared:
        block = "mlp.shared_experts."
        out += [
            in_layer(
                layer,
                (f"{block}gate_proj.weight", f"{block}up_proj.weight"),
                ((shared, hidden), (shared, hidden)),
                f"{block}linear_fc1.weight",
                f"{block}gate_up_proj.weight",
                GATE_UP,
            ),
            in_layer(
                layer,
                (f"{block}down_proj.weight",),
                ((hidden, shared),),
                f"{block}linear_fc2.weight",
                f"{block}down_proj.weight",
                ROW,
            ),
        ]
    return out
