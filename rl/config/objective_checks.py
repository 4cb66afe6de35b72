"""Which algorithm, advantage, loss and aggregation make sense together; every refusal says why and what would work."""

import math

from rl.config.declarations import NEEDS, describe, shipped
from rl.config.options import ConfigError, build, flatten, listed, read
from rl.config.schema import Config, Critic, DynamicSampling, ImplicitReward, Preference, algorithm_of

ADVANTAGE_NEEDS: dict[str, frozenset[str]] = {
    "gae": frozenset({"critic"}),
    "remax": frozenset({"greedy_baseline"}),
    "prime": frozenset({"implicit_reward", "groups"}),
    "grpo": frozenset({"groups"}),
    "grpo-passk": frozenset({"groups"}),
    "gdpo": frozenset({"groups"}),
    "rloo": frozenset({"groups"}),
    "opo": frozenset({"groups"}),
    "gpg": frozenset({"groups"}),
    "optimal-token-baseline": frozenset({"groups"}),
    "reinforce++": frozenset(),
    "reinforce++-baseline": frozenset({"groups"}),
}
"""What an advantage estimator is made of, in the words of `rl.algorithms.NEEDS`."""

COSTLY = frozenset({"critic", "greedy_baseline", "implicit_reward"})
"""What an algorithm makes for one advantage estimator; another estimator would let it go to waste."""

PER_TOKEN = frozenset({"gae", "reinforce++", "optimal-token-baseline", "prime"})
"""Estimators whose advantage differs between the tokens of a sample."""

WITHOUT_RATIO = frozenset({"reinforce", "gpg"})
"""Losses that take every token for one of the present policy's."""

CLIPPED = ("ppo", "gspo", "gmpo", "cispo", "clip-cov", "dppo-tv", "dppo-kl")
READERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "gamma": ("advantage", ("gae", "reinforce++", "prime")),
    "lam": ("advantage", ("gae",)),
    "whiten": ("advantage", ("gae",)),
    "normalize_by_std": ("advantage", ("grpo", "grpo-passk")),
    "clip_low": ("loss", CLIPPED),
    "clip_high": ("loss", CLIPPED),
    "dual_clip": ("loss", ("ppo",)),
    "dppo_max_ratio": ("loss", ("dppo-tv", "dppo-kl")),
    "sapo_tau_positive": ("loss", ("sapo",)),
    "sapo_tau_negative": ("loss", ("sapo",)),
    "cov_fraction": ("loss", ("clip-cov", "kl-cov")),
    "cov_low": ("loss", ("clip-cov",)),
    "cov_high": ("loss", ("clip-cov",)),
    "kl_cov_coef": ("loss", ("kl-cov",)),
    "dro_beta": ("loss", ("dro",)),
}
"""Key of the objective -> which advantages, or losses, read it."""

SMALL_CLIP = {
    "gspo": "clips the ratio of a whole sample, and its paper takes 0.0003 and 0.0004",
    "gmpo": "clips the logarithm of the ratio, and its paper takes 0.4 and 0.4",
    "dppo-kl": "bounds a divergence in nats, and its paper takes 0.05",
}
"""Losses to which the default clip range means something else, and what."""

SAMPLE_MEANS = ("gspo", "sapo")
"""Losses whose papers, and verl whatever its loss_agg_mode, average over the tokens of each sample first."""

SECTION_OF_NEED = {
    "critic": Critic(),
    "implicit_reward": ImplicitReward(),
    "preference": Preference(),
    "dynamic_sampling": DynamicSampling(),
}
"""Sections that mean something to some algorithms only, as they are by default."""


def check_objective(config: Config) -> None:
    """Raise ConfigError for the first combination that does not make sense."""
    check_sections(config)
    check_advantage(config)
    check_loss(config)
    check_unread(config)
    check_reward_kl(config)
    check_correction(config)


