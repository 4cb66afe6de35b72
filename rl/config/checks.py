"""Checks of a configuration by itself: ranges and contradictions.

`check` is a pure function, so that every rank raises the same ConfigError: one sentence with the numbers and
the remedy. `rl.config.layout_checks` checks a configuration against the number of ranks and the model.
"""

import importlib.util
import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rl.config.durations import seconds_of
from rl.config.effects import check_effects, replay_warnings
from rl.config.elastic_checks import check_elastic, check_limits
from rl.config.exclusions import check_exclusions
from rl.config.functions import FORM
from rl.config.layout_checks import divisors
from rl.config.needs import algorithm_of, learns, learns_from_samples, needs_sampling_masks, uses_teacher
from rl.config.objective_checks import check_objective, objective_warnings
from rl.config.options import ConfigError, flatten, show
from rl.config.ranges import ranges_of
from rl.config.reward_sources import check_sources
from rl.config.role_checks import check_roles
from rl.config.schema import Config, Rollout, Run, whole_run
from rl.config.sweep_checks import check_points
from rl.config.teacher_checks import check_teacher
from rl.config.trace import check_trace
from rl.config.wing import check_wing

MAX_NAME_BYTES = 255
"""Maximum length of a file's name on Linux, in bytes."""
OPTIMIZERS = ("training.optimizer", "critic.optimizer", "implicit_reward.optimizer")

REQUIRED = {
    "model.path": "a Hugging Face checkpoint directory",
    "data.train": "a list of parquet, JSONL or Arrow files",
}


def check(config: Config, points: Sequence[Config] = ()) -> list[str]:
    """Return warnings, one sentence each. Raises ConfigError for the first error.

    points: result of `load_points`; with a sweep in one job each of them is checked too.
    """
    check_wing(config)
    if points:
        for point in points:
            try:
                check(point)
                check_exclusions(replace(point, sweep=config.sweep))
            except ConfigError as error:
                raise ConfigError(f"point {point.run.name}: {error}") from error
        check_points(config, points)
    values = flatten(config)
    for key, what in REQUIRED.items():
        if not values[key] and not (key == "data.train" and config.run.mode in ("evaluate", "score_only")):
            raise ConfigError(f"{key} is empty, but a run needs it: set it to {what}.")
    for key, accepted in ranges_of(Config).items():
        if values[key] is not None and not accepted.accepts(values[key]):
            raise ConfigError(f"{key} is {values[key]}, but must be {accepted.words}.")
    check_names(config)
    check_contradictions(config)
    check_objective(config)
    check_roles(config)
    check_elastic(config)
    check_limits(config)
    check_exclusions(config)
    check_effects(config)
    check_trace(config.trace, config.run.max_steps)
    return warnings(config)


def check_directory_name(key: str, name: str) -> None:
    """Raise ConfigError unless a directory can have the name, and a line of a text can show it."""
    if name in ("", ".", "..") or "/" in name or name != name.strip() or not name.isprintable():
        raise ConfigError(
            f"{key} is {show(name)}, but becomes a directory's name; use one without '/', line breaks, "
            "control characters and spaces at its ends, e.g. grpo-gsm8k."
        )


def check_names(config: Config) -> None:
    name = config.run.name
    check_directory_name("run.name (without one, the config file's name)", name)
    longest = max(len(os.fsencode(part)) for part in (name, *Path(config.run.dir).parts))
    if longest > MAX_NAME_BYTES:
        raise ConfigError(
            f"run.dir={config.run.dir} has a name of {longest} bytes, more than the maximum of "
            f"{MAX_NAME_BYTES}; use a shorter run.name or run.dir."
        )
    if not re.fullmatch(FORM, config.reward.function):
        raise ConfigError(
            f"reward.function is {show(config.reward.function)}, but must be package.module:name or "
            "path/to/file.py:name."
        )
    check_sources(config.reward.sources)
    if config.run.max_time:
        try:
            seconds_of(config.run.max_time)
        except ValueError as error:
            raise ConfigError(f"run.max_time: {error}") from error
    if "" in config.rollout.stop:
        raise ConfigError("rollout.stop holds an empty string, which would end every response; remove it.")
    if min(config.rollout.stop_token_ids, default=0) < 0:
        raise ConfigError(
            f"rollout.stop_token_ids holds {min(config.rollout.stop_token_ids)}, but token ids are 0 or "
            "more; remove it."
        )


def check_trackers(config: Config) -> None:
    """Raise ConfigError for a tracker without its package, and for names that it rejects."""
    logging = config.logging
    for key, default in (("wandb", "none"), ("mlflow", ""), ("trackio", False)):
        value = getattr(logging, key)
        # A directory of that name, such as the one that wandb makes, is found too, but has no origin.
        if value != default and getattr(importlib.util.find_spec(key), "origin", None) is None:
            raise ConfigError(
                f"logging.{key}={show(value)} requires the package {key}, which is not installed: run pip "
                f"install {key}, or set logging.{key}={show(default)}."
            )
    if not re.fullmatch(r"[\w.-]+", logging.project):
        raise ConfigError(
            f"logging.project is {show(logging.project)}, but must consist of letters, digits, '_', '-' and "
            "'.', as trackers require: use e.g. lockstep."
        )


