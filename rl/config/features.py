"""Features of a run, by name. The tables of `exclusions` and `effects` are written in these names.

A feature is a key that is not at its default (`rollout.carry_over`), a key with one or more values
(`run.mode=train|check`), a name of NAMED, or "not " and one of these.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import reduce

from rl.config.declarations import Formula, describe, shipped
from rl.config.needs import (
    algorithm_of,
    generates_held_out,
    has_prediction_head,
    learns_from_data,
    learns_from_samples,
    needs_engine,
    needs_feedback,
    needs_reward,
    needs_sampling_masks,
    uses_teacher,
    validates,
)
from rl.config.options import as_text, flatten
from rl.config.schema import Config, Preference, whole_run
from rl.models import trains_class

CLASS = "a class of transformers"
"""The feature of a run whose policy trains as its class in transformers (`training.backend`)."""
MAX_RANK = 512
"""The largest rank of vLLM's adapters."""

PREFERENCE_KEYS = {
    "dpo": ("loss", "beta", "label_smoothing"),
    "kto": ("beta", "desirable_weight", "undesirable_weight"),
    "orpo": ("beta",),
    "simpo": ("beta", "gamma", "label_smoothing"),
    "spin": ("loss", "beta", "label_smoothing"),
    "sppo": ("beta",),
}
"""Algorithm -> keys of the section preference that it reads. Another algorithm that needs "preference" may
read all of them."""


@dataclass(frozen=True)
class Feature:
    """A feature that is more than the value of one key."""

    is_on: Callable[[Config], bool]
    on: str = ""
    """Setting that enables it, for messages; {section.key} is replaced by the value of the key."""
    off: str = ""
    """Description of its absence, for messages."""
    required: str = ""
    """Noun phrase that follows "requires" in messages."""
    algorithms: Callable[[str], bool] | None = None
    """Whether an algorithm has it, if the algorithm alone decides."""


def algorithm(
    is_on: Callable[[Config], bool],
    off: str = "",
    required: str = "",
    algorithms: Callable[[str], bool] | None = None,
) -> Feature:
    off = f"algorithm={{algorithm}}{off and ', which ' + off}"
    return Feature(is_on, "algorithm={algorithm}", off, required, algorithms)


def needs(*names: str, off: str = "", required: str = "") -> Feature:
    """Return the feature of an algorithm that needs one of these models or data."""

    def has(name: str) -> bool:
        return not set(describe(name).needs).isdisjoint(names)

    return algorithm(lambda config: has(config.algorithm), off, required, has)


def reads_preference(key: str) -> Feature:
    """Return the feature of an algorithm that reads a key of the section preference."""

    def has(name: str) -> bool:
        return "preference" in describe(name).needs and key in PREFERENCE_KEYS.get(name, (key,))

    return algorithm(lambda config: has(config.algorithm), algorithms=has)


def advantage(declares: Callable[[Formula], bool]) -> Feature:
    """Return the feature of advantage estimators with declarations that fulfil a condition."""
    return Feature(
        lambda config: (formula := config.objective.chosen[0]) is not None and declares(formula),
        "objective.advantage={objective.advantage}",
    )


def loss(declares: Callable[[Formula], bool]) -> Feature:
    """Return the feature of losses with declarations that fulfil a condition."""
    return Feature(
        lambda config: (formula := config.objective.chosen[1]) is not None and declares(formula),
        "objective.loss={objective.loss}",
    )


def runs_programs_in_containers(config: Config) -> bool:
    """Return whether a reward function gets a container for the programs that it runs."""
    sources = config.reward.sources.values()
    entries = [entry for source in sources for entry in (source if isinstance(source, list) else [source])]
    given = [config.reward.kwargs, *(entry.get("kwargs", {}) for entry in entries if isinstance(entry, dict))]
    return any(kwargs.get("container") for kwargs in given)


