"""What a configuration must satisfy: ranges, contradictions, and layouts that fit the world and the model.

`check` needs only the config; `check_layout` the world size and the model's config.json. Both are pure functions, so that
every rank raises the same ConfigError: one sentence with the numbers and what would work.
"""

import math
import re
from collections.abc import Callable, Collection
from typing import Any

from rl.config.durations import seconds_of
from rl.config.functions import FORM
from rl.config.limits import PhaseLimits
from rl.config.objective_checks import check_objective, objective_warnings
from rl.config.options import ConfigError, flatten, listed, show
from rl.config.reward_sources import check_sources
from rl.config.schema import Config, algorithm_of, learns_from_samples, needs_engine
from rl.models.sizes import expert_width, num_experts, num_kv_heads


def is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


AT_LEAST_ONE = ("at least 1", lambda v: v >= 1)
NOT_NEGATIVE = ("0 or more and finite", lambda v: 0 <= v < math.inf)
POSITIVE = ("greater than 0 and finite", lambda v: 0 < v < math.inf)
PROBABILITY = ("greater than 0 and at most 1", lambda v: 0 < v <= 1)
FRACTION = ("from 0 to 1", lambda v: 0 <= v <= 1)
BELOW_ONE = ("at least 0 and less than 1", lambda v: 0 <= v < 1)
BELOW_HALF = ("at least 0 and less than 0.5", lambda v: 0 <= v < 0.5)
FINITE = ("finite", math.isfinite)
FINITE_OR_LIST = (
    "a finite number, or a list of finite numbers",
    lambda v: all(map(is_finite, v)) if isinstance(v, list) else is_finite(v),
)
ONE_OR_MORE = ("1 or more and finite", lambda v: 1 <= v < math.inf)
ZERO_OR_ABOVE_ONE = ("0 (off) or greater than 1 and finite", lambda v: v == 0 or 1 < v < math.inf)

OPTIMIZER = {
    "lr": NOT_NEGATIVE,
    "min_lr": NOT_NEGATIVE,
    "warmup_steps": NOT_NEGATIVE,
    "beta1": BELOW_ONE,
    "beta2": BELOW_ONE,
    "eps": POSITIVE,
    "weight_decay": NOT_NEGATIVE,
    "clip_grad": NOT_NEGATIVE,
}
OPTIMIZERS = ("training.optimizer", "critic.optimizer", "implicit_reward.optimizer")

RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    **{f"{section}.{key}": accepted for section in OPTIMIZERS for key, accepted in OPTIMIZER.items()},
    "run.max_steps": AT_LEAST_ONE,
    "run.seed": NOT_NEGATIVE,
    "data.max_prompt_tokens": AT_LEAST_ONE,
    "data.prompts_per_step": AT_LEAST_ONE,
    "training.tp": AT_LEAST_ONE,
    "training.pp": AT_LEAST_ONE,
    "training.ep": AT_LEAST_ONE,
    "training.etp": NOT_NEGATIVE,
    "training.micro_batch_tokens": AT_LEAST_ONE,
    "training.prompts_per_minibatch": NOT_NEGATIVE,
    "training.epochs": AT_LEAST_ONE,
    "training.head_chunk_tokens": AT_LEAST_ONE,
    "rollout.tp": AT_LEAST_ONE,
    "rollout.samples_per_prompt": AT_LEAST_ONE,
    "rollout.temperature": POSITIVE,
    "rollout.top_p": PROBABILITY,
    "rollout.top_k": NOT_NEGATIVE,
    "rollout.min_p": FRACTION,
    "rollout.max_response_tokens": AT_LEAST_ONE,
    "rollout.max_concurrent_samples": AT_LEAST_ONE,
    "rollout.gpu_memory_utilization": PROBABILITY,
    "rollout.cpu_kv_cache_mib": AT_LEAST_ONE,
    "reward.failure_score": FINITE,
    "reward.workers": NOT_NEGATIVE,
    "reward.timeout_s": POSITIVE,
    "reward.memory_mib": NOT_NEGATIVE,
    "reward.overlong_buffer_tokens": NOT_NEGATIVE,
    "reward.overlong_penalty": NOT_NEGATIVE,
    "reward.model.coef": FINITE,
    "reward.judge.gpu_memory_utilization": PROBABILITY,
    "reward.judge.coef": FINITE,
    "reward.judge.max_prompt_tokens": AT_LEAST_ONE,
    "reward.judge.max_response_tokens": AT_LEAST_ONE,
    "reward.judge.temperature": NOT_NEGATIVE,
    "objective.gamma": FRACTION,
    "objective.lam": FRACTION,
    "objective.sapo_tau_positive": POSITIVE,
    "objective.sapo_tau_negative": POSITIVE,
    "objective.cov_fraction": PROBABILITY,
    "objective.cov_low": FINITE,
    "objective.cov_high": FINITE,
    "objective.kl_cov_coef": NOT_NEGATIVE,
    "objective.dppo_max_ratio": ONE_OR_MORE,
    "objective.dro_beta": POSITIVE,
    "objective.reward_kl.coef": NOT_NEGATIVE,
    "objective.reward_kl.target": POSITIVE,
    "objective.reward_kl.horizon": AT_LEAST_ONE,
    "rollout_correction.truncate_tokens": NOT_NEGATIVE,
    "rollout_correction.truncate_samples": NOT_NEGATIVE,
    "rollout_correction.icepop_low": NOT_NEGATIVE,
    "rollout_correction.icepop_high": NOT_NEGATIVE,
    "rollout_correction.reject_low": FINITE_OR_LIST,
    "rollout_correction.reject_high": FINITE_OR_LIST,
    "critic.warmup_steps": NOT_NEGATIVE,
    "critic.value_clip": NOT_NEGATIVE,
    "implicit_reward.beta": POSITIVE,
    "implicit_reward.process_coef": NOT_NEGATIVE,
    "implicit_reward.outcome_coef": NOT_NEGATIVE,
    "implicit_reward.min_accuracy": FRACTION,
    "implicit_reward.max_accuracy": FRACTION,
    "preference.beta": POSITIVE,
    "preference.label_smoothing": BELOW_HALF,
    "dynamic_sampling.max_rounds": AT_LEAST_ONE,
    "dynamic_sampling.prompts_per_round": NOT_NEGATIVE,
    "objective.clip_low": FRACTION,
    "objective.clip_high": NOT_NEGATIVE,
    "objective.dual_clip": ZERO_OR_ABOVE_ONE,
    "objective.kl_coef": NOT_NEGATIVE,
    "objective.entropy_coef": FINITE,
    "validation.every": NOT_NEGATIVE,
    "validation.samples_per_prompt": NOT_NEGATIVE,
    "validation.temperature": POSITIVE,
    "validation.max_prompts": NOT_NEGATIVE,
    "refit.check_every": NOT_NEGATIVE,
    "refit.buffer_mib": AT_LEAST_ONE,
    "checkpoint.every": NOT_NEGATIVE,
    "checkpoint.keep_last": NOT_NEGATIVE,
    "checkpoint.keep_every": NOT_NEGATIVE,
    "checkpoint.keep_best": NOT_NEGATIVE,
    "logging.samples": NOT_NEGATIVE,
    "watchdog.beat_s": POSITIVE,
    "watchdog.lost_s": POSITIVE,
    **{f"watchdog.limits.{phase}": POSITIVE for phase in vars(PhaseLimits())},
    "agreement.weights_every": NOT_NEGATIVE,
    "memory.host_limit_gib": NOT_NEGATIVE,
}
"""Range of every numeric key, in words and as a predicate (False for nan)."""

REQUIRED = {
    "model.path": "a Hugging Face checkpoint directory",
    "data.train": "a list of parquet, JSONL or Arrow files",
    "data.prompt_key": "the column with the prompt",
}


def check(config: Config) -> list[str]:
    """Raise ConfigError for the first thing that is wrong with the config by itself; return warnings, one sentence each."""
    values = flatten(config)
    for key, what in REQUIRED.items():
        if not values[key]:
            raise ConfigError(f"{key} is empty, but a run needs it: set it to {what}.")
    for key, (words, accepts) in RANGES.items():
        if not accepts(values[key]):
            raise ConfigError(f"{key} is {values[key]}, but must be {words}.")
    check_names(config)
    check_contradictions(config)
    check_objective(config)
    return warnings(config)


def check_names(config: Config) -> None:
    name = config.run.name
    if name in ("", ".", "..") or "/" in name or name != name.strip() or not name.isprintable():
        raise ConfigError(
            f"run.name is {show(name)}, but names a directory: use a plain name without '/', e.g. grpo-gsm8k."
        )
    if not re.fullmatch(FORM, config.reward.function):
        raise ConfigError(
            f"reward.function is {show(config.reward.function)}, but must be package.module:name or path/to/file.py:name."
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
            f"rollout.stop_token_ids holds {min(config.rollout.stop_token_ids)}, but token ids are 0 or more."
        )


