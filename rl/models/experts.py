"""Parts common to mixtures of experts: weights of router and routed experts, fields of Megatron's config.

A routed expert is a SwiGLU MLP; a router picks `k` of the `E` experts per token. Shapes: `H` hidden, `F`
intermediate size of an expert.
"""

import functools

from rl.models.dense import in_layer, swiglu
from rl.models.layout import REPLICATED, Weight, expert_down, expert_gate_up
from rl.models.sizes import expert_width, num_experts


def megatron_fields(hf: dict, *, renormalise: bool, moe_layers: list[bool]) -> dict:
    """Return fields of Megatron's TransformerConfig for experts with a softmax router.

    renormalise: whether the k weights of a token sum to 1, as in Mixtral. The weights are then a softmax over
    the k largest logits. This equals the softmax over all logits, divided by its sum over these k logits.
    """
    return dict(
        num_moe_experts=num_experts(hf) or hf["num_experts"],  # KeyError names the absent key
        moe_router_topk=hf["num_experts_per_tok"],
        moe_ffn_hidden_size=expert_width(hf),
        moe_layer_freq=[int(is_moe) for is_moe in moe_layers],
        moe_router_pre_softmax=not renormalise,
        # 16-bit rounding can swap two experts of almost equal scores, which changes the function
        # discontinuously.
        moe_router_dtype="fp32",
        # The algorithm defines the whole loss; an auxiliary loss has another scale than a policy gradient.
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
    )


def sigmoid_fields(hf: dict, *, first_dense: int) -> dict:
    """Return Megatron's fields for DeepSeek-V3's mixture (arXiv:2412.19437, section 2.1.2).

    A router scores experts by a sigmoid. It chooses experts by their scores plus a bias per expert, and only
    from the best groups of experts. The first `first_dense` layers have no experts.
    """
    fields = megatron_fields(hf, renormalise=False, moe_layers=after_dense(hf, first_dense))
    fields |= dict(
        moe_router_score_function="sigmoid",  # Megatron divides a token's weights by their sum
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.0,
        moe_router_topk_scaling_factor=float(hf.get("routed_scaling_factor", 1.0)),
    )
    if (hf.get("n_group") or 1) > 1:
        fields |= dict(moe_router_num_groups=hf["n_group"], moe_router_group_topk=hf["topk_group"])
    return fields | shared_fields(hf)


def after_dense(hf: dict, first_dense: int) -> list[bool]:
    """Return for each layer whether it is a mixture: all but the first `first_dense`."""
    return [layer >= first_dense for layer in range(hf["num_hidden_layers"])]


def shared_fields(hf: dict) -> dict:
    """Return Megatron's field for the shared experts, which are one MLP of their total width."""
    width = (hf.get("n_shared_experts") or 0) * expert_width(hf)
    return dict(moe_shared_expert_intermediate_size=width) if width else {}


def check_sigmoid(hf: dict, family: str) -> None:
    """Raise ValueError, naming the family, for options of the mixture that Megatron lacks."""
    per_token, groups = hf["num_experts_per_tok"], hf.get("topk_group") or 1
    if not hf.get("norm_topk_prob", True):
        raise ValueError(
            f"{family} with norm_topk_prob false is not supported: Megatron always divides by the sum."
        )
    if hf.get("scoring_func", "sigmoid") != "sigmoid" or hf.get("topk_method", "noaux_tc") != "noaux_tc":
        raise ValueError(
            f"{family} is supported with scoring_func sigmoid and topk_method noaux_tc; other values are "
            "not supported."
        )
    if (hf.get("n_group") or 1) > 1 and per_token // groups != 2:
        raise ValueError(
            f"{family} with num_experts_per_tok {per_token} and topk_group {groups} is not supported: "
            "the model ranks a group by its two best experts, Megatron by its num_experts_per_tok // "
            "topk_group best."
        )


def mixture(hf: dict, layer: int, *, biased: bool) -> list[Weight]:
    """Return router, router bias [E] if `biased`, routed experts, and the shared experts as one MLP."""
    out = [router(hf, layer, "mlp")]
    if biased:
        name, shape = "mlp.gate.e_score_correction_bias", (num_experts(hf),)
        out.append(
            in_layer(layer, name, "mlp.router.expert_bias", REPLICATED, shape, suffix="", float32=True)
        )
    out += routed(hf, layer, "mlp")
    if width := shared_fields(hf).get("moe_shared_expert_intermediate_size"):
        out += swiglu(layer, "mlp.shared_experts", hf["hidden_size"], width)
    return out


def router(hf: dict, layer: int, block: str) -> Weight:
    """Return the router [E, H] of the MoE block that a checkpoint calls `block`, e.g. "mlp"."""
    return in_layer(layer, f"{block}.gate", "mlp.router", REPLICATED, (num_experts(hf), hf["hidden_size"]))


def routed(
    hf: dict, layer: int, block: str, *, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> list[Weight]:
    """Return gate and up [F, H] and down [H, F] of each routed expert of one layer.

    gate, up, down: their names in the checkpoint.
    """
    hidden, ffn = hf["hidden_size"], expert_width(hf)
    megatron, vllm = "mlp.experts.local_experts.{expert}.", f"{block}.experts.routed_experts."
    out = []
    for expert in range(num_experts(hf)):
        weight, name = functools.partial(in_layer, layer, expert=expert), f"{block}.experts.{expert}."
        gate_up, rows, columns = f"{name}{gate} {name}{up}", (ffn, hidden), (hidden, ffn)
        w13, w2 = f"{vllm}w13_weight", f"{vllm}w2_weight"
        out += [
            weight(gate_up, f"{megatron}linear_fc1", expert_gate_up(expert), rows, rows, vllm=w13),
            weight(name + down, f"{megatron}linear_fc2", expert_down(expert), columns, vllm=w2),
        ]
    return out
