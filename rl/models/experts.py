"""Parts common to mixtures of experts: weights of router and routed experts, fields of Megatron's config.

A routed expert is a SwiGLU MLP; a router picks `k` of the `E` experts per token. Shapes: `H` hidden, `F`
intermediate size of an expert.
"""

import functools

from rl.models.dense import in_layer
from rl.models.layout import REPLICATED, Weight, expert_down, expert_gate_up
from rl.models.sizes import expert_width, num_experts


def megatron_fields(hf: dict, *, renormalise: bool, moe_layers: list[bool]) -> dict:
    """Return fields of Megatron's TransformerConfig for experts with a softmax router.

    renormalise: whether the k weights of a token sum to 1, as in Mixtral. They are then a softmax over the k
    largest logits, which equals the softmax over all logits divided by its sum over those k.
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