NAMED = {
    # Algorithms
    "samples": algorithm(
        learns_from_samples,
        "does not learn from samples",
        "an algorithm that learns from samples, unlike algorithm={algorithm}",
    ),
    "generation": algorithm(needs_engine, "generates no responses"),
    "generation in the whole run": algorithm(
        lambda config: needs_engine(whole_run(config)),
        required="an algorithm or a validation that generates responses, unlike algorithm={algorithm}",
    ),
    "sampling": algorithm(
        lambda config: (
            learns_from_samples(config)
            or (generates_held_out(config) and config.validation.samples_per_prompt > 0)
        ),
        "samples no responses",
    ),
    "new samples": algorithm(
        lambda config: learns_from_samples(config) and config.run.mode != "train_only",
        "does not learn from samples",
    ),
    "scoring": algorithm(needs_reward, "scores no responses"),
    "ground truths": algorithm(
        lambda config: learns_from_samples(config) or needs_reward(config) or bool(config.data.curriculum),
        "neither generates nor scores responses",
    ),
    "new scores": algorithm(
        lambda config: "reward" in algorithm_of(config).needs and config.run.mode != "train_only",
        "does not learn from scores",
    ),
    "a policy loss": algorithm(
        lambda config: config.objective.loss != "none",
        "has a loss of its own",
        "an algorithm with a policy loss, unlike algorithm={algorithm}",
    ),
    "a loss of older tokens": algorithm(
        lambda config: config.objective.loss != "none" or "teacher" in algorithm_of(config).needs,
        required="a policy loss or algorithm=distill, not {algorithm}",
    ),
    "scored samples": algorithm(
        lambda config: "reward" in algorithm_of(config).needs or needs_feedback(config),
        required="an algorithm that scores its samples, unlike algorithm={algorithm}",
    ),
    "distillation": needs("teacher", off="does not distill"),
    "needs critic": needs("critic"),
    "needs implicit_reward": needs("implicit_reward"),
    "needs dynamic_sampling": needs("dynamic_sampling"),
    "greedy baselines": needs("greedy_baseline"),
    "whole responses": needs("preference", "implicit_reward"),
    "selection by scores": needs("dynamic_sampling", "implicit_reward"),
    "responses in the data": needs(
        "responses", required="an algorithm that reads responses in the data, unlike algorithm={algorithm}"
    ),
    "samples beside responses": algorithm(
        lambda config: learns_from_samples(config) and "responses" in algorithm_of(config).needs
    ),
    "learning from the data": algorithm(learns_from_data),
    "sft": algorithm(
        lambda config: not learns_from_samples(config) and "responses" in algorithm_of(config).needs,
        required="algorithm=sft, not {algorithm}",
    ),
    **{f"reads preference.{field.name}": reads_preference(field.name) for field in fields(Preference)},
    # Advantages and losses
    "advantages of single rewards": advantage(
        lambda formula: formula.columns.isdisjoint({"rewards", "token_rewards"})
    ),
    "advantages per token": advantage(lambda formula: formula.per_token),
    "advantages from probabilities": advantage(lambda formula: "sum_p_squared" in formula.columns),
    "a loss of selected tokens": loss(lambda formula: "selected_tokens" in formula.columns),
    "a loss per sample": loss(lambda formula: formula.per_sample),
    "a loss of weighted ratios": loss(lambda formula: "loss_weights" in formula.columns),
    CLASS: Feature(
        lambda config: trains_class(config.training.backend, config.model.path),
        "training.backend=transformers",
        "training.backend=megatron",
    ),
    # Sections
    "agents": Feature(lambda config: config.agents.is_on, "the section agents", "no environment and no tool"),
    "adapters": Feature(
        lambda config: config.adapter.is_on,
        "adapter.kind={adapter.kind}",
        required="an adapter.kind other than none",
    ),
    "drafts": Feature(
        lambda config: config.rollout.draft.is_on,
        "the section rollout.draft",
        "neither rollout.draft.path nor rollout.draft.method=mtp",
        required="rollout.draft.path or rollout.draft.method=mtp",
    ),
    "a prediction head": Feature(has_prediction_head, "training.mtp.head_lr or rollout.draft.method=mtp"),
    "template variables": Feature(lambda config: bool(config.data.template_kwargs), "data.template_kwargs"),
    "scaled rotation": Feature(lambda config: bool(config.model.rope_scaling), "model.rope_scaling"),
    "roles": Feature(
        lambda config: config.roles.is_on,
        "roles.rollout={roles.rollout}",
        off="an empty roles.rollout",
        required="the section roles",
    ),
    "a sweep": Feature(lambda config: config.sweep.is_on, "sweep.adapters"),
    "containers": Feature(
        lambda config: bool(config.agents.container.image), "agents.container.image={agents.container.image}"
    ),
    "programs in containers": Feature(runs_programs_in_containers, "reward.kwargs.container"),
    "a teacher": Feature(uses_teacher, "the section teacher", "algorithm={algorithm} and no teacher"),
    # Keys that have a meaning only with another key
    "new rows": Feature(
        lambda config: config.agents.is_on and config.agents.on_rewrite == "new_row",
        "agents.on_rewrite=new_row",
    ),
    "order of arrival": Feature(
        lambda config: config.agents.is_on and config.agents.order == "arrival", "agents.order=arrival"
    ),
    "adapters in the engine": Feature(
        lambda config: config.adapter.is_on and config.adapter.in_engine == "adapter",
        "adapter.in_engine=adapter",
    ),
    "recomputed experts": Feature(
        lambda config: (
            config.training.recompute == "selective" and "moe" in config.training.recompute_modules
        ),
        "moe in training.recompute_modules",
    ),
    "recomputed latents": Feature(
        lambda config: (
            config.training.recompute == "selective" and "mla_up_proj" in config.training.recompute_modules
        ),
        "mla_up_proj in training.recompute_modules",
    ),
    "merged adapters": Feature(
        lambda config: needs_engine(config) and config.adapter.in_engine == "merged",
        "adapter.in_engine=merged",
    ),
    "a large rank": Feature(lambda config: config.adapter.rank > MAX_RANK, "adapter.rank={adapter.rank}"),
    "lag": Feature(lambda config: config.roles.is_on and config.roles.lag > 0, "roles.lag={roles.lag}"),
    "no lag": Feature(lambda config: config.roles.is_on and config.roles.lag == 0, "roles.lag=0"),
    "sampling masks": Feature(
        needs_sampling_masks, "rollout.top_p={rollout.top_p}, top_k={rollout.top_k}, min_p={rollout.min_p}"
    ),
    "truncation": Feature(
        lambda config: learns_from_samples(config) and config.rollout.truncates,
        off="rollout.top_p=1, top_k=0 and min_p=0, or if nothing is learned from samples",
    ),
    "a correction": Feature(
        lambda config: config.rollout_correction.corrects or "teacher" in algorithm_of(config).needs,
        required="a weight in rollout_correction",
    ),
    "weights of tokens": Feature(
        lambda config: config.rollout_correction.weighs_tokens,
        "a weight of single tokens in rollout_correction",
    ),
    "weights of samples": Feature(
        lambda config: config.rollout_correction.weighs_samples,
        "a weight of whole samples in rollout_correction",
    ),
    "a mean over tokens": Feature(
        lambda config: config.objective.aggregation != "seq-mean-token-mean",
        "objective.aggregation={objective.aggregation}",
    ),
    "feedback": Feature(needs_feedback, "{{feedback}} in teacher.template"),
    "a held-out loss": Feature(
        lambda config: validates(config) and config.validation.loss, "validation.loss=true"
    ),
    "held-out responses": Feature(
        generates_held_out,
        "validation.greedy={validation.greedy} and samples_per_prompt={validation.samples_per_prompt}",
    ),
}
"""Name -> feature."""

