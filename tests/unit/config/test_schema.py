"""The real tree in rl/config/schema.py, its docs and its checks."""

import re

import pytest

from rl.config.checks import check
from rl.config.command_line import help_text, tree_docs
from rl.config.declarations import describe
from rl.config.layout_checks import check_layout
from rl.config.needs import needs_early_logprobs
from rl.config.options import ConfigError, flatten, load, to_yaml, tree_keys, without_none
from rl.config.ranges import ranges_of
from rl.config.schema import FIRST_KEYS, Config, changed, load_config, resolve
from tests.configs import config_with, refusal
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


# The tree


def test_the_help_has_every_key_and_ends_each_doc_as_a_sentence():
    docs, text = tree_docs(Config), help_text(Config, 120)
    for key in flatten(Config()):
        assert f"  {key}  (" in text and docs[key].endswith((".", ")")), key


def test_the_config_survives_the_round_trip_through_yaml(tmp_path):
    config = config_with(
        "reward.kwargs={tolerance: 1e-6}", "rollout.stop=['</answer>', 'a: b']", "run.name=1e-6"
    )
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load(Config, path) == config
    assert config.training.optimizer.lr == 1e-6


@each(
    "override, nearest",
    [
        ("run.learning_rate=1e-6", "training.optimizer.lr"),
        ("training.lr=1e-6", "training.optimizer.lr"),
        ("run.steps=3", "run.max_steps"),
        ("rollout.max_prompt_tokens=3", "data.max_prompt_tokens"),
        ("rollout.num_samples_per_prompt=3", "rollout.samples_per_prompt"),
        ("rollout.samples=3", "rollout.samples_per_prompt"),  # not logging.rollouts
        ("trainer.tp=3", "training.tp"),
        ("objective.kl_coeff=0.1", "objective.kl_coef"),
        ("data.seed=1", "run.seed"),
        ("rollout.min_replicas=1", "roles.min_replicas"),
    ],
)
def test_a_mistyped_key_leads_to_the_one_that_was_meant(override, nearest):
    with pytest.raises(ConfigError) as caught:
        config_with(override)
    assert f"; did you mean {nearest}" in str(caught.value)


# check


def test_the_defaults_with_model_and_data_pass_without_a_warning():
    assert check(config_with()) == []


@each("key, empty", [("model.path", ""), ("data.train", "[]"), ("data.prompt_key", "")])
def test_a_required_key_that_is_missing_is_named(key, empty):
    assert refusal(f"{key}={empty}").startswith(f"{key} is empty, but a run needs it: set it to ")


CHATS = ("algorithm=sft", "data.messages_key=messages", "data.val=val.jsonl")


@each(
    "overrides, words",
    [
        (("data.prompt_key=",), "set it to the column with the prompt"),
        ((*CHATS, "validation.loss=false"), "leave nothing to validate with"),
    ],
)
def test_keys_of_conversations_and_of_a_held_out_loss(overrides, words):
    assert re.search(words, refusal(*overrides))


@each("overrides", [CHATS, ("algorithm=dpo",), ("algorithm=kto",)])
def test_conversations_need_no_prompt_column(overrides):
    assert check(config_with(*overrides, "data.prompt_key=")) == []


def test_every_numeric_key_has_a_range():
    numeric = {key for key, kind in tree_keys(Config).items() if without_none(kind)[0] in (int, float)}
    numeric |= {key for key, value in flatten(Config()).items() if type(value) in (int, float)}
    assert set(ranges_of(Config)) == numeric


@each("key", [key for key, value in flatten(Config()).items() if type(value) is float])
def test_nan_is_out_of_every_range(key):
    assert refusal(f"{key}=.nan").startswith(f"{key} is nan, but must be ")


@each("key", [key for key, value in flatten(Config()).items() if type(value) is int])
def test_a_count_is_not_negative(key):
    assert refusal(f"{key}=-1").startswith(f"{key} is -1, but must be ")


