"""Keys that only some runs read. A key that the run does not read is refused.

The table READ_WITH is written in the names of `rl.config.features`. Refusals, and the warning of a replay,
follow from it.
"""

import functools
from dataclasses import fields
from fnmatch import fnmatch
from typing import Any

from rl.config.declarations import describe
from rl.config.features import NAMED, algorithms_with, is_on, setting
from rl.config.objective import ADVANTAGES, LOSSES, Objective
from rl.config.options import ConfigError, build, flatten, listed, read, show
from rl.config.schema import Config, Preference, whole_run

VALIDATE = "leave it out, or set data.val, validation.every and validation.greedy=true"


@functools.cache
def readers() -> dict[str, tuple[str, list[str]]]:
    """Return key of the section objective -> ("advantage" or "loss", names of its readers)."""
    found: dict[str, tuple[str, list[str]]] = {}
    for chooser, formulas in (("advantage", ADVANTAGES), ("loss", LOSSES)):
        for name, formula in formulas.items():
            for key in formula.reads & set(Objective.__dataclass_fields__):
                found.setdefault(key, (chooser, []))[1].append(name)
    return found


READ_WITH = [
    ("data.image_key", "model.vision data.max_pixels", ""),
    (
        "generation",
        "rollout.tp rollout.ep rollout.quantization rollout.stop rollout.stop_token_ids "
        "rollout.deterministic rollout.max_concurrent_samples rollout.gpu_memory_utilization "
        "rollout.cpu_kv_cache_mib rollout.enforce_eager rollout.async_scheduling rollout.draft.path "
        "rollout.draft.method rollout.flashinfer_all_reduce",
        VALIDATE,
    ),
    (
        "drafts",
        "rollout.draft.tokens rollout.draft.min_tokens_per_step",
        "leave it out, or set rollout.draft.path or rollout.draft.method=mtp",
    ),
    ("rollout.ep", "rollout.dp_attention", ""),
    ("agents", "rollout.kv_offload_gib", ""),
    (
        "sampling",
        "rollout.top_p rollout.top_k rollout.min_p",
        "leave it out, or set data.val, validation.every and validation.samples_per_prompt",
    ),
    ("samples", "rollout.temperature", "leave it out; validation.temperature is that of held-out responses"),
    ("new samples", "rollout.samples_per_prompt rollout.longest_first", ""),
    ("truncation", "rollout.biased_truncation", ""),
    (
        "rollout.carry_over",
        "rollout.oversample rollout.max_staleness rollout.on_stale rollout.carry_over_cache",
        "",
    ),
    (
        "scoring",
        "reward.function reward.kwargs reward.failure_score reward.max_failed_share reward.sources "
        "reward.in_process reward.workers reward.variables reward.timeout_s reward.memory_mib "
        "reward.keep_special_tokens reward.model.path reward.judge.path",
        VALIDATE,
    ),
    (
        "ground truths",
        "data.ground_truth_key",
        "leave it out; data.response_key names the column with the response to learn",
    ),
    ("new scores", "reward.overlong_buffer_tokens", ""),
    ("reward.overlong_buffer_tokens", "reward.overlong_penalty", ""),
    ("reward.model.path", "reward.model.coef", ""),
    ("reward.judge.path", "reward.judge.*", ""),
    ("needs critic", "critic.*", ""),
    ("needs implicit_reward", "implicit_reward.*", ""),
    ("needs dynamic_sampling", "dynamic_sampling.*", ""),
    *[(f"reads preference.{field.name}", f"preference.{field.name}", "") for field in fields(Preference)],
    ("preference.loss=sigmoid", "preference.label_smoothing", ""),
    *[
        (f"objective.{chooser}={'|'.join(names)}", f"objective.{key}", "")
        for key, (chooser, names) in readers().items()
    ],
    (
        "a policy loss",
        "objective.kl_coef objective.entropy_coef objective.reward_kl.coef "
        "objective.adaptive_entropy.target objective.off_policy_mask objective.top_entropy",
        "",
    ),
    ("objective.adaptive_entropy.target", "objective.adaptive_entropy.*", ""),
    ("rollout_correction.reject", "rollout_correction.reject_low rollout_correction.reject_high", ""),
    ("rollout_correction.icepop_high", "rollout_correction.icepop_level", ""),
    ("a teacher", "teacher.*", "leave it out, or set algorithm=distill or teacher.advantage_coef"),
    (
        "distillation",
        "teacher.divergence teacher.beta teacher.top_k teacher.student_share teacher.teacher_share "
        "teacher.gpu_memory_utilization",
        "",
    ),
    ("teacher.divergence=jensen_shannon", "teacher.beta", ""),
    ("teacher.teacher_share", "teacher.gpu_memory_utilization", ""),
    ("teacher.self_taught=present|initial", "teacher.template teacher.max_prompt_tokens", ""),
    ("agents", "agents.*", "leave it out, or set agents.environment or agents.tools"),
    (
        "roles",
        "roles.lag roles.granularity roles.cache roles.refit_after_steps",
        "leave it out, or set roles.train and roles.rollout",
    ),
    ("roles.granularity=turn|group|sample", "roles.cache roles.refit_after_steps", ""),
    ("training.recompute=selective", "training.recompute_modules", ""),
    ("training.recompute=full", "training.recompute_every", ""),
    ("run.elastic.min_nodes", "run.elastic.*", ""),
    ("trace.steps", "trace.torch_profiler trace.memory_snapshot trace.nvtx", ""),
]
"""Feature, keys that are read only with it (* stands for all of a section), and the remedy.

By default the remedy is to leave the key out, or to set the feature's key, or one of the algorithms that have
the feature."""