def check_contradictions(config: Config) -> None:
    values = flatten(config)
    for section in OPTIMIZERS:
        lr, min_lr = values[f"{section}.lr"], values[f"{section}.min_lr"]
        if min_lr > lr:
            raise ConfigError(f"{section}.min_lr={min_lr} is above {section}.lr={lr}, from which it decays.")
    check_data(config)
    check_checkpoint(config)
    if config.watchdog.lost_s < 4 * config.watchdog.beat_s:
        raise ConfigError(
            f"watchdog.lost_s={config.watchdog.lost_s:g} leaves no room for a late heartbeat: use at least four times "
            f"watchdog.beat_s={config.watchdog.beat_s:g}."
        )
    buffer, limit = config.reward.overlong_buffer_tokens, config.rollout.max_response_tokens
    if buffer > limit:
        raise ConfigError(
            f"reward.overlong_buffer_tokens={buffer} is more than rollout.max_response_tokens={limit}, the end of the buffer."
        )
    validation = config.validation
    if config.data.val and validation.every and not validation.greedy and not validation.samples_per_prompt:
        raise ConfigError(
            "validation.greedy=false and validation.samples_per_prompt=0 leave nothing to validate with; set one of them."
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
            f"training.prompts_per_minibatch={minibatch} does not divide data.prompts_per_step={step}; use {below} or {above}."
        )


def check_data(config: Config) -> None:
    data, needs = config.data, algorithm_of(config).needs
    if data.train_weights and len(data.train_weights) != len(data.train):
        raise ConfigError(
            f"data.train_weights has {len(data.train_weights)} numbers for {len(data.train)} files of data.train; give one for each."
        )
    if any(not 0 < weight < math.inf for weight in data.train_weights):
        raise ConfigError(
            f"data.train_weights holds {min(data.train_weights)}, but a share must be greater than 0 and finite."
        )
    if data.train_weights and data.curriculum:
        raise ConfigError(
            "data.curriculum orders all prompts, so data.train_weights cannot weigh their files too; set one of them."
        )
    if "pairs" in needs and (data.curriculum or data.train_weights):
        raise ConfigError(
            f"algorithm={config.algorithm} reads pairs, which have neither data.curriculum nor data.train_weights."
        )


def check_checkpoint(config: Config) -> None:
    checkpoint = config.checkpoint
    if checkpoint.keep_best and not checkpoint.best_metric:
        raise ConfigError(
            f"checkpoint.keep_best={checkpoint.keep_best} needs checkpoint.best_metric, the name of the metric that is meant."
        )
    if checkpoint.weights_only and checkpoint.resume in ("auto", "never"):
        raise ConfigError(
            f"checkpoint.weights_only=true needs a path in checkpoint.resume, not {checkpoint.resume}: that of the run, or of its "
            "checkpoint, whose weights are to be taken."
        )


def warnings(config: Config) -> list[str]:
    """What is allowed but unlikely to be meant."""
    rollout, values = config.rollout, flatten(config)
    found = []
    for section in OPTIMIZERS:
        warmup, min_lr = values[f"{section}.warmup_steps"], values[f"{section}.min_lr"]
        if warmup >= config.run.max_steps:
            found.append(
                f"{section}.warmup_steps={warmup} is not less than run.max_steps={config.run.max_steps}: the run ends within the warm-up."
            )
        if min_lr and values[f"{section}.schedule"] == "constant":
            found.append(
                f"{section}.min_lr={min_lr} has no effect with schedule=constant; set linear or cosine."
            )
    if config.critic.warmup_steps >= config.run.max_steps:
        found.append(
            f"critic.warmup_steps={config.critic.warmup_steps} is not less than run.max_steps={config.run.max_steps}: the policy never moves."
        )
    if shared := [path for path in config.data.val if path in config.data.train]:
        found.append(f"{shared[0]} is in data.train and in data.val: validation measures training prompts.")
    checkpoint, validation = config.checkpoint, config.validation
    if (
        checkpoint.keep_best
        and checkpoint.every
        and checkpoint.best_metric.startswith("val")
        and checkpoint.every % (validation.every or 1)
    ):
        found.append(
            f"checkpoint.every={checkpoint.every} is no multiple of validation.every={validation.every}: checkpoints of steps "
            f"without {checkpoint.best_metric} can not be among the best."
        )
    if not learns_from_samples(config):
        return found
    found += objective_warnings(config)
    if rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0:
        found.append(
            f"rollout.top_p={rollout.top_p}, top_k={rollout.top_k}, min_p={rollout.min_p} sample from a truncated "
            "distribution, but the trainer's log-probs are those of the whole one; 1, 0 and 0 make the two agree."
        )
    return found


