"""The checks of a config by itself, in rl/config/checks.py."""

import re

import pytest

from rl.config.checks import check
from rl.config.options import flatten, tree_keys, without_none
from rl.config.ranges import ranges_of
from rl.config.schema import Config, load_config
from tests.configs import config_with, refusal
from tests.each import each


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
        ((*CHATS, "data.string_prompts=user"), "write these as messages, and leave the key out"),
        (("algorithm=dpo", "data.string_prompts=user"), "is for prompts, not for conversations, pairs"),
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
        == "rollout.stop_token_ids holds -1, but token ids are 0 or more; remove it."
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
        "training.optimizer.min_lr=1e-05 is above training.optimizer.lr=1e-06, from which it decays; "
        "lower it."
    )


@each(
    "overrides, words",
    [
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
