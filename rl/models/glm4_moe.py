"""GLM-4.5, 4.6 and 4.7: dense first layers, then layers with DeepSeek-V3's mixtures of experts.

Attention rotates only a part of each head's channels. The large models have norms of queries and keys
(`use_qk_norm`), GLM-4.5-Air has none. `rl.models.mtp` describes the layer for multi-token prediction at the
end of the checkpoints.
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
    layers = [weight for number in range(hf["num_hidden_layers"]) for weight in layer(hf, number)]
    return [dense.embedding(hf), *layers, *dense.head(hf)]


def layer(hf: dict, number: int) -> list[Weight]:
    """Return the weights of a layer."""
    norms, biases = hf.get("use_qk_norm", False), hf.get("attention_bias", False)
    norm, *mlp = dense.mlp(hf, number)
    block = experts.mixture(hf, number, biased=True) if number >= _first_dense(hf) else mlp
    return [*dense.attention(hf, number, qkv_bias=biases, qk_norm=norms), norm, *block]
