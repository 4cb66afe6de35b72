"""The configuration tree: every key of a run, with its unit, default and the default's reason.

Built by `rl.options` from dataclass defaults <- the YAML file <- dotted overrides; what is refused is in `rl.config_checks`.
This module imports neither torch nor Megatron nor vLLM, so that `--help` and a config error take a fraction of a second.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass
class Run:
    name: str = "run"
    """Name of the run; also the last part of the default `run.dir`."""
    dir: str = ""
    """Directory for metrics, checkpoints, the resolved config and the code. Empty: `runs/<run.name>`."""
    max_steps: int = 100
    """Training steps (policy updates from one batch of prompts; for sft, optimizer steps)."""
    seed: int = 1
    """Seed of everything random: prompt order and sampling."""


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
    normalize_by_std: bool = True
    """grpo: divide by the standard deviation of the group. False gives Dr.GRPO's advantage."""
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
    """auto: continue from the newest complete checkpoint in `run.dir`, if there is one. never: start at step 0; refused if
    `run.dir` holds checkpoints and this run writes some."""
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


def resolve(config: Config) -> Config:
    """The config with derived values filled in: `run.dir`. The argument is left as it is."""
    return replace(config, run=replace(config.run, dir=config.run.dir or f"runs/{config.run.name}"))


def learns_from_samples(config: Config) -> bool:
    """Whether the algorithm trains on responses that the policy generates; sft trains on the data's own."""
    return config.algorithm != "sft"


def needs_engine(config: Config) -> bool:
    """Whether a generation engine is built: for training, or for validation alone."""
    return learns_from_samples(config) or bool(config.data.val and config.validation.every)
