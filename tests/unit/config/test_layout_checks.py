"""The checks of a config against the number of ranks and the model, in rl/config/layout_checks.py."""

import pytest

from rl.config.checks import check
from rl.config.layout_checks import check_layout
from rl.config.options import ConfigError
from tests.configs import config_with
from tests.each import each

SUPPORTED = ["Qwen3ForCausalLM", "LlamaForCausalLM"]
HF = {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "max_position_embeddings": 4096,
    "vocab_size": 1000,  # vLLM pads it to 1024
}


def layout_error(world_size, *overrides, **hf):
    config = config_with(*overrides)
    check(config)
    with pytest.raises(ConfigError) as caught:
        check_layout(config, world_size, HF | hf, SUPPORTED)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@each(
    "world_size, overrides",
    [
        (1, []),
        (8, ["training.tp=4", "training.pp=2", "rollout.tp=8"]),
        (12, ["training.tp=2", "training.pp=3", "rollout.tp=2"]),
        (64, ["data.prompts_per_step=8"]),
        (1, ["data.max_prompt_tokens=1000", "rollout.max_response_tokens=3096"]),
    ],
)
def test_a_layout_that_fits_passes(world_size, overrides):
    check_layout(config_with(*overrides), world_size, HF, SUPPORTED)


def test_rollout_tp_may_be_a_multiple_of_kv_heads():
    check_layout(config_with("rollout.tp=8"), 8, HF | {"num_key_value_heads": 2}, SUPPORTED)


def test_rollout_tp_has_to_split_the_padded_vocabulary():
    hf = HF | {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96, "intermediate_size": 96}
    with pytest.raises(
        ConfigError, match="rollout.tp=3 does not divide the model's vocabulary, padded to 1024; use 1 or 2"
    ):
        check_layout(config_with("rollout.tp=3"), 6, hf, SUPPORTED)


def test_kv_heads_default_to_attention_heads():
    hf = {key: value for key, value in HF.items() if key != "num_key_value_heads"}
    check_layout(config_with("training.tp=8"), 8, hf, SUPPORTED)


@each(
    "changes, shown",
    [
        (
            {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
            " Its class trains with training.backend=transformers.",
        ),
        ({"architectures": []}, ""),
        ({"architectures": None}, ""),
        (
            {"architectures": ["KimiLinear"], "model_type": "of_tomorrow"},
            " model_type=of_tomorrow in config.json is not known to this transformers; update transformers, "
            "or use another model.",
        ),
        (
            {"architectures": ["Qwen3VL"], "vision_config": {"model_type": "qwen3_vl"}},
            " training.backend=transformers with architectures=Qwen3VL in config.json: it reads images or "
            "sounds, but classes train on text alone; use another model (docs/models.md).",
        ),
    ],
)
def test_an_unsupported_architecture_names_what_its_class_lacks(changes, shown):
    name = (changes["architectures"] or ["(none)"])[0]
    assert layout_error(1, **changes) == (
        f"The model in /models/toy has, by its config.json, the architecture {name}; Megatron trains "
        f"LlamaForCausalLM and Qwen3ForCausalLM.{shown}"
    )


@pytest.mark.parametrize(
    "name",
    [
        "num_attention_heads",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "max_position_embeddings",
    ],
)
def test_a_size_missing_from_the_model_is_named(name):
    assert layout_error(1, **{name: None}).startswith(f"The model's config.json has no number '{name}'")


def test_a_world_the_training_grid_does_not_divide_is_an_error():
    assert layout_error(8, "training.tp=2", "training.pp=3") == (
        "training.tp=2 times training.pp=3 is 6, which does not divide the world of 8 ranks; use a product "
        "of 1, 2, 4 or 8, or start 6 ranks or a multiple of them."
    )
    assert "the world of 1 rank; set training.tp=1 training.pp=1, or start 2 ranks" in layout_error(
        1, "training.tp=2"
    )


def test_a_world_the_rollout_does_not_divide_is_an_error():
    assert (
        layout_error(6, "rollout.tp=4")
        == "rollout.tp=4 does not divide the world of 6 ranks; use 1, 2, 3 or 6, or start a multiple of 4 "
        "ranks."
    )


def test_gpt_oss_is_refused_with_more_engine_ranks_than_heads():
    """vLLM's model would divide by 0; other models' key/value heads are replicated."""
    sizes = dict(num_attention_heads=8, num_key_value_heads=2, hidden_size=64, intermediate_size=64)
    sizes |= dict(num_local_experts=8, num_experts_per_tok=2, architectures=["GptOssForCausalLM"])
    with pytest.raises(ConfigError, match="2 key/value heads, which vLLM .* gpt-oss; use 1 or 2"):
        check_layout(config_with("rollout.tp=4"), 4, HF | sizes, ["GptOssForCausalLM"])


@each("key", ["training", "rollout"])
@each(
    "hf, words",
    [
        ({"num_attention_heads": 4}, "4 attention heads"),
        ({"num_attention_heads": 12, "num_key_value_heads": 12}, "hidden size of 64"),
        (
            {
                "num_attention_heads": 12,
                "num_key_value_heads": 12,
                "hidden_size": 60,
                "intermediate_size": 64,
            },
            "intermediate size of 64",
        ),
    ],
)
def test_tensor_parallelism_has_to_divide_sizes(key, hf, words):
    assert (
        layout_error(12, f"{key}.tp=3", **hf)
        == f"{key}.tp=3 does not divide the model's {words}; use 1, 2 or 4."
    )


def test_the_advice_leaves_out_what_the_world_does_not_allow():
    assert layout_error(6, "training.tp=3").endswith("8 attention heads; use 1 or 2.")
    assert layout_error(6, "training.tp=3", "training.pp=2").endswith("8 attention heads; use 1.")


def test_training_needs_key_value_heads_that_it_divides():
    assert layout_error(8, "training.tp=8") == (
        "training.tp=8 does not divide the model's 4 key/value heads; use 1, 2 or 4."
    )


def test_rollout_tp_divides_or_repeats_kv_heads():
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 96, "vocab_size": 190}
    assert layout_error(12, "rollout.tp=4", **sizes) == (
        "rollout.tp=4 is neither a divisor nor a multiple of the model's 6 key/value heads; use 1, 2, 3, 6 "
        "or 12."
    )