@each(
    "key, value, words",
    [
        ("run.max_steps", "0", "at least 1"),
        ("training.tp", "0", "at least 1"),
        ("data.prompts_per_step", "0", "at least 1"),
        ("rollout.samples_per_prompt", "0", "at least 1"),
        ("adapter.dropout", "0.1", "0"),
        ("rollout.temperature", "5.0", "greater than 0 and at most 2"),
        ("rollout.top_p", "0.0", "greater than 0 and at most 1"),
        ("rollout.top_p", "1.1", "greater than 0 and at most 1"),
        ("rollout.min_p", "1.1", "from 0 to 1"),
        ("rollout.gpu_memory_utilization", "1.5", "greater than 0 and at most 1"),
        ("validation.temperature", "0.0", "greater than 0 and at most 2"),
        ("objective.clip_low", "1.1", "from 0 to 1"),
        ("objective.clip_low", "-0.1", "from 0 to 1"),
        ("objective.clip_high", "-0.1", "0 or more and finite"),
        ("objective.dual_clip", "0.5", "0 (off) or greater than 1 and finite"),
        ("objective.dual_clip", "1.0", "0 (off) or greater than 1 and finite"),
        ("training.optimizer.beta2", "1.0", "at least 0 and less than 1"),
        ("training.optimizer.eps", "0.0", "greater than 0 and finite"),
        ("training.optimizer.lr", ".inf", "0 or more and finite"),
        ("objective.entropy_coef", "-.inf", "finite"),
    ],
)
def test_a_value_out_of_range_is_named_with_the_range(key, value, words):
    assert (
        refusal(f"{key}={value}") == f"{key} is {value.lstrip('.').replace('-.', '-')}, but must be {words}."
    )


@each(
    "override",
    [
        "objective.clip_low=1",
        "objective.clip_low=0",
        "objective.dual_clip=0",
        "training.optimizer.clip_grad=0",
    ]
    + [
        "objective.entropy_coef=-0.1",
        "training.optimizer.lr=0",
        "validation.every=0",
        "checkpoint.keep_last=0",
        "run.seed=0",
    ],
)
def test_a_value_at_the_edge_of_its_range_passes(override):
    assert check(config_with(override)) == []


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "' a'", '"a\\nb"'])
def test_a_run_name_that_is_no_plain_path_component_is_an_error(name):
    error = refusal(f"run.name={name}")
    assert error.startswith("run.name (without one, the config file's name) is ")
    assert "use one without '/', line breaks" in error


def test_a_name_too_long_for_a_file_system_is_an_error():
    error = refusal(f"run.name={'x' * 300}")
    assert error.endswith("more than the maximum of 255; use a shorter run.name or run.dir.")


@each("function", ["", "rl.rewards.exact", "a.py:", ":f", "a.py:f()", "a:1f"])
def test_a_reward_function_needs_a_module_and_a_name(function):
    error = refusal(f"reward.function='{function}'")
    assert (
        error == f'reward.function is "{function}", but must be package.module:name or path/to/file.py:name.'
    )


@each("function", ["rl.rewards.exact:score", "my/own.py:f_1", "C:/x.py:f"])
def test_a_reward_function_in_a_module_or_a_file_passes(function):
    assert check(config_with(f"reward.function={function}")) == []


def test_an_empty_stop_string_is_an_error():
    assert "rollout.stop holds an empty string" in refusal("rollout.stop=[a, '']")


def test_a_negative_stop_token_is_an_error():
    assert (
        refusal("rollout.stop_token_ids=[5, -1]")
        == "rollout.stop_token_ids holds -1, but token ids are 0 or more."
    )


def test_more_drafts_than_a_response_takes_are_an_error():
    draft = ("rollout.draft.path=d", "rollout.max_response_tokens=16")
    assert check(config_with(*draft, "rollout.draft.tokens=15")) == []
    assert refusal(*draft, "rollout.draft.tokens=500") == (
        "rollout.draft.tokens=500 must be below rollout.max_response_tokens=16, because a step yields one "
        "token besides the accepted drafts; use at most 15."
    )
    assert refusal("rollout.draft.path=d", "rollout.max_response_tokens=1").endswith(
        "leave out rollout.draft.path=d."
    )


def test_a_minibatch_larger_than_the_step_is_an_error():
    assert refusal("data.prompts_per_step=8", "training.prompts_per_minibatch=16") == (
        "training.prompts_per_minibatch=16 is larger than data.prompts_per_step=8; use at most 8, or 0 for "
        "the whole batch."
    )