def check_sections(config: Config) -> None:
    needs = algorithm_of(config).needs
    for section, default in SECTION_OF_NEED.items():
        values, defaults = flatten(getattr(config, section)), flatten(default)
        changed = [key for key in values if values[key] != defaults[key]]
        if changed and section not in needs and not config.algorithm.endswith(".py"):
            users = [name for name in shipped() if section in describe(name).needs]
            raise ConfigError(
                f"{section}.{changed[0]} is set, but algorithm={config.algorithm} has no use for it; "
                f"{listed(users, 'and')} {'has' if len(users) == 1 else 'have'}."
            )


def check_advantage(config: Config) -> None:
    algorithm, advantage = config.algorithm, config.objective.advantage
    needs, defaults = set(algorithm_of(config).needs), algorithm_of(config).defaults
    own = defaults.get("objective.advantage", "none")
    if own == "none":
        for key in ("advantage", "loss"):
            if getattr(config.objective, key) != "none" and not algorithm.endswith(".py"):
                raise ConfigError(
                    f"objective.{key}={getattr(config.objective, key)}, but algorithm={algorithm} has a loss of its own; leave it out."
                )
        return
    for key in ("advantage", "loss"):
        if getattr(config.objective, key) == "none":
            raise ConfigError(
                f"objective.{key}=none, but algorithm={algorithm} is a policy gradient; its own is {defaults[f'objective.{key}']}."
            )
    missing = ADVANTAGE_NEEDS[advantage] - needs
    if missing:
        fits = [name for name in shipped() if suits(name, advantage)]
        raise ConfigError(
            f"objective.advantage={advantage} needs {what(missing)}, which algorithm={algorithm} does not make; "
            f"use algorithm={listed(fits, 'or')}."
        )
    wasted = (needs & COSTLY) - ADVANTAGE_NEEDS[advantage]
    if wasted:
        raise ConfigError(
            f"algorithm={algorithm} makes {what(wasted)}, which objective.advantage={advantage} has no use for; "
            f"use objective.advantage={own}, or algorithm=grpo."
        )
    names, weights = config.objective.reward_columns, config.objective.reward_weights
    if (names or weights) and advantage != "gdpo":
        raise ConfigError(
            f"objective.reward_columns and reward_weights are for objective.advantage=gdpo, not {advantage}."
        )
    if weights and len(weights) != len(names):
        raise ConfigError(
            f"objective.reward_weights has {len(weights)} numbers for {len(names)} objective.reward_columns; give one for each."
        )
    if advantage in ("gdpo", "prime"):
        check_reward_terms(config)
    if advantage == "remax" and config.objective.reward_kl.coef:
        raise ConfigError(
            "objective.reward_kl.coef cannot go with objective.advantage=remax: the greedy baseline has no such term; use objective.kl_coef."
        )


def check_reward_terms(config: Config) -> None:
    """Estimators that take single numbers of the reward function, not the reward as a whole."""
    reward, advantage = config.reward, config.objective.advantage
    terms = {
        "objective.reward_kl.coef": config.objective.reward_kl.coef,
        "reward.overlong_buffer_tokens": reward.overlong_buffer_tokens,
        "reward.model.path": reward.model.path,
        "reward.judge.path": reward.judge.path,
    }
    for key, value in terms.items():
        if value:
            raise ConfigError(
                f"{key}={value} is a term of the reward, which objective.advantage={advantage} does not read: it takes "
                f"{'the outcome (acc)' if advantage == 'prime' else 'objective.reward_columns'} of the reward function; leave it out."
            )


