"""GLM-4.5, 4.6 and 4.7: a part of each head rotated, and DeepSeek-V3's mixtures after dense first layers.

The large models have norms of queries and keys (`use_qk_norm`), GLM-4.5-Air has none. The layers for
multi-token prediction at the end of the checkpoints are neither trained nor served nor exported.
"""

from rl.models import dense, experts
from rl.models.layout import Weight

ARCHITECTURES = ("Glm4MoeForCausalLM",)


def megatron_config(hf: dict) -> dict:
    """Return the fields of Megatron's TransformerConfig that follow from the Hugging Face config."""
    mixture = experts.sigmoid_fields(hf, first_dense=_first_dense(hf))
    own = dict(qk_layernorm=hf.get("use_qk_norm", False), add_qkv_bias=hf.get("attention_bias", False))
    return dense.megatron_config(hf) | mixture | own


def _first_dense(hf: dict) -> int:
    return hf.get("first_k_dense_replace", 1)


def check(hf: dict) -> None:
    """Raise ValueError for a config with an unsupported option."""
    dense.check_decoder(hf, "GLM-4.5", partial=True)
    experts.check_sigmoid(hf, "GLM-4.5")
    if not any(experts.after_dense(hf, _first_dense(hf))):
        raise ValueError("GLM-4.5 without a layer of experts is not supported.")


def weights(hf: dict) -> list[Weight]:
    """Return every parameter and the routers' biases, in the order of the forward pass."""
    norms, biases = hf.get("use_qk_norm", False), hf.get("attention_bias", False)
    out = [dense.embedding(hf)]
    for layer, is_moe in enumerate(experts.after_dense(hf, _first_dense(hf))):
        norm, *mlp = dense.mlp(hf, layer)
        out += [*dense.attention(hf, layer, qkv_bias=biases, qk_norm=norms), norm]
        out += experts.mixture(hf, layer, biased=True) if is_moe else mlp
    return [*out, *dense.head(hf)]
