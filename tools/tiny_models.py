"""Tiny random Hugging Face checkpoints of every architecture, for tests and tools/gpu_acceptance.py.

Biases, norms and routers' biases are random too, so that a wrong layout changes results.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tools.make_image_toy import PREPROCESSOR, build_image_tokenizer, image_tokens
from tools.make_toy import build_tokenizer

SIZES: dict[str, Any] = dict(
    hidden_size=128,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.1,
)
"""Heads of 32 channels: vLLM's CPU attention requires a multiple of 32."""
SPECIAL = dict(bos_token_id=2, eos_token_id=1, pad_token_id=0)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
"""Llama 3.1's scaling. The context is so short that tests cover kept, mixed and scaled frequencies."""
LATENTS = dict(
    num_key_value_heads=4,
    kv_lora_rank=512,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=8,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
)
"""vLLM's attention over latents requires kv_lora_rank + qk_rope_head_dim = 576 on CPU, and on Hopper one of a
few combinations of the three widths of a head; this one is the smallest."""
_YARN: dict[str, Any] = dict(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0
)
YARN = dict(rope_theta=10000.0, mscale=1.0, mscale_all_dim=1.0, **_YARN)
GPT_OSS_ROPE = dict(rope_theta=150000.0, truncate=False, **_YARN)
LAYER_TYPES = ["sliding_attention", "full_attention"]
GEMMA3 = dict(
    head_dim=64,
    query_pre_attn_scalar=48,
    num_hidden_layers=4,
    sliding_window=12,  # shorter than the sequences of tests
    layer_types=2 * LAYER_TYPES,
    rope_parameters=dict(
        sliding_attention=dict(rope_type="default", rope_theta=100.0),
        full_attention=dict(rope_type="linear", rope_theta=10000.0, factor=8.0),
    ),
)
GRANITE = dict(
    embedding_multiplier=12.0,
    attention_multiplier=0.125,
    residual_multiplier=0.22,
    logits_scaling=8.0,
    initializer_range=0.2,
)
DELTA_NETS = dict(
    head_dim=64,
    num_hidden_layers=4,
    full_attention_interval=2,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=32,
    linear_value_head_dim=32,  # vLLM's kernels on a GPU compile only for keys and values of one size
)
GATED_EXPERT = dict(
    num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48, shared_expert_intermediate_size=64
)
PARTICULAR: dict[str, dict] = {
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": dict(head_dim=64),  # differs from hidden / heads
    "LlamaForCausalLM": dict(rope_parameters=LLAMA3_ROPE),
    "MistralForCausalLM": dict(head_dim=64, sliding_window=None, num_hidden_layers=3),  # PP 2 splits unevenly
    # A dense first layer, an intermediate size for experts, a head_dim other than hidden / heads.
    "Qwen3MoeForCausalLM": dict(
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        mlp_only_layers=[0],
        norm_topk_prob=True,
    ),
    "MixtralForCausalLM": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "DeepseekV3ForCausalLM": LATENTS
    | dict(
        q_lora_rank=48,
        n_shared_experts=1,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        rope_parameters=YARN,
        num_hidden_layers=3,
        first_k_dense_replace=2,  # PP 2: 2 dense and 1
    ),
    "DeepseekV2ForCausalLM": LATENTS
    | dict(
        q_lora_rank=None,
        n_shared_experts=2,
        num_experts_per_tok=3,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
    ),
    "SeedOssForCausalLM": dict(head_dim=64, attention_dropout=0.0, residual_dropout=0.0),
    "SmolLM3ForCausalLM": dict(num_hidden_layers=3, no_rope_layer_interval=2),
    "GraniteForCausalLM": GRANITE,
    "GraniteMoeHybridForCausalLM": GRANITE
    | dict(
        layer_types=["full_attention", "full_attention"],
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=96,
        position_embedding_type="rope",
        time_step_limit=None,
    ),
    "Gemma3ForCausalLM": GEMMA3,
    "Phi3ForCausalLM": {},
    "MiniMaxM2ForCausalLM": dict(head_dim=64, rotary_dim=32, num_local_experts=8, num_experts_per_tok=3),
    "Qwen3NextForCausalLM": DELTA_NETS | GATED_EXPERT,
    "Qwen3_5ForCausalLM": DELTA_NETS,
    "Qwen3_5MoeForCausalLM": DELTA_NETS | GATED_EXPERT,
    "GptOssForCausalLM": dict(
        head_dim=64,
        intermediate_size=128,  # vLLM on CPU requires a multiple of 32 per rank
        num_local_experts=8,
        num_experts_per_tok=3,
        num_hidden_layers=3,
        sliding_window=12,
        rope_parameters=GPT_OSS_ROPE,
    ),
    "Glm4MoeLiteForCausalLM": LATENTS
    | dict(
        q_lora_rank=48,
        n_shared_experts=1,
        num_experts_per_tok=3,
        routed_scaling_factor=1.8,
        rms_norm_eps=1e-6,  # docs/models.md, note 4
    ),
    "Glm4MoeForCausalLM": dict(
        head_dim=64,
        partial_rotary_factor=0.5,
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
    ),
}
"""Architecture -> keys of its tiny config in addition to SIZES."""
CONFIGS = {"Gemma3": "Gemma3TextConfig", "Qwen3_5": "Qwen3_5TextConfig", "Qwen3_5Moe": "Qwen3_5MoeTextConfig"}
"""Model -> class of its config if the class is not named after the model."""
PUBLISHED = {
    "DeepseekV3ForCausalLM": dict(topk_method="noaux_tc", scoring_func="sigmoid"),
    "MiniMaxM2ForCausalLM": dict(scoring_func="sigmoid", use_routing_bias=True, rotary_dim=32),
    "Glm4MoeLiteForCausalLM": dict(topk_method="noaux_tc", first_k_dense_replace=1),
    "NemotronHForCausalLM": dict(num_hidden_layers=3),
}
"""Keys of published configs that transformers 5 omits and vLLM reads, for example topk_method."""
TOWER = dict(depth=2, hidden_size=64, intermediate_size=96, num_heads=2, out_hidden_size=SIZES["hidden_size"])
DEEP_TEXT = dict(
    head_dim=64,
    num_hidden_layers=4,
    rope_parameters=dict(
        rope_type="default", rope_theta=1e4, mrope_section=[12, 10, 10], mrope_interleaved=True
    ),
)
PLAIN_TOWER = TOWER | dict(
    patch_size=14,
    num_position_embeddings=9,  # a grid of 3 x 3, the images' embeddings are interpolated from it
)
DEEP_TOWER = PLAIN_TOWER | dict(deepstack_visual_indexes=[0, 1])
QUARTER = dict(
    rope_parameters=dict(
        rope_type="default",
        rope_theta=1e4,
        partial_rotary_factor=0.25,
        mrope_section=[4, 2, 2],
        mrope_interleaved=True,
    )
)
VISION: dict[str, tuple[dict, dict]] = {
    "Qwen2_5_VLForConditionalGeneration": (
        dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 6, 6])),
        TOWER | dict(window_size=56, fullatt_block_indexes=[1]),
    ),
    "Qwen3VLForConditionalGeneration": (DEEP_TEXT, DEEP_TOWER),
    "Qwen3VLMoeForConditionalGeneration": (
        DEEP_TEXT
        | dict(
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            mlp_only_layers=[0],
            norm_topk_prob=True,  # transformers assumes it, vLLM reads it
        ),
        DEEP_TOWER,
    ),
    "Qwen3_5ForConditionalGeneration": (DELTA_NETS | QUARTER, PLAIN_TOWER),
    "Qwen3_5MoeForConditionalGeneration": (DELTA_NETS | GATED_EXPERT | QUARTER, PLAIN_TOWER),
}
"""Architecture with a vision tower -> keys of its tiny text and vision configs in addition to SIZES."""


