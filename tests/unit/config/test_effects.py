"""Keys of rollout and reward without effect: refused for every algorithm that does not read them."""

import json
from fnmatch import fnmatch

import pytest

from rl.config import declarations
from rl.config.checks import check
from rl.config.declarations import shipped
from rl.config.effects import READ_WITH, VALIDATE
from rl.config.options import ConfigError, flatten
from rl.config.schema import Config, load_config

FROM_DATA = {"sft", "dpo", "kto", "orpo", "simpo"}
UNSCORED = FROM_DATA | {"spin", "distill"}
MORE = {"distill": ["teacher.path=teacher"]}
"""Algorithm -> keys that it requires."""
SAMPLING = {
    "tp": 2,
    "samples_per_prompt": 3,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "ep": 2,
    "quantization": "fp8",
    "stop": "[END]",
    "stop_token_ids": "[7]",
    "deterministic": "true",
    "max_concurrent_samples": 64,
    "gpu_memory_utilization": 0.4,
    "cpu_kv_cache_mib": 16,
    "enforce_eager": "true",
    "async_scheduling": "false",
    "flashinfer_all_reduce": "true",
    "longest_first": "true",
    "draft.path": "draft",
    "draft.method": "mtp",
}
WITHOUT_ANOTHER = {
    "rollout.biased_truncation": "true",
    "rollout.dp_attention": "true",
    "rollout.kv_offload_gib": 1.0,
    "rollout.draft.tokens": 2,
    "rollout.draft.min_tokens_per_step": 1.0,
    "rollout.oversample": 1.5,
    "rollout.max_staleness": 2,
    "rollout.on_stale": "drop",
    "rollout.carry_over_cache": "keep",
    "reward.overlong_penalty": 2.0,
    "reward.model.coef": 2.0,
    "reward.judge.gpu_memory_utilization": 0.3,
    "reward.judge.template": "'{response}'",
    "reward.judge.parser": "own:parse",
    "reward.judge.coef": 2.0,
    "reward.judge.max_prompt_tokens": 9,
    "reward.judge.max_response_tokens": 9,
    "reward.judge.temperature": 1.0,
}
"""Keys that need another key, with any algorithm."""
SCORING = {
    "function": "own:score",
    "kwargs": "{a: 1}",
    "failure_score": -1.0,
    "max_failed_share": 0.5,
    "sources": "{a: {function: 'own:score'}}",
    "in_process": "true",
    "workers": 3,
    "timeout_s": 9.0,
    "memory_mib": 9,
    "overlong_buffer_tokens": 4,
    "model.path": "reward",
    "variables": ["KEY"],
    "keep_special_tokens": "[all]",
    "judge.path": "judge",
}
ELSEWHERE = {"rollout.max_response_tokens", "rollout.carry_over"}
"""Keys that every run reads, or that other checks refuse."""
VALUES = {f"rollout.{key}": value for key, value in SAMPLING.items()} | WITHOUT_ANOTHER
VALUES |= {f"reward.{key}": value for key, value in SCORING.items()}


def error(algorithm: str, *overrides: str) -> str:
    base = [f"algorithm={algorithm}", "model.path=toy", "data.train=toy.jsonl", *MORE.get(algorithm, [])]
    try:
        check(load_config(None, [*base, *overrides]))
    except ConfigError as refusal:
        return str(refusal)
    return ""


def test_every_key_of_the_two_sections_is_read_with_a_feature():
    keys = {key for key in flatten(Config()) if key.startswith(("rollout.", "reward."))}
    read = {
        key
        for key in keys
        for _, patterns, _ in READ_WITH
        if any(fnmatch(key, pattern) for pattern in patterns.split())
    }
    assert read == set(VALUES) and keys - read == ELSEWHERE


@pytest.mark.parametrize("algorithm", shipped())
def test_keys_without_effect_are_refused(algorithm):
    unread = set(WITHOUT_ANOTHER)
    unread |= {f"rollout.{key}" for key in SAMPLING} if algorithm in FROM_DATA else set()
    unread |= {f"reward.{key}" for key in SCORING} if algorithm in UNSCORED else set()
    for key, value in VALUES.items():
        said = error(algorithm, f"{key}={value}")
        assert ("has no effect" in said) == (key in unread), (key, said)
        assert key not in unread or (said.startswith(f"{key}=") and "; leave it out" in said), said
    defaults = flatten(load_config(None, [f"algorithm={algorithm}"]))
    assert error(algorithm, *(f"{key}={json.dumps(defaults[key])}" for key in VALUES)) == ""


def test_all_keys_without_effect_are_named_at_once():
    assert error("sft", "rollout.tp=2", "rollout.enforce_eager=true", "rollout.temperature=0.7") == (
        "rollout.tp=2 and rollout.enforce_eager=true have no effect with algorithm=sft, which generates no "
        "responses; leave them out, or set data.val, validation.every and validation.greedy=true. "
        "rollout.temperature=0.7 has no effect with algorithm=sft, which does not learn from samples; leave "
        "it out; validation.temperature is that of held-out responses."
    )


def test_a_run_that_only_reads_responses_has_no_ground_truths():
    key = 'data.ground_truth_key="answer"'
    said = error("sft", key)
    assert said.startswith(f"{key} has no effect with algorithm=sft, which neither generates nor scores")
    assert said.endswith("data.response_key names the column with the response to learn.")
    assert "has no effect" in error("dpo", key) and error("spin", key) == error("distill", key) == ""
    assert (
        error("sft", key, "data.val=v", "validation.greedy=true")
        == error("sft", key, "data.curriculum=o:f")
        == ""
    )