def check_unread(config: Config) -> None:
    """Raise ConfigError for a key of the objective that is set and that the chosen advantage and loss do not read."""
    own = build(Config, read(None), algorithm_of(config).defaults).objective
    goal = config.objective
    for key, (chooser, readers) in READERS.items():
        chosen = getattr(goal, chooser)
        if getattr(goal, key) != getattr(own, key) and chosen not in readers:
            raise ConfigError(
                f"objective.{key}={getattr(goal, key)} has no effect with objective.{chooser}={chosen}; {listed(readers, 'and')} "
                f"{'reads' if len(readers) == 1 else 'read'} it."
            )
    if goal.loss == "none" and not config.algorithm.endswith(".py"):
        for key, value in {
            "kl_coef": goal.kl_coef,
            "entropy_coef": goal.entropy_coef,
            "reward_kl.coef": goal.reward_kl.coef,
        }.items():
            if value:
                raise ConfigError(
                    f"objective.{key}={value} has no effect with algorithm={config.algorithm}, which has a loss of its own."
                )
    preference = config.preference
    if preference.label_smoothing and preference.loss != "sigmoid":
        raise ConfigError(
            f"preference.label_smoothing={preference.label_smoothing} has no effect with preference.loss={preference.loss}."
        )
    if config.algorithm == "sppo" and (preference.loss != "sigmoid" or preference.label_smoothing):
        raise ConfigError(
            "preference.loss and label_smoothing are for pairs; algorithm=sppo has a loss of its own, and reads preference.beta."
        )


def suits(algorithm: str, advantage: str) -> bool:
    """Whether a shipped algorithm makes what the estimator needs, and nothing costly that it does not."""
    needs = set(describe(algorithm).needs)
    is_policy_gradient = "objective.advantage" in describe(algorithm).defaults
    return (
        is_policy_gradient
        and ADVANTAGE_NEEDS[advantage] <= needs
        and (needs & COSTLY) <= ADVANTAGE_NEEDS[advantage]
    )


def check_reward_kl(config: Config) -> None:
    penalty = config.objective.reward_kl
    samples = config.data.prompts_per_step * config.rollout.samples_per_prompt
    if penalty.coef and penalty.controller == "adaptive" and penalty.horizon <= 0.2 * samples:
        raise ConfigError(
            f"objective.reward_kl.horizon={penalty.horizon} lets the weight fall to 0 or below in one step of {samples} samples; "
            f"use more than {math.ceil(0.2 * samples)}, such as 10000."
        )
    if penalty.controller == "adaptive" and not penalty.coef:
        raise ConfigError(
            "objective.reward_kl.controller=adaptive has no weight to start from; set objective.reward_kl.coef, e.g. 0.05."
        )


def what(needs: frozenset[str] | set[str]) -> str:
    return listed(sorted(NEEDS[need] for need in needs), "and")


def check_loss(config: Config) -> None:
    goal = config.objective
    bounds = config.implicit_reward
    if bounds.min_accuracy > bounds.max_accuracy:
        raise ConfigError(
            f"implicit_reward.min_accuracy={bounds.min_accuracy} is above max_accuracy={bounds.max_accuracy}: no prompt would be left."
        )
    if goal.loss == "gmpo":
        if goal.aggregation != "seq-mean-token-mean":
            raise ConfigError(
                f"objective.loss=gmpo is one number per sample, whose mean over samples is objective.aggregation=seq-mean-token-mean; "
                f"{goal.aggregation} would weigh samples by their length."
            )
        if goal.advantage in PER_TOKEN:
            raise ConfigError(
                f"objective.loss=gmpo takes one advantage per sample, but objective.advantage={goal.advantage} gives one per token; "
                "use grpo or rloo."
            )
    if goal.loss == "clip-cov" and goal.cov_low >= goal.cov_high:
        raise ConfigError(
            f"objective.cov_low={goal.cov_low} is not below objective.cov_high={goal.cov_high}."
        )