BY_CLASS: dict[str, dict] = {
    "Gemma2ForCausalLM": dict(
        head_dim=64,
        query_pre_attn_scalar=48,
        sliding_window=12,  # shorter than the sequences of tests
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "Olmo2ForCausalLM": {},
    "CohereForCausalLM": dict(logit_scale=0.5),
    "Cohere2ForCausalLM": dict(logit_scale=0.5, sliding_window=12, layer_types=LAYER_TYPES),
    "Starcoder2ForCausalLM": dict(sliding_window=12),
    "OlmoeForCausalLM": dict(num_experts=8, num_experts_per_tok=3),
    "NemotronHForCausalLM": dict(
        layers_block_type=["linear_attention", "mlp", "full_attention"],
        head_dim=32,
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=32,
        n_groups=2,
        chunk_size=16,
    ),
    "Zamba2ForCausalLM": dict(
        num_key_value_heads=4,
        layers_block_type=["mamba", "hybrid"],
        hybrid_layer_ids=[1],
        num_mem_blocks=1,
        use_mem_rope=True,
        n_mamba_heads=8,
        mamba_headdim=32,
        mamba_d_state=32,
        chunk_size=16,
    ),
    "Ernie4_5_MoeForCausalLM": dict(
        moe_num_experts=8, moe_k=3, moe_intermediate_size=32, moe_num_shared_experts=1
    ),
    "PhiForCausalLM": dict(num_key_value_heads=4),
    # Widths of which vLLM's kernel of experts on a CPU takes none.
    "Dots1ForCausalLM": dict(
        hidden_size=80,
        head_dim=32,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=3,
        n_shared_experts=1,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        sliding_window=None,
    ),
}
"""Models without a file in rl/models, which train as their class in transformers."""


def tiny_config(architecture: str, *, tie: bool = False, **options: Any) -> transformers.PreTrainedConfig:
    """Return the config of a random model of 2 or 3 layers, 4 heads, 2 KV heads and the toy's vocabulary."""
    if architecture in VISION:
        return _tiny_vision_config(architecture, tie=tie, **options)
    name = architecture.removesuffix("ForCausalLM")
    kind = getattr(transformers, CONFIGS.get(name, f"{name}Config"))
    return kind(
        architectures=[architecture],
        vocab_size=len(build_tokenizer()),
        tie_word_embeddings=tie,
        **SPECIAL | SIZES | (PARTICULAR | BY_CLASS)[architecture] | options,
    )


def _tiny_vision_config(architecture: str, *, tie: bool, **options: Any) -> transformers.PreTrainedConfig:
    """Return the config of a model with a vision tower. options: of its text model."""
    text, vision = VISION[architecture]
    tokenizer = build_image_tokenizer()
    kind = getattr(transformers, architecture.removesuffix("ForConditionalGeneration") + "Config")
    return kind(
        architectures=[architecture],
        text_config=dict(vocab_size=len(tokenizer), **SPECIAL | SIZES | text | options),
        vision_config=vision,
        tie_word_embeddings=tie,
        **image_tokens(tokenizer) | SPECIAL,
    )


def save_tiny(architecture: str, directory: Path, *, seed: int, tie: bool = False, **options: Any) -> str:
    """Save a random model of `tiny_config` with the toy's tokenizer; return the directory.

    With num_nextn_predict_layers=1 it has a head for multi-token prediction, as DeepSeek-V3's files hold it.
    """
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(tiny_config(architecture, tie=tie, **options))
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if (tensor.ndim == 1 or name.endswith("_bias")) and "inv_freq" not in name:
                tensor.add_(torch.randn_like(tensor) * 0.2)
            if name.endswith("A_log"):
                tensor.sub_(3.0)  # states of gated delta nets last for some tokens
                # Their norms would multiply the gradient of a token with embedding 0 by a million.
                model.get_input_embeddings().weight[0].normal_(std=0.1)
    model.save_pretrained(directory)
    if architecture in VISION:
        build_image_tokenizer().save_pretrained(directory)
        Path(directory, "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    else:
        build_tokenizer().save_pretrained(directory)
    config = Path(directory, "config.json")
    hf = json.loads(config.read_text()) | PUBLISHED.get(architecture, {})
    config.write_text(json.dumps(hf))
    file = Path(directory, "model.safetensors")
    if architecture == "Qwen3VLMoeForConditionalGeneration":  # published files have [E, H, 2F] and [E, F, H]
        tensors = load_file(file)
        experts = {name: x.mT.contiguous() for name, x in tensors.items() if ".mlp.experts." in name}
        save_file(tensors | experts, file, metadata={"format": "pt"})
    if architecture == "Qwen3_5MoeForConditionalGeneration":
        save_file(_with_joined_experts(load_file(file)), file, metadata={"format": "pt"})
    if options.get("num_nextn_predict_layers"):
        save_file(_with_prediction_head(load_file(file), hf), file, metadata={"format": "pt"})
    return str(directory)


def _with_joined_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with the experts of a layer in two of them, as published files have them."""
    out = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for block in {name.partition(".experts.")[0] for name in tensors.keys() - out.keys()}:
        count = sum(name.startswith(f"{block}.experts.") for name in tensors) // 3
        gate, up, down = (
            torch.stack([tensors[f"{block}.experts.{expert}.{kind}_proj.weight"] for expert in range(count)])
            for kind in ("gate", "up", "down")
        )
        out |= {f"{block}.experts.gate_up_proj": torch.cat([gate, up], 1), f"{block}.experts.down_proj": down}
    return out


def _with_prediction_head(tensors: dict[str, torch.Tensor], hf: dict) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint and of a head with a layer like the last one."""
    number, hidden = hf["num_hidden_layers"], hf["hidden_size"]
    prefix, last = f"model.layers.{number}.", f"model.layers.{number - 1}."
    layer = {n.removeprefix(last): t + 0.02 * torch.randn(t.shape) for n, t in tensors.items() if last in n}
    norms = {
        f"{name}.weight": 1 + 0.2 * torch.randn(hidden) for name in ("enorm", "hnorm", "shared_head.norm")
    }
    shared = {
        "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        "shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    head = {"eh_proj.weight": 0.1 * torch.randn(hidden, 2 * hidden)} | layer | norms | shared
    return tensors | {prefix + name: tensor for name, tensor in head.items()}