OPTIONAL = (
    CLASS,
    "a prediction head",
    "a sweep",
    "a teacher",
    "adapters",
    "agents",
    "containers",
    "data.image_key",
    "drafts",
    "model.numerics=bitwise",
    "programs in containers",
    "refit.changed_only",
    "roles",
    "rollout.carry_over",
    "rollout.kv_offload_gib",
    "rollout.quantization=fp8",
    "run.mode=check",
    "run.mode=evaluate",
    "run.mode=train_only|score_only",
    "sampling masks",
    "sweep.stop",
    "trace.steps",
    "training.router_replay",
)
"""Features whose implementation can be taken out (`rl.config.wing`)."""

DEFAULTS = flatten(Config())


def is_on(config: Config, feature: str) -> bool:
    """Return whether a config has a feature."""
    if feature.startswith("not "):
        return not is_on(config, feature.removeprefix("not "))
    if feature in NAMED:
        return NAMED[feature].is_on(config)
    key, _, values = feature.partition("=")
    value = value_of(config, key)
    return as_text(value) in values.split("|") if values else value != DEFAULTS[key]


def setting(config: Config, feature: str) -> str:
    """Return the keys with values by which a config has a feature."""
    name = feature.removeprefix("not ")
    if name in NAMED:
        text = NAMED[name].on if name == feature else NAMED[name].off
        assert text, feature
        return text.format(**vars(config))
    key = name.partition("=")[0]
    value = value_of(config, key)
    return f"an empty {key}" if value in ("", []) else f"{key}={as_text(value)}"


def requirement(config: Config, feature: str) -> str:
    """Return what a config must have for a feature, after "requires"."""
    if feature not in NAMED:
        return feature
    text = NAMED[feature].required
    assert text, feature
    return text.format(**vars(config))


def algorithms_with(feature: str) -> list[str]:
    """Return the shipped algorithms that have a feature, if the algorithm alone decides; else none."""
    has = NAMED[feature].algorithms if feature in NAMED else None
    return [name for name in shipped() if has(name)] if has else []


def value_of(config: Config, key: str) -> object:
    return reduce(getattr, key.split("."), config)
