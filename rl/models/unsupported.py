"""Features that an architecture without a file here would need, according to its config.json."""

from typing import Any

NEEDS = {
    "index_topk": "sparse attention whose keys an indexer chooses",
    "linear_num_value_heads": "gated delta nets in this class",
    "linear_attn_config": "linear attention in some layers",
    "hybrid_override_pattern": "Mamba layers",
    "ssm_state_size": "Mamba layers",
    "mamba_d_state": "Mamba layers",
    "state_size": "Mamba layers",
    "conv_L_cache": "convolutions in place of attention in some layers",
    "attention_chunk_size": "attention within chunks",
    "attn_logit_softcapping": "attention with capped scores",
    "final_logit_softcapping": "capped logits",
    "altup_num_inputs": "several streams of activations",
    "zero_expert_num": "experts that return their input",
    "shared_expert_intermediate_size": "a shared expert with a gate in this class",
    "attn_type_list": "linear attention in some layers",
    "audio_config": "an encoder of sound",
    "vision_config": "an encoder of images other than those of docs/vision.md",
    "sliding_window": "attention with a window in this class",
}
"""Key of config.json, or of its text_config -> what the model needs if the value is not empty."""


def needed(hf: dict[str, Any]) -> str:
    """Return a clause on the first key of `NEEDS` in a config, its value and its need.

    Returns "" if the config names no architecture.
    """
    if not hf.get("architectures"):
        return ""
    for key, need in NEEDS.items():
        for prefix, tree in (("", hf), ("text_config.", hf.get("text_config") or {})):
            value = tree.get(key)
            if value:
                kind = value.get("model_type", "...") if isinstance(value, dict) else value
                return f", whose {prefix}{key}={str(kind)[:40]} needs {need} (not built)"
    return ", which needs a file of its own in rl/models (docs/extending.md)"
