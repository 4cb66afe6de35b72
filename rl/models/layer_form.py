"""Properties of a model's layers that Megatron's config cannot express, as plain data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerForm:
    """Changes of layers, which `rl.training.layer_form` makes; the defaults change nothing."""

    embedding_scale: float = 1.0
    """Factor of the token embeddings, rounded to the model's dtype. A tied head is not multiplied."""
    output_scale: float = 1.0
    """Factor of the outputs of attention and MLP before the residual sum."""
    logits_scale: float = 1.0
    """Factor of the logits."""
    post_norms: bool = False
    """Whether the outputs of attention and MLP are normed before the residual sum."""
    norms_all_heads: bool = False
    """Whether an RMSNorm of queries and keys is over all heads of a token, not over each head."""
    activation: str = "silu"
    """Activation of the gate of an MLP: silu, gelu_tanh or quick_gelu."""
    rows_alternate: bool = False
    """Whether rows of gate and up alternate in the experts' weights; else gate is before up."""
    windowed: tuple[bool, ...] = ()
    """For each layer, whether it has the rotary embedding of layers with a window. (): all layers have the
    same rotary embedding."""