SPLIT = ("roles.train=0-0", "roles.rollout=1-1")


@pytest.mark.parametrize(
    ("key", "feature", "said"),
    [
        ("agents.max_turns=3", ("agents.tools=[own:tool]",), "set agents.environment or agents.tools."),
        ("roles.lag=2", SPLIT, "set roles.train and roles.rollout."),
        ("roles.granularity=group", SPLIT, "set roles.train and roles.rollout."),
        ("roles.cache=keep", (*SPLIT, "roles.granularity=group"), "set roles.train and roles.rollout."),
    ],
)
def test_keys_of_a_section_that_is_off_are_refused(key, feature, said):
    assert "has no effect" in error("grpo", key) and error("grpo", key).endswith(said)
    assert error("grpo", *feature, key) == ""


@pytest.mark.parametrize("key", ["roles.cache=keep", "roles.refit_after_steps=4"])
def test_keys_of_samples_in_flight_are_refused_for_whole_batches(key):
    said = error("grpo", *SPLIT, key)
    assert said.startswith(key.partition("=")[0]) and "has no effect with roles.granularity=batch" in said
    assert said.endswith("; leave it out, or set roles.granularity=turn, group or sample.")


def test_validation_reads_the_keys_of_generation():
    assert VALIDATE in error("dpo", "rollout.tp=2")
    held_out = ["data.val=test.jsonl", "validation.greedy=true", "validation.samples_per_prompt=2"]
    trained = {"rollout.temperature", "rollout.samples_per_prompt", "rollout.longest_first"}
    trained |= {"reward.overlong_buffer_tokens", *WITHOUT_ANOTHER}
    for mode in ("train", "check"):
        for key in set(VALUES) - trained:
            assert error("dpo", *held_out, f"run.mode={mode}", f"{key}={VALUES[key]}") == "", key


@pytest.mark.parametrize("key", WITHOUT_ANOTHER)
def test_a_key_is_accepted_with_the_one_that_it_needs(key):
    others = ["reward.model.path=reward", "reward.judge.path=judge", "reward.overlong_buffer_tokens=4"]
    others += ["rollout.carry_over=true", "rollout_correction.truncate_tokens=2"]
    if key == "rollout.biased_truncation":
        others = ["rollout.top_p=0.9"]
    if key.startswith("rollout.draft."):
        others = ["rollout.draft.path=draft"]
    if key == "rollout.dp_attention":
        others = ["rollout.ep=2"]
    if key == "rollout.kv_offload_gib":
        others = ["agents.environment=game.py:Game"]
    assert error("grpo", *others, f"{key}={WITHOUT_ANOTHER[key]}") == ""


def test_an_algorithm_of_the_user_may_read_any_key(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "NEEDS = ('responses',)\nDEFAULTS = {}\ndef collect(phases): ...\ndef learn(phases, batch): ...\n"
    )
    for key, value in VALUES.items():
        assert "has no effect" not in error(str(own), f"{key}={value}")


FUNCTIONS = "def collect(phases): ...\ndef learn(phases, batch): ...\n"


@pytest.mark.parametrize(
    ("need", "key"),
    [
        ("critic", "critic.warmup_steps=3"),
        ("implicit_reward", "implicit_reward.beta=0.3"),
        ("dynamic_sampling", "dynamic_sampling.max_rounds=3"),
        ("preference", "preference.label_smoothing=0.1"),
        ("preference", "preference.gamma=0.3"),
    ],
)
def test_a_new_algorithm_reads_the_section_that_it_needs(tmp_path, monkeypatch, need, key):
    monkeypatch.setattr(declarations, "ALGORITHMS", tmp_path)
    for name, needs in ((f"with_{need}", ("samples", need)), (f"without_{need}", ("samples",))):
        (tmp_path / f"{name}.py").write_text(f"NEEDS = {needs}\nDEFAULTS = {{}}\n{FUNCTIONS}")
    assert error(f"with_{need}", key) == ""
    assert error(f"without_{need}", key) == (
        f"{key} has no effect with algorithm=without_{need}; leave it out, or set algorithm=with_{need}."
    )


@pytest.mark.parametrize("key", ["teacher.path=t", "teacher.top_k=5", "teacher.sources={a: t}"])
def test_teachers_that_a_users_algorithm_does_not_need_are_refused(tmp_path, key):
    policy = {"objective.advantage": "reinforce++", "objective.loss": "ppo"}
    for name, needs, defaults in (
        ("own", ("samples", "reward"), policy),
        ("taught", ("samples", "teacher"), {}),
    ):
        (tmp_path / f"{name}.py").write_text(f"NEEDS = {needs}\nDEFAULTS = {defaults}\n{FUNCTIONS}")
    said = error(f"{tmp_path}/own.py", key)
    assert said.startswith(key.partition("=")[0]) and "has no effect with algorithm=" in said
    assert error(f"{tmp_path}/taught.py", "teacher.path=t", key) == ""
    beside = ("teacher.path=t", "teacher.advantage_coef=0.1")
    assert error(f"{tmp_path}/own.py", *beside) == ""
    assert "leave it out, or set algorithm=distill" in error(f"{tmp_path}/own.py", *beside, "teacher.top_k=5")