def check_contradictions(config: Config) -> None:
    values = flatten(config)
    for section in OPTIMIZERS:
        lr, min_lr = values[f"{section}.lr"], values[f"{section}.min_lr"]
        if min_lr > lr:
            raise ConfigError(
                f"{section}.min_lr={min_lr} is above {section}.lr={lr}, from which it decays; lower it."
            )
    check_data(config)
    check_checkpoint(config)
    check_trackers(config)
    check_stored(config.run)
    if config.rollout.draft.is_on:
        check_draft(config.rollout)
    if config.agents.is_on:
        check_agents(config)
    if uses_teacher(config):
        check_teacher(config)
    if config.watchdog.lost_s < 4 * config.watchdog.beat_s:
        raise ConfigError(
            f"watchdog.lost_s={config.watchdog.lost_s:g} leaves no room for a late heartbeat: use at least "
            f"four times watchdog.beat_s={config.watchdog.beat_s:g}."
        )
    buffer, limit = config.reward.overlong_buffer_tokens, config.rollout.max_response_tokens
    if buffer > limit:
        raise ConfigError(
            f"reward.overlong_buffer_tokens={buffer} is more than rollout.max_response_tokens={limit}, the "
            "end of the buffer; lower it."
        )
    validation = config.validation
    measures = validation.greedy or validation.samples_per_prompt or validation.loss
    if config.run.mode == "evaluate" and not config.data.val:
        raise ConfigError(
            "run.mode=evaluate with an empty data.val has nothing to measure; set data.val to the files with "
            "the prompts."
        )
    if config.data.val and validation.every and not measures:
        raise ConfigError(
            "validation.greedy=false and validation.samples_per_prompt=0 leave nothing to validate with; "
            "set one of them."
        )
    top_k = validation.top_k or config.rollout.top_k
    if needs_sampling_masks(config) and validation.top_p == 1 and not top_k:
        raise ConfigError(
            f"validation.top_p=1: because of rollout.top_p={config.rollout.top_p:g} the engine returns the "
            "tokens that it kept, which would be the whole vocabulary for every token; use less than 1, or "
            "validation.top_k."
        )
    step, minibatch = config.data.prompts_per_step, config.training.prompts_per_minibatch
    if minibatch > step:
        raise ConfigError(
            f"training.prompts_per_minibatch={minibatch} is larger than data.prompts_per_step={step}; "
            f"use at most {step}, or 0 for the whole batch."
        )
    if minibatch and step % minibatch:
        below = max(n for n in divisors(step) if n < minibatch)
        above = min(n for n in divisors(step) if n > minibatch)
        raise ConfigError(
            f"training.prompts_per_minibatch={minibatch} does not divide data.prompts_per_step={step}; use "
            f"{below} or {above}."
        )


def check_data(config: Config) -> None:
    data, needs = config.data, algorithm_of(config).needs
    if not data.prompt_key and {"pairs", "labels"}.isdisjoint(needs) and not data.messages_key:
        raise ConfigError(
            "data.prompt_key is empty, but a run needs it: set it to the column with the prompt."
        )
    reads_others = data.messages_key or (learns(config) and {"pairs", "labels"} & {*needs})
    if data.string_prompts == "user" and reads_others:
        raise ConfigError(
            "data.string_prompts=user is for prompts, not for conversations, pairs or labelled responses; "
            "write these as messages, and leave the key out."
        )
    if data.train_weights and len(data.train_weights) != len(data.train):
        raise ConfigError(
            f"data.train_weights has {len(data.train_weights)} numbers for {len(data.train)} files of "
            "data.train; give one for each."
        )
    if data.train_weights and data.max_rows:
        raise ConfigError(
            f"data.max_rows={data.max_rows} counts the rows of all files together, but data.train_weights "
            "draws from each file; leave one of them out."
        )
    if any(not 0 < weight < math.inf for weight in data.train_weights):
        raise ConfigError(
            f"data.train_weights holds {min(data.train_weights)}, but a share must be greater than 0 and "
            "finite."
        )


def check_stored(run: Run) -> None:
    """Raise ConfigError if run.mode=train_only reads the rollouts that it replaces."""
    own = not run.rollouts or Path(run.rollouts).resolve() == Path(run.dir).resolve()
    if run.mode == "train_only" and own:
        raise ConfigError(
            f"run.mode=train_only needs run.rollouts, the directory of another run than run.dir={run.dir}, "
            "because a run replaces the rollouts of its own directory; set both."
        )


