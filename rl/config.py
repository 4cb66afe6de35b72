"""The configuration tree: every key of a run, with its unit, default and the default's reason.

Built by `rl.options` from dataclass defaults <- the algorithm's defaults <- the YAML file <- dotted overrides.
This module imports neither torch nor Megatron nor vLLM, so that `--help` and a config error take a fraction of a second.
Checks that need only the config are in `check`; those that need the world size or the model are in `check_layout`.
"""

import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rl.options import ConfigError, flatten, listed, show


@dataclass
class Run:
    name: str = "run"
    """Name of the run; also the last part of the default `run.dir`."""
    dir: str = ""
    """Directory for metrics, checkpoints, the resolved config and the code. Empty: `runs/<run.name>`."""
    max_steps: int = 100
    """Training steps (policy updates from one batch of prompts; for sft, optimizer steps)."""
    seed: int = 1
    """Seed of everything random: prompt order, sampling, initial weights where there are none to load."""


@dataclass
class Model:
    path: str = ""
    """Hugging Face checkpoint directory (config.json, *.safetensors, tokenizer.json). Required."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the weights in training and generation. Master weights and gradient sums are float32 in any case."""


@dataclass
class Data:
    train: list[str] = field(default_factory=list)
    """Parquet or JSONL files with training prompts. Required."""
    val: list[str] = field(default_factory=list)
    """Parquet or JSONL files with held-out prompts. Empty: no validation."""
    prompt_key: str = "prompt"
    """Column with the prompt: a list of {role, content} messages (chat template applied) or a string (taken as it is)."""
    response_key: str = ""
    """sft only: column with the target response. Empty: `reward_model.ground_truth`."""
    max_prompt_tokens: int = 1024
    """Longest prompt in tokens, after the chat template."""
    overlong_prompts: Literal["error", "drop", "truncate_left"] = "error"
    """What to do with a prompt of more than `max_prompt_tokens`: stop, leave it out, or keep its last tokens."""
    shuffle: bool = True
    """Shuffle the prompts anew in each epoch, from (run.seed, epoch)."""
    prompts_per_step: int = 64
    """Prompts drawn per training step, over all ranks."""


@dataclass
class Optimizer:
    lr: float = 1e-6
    """Peak learning rate of Adam. 1e-6 is what RL on 7B and larger models uses; toy models want 1e-3 or so."""
    min_lr: float = 0.0
    """Learning rate that the decay would reach at the step after the last."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay from `lr` to `min_lr` over `run.max_steps`, after the warm-up."""
    beta1: float = 0.9
    """Adam's decay of the first moment."""
    beta2: float = 0.999
    """Adam's decay of the second moment."""
    eps: float = 1e-8
    """Added to Adam's denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay; not applied to norms and biases. RL keeps it at 0: the reference policy is the regulariser."""
    clip_grad: float = 1.0
    """Largest L2 norm of the whole gradient; 0 turns clipping off."""


@dataclass
class Training:
    tp: int = 1
    """Tensor parallel size of the training grid."""
    pp: int = 1
    """Pipeline parallel size of the training grid. Data parallel size is world / (tp * pp)."""
    sequence_parallel: bool = True
    """Shard activations between the tensor parallel regions along the sequence; only means something for tp > 1."""
    micro_batch_tokens: int = 16384
    """Most tokens (prompts and responses) packed into one micro-batch of one data parallel rank. A longer sequence
    forms a micro-batch of its own."""
    prompts_per_minibatch: int = 0
    """Prompts (with all their samples) per optimizer step. 0: the whole batch of `data.prompts_per_step`."""
    epochs: int = 1
    """Passes over the batch of a step."""
    recompute: bool = False
    """Recompute every layer's activations in the backward pass (Megatron full recompute, uniform)."""
    head_chunk_tokens: int = 1024
    """Tokens whose logits exist in float32 at a time, in the log-prob and entropy computation."""
    optimizer: Optimizer = field(default_factory=Optimizer)


@dataclass
class Rollout:
    tp: int = 1
    """Tensor parallel size of one vLLM replica; there are world / tp replicas."""
    samples_per_prompt: int = 8
    """Responses sampled for each prompt: the size of a group."""
    temperature: float = 1.0
    """Softmax temperature of sampling; the trainer's log-probs are taken at the same temperature."""
    top_p: float = 1.0
    """Nucleus: keep the smallest set of tokens with this much probability. 1: all."""
    top_k: int = 0
    """Keep the k most probable tokens. 0: all."""
    min_p: float = 0.0
    """Keep tokens with at least this fraction of the most probable token's probability. 0: all."""
    max_response_tokens: int = 1024
    """Longest response in tokens, the end-of-sequence token included."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a response; they stay in its tokens."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Token ids that end a response besides the tokenizer's end-of-sequence token."""
    deterministic: bool = False
    """Assign prompts to replicas by a fixed rule, not by who is free first. With one seed, world and layout the run is
    then repeatable bit for bit on CPU."""
    max_concurrent_samples: int = 256
    """Most samples that one replica generates at a time (vLLM's max_num_seqs)."""
    gpu_memory_utilization: float = 0.5
    """Fraction of a GPU's memory that the engine may take while it is awake. No effect on CPU."""
    cpu_kv_cache_mib: int = 64
    """KV cache per rank on CPU, in MiB; given back while the trainer works."""
    enforce_eager: bool = False
    """Do without CUDA graphs and torch.compile in the engine. Always on with CPU."""