def check_effects(config: Config) -> None:
    """Raise ConfigError for all keys that are not at their defaults and have no effect.

    A mode that does a part of a run accepts the config of the whole run, so `run.mode` is not considered. A
    user's algorithm may read other keys, except the teachers' keys: the run builds teachers itself.
    """
    whole = whole_run(config)
    if sentences := [_sentence(whole, *row) for row in _unread(whole)]:
        raise ConfigError(" ".join(sentences))


def _sentence(config: Config, feature: str, keys: list[str], remedy: str) -> str:
    if not remedy:
        key, _, values = feature.partition("=")
        if feature in NAMED:
            key, values = "algorithm", "|".join(algorithms_with(feature))
        setter = f"{key}={listed(values.split('|'), 'or')}" if values else key
        remedy = "leave it out" if feature in NAMED and not values else f"leave it out, or set {setter}"
    if len(keys) == 1:
        return f"{keys[0]} has no effect with {setting(config, f'not {feature}')}; {remedy}."
    remedy = remedy.replace("it", "them", 1)
    return f"{listed(keys, 'and')} have no effect with {setting(config, f'not {feature}')}; {remedy}."


def replay_warnings(config: Config) -> list[str]:
    """Return a sentence that names the keys without effect in run.mode=train_only, if there are any."""
    if config.run.mode != "train_only":
        return []
    keys = [key for _, keys, _ in _unread(config) for key in keys]
    if not keys:
        return []
    have = "have" if len(keys) > 1 else "has"
    return [f"run.mode=train_only generates and scores nothing: {listed(keys, 'and')} {have} no effect."]


def _unread(config: Config) -> list[tuple[str, list[str], str]]:
    """Return the rows of READ_WITH that refuse keys, with these keys as key=value, each in one row."""
    values, defaults = flatten(config), _defaults(config.algorithm)
    own = {f"objective.{key}" for formula in config.objective.chosen if formula for key in formula.reads}
    changed = [key for key in values if values[key] != defaults[key] and key not in own]
    is_users = config.algorithm.endswith(".py")
    if is_users:
        changed = [key for key in changed if not key.startswith(("rollout.", "reward."))]
    found = []
    for feature, patterns, remedy in READ_WITH:
        accepts = is_users and feature in NAMED and not patterns.startswith("teacher.")
        keys = [key for key in changed if _matches(key, patterns)]
        if keys and not accepts and not is_on(config, feature):
            found.append((feature, [f"{key}={show(values[key])}" for key in keys], remedy))
            changed = [key for key in changed if key not in keys]
    return found


@functools.cache
def _defaults(algorithm: str) -> dict[str, Any]:
    return flatten(build(Config, read(None), describe(algorithm).defaults))


@functools.cache
def _matches(key: str, patterns: str) -> bool:
    return any(fnmatch(key, pattern) for pattern in patterns.split())