def check_agents(config: Config) -> None:
    """Raise ConfigError, or ValueError for a malformed entry, if the section agents cannot be used."""
    agents, rollout = config.agents, config.rollout
    _ = agents.plan  # raises ValueError for a malformed entry
    if agents.container.image and agents.container.wall_s >= agents.timeout_s:
        raise ConfigError(
            f"agents.container.wall_s={agents.container.wall_s:g} must be below "
            f"agents.timeout_s={agents.timeout_s:g}, at which the whole trajectory fails; raise "
            "agents.timeout_s."
        )
    if config.watchdog.limits.environments <= agents.timeout_s:
        raise ConfigError(
            f"watchdog.limits.environments={config.watchdog.limits.environments:g} must exceed "
            f"agents.timeout_s={agents.timeout_s:g}, the limit of a single call; raise "
            "watchdog.limits.environments."
        )
    if agents.max_tokens_per_turn > rollout.max_response_tokens:
        raise ConfigError(
            f"agents.max_tokens_per_turn={agents.max_tokens_per_turn} is above "
            f"rollout.max_response_tokens={rollout.max_response_tokens}, the limit of all turns together; "
            "lower it, or use 0."
        )


def check_draft(rollout: Rollout) -> None:
    """Raise ConfigError if an engine step may verify more tokens than a response has."""
    longest = rollout.max_response_tokens - 1
    if rollout.draft.tokens > longest:
        remedy = f"use at most {longest}" if longest else f"leave out {rollout.draft.setting}"
        raise ConfigError(
            f"rollout.draft.tokens={rollout.draft.tokens} must be below rollout.max_response_tokens="
            f"{rollout.max_response_tokens}, because a step yields one token besides the accepted drafts; "
            f"{remedy}."
        )


def check_checkpoint(config: Config) -> None:
    checkpoint = config.checkpoint
    if checkpoint.keep_best and not checkpoint.best_metric:
        raise ConfigError(
            f"checkpoint.keep_best={checkpoint.keep_best} needs checkpoint.best_metric, the name of the "
            "metric that is meant."
        )
    if checkpoint.weights_only and checkpoint.resume in ("auto", "never"):
        raise ConfigError(
            f"checkpoint.weights_only=true needs a path in checkpoint.resume, not {checkpoint.resume}: that "
            "of the run, or of its checkpoint, whose weights are to be taken."
        )
    if checkpoint.weights_only and Path(config.run.dir).resolve() in (
        source := Path(checkpoint.resume).resolve(),
        *source.parents,
    ):
        raise ConfigError(
            f"checkpoint.weights_only=true with checkpoint.resume={checkpoint.resume} starts a run in the "
            f"directory of the run from which it starts; set another run.dir than {config.run.dir}."
        )


def warnings(config: Config) -> list[str]:
    """Return one sentence for each setting that is allowed but probably unintended."""
    rollout, values = config.rollout, flatten(config)
    found = []
    for section in OPTIMIZERS:
        warmup, min_lr = values[f"{section}.warmup_steps"], values[f"{section}.min_lr"]
        if warmup >= config.run.max_steps:
            found.append(
                f"{section}.warmup_steps={warmup} is not less than run.max_steps={config.run.max_steps}: "
                "the run ends within the warm-up."
            )
        if min_lr and values[f"{section}.schedule"] == "constant":
            found.append(
                f"{section}.min_lr={min_lr} has no effect with schedule=constant; set linear or cosine."
            )
    if config.critic.warmup_steps >= config.run.max_steps:
        found.append(
            f"critic.warmup_steps={config.critic.warmup_steps} is not less than "
            f"run.max_steps={config.run.max_steps}: the policy never moves."
        )
    if shared := [path for path in config.data.val if path in config.data.train]:
        found.append(f"{shared[0]} is in data.train and in data.val: validation measures training prompts.")
    checkpoint, validation = config.checkpoint, config.validation
    held_out = whole_run(config).data.val  # a check drops data.val
    if not held_out and validation.every not in (0, type(validation).every):
        found.append(
            f"validation.every={validation.every} measures nothing, because data.val is empty; set it."
        )
    if (
        checkpoint.keep_best
        and checkpoint.every
        and checkpoint.best_metric.startswith("val")
        and checkpoint.every % (validation.every or 1)
    ):
        found.append(
            f"checkpoint.every={checkpoint.every} is no multiple of validation.every={validation.every}: "
            f"checkpoints of steps without {checkpoint.best_metric} can not be among the best."
        )
    if not learns_from_samples(config):
        return found
    found += replay_warnings(config)
    found += objective_warnings(config)
    if rollout.truncates and rollout.biased_truncation:
        found.append(
            f"rollout.biased_truncation=true: rollout.top_p={rollout.top_p}, top_k={rollout.top_k}, "
            f"min_p={rollout.min_p} sample from a truncated distribution, but the trainer's log-probs are "
            "those of the whole one, so ratios and KL are biased; false makes the two agree."
        )
    return found
