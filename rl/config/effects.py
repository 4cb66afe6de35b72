"""Keys of the sections rollout and reward that only some runs read. A key that the run does not read is
refused.

`GROUPS` is the only list of them: refusals, and the warning of a replay, follow from it. The keys of other
sections are checked with their sections.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rl.config.options import ConfigError, build, flatten, listed, read, show
from rl.config.schema import (
    Config,
    Judge,
    algorithm_of,
    generates_held_out,
    learns_from_samples,
    needs_engine,
    needs_reward,
)


@dataclass(frozen=True, eq=False)  # found by identity
class Group:
    """Keys that are read under one condition."""

    section: str
    keys: Sequence[str]
    reads: Callable[[Config], bool]
    reason: str
    """End of the sentence "KEY has no effect ..."; {algorithm} is the algorithm's name."""
    remedy: str = "leave it out"


VALIDATE = "leave it out, or set data.val, validation.every and validation.greedy=true"

GROUPS = (
    Group(
        "rollout",
        (
            "tp stop stop_token_ids deterministic max_concurrent_samples gpu_memory_utilization "
            "cpu_kv_cache_mib enforce_eager"
        ).split(),
        needs_engine,
        "with algorithm={algorithm}, which generates no responses",
        VALIDATE,
    ),
    Group(
        "rollout",
        ("top_p", "top_k", "min_p"),
        lambda config: (
            learns_from_samples(config)
            or (generates_held_out(config) and config.validation.samples_per_prompt > 0)
        ),
        "with algorithm={algorithm}, which samples no responses",
        "leave it out, or set data.val, validation.every and validation.samples_per_prompt",
    ),
    Group(
        "rollout",
        ("temperature",),
        learns_from_samples,
        "with algorithm={algorithm}, which does not learn from samples",
        "leave it out; validation.temperature is that of held-out responses",
    ),
    Group(
        "rollout",
        ("samples_per_prompt", "longest_first"),
        lambda config: learns_from_samples(config) and config.run.mode != "train_only",
        "with algorithm={algorithm}, which does not learn from samples",
    ),
    Group(
        "rollout",
        ("biased_truncation",),
        lambda config: learns_from_samples(config) and config.rollout.truncates,
        "with rollout.top_p=1, top_k=0 and min_p=0, or if nothing is learned from samples",
    ),
    Group(
        "rollout",
        ("oversample", "max_staleness", "on_stale", "carry_over_cache"),
        lambda config: config.rollout.carry_over,
        "with rollout.carry_over=false",
        "leave it out, or set rollout.carry_over=true",
    ),
    Group(
        "reward",
        (
            "function kwargs failure_score sources workers variables timeout_s memory_mib model.path "
            "judge.path"
        ).split(),
        needs_reward,
        "with algorithm={algorithm}, which scores no responses",
        VALIDATE,
    ),
    Group(
        "reward",
        ("overlong_buffer_tokens",),
        lambda config: "reward" in algorithm_of(config).needs and config.run.mode != "train_only",
        "with algorithm={algorithm}, which does not learn from scores",
    ),
    Group(
        "reward",
        ("overlong_penalty",),
        lambda config: config.reward.overlong_buffer_tokens > 0,
        "with reward.overlong_buffer_tokens=0",
        "leave it out, or set reward.overlong_buffer_tokens",
    ),
    Group(
        "reward",
        ("model.coef",),
        lambda config: bool(config.reward.model.path),
        "without reward.model.path",
        "leave it out, or set reward.model.path",
    ),
    Group(
        "reward",
        [f"judge.{key}" for key in vars(Judge()) if key != "path"],
        lambda config: bool(config.reward.judge.path),
        "without reward.judge.path",
        "leave it out, or set reward.judge.path",
    ),
)


def check_effects(config: Config) -> None:
    """Raise ConfigError for all keys that are not at their defaults and have no effect.

    A mode that does a part of a run accepts the config of the whole run, so `run.mode` is not considered. A
    user's algorithm may read any key, so it is not checked.
    """
    if not config.algorithm.endswith(".py"):
        unread = _unread(whole_run(config))
        sentences = [_sentence(group, keys, config.algorithm) for group, keys in unread.items()]
        if sentences:
            raise ConfigError(" ".join(sentences))


def _sentence(group: Group, keys: list[str], algorithm: str) -> str:
    reason = group.reason.format(algorithm=algorithm)
    if len(keys) == 1:
        return f"{keys[0]} has no effect {reason}; {group.remedy}."
    return f"{listed(keys, 'and')} have no effect {reason}; {group.remedy.replace('it', 'them', 1)}."


def replay_warnings(config: Config) -> list[str]:
    """Return a sentence that names the keys without effect in run.mode=train_only, if there are any."""
    if config.run.mode != "train_only" or config.algorithm.endswith(".py"):
        return []
    keys = [key for keys in _unread(config).values() for key in keys]
    if not keys:
        return []
    have = "have" if len(keys) > 1 else "has"
    return [f"run.mode=train_only generates and scores nothing: {listed(keys, 'and')} {have} no effect."]


def whole_run(config: Config) -> Config:
    """Return the config of the run of which `run.mode` does a part (a check has dropped data.val)."""
    dropped = config.run.mode == "check" and not config.data.val
    return replace(
        config,
        run=replace(config.run, mode="train"),
        data=replace(config.data, val=["dropped"]) if dropped else config.data,
    )


def _unread(config: Config) -> dict[Group, list[str]]:
    """Return the keys that are not at their defaults and not read, as key=value."""
    values, defaults = flatten(config), flatten(build(Config, read(None), algorithm_of(config).defaults))
    found: dict[Group, list[str]] = {}
    for group in GROUPS:
        for key in (f"{group.section}.{key}" for key in group.keys):
            if values[key] != defaults[key] and not group.reads(config):
                found.setdefault(group, []).append(f"{key}={show(values[key])}")
    return found