def check_layout(
    config: Config,
    world_size: int,
    hf: dict[str, Any],
    supported: Collection[str],
    *,
    path: str | None = None,
) -> None:
    """Raise ConfigError for the first thing that does not fit the number of ranks or the model.

    `hf` is the config.json of the model in `path` (default: model.path, which generates too), `supported` the architectures
    there is code for. A pure function of its arguments, so
    every rank raises the same.
    """
    architectures = hf.get("architectures") or []
    if not set(architectures) & set(supported):
        raise ConfigError(
            f"The model in {path or config.model.path} has the architecture {', '.join(architectures) or '(none)'}; "
            f"supported: {listed(sorted(supported), 'and')}."
        )
    check_training_grid(config, world_size, hf)
    check_minibatch(config, world_size)
    if needs_engine(config) and path is None:
        check_rollout_grid(config, world_size, hf)
        check_positions(
            hf,
            ("data.max_prompt_tokens", config.data.max_prompt_tokens),
            ("rollout.max_response_tokens", config.rollout.max_response_tokens),
        )


def check_judge(config: Config, world_size: int, hf: dict[str, Any]) -> None:
    """The same for the judge, which only generates; `hf` is its config.json."""
    judge = config.reward.judge
    try:
        check_rollout_grid(config, world_size, hf)
        check_positions(
            hf,
            ("reward.judge.max_prompt_tokens", judge.max_prompt_tokens),
            ("reward.judge.max_response_tokens", judge.max_response_tokens),
        )
    except ConfigError as error:
        raise ConfigError(f"reward.judge.path={judge.path}: {error}") from error


def check_positions(hf: dict[str, Any], prompt: tuple[str, int], response: tuple[str, int]) -> None:
    """The longest prompt and response, each a key and its value, fit into the model's positions."""
    positions, total = model_size(hf, "max_position_embeddings"), prompt[1] + response[1]
    if total > positions:
        raise ConfigError(
            f"{prompt[0]}={prompt[1]} and {response[0]}={response[1]} add up to {total} tokens, "
            f"but the model has {positions} positions (max_position_embeddings); lower them to {positions} together."
        )


