"""Checks of algorithm, advantage, loss and aggregation: do they fit together? Every error gives the reason
and the remedy.

The declarations of the chosen estimator and loss (`rl.config.declarations.Formula`) decide; no name of one
stands here.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import fields

from rl.config.declarations import NEEDS, describe, shipped
from rl.config.options import ConfigError, build, flatten, listed, read
from rl.config.schema import (
    ADVANTAGES,
    LOSSES,
    Config,
    Critic,
    DynamicSampling,
    ImplicitReward,
    Objective,
    Preference,
    algorithm_of,
)

COSTLY = frozenset({"critic", "greedy_baseline", "implicit_reward"})
"""Needs that an algorithm provides for one advantage estimator; with another estimator they would be
wasted."""

SECTION_OF_NEED = {
    "critic": Critic(),
    "implicit_reward": ImplicitReward(),
    "preference": Preference(),
    "dynamic_sampling": DynamicSampling(),
}
"""Sections that only some algorithms read, with their defaults."""
PREFERENCE_KEYS = {
    "dpo": ("loss", "beta", "label_smoothing"),
    "spin": ("loss", "beta", "label_smoothing"),
    "sppo": ("beta",),
    "kto": ("beta", "desirable_weight", "undesirable_weight"),
    "orpo": ("beta",),
    "simpo": ("beta", "gamma", "label_smoothing"),
}
"""Keys of the section preference that each algorithm reads."""


@functools.cache
def readers() -> dict[str, tuple[str, list[str]]]:
    """Return key of the section objective -> ("advantage" or "loss", names of those that read it)."""
    found: dict[str, tuple[str, list[str]]] = {}
    for chooser, formulas in (("advantage", ADVANTAGES), ("loss", LOSSES)):
        for name, formula in formulas.items():
            for key in formula.reads & set(Objective.__dataclass_fields__):
                found.setdefault(key, (chooser, []))[1].append(name)
    return found


def check_objective(config: Config) -> None:
    """Raise ConfigError for the first combination that does not fit together."""
    check_sections(config)
    check_advantage(config)
    check_loss(config)
    check_unread(config)
    check_mismatch(config)
    check_reward_kl(config)
    check_adaptive_entropy(config)
    check_correction(config)


def check_sections(config: Config) -> None:
    """Raise ConfigError for a section that is set, but not read by the algorithm."""
    needs = algorithm_of(config).needs
    for section, default in SECTION_OF_NEED.items():
        values, defaults = flatten(getattr(config, section)), flatten(default)
        changed = [key for key in values if values[key] != defaults[key]]
        if changed and section not in needs and not config.algorithm.endswith(".py"):
            users = [name for name in shipped() if section in describe(name).needs]
            raise ConfigError(
                f"{section}.{changed[0]} is set, but algorithm={config.algorithm} does not read it; "
                f"{plural(users, 'does', 'do')}. Leave it out."
            )


def check_advantage(config: Config) -> None:
    """Raise ConfigError if the algorithm does not provide what the estimator needs, or provides it in
    vain."""
    algorithm, name = config.algorithm, config.objective.advantage
    needs, defaults = set(algorithm_of(config).needs), algorithm_of(config).defaults
    own = defaults.get("objective.advantage", "none")
    if own == "none":
        for key in ("advantage", "loss"):
            if getattr(config.objective, key) != "none" and not algorithm.endswith(".py"):
                raise ConfigError(
                    f"objective.{key}={getattr(config.objective, key)}, but algorithm={algorithm} has a loss "
                    "of its own; leave it out."
                )
        return
    for key in ("advantage", "loss"):
        if getattr(config.objective, key) == "none":
            raise ConfigError(
                f"objective.{key}=none, but algorithm={algorithm} is a policy gradient; its default is "
                f"{defaults[f'objective.{key}']}."
            )
    required = frozenset(ADVANTAGES[name].needs)
    if missing := required - needs:
        fits = [other for other in shipped() if suits(other, name)]
        raise ConfigError(
            f"objective.advantage={name} needs {in_words(missing)}, which algorithm={algorithm} does not "
            f"provide; use algorithm={listed(fits, 'or')}."
        )
    if wasted := (needs & COSTLY) - required:
        raise ConfigError(
            f"algorithm={algorithm} provides {in_words(wasted)}, which objective.advantage={name} does not "
            f"read; use objective.advantage={own}, or algorithm=grpo."
        )
    columns, weights = config.objective.reward_columns, config.objective.reward_weights
    if weights and len(weights) != len(columns):
        raise ConfigError(
            f"objective.reward_weights has {len(weights)} numbers for {len(columns)} "
            "objective.reward_columns; give one for each."
        )
    if not ADVANTAGES[name].columns & {"rewards", "token_rewards"}:
        check_reward_terms(config)
    if "greedy_baseline" in required and config.objective.reward_kl.coef:
        raise ConfigError(
            f"objective.reward_kl.coef={config.objective.reward_kl.coef} cannot be combined with "
            f"objective.advantage={name}, whose greedy baseline has no such term; use objective.kl_coef."
        )


def check_reward_terms(config: Config) -> None:
    """Raise ConfigError for a term of the reward, if the estimator reads single numbers of the reward
    function."""
    reward = config.reward
    terms = {
        "objective.reward_kl.coef": config.objective.reward_kl.coef,
        "reward.overlong_buffer_tokens": reward.overlong_buffer_tokens,
        "reward.model.path": reward.model.path,
        "reward.judge.path": reward.judge.path,
    }
    for key, value in terms.items():
        if value:
            raise ConfigError(
                f"{key}={value} is a term of the reward, but "
                f"objective.advantage={config.objective.advantage} reads single numbers of the reward "
                "function; leave it out."
            )


def check_unread(config: Config) -> None:
    """Raise ConfigError for a key that is set, but not read by the chosen advantage, loss or algorithm."""
    own = build(Config, read(None), algorithm_of(config).defaults).objective
    goal = config.objective
    for key, (chooser, names) in readers().items():
        chosen = getattr(goal, chooser)
        if getattr(goal, key) != getattr(own, key) and chosen not in names:
            raise ConfigError(
                f"objective.{key}={getattr(goal, key)} has no effect with objective.{chooser}={chosen}; "
                f"{plural(names, 'reads', 'read')} it."
            )
    if goal.loss == "none" and not config.algorithm.endswith(".py"):
        unread = {
            "kl_coef": goal.kl_coef,
            "entropy_coef": goal.entropy_coef,
            "reward_kl.coef": goal.reward_kl.coef,
            "adaptive_entropy.target": goal.adaptive_entropy.target,
            "off_policy_mask": goal.off_policy_mask,
            "top_entropy": goal.top_entropy if goal.top_entropy < 1 else 0,
        }
        for key, value in unread.items():
            if value:
                raise ConfigError(
                    f"objective.{key}={value} has no effect with algorithm={config.algorithm}, which has a "
                    "loss of its own; leave it out."
                )
    preference = config.preference
    if preference.label_smoothing and preference.loss != "sigmoid":
        raise ConfigError(
            f"preference.label_smoothing={preference.label_smoothing} has no effect with "
            f"preference.loss={preference.loss}; leave it out."
        )
    reads = PREFERENCE_KEYS.get(config.algorithm)
    defaults = vars(build(Config, read(None), algorithm_of(config).defaults).preference)
    for key, value in vars(preference).items():
        if reads and key not in reads and value != defaults[key]:
            known = listed([f"preference.{name}" for name in reads], "and")
            raise ConfigError(
                f"preference.{key}={value} has no effect with algorithm={config.algorithm}, which reads only "
                f"{known}; leave it out."
            )


def check_mismatch(config: Config) -> None:
    """Raise ConfigError if a mini-batch of kto has one response, because it also reads mismatched ones."""
    sizes = {
        "training.prompts_per_minibatch": config.training.prompts_per_minibatch,
        "data.prompts_per_step": config.data.prompts_per_step,
    }
    for key, size in sizes.items():
        if "labels" in algorithm_of(config).needs and size == 1:
            raise ConfigError(
                f"{key}=1 leaves algorithm={config.algorithm} no response to another prompt in the "
                "mini-batch; use 2 or more."
            )


def suits(algorithm: str, advantage: str) -> bool:
    """Return whether a shipped algorithm provides what the estimator needs, and nothing costly beyond
    that."""
    needs, required = set(describe(algorithm).needs), set(ADVANTAGES[advantage].needs)
    is_policy_gradient = "objective.advantage" in describe(algorithm).defaults
    return is_policy_gradient and required <= needs and needs & COSTLY <= required


def check_reward_kl(config: Config) -> None:
    """Raise ConfigError for an adaptive weight of the KL penalty that cannot work."""
    penalty = config.objective.reward_kl
    samples = config.data.prompts_per_step * config.rollout.samples_per_prompt
    if penalty.coef and penalty.controller == "adaptive" and penalty.horizon <= 0.2 * samples:
        raise ConfigError(
            f"objective.reward_kl.horizon={penalty.horizon} lets the weight fall to 0 or below in one step "
            f"of {samples} samples; use more than {math.ceil(0.2 * samples)}, such as 10000."
        )
    if penalty.controller == "adaptive" and not penalty.coef:
        raise ConfigError(
            "objective.reward_kl.controller=adaptive has no weight to start from; set "
            "objective.reward_kl.coef, e.g. 0.05."
        )


def check_adaptive_entropy(config: Config) -> None:
    """Raise ConfigError for an adaptive weight of the entropy bonus that cannot work."""
    goal = config.objective
    control, key = goal.adaptive_entropy, "objective.adaptive_entropy"
    changed = [field.name for field in fields(control) if getattr(control, field.name) != field.default]
    if not control.target:
        if changed:
            raise ConfigError(
                f"{key}.{changed[0]} has no effect without {key}.target; set it, e.g. to 0.2, or leave "
                "both out."
            )
        return
    if not control.low <= goal.entropy_coef <= control.high:
        raise ConfigError(
            f"objective.entropy_coef={goal.entropy_coef}, the first weight, must be from "
            f"{key}.low={control.low} to {key}.high={control.high}; change one of them."
        )
    if config.rollout_correction.bypass:
        raise ConfigError(
            f"rollout_correction.bypass=true leaves out the forward pass whose entropy {key} reads; set one "
            "of them."
        )


def check_loss(config: Config) -> None:
    """Raise ConfigError if the loss does not fit the aggregation, the advantage or its own keys."""
    goal = config.objective
    bounds = config.implicit_reward
    if bounds.min_accuracy > bounds.max_accuracy:
        raise ConfigError(
            f"implicit_reward.min_accuracy={bounds.min_accuracy} is above "
            f"max_accuracy={bounds.max_accuracy}, so that no prompt would be left; lower it."
        )
    estimator, loss = goal.chosen
    if loss is None:
        return
    if goal.top_entropy < 1 and "selected_tokens" in loss.columns:
        raise ConfigError(
            f"objective.top_entropy={goal.top_entropy} and objective.loss={goal.loss} both select tokens; "
            "use one of them."
        )
    if loss.per_sample and goal.aggregation != "seq-mean-token-mean":
        raise ConfigError(
            f"objective.loss={goal.loss} is one number per sample, which "
            f"objective.aggregation={goal.aggregation} would weigh by the sample's length; use "
            "seq-mean-token-mean."
        )
    if loss.per_sample and estimator is not None and estimator.per_token:
        raise ConfigError(
            f"objective.loss={goal.loss} requires one advantage per sample, but "
            f"objective.advantage={goal.advantage} gives one per token; use grpo or rloo."
        )
    for low, high in loss.ascending:
        if getattr(goal, low) >= getattr(goal, high):
            raise ConfigError(
                f"objective.{low}={getattr(goal, low)} is not below objective.{high}={getattr(goal, high)}; "
                "lower it."
            )


def check_correction(config: Config) -> None:
    """Raise ConfigError for a rollout correction with two weights per token, bounds out of order, or no
    effect."""
    fix = config.rollout_correction
    weights = [name for name in ("truncate_tokens", "truncate_samples", "icepop_high") if getattr(fix, name)]
    if len(weights) > 1:
        raise ConfigError(
            f"rollout_correction.{weights[0]} and {weights[1]} both weigh a token by its ratio; set one of "
            "them."
        )
    for name in ("truncate_tokens", "truncate_samples"):
        if 0 < getattr(fix, name) < 1:
            raise ConfigError(
                f"rollout_correction.{name}={getattr(fix, name)} reduces the weight of tokens on which "
                "engine and trainer agree, whose ratio is 1; use 1 or more, such as 2.0."
            )
    if (fix.icepop_low or fix.icepop_high) and not fix.icepop_low <= 1 <= fix.icepop_high:
        raise ConfigError(
            f"rollout_correction.icepop_low={fix.icepop_low} and icepop_high={fix.icepop_high} drop tokens "
            "on which engine and trainer agree, whose ratio is 1; use bounds around it, such as 0.5 and 5."
        )
    if fix.icepop_level != "token" and not fix.icepop_high:
        raise ConfigError(
            f"rollout_correction.icepop_level={fix.icepop_level} has no effect without icepop_high; set "
            "icepop_high, or leave it out."
        )
    rejections = fix.rejections
    for rejection in rejections:
        if not (rejection.low <= 0 <= rejection.high and rejection.low < rejection.high):
            raise ConfigError(
                f"rollout_correction.reject={rejection.name} keeps divergences from "
                f"reject_low={rejection.low} to reject_high={rejection.high} nats, but tokens on which "
                "engine and trainer agree have 0; use bounds around it, such as 0 and 0.5."
            )
    estimator, loss = config.objective.chosen
    if loss is not None and loss.per_sample and weights and not fix.weighs_samples:
        raise ConfigError(
            f"rollout_correction.{weights[0]} weighs single tokens, but "
            f"objective.loss={config.objective.loss} has one loss per sample; use truncate_samples, "
            "icepop_level=sample or reject."
        )
    if loss is not None and "loss_weights" in loss.columns and fix.weighs_samples:
        raise ConfigError(
            f"rollout_correction.{weights[0]} weighs whole samples, but "
            f"objective.loss={config.objective.loss} multiplies the weights of a sample's tokens; use "
            "truncate_tokens, or icepop_level=token."
        )
    if not rejections and (fix.reject_low or fix.reject_high):
        raise ConfigError(
            "rollout_correction.reject_low and reject_high are bounds for rollout_correction.reject, which "
            "is none; set it, or leave them out."
        )
    if fix.bypass and estimator is not None and "sum_p_squared" in estimator.columns:
        raise ConfigError(
            "rollout_correction.bypass=true leaves out the forward pass that "
            f"objective.advantage={config.objective.advantage} reads; set one of them."
        )
    if fix.bypass and (weights or rejections):
        keys = [*weights, *(["reject"] if rejections else [])]
        raise ConfigError(
            "rollout_correction.bypass=true uses the engine's log-probs as those of the old policy, which "
            f"leaves {keys[0]} nothing to correct; set one of them."
        )
    if (fix.bypass or weights or rejections) and loss is None:
        raise ConfigError(
            f"rollout_correction is for policy gradients, but algorithm={config.algorithm} is none; leave "
            "it out."
        )


def objective_warnings(config: Config) -> list[str]:
    """Return one sentence for each combination that is allowed but probably unintended."""
    found, goal = [], config.objective
    estimator, loss = goal.chosen
    if loss is not None and loss.small_clip and goal.clip_low == goal.clip_high == 0.2:
        found.append(
            f"objective.clip_low=0.2 and clip_high=0.2 are PPO's, but objective.loss={goal.loss} "
            f"{loss.small_clip}."
        )
    if loss is not None and loss.aggregation and goal.aggregation != loss.aggregation:
        found.append(
            f"objective.aggregation={goal.aggregation} is not the mean of objective.loss={goal.loss} in its "
            f"paper; set objective.aggregation={loss.aggregation}."
        )
    if goal.reward_kl.controller == "adaptive" and goal.reward_kl.target >= 1:
        found.append(
            f"objective.reward_kl.target={goal.reward_kl.target:g} is in nats per token, and so much hardly "
            "bounds the policy; use about 0.1, or divide a target per sample by the mean response length."
        )
    needs = algorithm_of(config).needs if estimator is None else estimator.needs
    if "groups" in needs and config.rollout.samples_per_prompt == 1:
        found.append(
            f"rollout.samples_per_prompt=1 leaves algorithm={config.algorithm} no group to compare with, and "
            "every advantage is 0; use 2 or more."
        )
    minibatch = config.training.prompts_per_minibatch
    several = config.training.epochs > 1 or (minibatch and minibatch < config.data.prompts_per_step)
    if goal.kl_coef and goal.kl_estimator == "k1":
        found.append(
            "objective.kl_estimator=k1 in the loss has a mean gradient of 0, so it does not bound the "
            "policy; use k2, k3 or k1+."
        )
    if loss is not None and not loss.uses_ratio and several:
        found.append(
            f"objective.loss={goal.loss} has no ratio to correct for the updates of the policy since the "
            "samples were drawn, but a step has several updates; set training.prompts_per_minibatch=0 and "
            "training.epochs=1, or use objective.loss=ppo."
        )
    return found


def in_words(needs: Iterable[str]) -> str:
    return listed(sorted(NEEDS[need] for need in needs), "and")


def plural(names: list[str], one: str, several: str) -> str:
    """Return the names with a verb in the right number: "ppo does", "dpo and spin do"."""
    return f"{listed(names, 'and')} {one if len(names) == 1 else several}"