@dataclass
class Reward:
    function: str = "rl.rewards.exact:score"
    """Reward function `score(prompt, response, ground_truth, **extra) -> float | dict`, as `package.module:name` or
    `path/to/file.py:name`. A dict needs the key `score`; its other numbers are logged, `acc` as accuracy."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments passed to every call of the reward function."""
    failure_score: float = 0.0
    """Score of a sample whose reward function raised; counted in `reward/failures`."""


@dataclass
class Objective:
    advantage: Literal["grpo"] = "grpo"
    """Advantage estimator."""
    normalize_by_std: bool = True
    """grpo: divide by the standard deviation of the group. False gives Dr.GRPO's advantage."""
    loss: Literal["ppo"] = "ppo"
    """Policy loss."""
    clip_low: float = 0.2
    """The probability ratio is clipped from below at 1 - clip_low."""
    clip_high: float = 0.2
    """The probability ratio is clipped from above at 1 + clip_high."""
    dual_clip: float = 3.0
    """Dual clip: bound of the loss for negative advantages, as a factor of the advantage. 0 turns it off."""
    aggregation: Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "token-mean"
    """How token losses become one number; denominators are global over the mini-batch."""
    kl_coef: float = 0.0
    """Weight of the KL divergence from the reference policy in the loss. 0: no reference policy is kept."""
    kl_estimator: Literal["k1", "abs", "k2", "k3"] = "k3"
    """Estimator of that KL divergence (Schulman, 'Approximating KL divergence')."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""


@dataclass
class Validation:
    every: int = 10
    """Steps between validations; one more at the end. 0: never."""
    before_training: bool = True
    """Validate before the first step too."""
    samples_per_prompt: int = 1
    """Responses per held-out prompt."""
    temperature: float = 0.0
    """Temperature of validation; 0 is greedy."""
    max_prompts: int = 0
    """Use only the first so many held-out prompts. 0: all."""


@dataclass
class Refit:
    check_every: int = 0
    """Steps between comparisons of every weight in the engine with the trainer's. The first refit is always checked;
    0: only that one."""


@dataclass
class Checkpoint:
    every: int = 0
    """Steps between checkpoints; one more at the end. 0: none at all."""
    keep: int = 2
    """Newest checkpoints kept. 0: all."""
    resume: Literal["auto", "never"] = "auto"
    """auto: continue from the newest complete checkpoint in `run.dir`, if there is one. never: start at step 0."""
    export_hf: bool = False
    """At the end write the policy as a Hugging Face checkpoint to `<run.dir>/hf`."""


@dataclass
class Logging:
    tensorboard: bool = True
    """Write TensorBoard event files to `<run.dir>/tensorboard`."""
    samples: int = 0
    """Samples per step (prompt, response, score) written to `<run.dir>/samples.jsonl`."""


@dataclass
class Config:
    algorithm: Literal["grpo", "sft"] = "grpo"
    """Which file of rl/algorithms runs."""
    run: Run = field(default_factory=Run)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    training: Training = field(default_factory=Training)
    rollout: Rollout = field(default_factory=Rollout)
    reward: Reward = field(default_factory=Reward)
    objective: Objective = field(default_factory=Objective)
    validation: Validation = field(default_factory=Validation)
    refit: Refit = field(default_factory=Refit)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    logging: Logging = field(default_factory=Logging)


# Checks ---------------------------------------------------------------------------------------------------------------

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
    if config.objective.advantage == "grpo" and rollout.samples_per_prompt == 1:
        found.append("rollout.samples_per_prompt=1 leaves objective.advantage=grpo no group to compare with; use 2 or more.")
    if rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0:
        found.append(
            f"rollout.top_p={rollout.top_p}, top_k={rollout.top_k}, min_p={rollout.min_p} sample from a truncated "
            "distribution, but the trainer's log-probs are those of the whole one; 1, 0 and 0 make the two agree."
        )
    return found


def resolve(config: Config) -> Config:
    """The config with derived values filled in: `run.dir`. The argument is left as it is."""
    return replace(config, run=replace(config.run, dir=config.run.dir or f"runs/{config.run.name}"))


def learns_from_samples(config: Config) -> bool:
    """Whether the algorithm trains on responses that the policy generates; sft trains on the data's own."""
    return config.algorithm != "sft"


def needs_engine(config: Config) -> bool:
    """Whether a generation engine is built: for training, or for validation alone."""
    return learns_from_samples(config) or bool(config.data.val and config.validation.every)


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
