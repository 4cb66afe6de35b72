"""What mixtures of experts share: the routed experts' weights, the router's, and the fields of Megatron's config.

A routed expert is a SwiGLU MLP of its own; a router picks `k` of the `E` experts per token. Shapes: `H` hidden, `F` an
expert's intermediate size.
"""

from dataclasses import replace

from rl.models.dense import in_layer
from rl.models.layout import REPLICATED, Weight, expert_down, expert_gate_up


def megatron_fields(
    *, num_experts: int, per_token: int, ffn: int, renormalise: bool, moe_layers: list[bool]
) -> dict:
    """Fields of Megatron's TransformerConfig for experts behind a softmax router.

    renormalise: the k weights of a token sum to 1, as in Mixtral. A softmax over the k largest logits is the softmax over
    all of them divided by its sum over those k.
    """
    return dict(
        num_moe_experts=num_experts,
        moe_router_topk=per_token,
        moe_ffn_hidden_size=ffn,
        moe_layer_freq=[int(is_moe) for is_moe in moe_layers],
        moe_router_pre_softmax=not renormalise,
        # Two experts of almost equal scores change places under 16-bit rounding: another function, not a rounding error.
        moe_router_dtype="fp32",
        # The loss is the algorithm's alone: no auxiliary loss, whose scale is not that of a policy gradient.
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
    )


def routed(
    hf: dict, layer: int, *, block: str, num_experts: int, ffn: int, names: tuple[str, str, str]
) -> list[Weight]:
    """The router [E, H] and the experts' gate and up [F, H] and down [H, F] of one layer.

    block: name of the MoE block in a layer of the checkpoint, e.g. "mlp". names: those of gate, up and down in an expert.
    """
    hidden = hf["hidden_size"]
    router = f"{block}.gate.weight"
    out = [in_layer(layer, (router,), ((num_experts, hidden),), "mlp.router.weight", router, REPLICATED)]
    gate, up, down = names
    for expert in range(num_experts):
        prefix = f"{block}.experts.{expert}."
        local, stacked = "mlp.experts.local_experts.{expert}.", f"{block}.experts.routed_experts."
        both = [
            in_layer(
                layer,
                (f"{prefix}{gate}.weight", f"{prefix}{up}.weight"),
                ((ffn, hidden), (ffn, hidden)),
                local + "linear_fc1.weight",
                stacked + "w13_weight",
                expert_gate_up(expert),
            ),
            in_layer(
                layer,
                (f"{prefix}{down}.weight",),
                ((hidden, ffn),),
                local + "linear_fc2.weight",
                stacked + "w2_weight",
                expert_down(expert),
            ),
        ]
        out += [replace(weight, expert=expert) for weight in both]
    return out
