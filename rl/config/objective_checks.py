"""Checks of algorithm, advantage, loss and aggregation: do they fit together? Every error gives the reason
and the remedy.

The checks read the declarations of the chosen estimator and loss (`rl.config.declarations.Formula`). They
name no estimator and no loss.
"""

import math
from collections.abc import Iterable

from rl.config.declarations import NEEDS, describe, formula_of, shipped
from rl.config.needs import algorithm_of
from rl.config.objective import Objective
from rl.config.options import ConfigError, listed
from rl.config.schema import Config

COSTLY = frozenset({"critic", "greedy_baseline", "implicit_reward"})
"""Needs that an algorithm provides for one advantage estimator; with another estimator they would be
wasted."""


def check_objective(config: Config) -> None:
    """Raise ConfigError for the first combination that does not fit together."""
    check_advantage(config)
    check_groups(config)
    check_loss(config)
    check_own_functions(config)
    check_mismatch(config)
    check_filtration(config)
    check_reward_kl(config)
    check_adaptive_entropy(config)
    check_correction(config)


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
            default = defaults.get(f"objective.{key}", "none")
            remedy = f"set objective.{key}, e.g. ppo, or name it in the DEFAULTS of the file"
            if default != "none":
                remedy = f"its default is {default}"
            raise ConfigError(
                f"objective.{key}=none, but algorithm={algorithm} is a policy gradient; {remedy}."
            )
    required = needs_of(name)
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


def check_groups(config: Config) -> None:
    """Raise ConfigError if a run that learns compares the samples of a prompt, but draws only one.

    TRL and OpenRLHF refuse this, too; verl takes the raw score as the advantage, which is another estimator.
    """
    estimator, teacher = config.objective.chosen[0], config.teacher.advantage_coef > 0
    needs = algorithm_of(config).needs if estimator is None else estimator.needs
    compares = "groups" in needs and (estimator is not None or "preference" in needs)
    is_alone = compares and config.rollout.samples_per_prompt == 1
    other_terms = config.objective.kl_coef or config.objective.entropy_coef or teacher
    if is_alone and config.run.mode in ("train", "check", "train_only") and not other_terms:
        own = config.objective.advantage
        setting = f"algorithm={config.algorithm}" if estimator is None else f"objective.advantage={own}"
        raise ConfigError(
            f"rollout.samples_per_prompt=1 leaves {setting} no other sample of the prompt to compare with, "
            "so nothing is learned; use 2 or more, or compare the batch (algorithm=reinforce_pp, or "
            "objective.advantage=reinforce++)."
        )


def needs_of(advantage: str) -> frozenset[str]:
    """Return what an advantage estimator, by its name in a config, needs of the algorithm."""
    estimator = formula_of("advantages", advantage)
    return frozenset(() if estimator is None else estimator.needs)


def check_own_functions(config: Config) -> None:
    """Raise ConfigError if `objective.kwargs` and the keys of the section objective do not fit the parameters
    of the user's functions."""
    goal = config.objective
    own = [each for each in goal.chosen if each is not None and ".py:" in each.spec]
    unread = goal.kwargs.keys() - frozenset().union(*(each.parameters for each in own))
    if unread:
        raise ConfigError(
            f"objective.kwargs.{min(unread)} is no keyword-only parameter of a function in your file; name "
            "the function in objective.advantage or objective.loss, or leave it out."
        )
    known = {*Objective.__dataclass_fields__, *goal.kwargs, "seed"}
    for each in own:
        if missing := each.required - known:
            raise ConfigError(
                f"{each.spec} has the parameter {min(missing)} without a value; set "
                f"objective.kwargs.{min(missing)}, or give it a default."
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
    needs, required = set(describe(algorithm).needs), needs_of(advantage)
    is_policy_gradient = "objective.advantage" in describe(algorithm).defaults
    return is_policy_gradient and required <= needs and needs & COSTLY <= required


def check_filtration(config: Config) -> None:
    """Raise ConfigError for a filtration without other samples of the prompt, and for a power without it."""
    goal = config.objective
    if goal.filtration not in ("none", "power") and config.rollout.samples_per_prompt == 1:
        raise ConfigError(
            f"objective.filtration={goal.filtration} compares the samples of a prompt, but "
            "rollout.samples_per_prompt=1; set it to 2 or more, e.g. 5 as in the paper."
        )
    if goal.filtration != "power" and goal.filtration_power != Objective().filtration_power:
        raise ConfigError(
            f"objective.filtration_power={goal.filtration_power} has no effect with "
            f"objective.filtration={goal.filtration}; leave it out, or set objective.filtration=power."
        )


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
    """Raise ConfigError for an initial weight of the entropy bonus outside the bounds of the adaptive one."""
    goal, control = config.objective, config.objective.adaptive_entropy
    if control.target and not control.low <= goal.entropy_coef <= control.high:
        raise ConfigError(
            f"objective.entropy_coef={goal.entropy_coef}, the first weight, must be from "
            f"objective.adaptive_entropy.low={control.low} to high={control.high}; change one of them."
        )


def check_loss(config: Config) -> None:
    """Raise ConfigError for bounds of a loss or of the implicit reward out of order."""
    goal = config.objective
    bounds = config.implicit_reward
    if bounds.min_accuracy > bounds.max_accuracy:
        raise ConfigError(
            f"implicit_reward.min_accuracy={bounds.min_accuracy} is above "
            f"max_accuracy={bounds.max_accuracy}, so that no prompt would be left; lower it."
        )
    loss = goal.chosen[1]
    for low, high in loss.ascending if loss is not None else ():
        if getattr(goal, low) >= getattr(goal, high):
            raise ConfigError(
                f"objective.{low}={getattr(goal, low)} is not below objective.{high}={getattr(goal, high)}; "
                "lower it."
            )


def check_correction(config: Config) -> None:
    """Raise ConfigError for bounds that drop or reduce tokens on which engine and trainer agree."""
    fix = config.rollout_correction
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
    for rejection in fix.rejections:
        if not (rejection.low <= 0 <= rejection.high and rejection.low < rejection.high):
            raise ConfigError(
                f"rollout_correction.reject={rejection.name} keeps divergences from "
                f"reject_low={rejection.low} to reject_high={rejection.high} nats, but tokens on which "
                "engine and trainer agree have 0; use bounds around it, such as 0 and 0.5."
            )


def objective_warnings(config: Config) -> list[str]:
    """Return one sentence for each combination that is allowed but probably unintended."""
    found, goal = [], config.objective
    _, loss = goal.chosen
    if goal.reward_kl.controller == "adaptive" and goal.reward_kl.target >= 1:
        found.append(
            f"objective.reward_kl.target={goal.reward_kl.target:g} is in nats per token, and so much hardly "
            "bounds the policy; use about 0.1, or divide a target per sample by the mean response length."
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