def check_training_grid(config: Config, world_size: int, hf: dict[str, Any]) -> None:
    tp, pp = config.training.tp, config.training.pp
    if world_size % (tp * pp):
        raise ConfigError(
            f"training.tp={tp} times training.pp={pp} is {tp * pp}, which does not divide the world of {world_size} ranks; "
            f"use a product of {listed(divisors(world_size), 'or')}."
        )
    sizes = split_sizes(hf) | {"{} key/value heads": num_kv_heads(hf)}
    fits = [n for n in divisors(world_size // pp) if all(size % n == 0 for size in sizes.values())]
    check_divides("training.tp", tp, sizes, fits)
    layers = model_size(hf, "num_hidden_layers")
    if pp > layers:
        fits = [n for n in divisors(world_size // tp) if n <= layers]
        raise ConfigError(
            f"training.pp={pp} leaves stages without a layer, the model has {layers}; use {listed(fits, 'or')}."
        )
    check_expert_grid(config, world_size, hf)


def check_expert_grid(config: Config, world_size: int, hf: dict[str, Any]) -> None:
    training, experts = config.training, num_experts(hf)
    tp, pp, ep, etp = training.tp, training.pp, training.ep, training.expert_tp
    if not experts:
        if ep > 1 or training.etp:
            raise ConfigError(
                f"training.ep={ep} and training.etp={training.etp} split experts, but the model has none; leave them out."
            )
        return
    check_divides(
        "training.ep",
        ep,
        {"{} experts": experts},
        [n for n in divisors(world_size // pp) if experts % n == 0],
    )
    check_divides(
        "training.etp",
        etp,
        {"experts' intermediate size of {}": expert_width(hf)},
        divisors(expert_width(hf)),
    )
    if world_size % (etp * ep * pp):
        raise ConfigError(
            f"The experts' grid of training.ep={ep} x etp={etp} x training.pp={pp} is {etp * ep * pp}, which does not divide the "
            f"world of {world_size} ranks; use a product of {listed(divisors(world_size), 'or')}."
        )
    # megatron-core 0.16.1 then adds up the experts' gradients over data parallel ranks only, not over tensor parallel ones.
    if ep == 1 and etp != tp:
        raise ConfigError(
            f"training.etp={etp} differs from training.tp={tp}, which works only with training.ep above 1; leave it out."
        )
    # Routers choose for whole tokens, which lie on one tensor parallel rank under sequence parallelism only.
    if tp > 1 and not training.sequence_parallel:
        raise ConfigError(
            f"training.sequence_parallel=false with training.tp={tp} cannot train a mixture of experts; set it to true."
        )


def check_rollout_grid(config: Config, world_size: int, hf: dict[str, Any]) -> None:
    tp, sizes, kv_heads = config.rollout.tp, split_sizes(hf), num_kv_heads(hf)
    if num_experts(hf):
        sizes |= {"experts' intermediate size of {}": expert_width(hf)}
    if world_size % tp:
        raise ConfigError(
            f"rollout.tp={tp} does not divide the world of {world_size} ranks; use {listed(divisors(world_size), 'or')}."
        )
    # vLLM replicates key/value heads when there are fewer of them than ranks; Megatron does not.
    fits = [n for n in divisors(world_size) if all(size % n == 0 for size in sizes.values())]
    fits = [n for n in fits if kv_heads % n == 0 or n % kv_heads == 0]
    # vLLM pads the vocabulary to a multiple of 64 and then splits it evenly.
    padded = math.ceil(model_size(hf, "vocab_size") / 64) * 64
    sizes |= {"vocabulary, padded to {}": padded}
    fits = [n for n in fits if padded % n == 0]
    check_divides("rollout.tp", tp, sizes, fits)
    if kv_heads % tp and tp % kv_heads:
        raise ConfigError(
            f"rollout.tp={tp} is neither a divisor nor a multiple of the model's {kv_heads} key/value heads; "
            f"use {listed(fits, 'or')}."
        )


def check_minibatch(config: Config, world_size: int) -> None:
    """A mini-batch has a sample for every data parallel rank."""
    tp, pp, step = config.training.tp, config.training.pp, config.data.prompts_per_step
    dp = world_size // (tp * pp)
    needs = algorithm_of(config).needs
    samples = config.rollout.samples_per_prompt if "samples" in needs else 1
    prompts = config.training.prompts_per_minibatch or step
    if prompts * samples >= dp:
        return
    needed = math.ceil(dp / samples)
    if needed <= step:
        advice = f"set training.prompts_per_minibatch to {min(n for n in divisors(step) if n >= needed)}"
    elif config.training.prompts_per_minibatch:
        advice = f"raise data.prompts_per_step and training.prompts_per_minibatch to at least {needed}"
    else:
        advice = f"raise data.prompts_per_step to at least {needed}"
    raise ConfigError(
        f"A mini-batch of {prompts} prompts x {samples} samples is too small for the data parallel size of {dp} "
        f"({world_size} ranks / (tp={tp} x pp={pp})); {advice}."
    )


def check_divides(key: str, value: int, sizes: dict[str, int], fits: list[int]) -> None:
    """`value` must divide each of the model's `sizes` (words with a {} -> size); `fits` are the values that would do."""
    for words, size in sizes.items():
        if size % value:
            raise ConfigError(
                f"{key}={value} does not divide the model's {words.format(size)}; use {listed(fits, 'or')}."
            )


def split_sizes(hf: dict[str, Any]) -> dict[str, int]:
    """What tensor parallelism splits evenly, in training and in generation."""
    return {
        "{} attention heads": model_size(hf, "num_attention_heads"),
        "hidden size of {}": model_size(hf, "hidden_size"),
        "intermediate size of {}": model_size(hf, "intermediate_size"),
    }


def model_size(hf: dict[str, Any], name: str) -> int:
    if not isinstance(hf.get(name), int):
        raise ConfigError(
            f"The model's config.json has no number '{name}'; is model.path a Hugging Face checkpoint?"
        )
    return hf[name]


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
