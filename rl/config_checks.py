"""What a configuration must satisfy: ranges, contradictions, and layouts that fit the world and the model.

`check` needs only the config; `check_layout` the world size and the model's config.json. Both are pure functions, so that
every rank raises the same ConfigError: one sentence with the numbers and what would work.
"""

import math
import re
from collections.abc import Callable, Collection
from typing import Any

from rl.config import Config, learns_from_samples, needs_engine
from rl.options import ConfigError, flatten, listed, show

AT_LEAST_ONE = ("at least 1", lambda v: v >= 1)
NOT_NEGATIVE = ("0 or more and finite", lambda v: 0 <= v < math.inf)
POSITIVE = ("greater than 0 and finite", lambda v: 0 < v < math.inf)
PROBABILITY = ("greater than 0 and at most 1", lambda v: 0 < v <= 1)
FRACTION = ("from 0 to 1", lambda v: 0 <= v <= 1)
BELOW_ONE = ("at least 0 and less than 1", lambda v: 0 <= v < 1)
FINITE = ("finite", math.isfinite)
ZERO_OR_ABOVE_ONE = ("0 (off) or greater than 1 and finite", lambda v: v == 0 or 1 < v < math.inf)

RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "run.max_steps": AT_LEAST_ONE,
    "run.seed": NOT_NEGATIVE,
    "data.max_prompt_tokens": AT_LEAST_ONE,
    "data.prompts_per_step": AT_LEAST_ONE,
    "training.tp": AT_LEAST_ONE,
    "training.pp": AT_LEAST_ONE,
    "training.micro_batch_tokens": AT_LEAST_ONE,
    "training.prompts_per_minibatch": NOT_NEGATIVE,
    "training.epochs": AT_LEAST_ONE,
    "training.head_chunk_tokens": AT_LEAST_ONE,
    "training.optimizer.lr": NOT_NEGATIVE,
    "training.optimizer.min_lr": NOT_NEGATIVE,
    "training.optimizer.warmup_steps": NOT_NEGATIVE,
    "training.optimizer.beta1": BELOW_ONE,
    "training.optimizer.beta2": BELOW_ONE,
    "training.optimizer.eps": POSITIVE,
    "training.optimizer.weight_decay": NOT_NEGATIVE,
    "training.optimizer.clip_grad": NOT_NEGATIVE,
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
    "objective.clip_low": BELOW_ONE,
    "objective.clip_high": NOT_NEGATIVE,
    "objective.dual_clip": ZERO_OR_ABOVE_ONE,
    "objective.kl_coef": NOT_NEGATIVE,
    "objective.entropy_coef": FINITE,
    "validation.every": NOT_NEGATIVE,
    "validation.samples_per_prompt": AT_LEAST_ONE,
    "validation.temperature": NOT_NEGATIVE,
    "validation.max_prompts": NOT_NEGATIVE,
    "refit.check_every": NOT_NEGATIVE,
    "checkpoint.every": NOT_NEGATIVE,
    "checkpoint.keep": NOT_NEGATIVE,
    "logging.samples": NOT_NEGATIVE,
}
"""Range of every numeric key, in words and as a predicate (False for nan)."""

