"""The head for multi-token prediction (MTP) after the last layer of a checkpoint (DeepSeek-V3, GLM-4.5).

From the last hidden state h at position t and the embedding of the token at t + 1, the head predicts the
token at t + 2 (arXiv:2412.19437, section 2.2):

    h' = layer(eh_proj([enorm(embedding of token t + 1), hnorm(h)])),  logits = lm_head(shared_head.norm(h'))

The embedding and `lm_head` are the policy's; the published files hold copies of both.
"""

from dataclasses import replace

from rl.models import architecture
from rl.models.dense import embedding, head
from rl.models.layout import REPLICATED, Weight
from rl.models.sizes import PREDICTING

HEADS = {
    "DeepseekV3ForCausalLM": "DeepSeekMTPModel",
    "Glm4MoeLiteForCausalLM": "Glm4MoeLiteMTPModel",
    "Glm4MoeForCausalLM": "Glm4MoeMTPModel",
}
"""Architecture with a supported head -> vLLM's name of the head."""


def check(hf: dict, *, key: str, path: str) -> None:
    """Raise ValueError if the checkpoint has no supported head. key: config key that requires a head."""
    name, count = hf["architectures"][0], max(hf.get(key) or 0 for key in PREDICTING)
    if name not in HEADS:
        raise ValueError(
            f"{key} requires a head for multi-token prediction, which is supported for {', '.join(HEADS)}, "
            f"not for {name} (model.path={path}); leave out {key}."
        )
    if count != 1:
        raise ValueError(
            f"{key} requires a checkpoint with one layer for multi-token prediction, but "
            f"num_nextn_predict_layers is {count} in config.json of model.path={path}; use the published "
            f"checkpoint, or leave out {key}."
        )


def weights(hf: dict) -> list[Weight]:
    """Return every weight of the head. In training and in generation it is on the last pipeline stage."""
    number, hidden = hf["num_hidden_layers"], hf["hidden_size"]
    prefix = f"model.layers.{number}."

    def own(name: str, megatron: str, *shape: int) -> Weight:
        name = f"{prefix}{name}.weight"
        return Weight((name,), (shape,), f"mtp.{megatron}.weight", name, REPLICATED)

    def in_block(weight: Weight) -> Weight:
        megatron = weight.megatron.replace("decoder.layers.{layer}", "mtp.layer")
        vllm = weight.vllm.replace(prefix, f"{prefix}mtp_block.")
        return replace(weight, layer=None, megatron=megatron, vllm=vllm)

    return [
        own("enorm", "enorm", hidden),
        own("hnorm", "hnorm", hidden),
        own("eh_proj", "eh_proj", hidden, 2 * hidden),
        *map(in_block, architecture(hf).layer(hf, number)),
        own("shared_head.norm", "norm", hidden),
    ]


def copies(hf: dict) -> list[Weight]:
    """Return embedding and head of the policy under the names that the head's copies have in the files."""
    prefix = f"model.layers.{hf['num_hidden_layers']}."
    *_, output = head(hf)
    named = ((embedding(hf), "embed_tokens"), (output, "shared_head.head"))
    return [replace(weight, hf=(f"{prefix}{name}.weight",)) for weight, name in named]