def test_stages_without_a_layer_are_an_error():
    assert (
        layout_error(8, "training.pp=8")
        == "training.pp=8 leaves stages without a layer, the model has 6; use 1, 2 or 4."
    )


def test_the_first_stage_has_the_layers_that_read_the_tower():
    vision = {"deepstack_visual_indexes": [3, 6]}
    assert layout_error(8, "training.pp=4", "data.image_key=images", vision_config=vision) == (
        "training.pp=4 gives the first stage 1 layers, but it must have the 2 that receive inner outputs of "
        "the vision tower; use 1 or 2."
    )


def test_a_minibatch_has_a_sample_for_every_dp_rank():
    assert layout_error(64, "training.tp=2", "data.prompts_per_step=4", "rollout.samples_per_prompt=4") == (
        "A mini-batch of 4 prompts x 4 samples is too small for the data parallel size of 32 (64 ranks / "
        "(tp=2 x cp=1 x pp=1)); raise data.prompts_per_step to at least 8."
    )


@each("ranks, advised", [(20, 6), (24, 6), (25, 12), (48, 12)])
def test_a_small_minibatch_of_a_large_step_is_told_a_divisor(ranks, advised):
    error = layout_error(
        ranks, "data.prompts_per_step=12", "training.prompts_per_minibatch=2", "rollout.samples_per_prompt=4"
    )
    assert error.endswith(
        f"({ranks} ranks / (tp=1 x cp=1 x pp=1)); set training.prompts_per_minibatch to {advised}."
    )


def test_a_small_minibatch_of_a_small_step_is_told_to_raise_both():
    error = layout_error(
        64, "data.prompts_per_step=4", "training.prompts_per_minibatch=2", "rollout.samples_per_prompt=4"
    )
    assert error.endswith("raise data.prompts_per_step and training.prompts_per_minibatch to at least 16.")


def test_sft_counts_one_sample_per_prompt():
    overrides = ["data.prompts_per_step=4", "rollout.samples_per_prompt=8"]
    check_layout(config_with(*overrides), 8, HF, SUPPORTED)
    assert layout_error(8, "algorithm=sft", *overrides).startswith(
        "A mini-batch of 4 prompts x 1 samples is too small"
    )


def test_a_run_without_an_engine_is_not_held_to_a_rollout_layout():
    overrides = ["algorithm=sft", "rollout.tp=3", "rollout.max_response_tokens=9000"]
    check_layout(config_with(*overrides), 2, HF, SUPPORTED)
    check_layout(config_with(*overrides, "data.val=val.jsonl"), 2, HF, SUPPORTED)  # the loss needs none
    assert layout_error(2, *overrides, "data.val=val.jsonl", "validation.greedy=true").startswith(
        "rollout.tp=3 does not divide the world of 2 ranks"
    )


def test_chunks_need_stages_and_a_layer_each():
    check_layout(config_with("training.pp=2", "training.vpp=2"), 2, HF, SUPPORTED)
    assert layout_error(2, "training.vpp=2") == (
        "training.vpp=2 divides pipeline stages, but training.pp=1 has none; leave it out, or set "
        "training.pp to 2 or more."
    )
    layers = HF["num_hidden_layers"]
    assert layout_error(2, "training.pp=2", f"training.vpp={layers}") == (
        f"training.vpp={layers} with training.pp=2 makes {2 * layers} chunks, but the model has {layers} "
        f"layers; use training.vpp={layers // 2} or less."
    )


def test_recomputation_names_what_there_is():
    with pytest.raises(ConfigError, match='"selective", "full"; write full[.]'):
        config_with("training.recompute=true")
    error = layout_error(1, "training.recompute=selective", "training.recompute_modules=[mla_up_proj]")
    assert "but the model has none (kv_lora_rank); leave it out." in error


def test_distributions_of_capped_logits_are_refused():
    assert layout_error(1, "algorithm=distill", "teacher.path=t", final_logit_softcapping=30.0) == (
        "algorithm=distill compares distributions of plain logits, but the model in /models/toy caps its "
        "logits (final_logit_softcapping=30); use another model, or algorithm=grpo with "
        "teacher.advantage_coef."
    )


def test_more_tokens_than_the_model_has_positions_are_an_error():
    assert layout_error(1, "data.max_prompt_tokens=1024", "rollout.max_response_tokens=4000") == (
        "data.max_prompt_tokens=1024 and rollout.max_response_tokens=4000 add up to 5024 tokens, but the "
        "model has 4096 positions (max_position_embeddings); lower them to 4096 together, or scale its "
        "rotary embedding (docs/models.md, Long contexts)."
    )