REQUIRED = {
    "model.path": "a Hugging Face checkpoint directory",
    "data.train": "a list of Parquet or JSONL files",
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
    return warnings(config)


def check_names(config: Config) -> None:
    name = config.run.name
    if name in ("", ".", "..") or "/" in name or name != name.strip() or not name.isprintable():
        raise ConfigError(f"run.name is {show(name)}, but names a directory: use a plain name without '/', e.g. grpo-gsm8k.")
    if not re.fullmatch(r".+:[A-Za-z_]\w*", config.reward.function):
        raise ConfigError(
            f"reward.function is {show(config.reward.function)}, but must be package.module:name or path/to/file.py:name."
        )
    if "" in config.rollout.stop:
        raise ConfigError("rollout.stop holds an empty string, which would end every response; remove it.")
    if min(config.rollout.stop_token_ids, default=0) < 0:
        raise ConfigError(f"rollout.stop_token_ids holds {min(config.rollout.stop_token_ids)}, but token ids are 0 or more.")


def check_contradictions(config: Config) -> None:
    optimizer = config.training.optimizer
    if optimizer.min_lr > optimizer.lr:
        raise ConfigError(
            f"training.optimizer.min_lr={optimizer.min_lr} is above training.optimizer.lr={optimizer.lr}, from which it decays."
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


def warnings(config: Config) -> list[str]:
    """What is allowed but unlikely to be meant."""
    optimizer, rollout, validation = config.training.optimizer, config.rollout, config.validation
    found = []
    if optimizer.warmup_steps >= config.run.max_steps:
        found.append(
            f"training.optimizer.warmup_steps={optimizer.warmup_steps} is not less than run.max_steps={config.run.max_steps}: "
            "the run ends within the warm-up."
        )
    if optimizer.min_lr and optimizer.schedule == "constant":
        found.append(
            f"training.optimizer.min_lr={optimizer.min_lr} has no effect with schedule=constant; set linear or cosine."
        )
    if shared := [path for path in config.data.val if path in config.data.train]:
        found.append(f"{shared[0]} is in data.train and in data.val: validation measures training prompts.")
    if config.data.val and validation.samples_per_prompt > 1 and validation.temperature == 0:
        found.append(
            f"validation.samples_per_prompt={validation.samples_per_prompt} at validation.temperature=0 samples the same "
            "response every time; raise the temperature or use 1."
        )
    if not learns_from_samples(config):
        return found
    if config.algorithm == "grpo" and rollout.samples_per_prompt == 1:
        found.append("rollout.samples_per_prompt=1 leaves algorithm=grpo no group to compare with; use 2 or more.")
    if rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0:
        found.append(
            f"rollout.top_p={rollout.top_p}, top_k={rollout.top_k}, min_p={rollout.min_p} sample from a truncated "
            "distribution, but the trainer's log-probs are those of the whole one; 1, 0 and 0 make the two agree."
        )
    return found


def check_layout(config: Config, world_size: int, hf: dict[str, Any], supported: Collection[str]) -> None:
    """Raise ConfigError for the first thing that does not fit the number of ranks or the model.

    `hf` is the model's config.json, `supported` the architectures there is code for. A pure function of its arguments, so
    every rank raises the same.
    """
    architectures = hf.get("architectures") or []
    if not set(architectures) & set(supported):
        raise ConfigError(
            f"The model in {config.model.path} has the architecture {', '.join(architectures) or '(none)'}; "
            f"supported: {listed(sorted(supported), 'and')}."
        )
    check_training_grid(config, world_size, hf)
    check_minibatch(config, world_size)
    if not needs_engine(config):
        return
    check_rollout_grid(config, world_size, hf)
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    positions = model_size(hf, "max_position_embeddings")
    if prompt + response > positions:
        raise ConfigError(
            f"data.max_prompt_tokens={prompt} and rollout.max_response_tokens={response} add up to {prompt + response} tokens, "
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
    check_divides("training.pp", pp, {"{} layers": layers}, [n for n in divisors(world_size // tp) if layers % n == 0])


def check_rollout_grid(config: Config, world_size: int, hf: dict[str, Any]) -> None:
    tp, sizes, kv_heads = config.rollout.tp, split_sizes(hf), num_kv_heads(hf)
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
    samples = config.rollout.samples_per_prompt if learns_from_samples(config) else 1
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
            raise ConfigError(f"{key}={value} does not divide the model's {words.format(size)}; use {listed(fits, 'or')}.")


def split_sizes(hf: dict[str, Any]) -> dict[str, int]:
    """What tensor parallelism splits evenly, in training and in generation."""
    return {
        "{} attention heads": model_size(hf, "num_attention_heads"),
        "hidden size of {}": model_size(hf, "hidden_size"),
        "intermediate size of {}": model_size(hf, "intermediate_size"),
    }


def num_kv_heads(hf: dict[str, Any]) -> int:
    """Absent in configs from before grouped-query attention."""
    return hf.get("num_key_value_heads") or model_size(hf, "num_attention_heads")


def model_size(hf: dict[str, Any], name: str) -> int:
    if not isinstance(hf.get(name), int):
        raise ConfigError(f"The model's config.json has no number '{name}'; is model.path a Hugging Face checkpoint?")
    return hf[name]


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