def test_a_minibatch_has_to_divide_the_step():
    assert refusal("data.prompts_per_step=12", "training.prompts_per_minibatch=5") == (
        "training.prompts_per_minibatch=5 does not divide data.prompts_per_step=12; use 4 or 6."
    )


@each("minibatch", [0, 1, 4, 12])
def test_a_minibatch_that_divides_the_step_passes(minibatch):
    assert check(config_with("data.prompts_per_step=12", f"training.prompts_per_minibatch={minibatch}")) == []


def test_keep_best_needs_a_metric_and_weights_only_a_path():
    assert "checkpoint.keep_best=1 needs checkpoint.best_metric" in refusal("checkpoint.keep_best=1")
    for resume in ("auto", "never"):
        words = f"checkpoint.weights_only=true needs a path in checkpoint.resume, not {resume}"
        assert words in refusal("checkpoint.weights_only=true", f"checkpoint.resume={resume}")
    assert check(config_with("checkpoint.weights_only=true", "checkpoint.resume=runs/other")) == []


def test_checkpoints_between_validations_are_warned_of():
    best = (
        "checkpoint.keep_best=1",
        "checkpoint.best_metric=val-core/math/acc/mean@1",
        "validation.every=10",
    )
    [warning] = check(config_with(*best, "checkpoint.every=25"))
    assert warning.startswith("checkpoint.every=25 is no multiple of validation.every=10")
    assert check(config_with(*best, "checkpoint.every=20")) == []


def test_a_decay_that_rises_is_an_error():
    assert refusal("training.optimizer={lr: 1e-6, min_lr: 1e-5, schedule: linear}") == (
        "training.optimizer.min_lr=1e-05 is above training.optimizer.lr=1e-06, from which it decays."
    )


@each(
    "overrides, words",
    [
        (["rollout.samples_per_prompt=1"], ["rollout.samples_per_prompt=1", "no group", "2 or more"]),
        (
            ["run.max_steps=10", "training.optimizer.warmup_steps=10"],
            ["warmup_steps=10", "run.max_steps=10", "warm-up"],
        ),
        (["training.optimizer.min_lr=1e-7"], ["min_lr=1e-07 has no effect", "linear or cosine"]),
        (["data.val=train.jsonl"], ["train.jsonl is in data.train and in data.val"]),
        (["rollout.biased_truncation=true", "rollout.top_p=0.9"], ["rollout.top_p=0.9", "truncated"]),
        (["rollout.biased_truncation=true", "rollout.top_k=5"], ["top_k=5", "truncated"]),
        (["rollout.biased_truncation=true", "rollout.min_p=0.1"], ["min_p=0.1", "truncated"]),
    ],
)
def test_what_is_unlikely_to_be_meant_is_one_warning(overrides, words):
    (warning,) = check(config_with(*overrides))
    assert all(word in warning for word in words)


def test_a_truncated_distribution_with_its_mask_is_no_warning():
    assert check(config_with("rollout.top_k=20", "rollout.top_p=0.9", "rollout.min_p=0.05")) == []


def test_validation_without_held_out_data_is_a_warning():
    (warning,) = check(config_with("validation.every=5", "data.val=[]", "validation.samples_per_prompt=4"))
    assert warning.startswith("validation.every=5 measures nothing, because data.val is empty")


def test_a_check_of_a_run_that_validates_has_no_warning_of_empty_data():
    files = ["model.path=toy", "data.train=train.jsonl", "data.val=test.jsonl", "validation.every=5"]
    assert check(load_config(None, [*files, "run.mode=check"])) == []


# resolve


def test_resolve_fills_the_run_directory_from_the_name():
    config = load(Config, None, ["run.name=a"])
    resolved = resolve(config)
    assert resolved.run.dir == "runs/a" and config.run.dir == "" and resolve(resolved) == resolved
    assert load_config(None, ["run.name=a"]).run.dir == "runs/a"


def test_resolve_keeps_a_given_run_directory():
    assert resolve(config_with("run.dir=/scratch/x")).run.dir == "/scratch/x"


# check_layout


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


OWN_FILE = ", which needs a file of its own in rl/models (docs/extending.md)"