def check_correction(config: Config) -> None:
    """At most one weight per token, bounds in order, and nothing to correct where the engine's log-probs are the old ones."""
    fix = config.rollout_correction
    weighs = [
        name
        for name, on in (
            ("truncate_tokens", fix.truncate_tokens),
            ("truncate_samples", fix.truncate_samples),
            ("icepop_high", fix.icepop_high),
        )
        if on
    ]
    if len(weighs) > 1:
        raise ConfigError(
            f"rollout_correction.{weighs[0]} and {weighs[1]} both weigh a token by its ratio; set one of them."
        )
    if (fix.icepop_low or fix.icepop_high) and not fix.icepop_low <= 1 <= fix.icepop_high:
        raise ConfigError(
            f"rollout_correction.icepop_low={fix.icepop_low} and icepop_high={fix.icepop_high} drop tokens on which engine and trainer "
            "agree, whose ratio is 1; use bounds around it, such as 0.5 and 5."
        )
    rejections = fix.rejections
    for rejection in rejections:
        if not (rejection.low <= 0 <= rejection.high and rejection.low < rejection.high):
            raise ConfigError(
                f"rollout_correction.reject={rejection.name} keeps divergences from "
                f"reject_low={rejection.low} to reject_high={rejection.high} nats, but tokens on which "
                "engine and trainer agree have 0; use bounds around it, such as 0 and 0.5."
            )
    if config.objective.loss == "gmpo" and (fix.truncate_tokens or fix.icepop_high):
        raise ConfigError(
            f"rollout_correction.{weighs[0]} weighs single tokens, but objective.loss=gmpo has one loss per sample; use truncate_samples or reject."
        )
    if not rejections and (fix.reject_low or fix.reject_high):
        raise ConfigError(
            "rollout_correction.reject_low and reject_high are bounds for rollout_correction.reject, which is none."
        )
    if fix.bypass and config.objective.advantage == "optimal-token-baseline":
        raise ConfigError(
            "rollout_correction.bypass=true leaves out the forward pass that objective.advantage=optimal-token-baseline reads; set one of them."
        )
    if fix.bypass and (weighs or rejections):
        keys = [*weighs, *(["reject"] if rejections else [])]
        raise ConfigError(
            f"rollout_correction.bypass=true takes the engine's log-probs for the old policy's, which leaves {keys[0]} nothing to correct; "
            "set one of them."
        )
    if (fix.bypass or weighs or rejections) and config.objective.loss == "none":
        raise ConfigError(
            f"rollout_correction is for policy gradients, and algorithm={config.algorithm} is none."
        )


def objective_warnings(config: Config) -> list[str]:
    """What is allowed but unlikely to be meant."""
    found, goal = [], config.objective
    small = SMALL_CLIP.get(goal.loss)
    if small is not None and goal.clip_low == goal.clip_high == 0.2:
        found.append(
            f"objective.clip_low=0.2 and clip_high=0.2 are PPO's; objective.loss={goal.loss} {small}."
        )
    if goal.loss in SAMPLE_MEANS and goal.aggregation != "seq-mean-token-mean":
        found.append(
            f"objective.aggregation={goal.aggregation} is not the mean of objective.loss={goal.loss}, whose "
            "paper and verl average over the tokens of each sample first; set "
            "objective.aggregation=seq-mean-token-mean."
        )
    if goal.reward_kl.controller == "adaptive" and goal.reward_kl.target >= 1:
        found.append(
            f"objective.reward_kl.target={goal.reward_kl.target:g} is in nats per token, and so much hardly "
            "bounds the policy; use 0.1 or so, or divide a target per sample by the mean response length."
        )
    needs = ADVANTAGE_NEEDS.get(goal.advantage, algorithm_of(config).needs)
    if "groups" in needs and config.rollout.samples_per_prompt == 1:
        found.append(
            f"rollout.samples_per_prompt=1 leaves algorithm={config.algorithm} no group to compare with, and every advantage is 0; use 2 or more."
        )
    minibatch = config.training.prompts_per_minibatch
    several = config.training.epochs > 1 or (minibatch and minibatch < config.data.prompts_per_step)
    if goal.kl_coef and goal.kl_estimator == "k1":
        found.append(
            "objective.kl_estimator=k1 in the loss has a mean gradient of 0 and pulls the policy nowhere; use k2, k3 or k1+."
        )
    if goal.loss in WITHOUT_RATIO and several:
        found.append(
            f"objective.loss={goal.loss} does not know that the policy has moved since the samples were drawn, and a step has several "
            "updates; set training.prompts_per_minibatch=0 and training.epochs=1, or use objective.loss=ppo."
        )
    return found