@each(
    "changes, shown",
    [
        ({"architectures": ["Olmo2ForCausalLM"]}, f"Olmo2ForCausalLM{OWN_FILE}"),
        ({"architectures": []}, "(none)"),
        ({"architectures": None}, "(none)"),
        (
            {"architectures": ["NemotronHForCausalLM"], "ssm_state_size": 128},
            "NemotronHForCausalLM, whose ssm_state_size=128 needs Mamba layers (not built)",
        ),
        (
            {
                "architectures": ["KimiLinear"],
                "text_config": {"linear_num_value_heads": 32},
                "vision_config": {},
            },
            "KimiLinear, whose text_config.linear_num_value_heads=32 needs gated delta nets in this class "
            "(not built)",
        ),
        (
            {"architectures": ["Qwen3VL"], "vision_config": {"model_type": "qwen3_vl"}},
            "Qwen3VL, whose vision_config=qwen3_vl needs an encoder of images other than those of "
            "docs/vision.md (not built)",
        ),
    ],
)
def test_an_unsupported_architecture_names_what_it_needs(changes, shown):
    assert layout_error(1, **changes) == (
        f"The model in /models/toy has, by its config.json, the architecture {shown}; supported: "
        "LlamaForCausalLM and Qwen3ForCausalLM."
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


@each(
    "overrides, early",
    [
        ((), False),
        (("objective.kl_coef=0.1", "objective.entropy_coef=0.1"), False),
        (("rollout_correction.truncate_samples=2",), False),
        (("algorithm=spin",), False),
        (("algorithm=ppo", "objective.reward_kl.coef=0"), False),
        (("algorithm=ppo",), True),
        (("objective.reward_kl.coef=0.01",), True),
        (("objective.advantage=optimal-token-baseline",), True),
        (("objective.loss=kl-cov",), True),
        (("objective.top_entropy=0.2", "objective.off_policy_mask=0.1"), False),
        (("objective.adaptive_entropy.target=0.2",), True),
        (("rollout_correction.reject=token-k2", "rollout_correction.reject_high=0.1"), True),
    ],
)
def test_readers_of_old_log_probs_before_the_first_update(overrides, early):
    assert needs_early_logprobs(config_with(*overrides)) == early


def test_an_algorithm_declares_that_it_reads_old_log_probs(tmp_path):
    own = tmp_path / "own.py"
    text = "NEEDS = {}\nDEFAULTS = {{}}\ndef collect(phases): ...\ndef learn(phases, batch): ..."
    for needs, early in (('("samples",)', False), ('("samples", "old_logprobs")', True)):
        describe.cache_clear()
        own.write_text(text.format(needs))
        assert needs_early_logprobs(config_with(f"algorithm={own}")) == early


def test_only_what_differs_from_the_algorithms_defaults_is_changed(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "algorithm: dapo\nmodel: {path: m}\nrun: {max_steps: 7, mode: train}\n"
    )
    config = load_config(str(tmp_path / "mine.yaml"), ["training.optimizer.lr=1e-5"])
    assert changed(config) == {
        "algorithm": "dapo",
        "run": {"name": "mine", "dir": "runs/mine", "max_steps": 7},
        "model": {"path": "m"},
        "training": {"optimizer": {"lr": 1e-5}},
    }
    (tmp_path / "again.yaml").write_text(to_yaml(changed(config)))
    assert load_config(str(tmp_path / "again.yaml")) == config
    assert set(FIRST_KEYS) <= set(flatten(Config())) and len(FIRST_KEYS) == 20


def test_of_several_files_later_ones_win_key_by_key(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("run: {seed: 2, max_steps: 7}")
    second.write_text("run: {seed: 3}")
    run = load_config([first, second], ["run.max_steps=8"]).run
    assert (run.name, run.seed, run.max_steps) == ("b", 3, 8)


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("data: {train_files: a.parquet}\nactor_rollout_ref: {}", "verl; translate it with lockstep convert"),
        ("model_name_or_path: a", "TRL; docs/trl.md"),
    ],
)
def test_a_config_of_another_program_is_named(tmp_path, text, program):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=f"a.yaml is a config of {program}"):
        load_config(str(tmp_path / "a.yaml"))
