"""The configuration tree: every key of a run, with its unit, default and the default's reason.

Built by `rl.config.options` from dataclass defaults <- the algorithm's own <- the YAML file <- dotted overrides; what is refused is
in `rl.config.checks`. This module imports neither torch nor Megatron nor vLLM, so that `--help` and a config error take a fraction of a second.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rl.config.declarations import Algorithm, describe
from rl.config.limits import AgreementConfig, Memory, WatchdogConfig
from rl.config.options import ConfigError, build, read


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
    max_time: str = ""
    """Stop between two steps when the process has run this long, save, and leave with exit code 75: hours:minutes:seconds, or
    another form of sbatch's --time. Empty: no limit but the end of the Slurm job."""
    on_stop_in_generation: Literal["redo", "finish"] = "redo"
    """What a stop does to a generation that it comes into. redo: drop it, so that little of a long step has to fit before the end;
    the next start takes the step again, from the same prompts. finish: complete the step first."""


@dataclass
class Model:
    path: str = ""
    """Hugging Face checkpoint directory (config.json, *.safetensors, tokenizer.json). Required."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the weights in training and generation. Master weights and gradient sums are float32 in any case."""


@dataclass
class Data:
    train: list[str] = field(default_factory=list)
    """Files with training prompts: parquet, JSONL, Arrow, or a directory of datasets' save_to_disk. Required."""
    train_weights: list[float] = field(default_factory=list)
    """Share of each file of `train` in the draws, in the same order; each file then walks through epochs of its own.
    Empty: all files are one data set."""
    curriculum: str = ""
    """Function `order(epoch, prompts, rng) -> indices`, as `package.module:name` or `path/to/file.py:name`, that gives the
    order of the prompts of an epoch, and which take part. Empty: `shuffle` decides."""
    val: list[str] = field(default_factory=list)
    """Files with held-out prompts, as for `train`. Empty: no validation."""
    prompt_key: str = "prompt"
    """Column with the prompt: a list of {role, content} messages (chat template applied) or a string (taken as it is)."""
    response_key: str = ""
    """sft and spin: column with the target response. Empty: `reward_model.ground_truth`."""
    chosen_key: str = "chosen"
    """dpo: column with the preferred response."""
    rejected_key: str = "rejected"
    """dpo: column with the other response."""
    max_prompt_tokens: int = 1024
    """Longest prompt in tokens, after the chat template."""
    overlong_prompts: Literal["error", "drop", "truncate_left"] = "error"
    """What to do with a prompt of more than `max_prompt_tokens`: stop, leave it out, or keep its last tokens. For the pairs
    of dpo also with a response of more than `rollout.max_response_tokens` (the first tokens are kept)."""
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
    ep: int = 1
    """Expert parallel size: the routed experts of a layer lie on this many ranks of a stage. 1 for a model without experts."""
    etp: int = 0
    """Tensor parallel size of the routed experts. 0: 1 with ep > 1, where whole experts save the communication within them,
    else `training.tp`."""
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
    offload: Literal["auto", "none", "optimizer", "all"] = "auto"
    """What the training models move to host memory while the engine generates: nothing, gradients and optimizer state, or the
    weights too. auto: all on CUDA, none on CPU."""
    optimizer: Optimizer = field(default_factory=Optimizer)

    @property
    def expert_tp(self) -> int:
        """`etp`, decided where it is 0."""
        return self.etp or (self.tp if self.ep == 1 else 1)


@dataclass
class Critic:
    """ppo: the value model."""

    path: str = ""
    """Hugging Face checkpoint that the critic starts from: a causal language model, whose head is replaced by a value head
    that starts at 0, or a sequence classifier with one label. Empty: `model.path`."""
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(lr=1e-5))
    """As for the policy; a critic learns a regression, and takes a ten times higher learning rate."""
    warmup_steps: int = 0
    """First steps in which only the critic learns and the policy stays; the policy's learning rate starts after them."""
    value_clip: float = 0.5
    """Values move at most this far from those before the step's updates. 0: no clipping."""


@dataclass
class ImplicitReward:
    """prime: the reward model that learns during the run."""

    path: str = ""
    """Hugging Face checkpoint of the causal language model it starts from, and is held against. Empty: `model.path`."""
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(lr=1e-6))
    """As for the policy."""
    beta: float = 0.05
    """Scale of the implicit reward beta * log(pi / pi_ref)."""
    process_coef: float = 5.0
    """Weight of the advantage from process rewards; both weights are those of the authors' code."""
    outcome_coef: float = 5.0
    """Weight of the advantage from outcome rewards."""
    min_accuracy: float = 0.2
    """Prompts whose samples are right less often than this are left out of the step."""
    max_accuracy: float = 0.8
    """Prompts whose samples are right more often than this are left out of the step."""


@dataclass
class Preference:
    """dpo, spin and sppo: learning from pairs."""

    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """dpo and spin: DPO's logistic loss, SLiC's hinge, or IPO's square."""
    beta: float = 0.1
    """Weight of the divergence from the reference policy. For sppo 1 / eta."""
    label_smoothing: float = 0.0
    """sigmoid: probability that a pair's preference is wrong (conservative DPO), below 0.5."""


@dataclass
class DynamicSampling:
    """dapo: groups whose samples all have one score teach nothing and are replaced."""

    max_rounds: int = 10
    """Most rounds of generation in a step. After them the step goes on with the groups there are."""
    prompts_per_round: int = 0
    """Prompts drawn per round. 0: `data.prompts_per_step`."""


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
class RewardModel:
    path: str = ""
    """Hugging Face checkpoint of a sequence classifier with one label, whose number is added to the score. Empty: none."""
    coef: float = 1.0
    """Weight of that number."""


@dataclass
class Judge:
    path: str = ""
    """Hugging Face checkpoint of a language model that grades responses, generated with vLLM. Empty: none."""
    gpu_memory_utilization: float = 0.2
    """Fraction of a GPU's memory for the judge, which stays there; its layout is `rollout.tp`. No effect on CPU."""
    template: str = (
        "Question:\n{prompt}\n\nAnswer:\n{response}\n\nReference answer:\n{ground_truth}\n\n"
        "Grade the answer from 0 (wrong) to 10 (right). End with 'Grade: <number>'."
    )
    """What the judge is asked, as a user message; {prompt}, {response} and {ground_truth} are filled in."""
    parser: str = "rl.rewards.judge:grade"
    """Function `parse(text) -> float` of the judge's answer, as `package.module:name` or `path/to/file.py:name`."""
    coef: float = 1.0
    """Weight of its number in the score."""
    max_prompt_tokens: int = 4096
    """Longest question to the judge, in tokens; longer ones count as failed."""
    max_response_tokens: int = 512
    """Longest answer of the judge, in tokens."""
    temperature: float = 0.0
    """Temperature of the judge's answer; 0 is greedy."""


@dataclass
class Reward:
    function: str = "rl.rewards.exact:score"
    """Reward function `score(prompt, response, ground_truth, **extra) -> float | dict`, as `package.module:name` or
    `path/to/file.py:name`. A dict needs the key `score`; its other numbers are logged, `acc` as accuracy."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments passed to every call of the reward function."""
    failure_score: float = 0.0
    """Score of a sample whose reward function raised, hung or died; counted in `reward/failures`."""
    sources: dict[str, Any] = field(default_factory=dict)
    """Other reward functions by `data_source`: a list of {function, weight, kwargs}; the score is their weighted sum."""
    workers: int = 0
    """Processes per rank that call the reward function. 0: as many as the rank has cores."""
    timeout_s: float = 30.0
    """Longest time that scoring one sample may take, in seconds; then it is killed and counts as failed."""
    memory_mib: int = 4096
    """Address space of a scoring process, in MiB; a reward function that imports torch needs more. 0: no limit."""
    overlong_buffer_tokens: int = 0
    """Soft overlong punishment (DAPO): over the last so many tokens before `rollout.max_response_tokens` the reward falls
    linearly. 0: none."""
    overlong_penalty: float = 1.0
    """What it has fallen by at the limit."""
    model: RewardModel = field(default_factory=RewardModel)
    judge: Judge = field(default_factory=Judge)


@dataclass
class RewardKl:
    """KL divergence from the reference policy, subtracted from the reward of every token."""

    coef: float = 0.0
    """Its weight; the first one, if it adapts. 0: none, and no reference policy is kept for it."""
    estimator: Literal["k1", "abs", "k2", "k3"] = "k1"
    """Estimator of the divergence of a token."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: each step moves the weight so that the mean divergence of a token approaches `target`."""
    target: float = 0.1
    """adaptive: target of `actor/reward_kl_penalty`, in nats per token; verl's default. The 6 nats per sample
    of arXiv:1909.08593 are 6 / (mean response length) here."""
    horizon: int = 10000
    """adaptive: samples over which the weight may change by about a fifth."""


@dataclass
class Objective:
    """Policy gradient: which advantage, which loss, which mean. docs/algorithms.md has the formulas."""

    advantage: Literal[
        "none",
        "gae",
        "grpo",
        "grpo-passk",
        "gdpo",
        "rloo",
        "reinforce++",
        "reinforce++-baseline",
        "remax",
        "opo",
        "gpg",
        "optimal-token-baseline",
        "prime",
    ] = "none"
    """Advantage estimator. Each algorithm sets its own; none: the algorithm has no policy gradient."""
    loss: Literal[
        "none",
        "ppo",
        "reinforce",
        "gspo",
        "gmpo",
        "sapo",
        "cispo",
        "clip-cov",
        "kl-cov",
        "gpg",
        "dppo-tv",
        "dppo-kl",
        "dro",
    ] = "none"
    """Policy loss per token. Each algorithm sets its own; none: as for `advantage`."""
    aggregation: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """How token losses become one number; denominators are global over the mini-batch."""
    normalize_by_std: bool = True
    """grpo, grpo-passk: divide by the standard deviation of the group. False gives Dr.GRPO's advantage."""
    gamma: float = 1.0
    """Discount per token of gae, reinforce++ and prime."""
    lam: float = 1.0
    """gae: weight of longer returns; 1 is Monte Carlo, 0 one step."""
    whiten: bool = True
    """gae: advantages of the whole batch to mean 0 and variance 1."""
    reward_columns: list[str] = field(default_factory=list)
    """gdpo: which numbers of the reward function are normalised apart, in the place of the score. Empty: all that it gives
    beside `score` and `acc`."""
    reward_weights: list[float] = field(default_factory=list)
    """gdpo: weight of each. Empty: 1."""
    clip_low: float = 0.2
    """The probability ratio is clipped from below at 1 - clip_low."""
    clip_high: float = 0.2
    """The probability ratio is clipped from above at 1 + clip_high."""
    dual_clip: float = 3.0
    """ppo: bound of the loss for negative advantages, as a factor of the advantage. 0 turns it off."""
    dppo_max_ratio: float = 20.0
    """dppo-tv, dppo-kl: largest weight of a token by its probability ratio; verl's `clip_ratio_c`."""
    sapo_tau_positive: float = 1.0
    """sapo: temperature of the gate where the advantage is positive."""
    sapo_tau_negative: float = 1.05
    """sapo: temperature of the gate where it is negative."""
    cov_fraction: float = 0.0002
    """clip-cov, kl-cov: share of the mini-batch's tokens that are picked. The paper's runs take 2e-4 for
    clip-cov, and for kl-cov 2e-3 with a model of 7B parameters and 2e-4 with one of 32B."""
    cov_low: float = 1.0
    """clip-cov: tokens are picked among those with a covariance of at least this."""
    cov_high: float = 5.0
    """clip-cov: and of at most this."""
    kl_cov_coef: float = 1.0
    """kl-cov: weight of the divergence on the tokens picked. The paper's runs take 1; verl's default: 0.1."""
    dro_beta: float = 0.1
    """dro: weight of the squared log ratio."""
    kl_coef: float = 0.0
    """Weight of the KL divergence from the reference policy in the loss. 0: no reference policy is kept for it."""
    kl_estimator: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k3"
    """Estimator of that divergence (Schulman, 'Approximating KL divergence'); with + the gradient is that of k2."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    reward_kl: RewardKl = field(default_factory=RewardKl)


REJECTIONS = ("token-k1", "token-k2", "token-k3", "sample-k1", "sample-k2", "sample-k3")
"""Names of the criteria of `rollout_correction.reject`."""


@dataclass(frozen=True)
class Rejection:
    """One criterion of `rollout_correction.reject`."""

    name: str
    """One of REJECTIONS."""
    low: float
    """Lower bound in nats."""
    high: float
    """Upper bound in nats."""

    @property
    def level(self) -> Literal["token", "sequence"]:
        return "token" if self.name.startswith("token") else "sequence"

    @property
    def statistic(self) -> Literal["k1", "k2", "k3"]:
        return self.name.partition("-")[2]


@dataclass
class RolloutCorrection:
    """The engine's probabilities of the tokens it sampled are not exactly the trainer's, even at the same weights."""

    truncate_tokens: float = 0.0
    """Weigh a token's loss by min(p_trainer / p_engine, this). 2.0 is usual; 0: off."""
    truncate_samples: float = 0.0
    """Weigh a sample's loss by min(product of its tokens' ratios, this). 0: off."""
    icepop_low: float = 0.0
    """IcePop: a token's loss is weighed by its ratio, and dropped where that is below this (its authors: 0.5)."""
    icepop_high: float = 0.0
    """IcePop: and dropped where the ratio is above this (its authors: 5). 0: off."""
    reject: str = "none"
    """Drop tokens, or samples, whose divergence by this estimator (for samples: its mean over tokens) leaves
    the bounds. One of token-k1, token-k2, token-k3, sample-k1, sample-k2, sample-k3, or several with commas
    between them: a token then has to pass each one."""
    reject_low: Any = 0.0
    """Lower bound in nats, 0 or less: k1 may be negative, k2 and k3 are not. With several criteria one number
    for all of them, or a list with one for each."""
    reject_high: Any = 0.0
    """Upper bound in nats, as reject_low."""
    bypass: bool = False
    """Take the engine's log-probs for those of the old policy: no forward pass for them, and ratios start from what was
    sampled from. The other keys then have nothing to correct."""

    @property
    def rejections(self) -> list[Rejection]:
        """The criteria of `reject` with their bounds, in its order; none for "none".

        Raises ConfigError for an unknown or repeated criterion, and for a list of bounds of another length.
        """
        names = [name.strip() for name in self.reject.split(",")]
        if names == ["none"]:
            return []
        unknown = [name for name in names if name not in REJECTIONS]
        if unknown:
            raise ConfigError(
                f"rollout_correction.reject={self.reject} holds '{unknown[0]}', but must be none, or one or "
                f"more of {', '.join(REJECTIONS)} with commas between them."
            )
        if len(set(names)) < len(names):
            raise ConfigError(f"rollout_correction.reject={self.reject} repeats a criterion; name each once.")
        bounds = {}
        for key in ("reject_low", "reject_high"):
            value = getattr(self, key)
            bounds[key] = value if isinstance(value, list) else [value] * len(names)
            if len(bounds[key]) != len(names):
                raise ConfigError(
                    f"rollout_correction.{key} has {len(value)} numbers for {len(names)} criteria in "
                    f"rollout_correction.reject={self.reject}; give one number, or one for each."
                )
        criteria = zip(names, bounds["reject_low"], bounds["reject_high"], strict=True)
        return [Rejection(*criterion) for criterion in criteria]


@dataclass
class Validation:
    every: int = 10
    """Steps between validations; one more at the end. 0: never."""
    before_training: bool = True
    """Validate before the first step too."""
    greedy: bool = True
    """One greedy response per held-out prompt: val-core/<data_source>/acc/mean@1."""
    samples_per_prompt: int = 0
    """Sampled responses per held-out prompt: mean@k, best@k (pass@k) and maj@k. 0: none."""
    temperature: float = 1.0
    """Temperature of the sampled responses; top_p, top_k and min_p are those of `rollout`."""
    max_prompts: int = 0
    """Use only the first so many held-out prompts. 0: all."""


@dataclass
class Refit:
    check_every: int = 0
    """Steps between comparisons of every weight in the engine with the trainer's. The first refit is always checked;
    0: only that one."""
    buffer_mib: int = 512
    """Memory for the messages of a refit, per rank; larger weights travel in parts. It is free again before generation."""


@dataclass
class Checkpoint:
    every: int = 0
    """Steps between checkpoints; one more at the end. 0: none but when the run is stopped before its end."""
    keep_last: int = 2
    """Newest checkpoints kept. 0: all."""
    keep_every: int = 0
    """Checkpoints of a step that this divides are kept for ever. 0: none."""
    keep_best: int = 0
    """Checkpoints kept for their `best_metric`, among those of steps that have it. 0: none."""
    best_metric: str = ""
    """Name of a metric of the step, such as val-core/openai/gsm8k/acc/mean@1."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Which values of `best_metric` are the best."""
    background: bool = False
    """Copy to host memory (over all ranks 14 bytes per parameter in bfloat16, 12 in float32) and write while the next steps go
    on; the checkpoint counts from the step at whose end all ranks have written."""
    resume: str = "auto"
    """auto: continue from the newest complete checkpoint in `run.dir`, if there is one. never: start at step 0; refused if
    `run.dir` holds checkpoints and this run writes some. A path: as auto, but a run whose `run.dir` holds none yet begins
    with that checkpoint, or with the newest of that run directory."""
    weights_only: bool = False
    """With a path in `resume`: take the weights alone and begin at step 0, with a new optimizer; the reference policy is then
    what was taken, so that the path must stay there."""
    verify: bool = True
    """Compare the checksum of every file before a checkpoint is taken, each rank a share of them. false: only their sizes."""
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
    algorithm: str = "grpo"
    """Which file of rl/algorithms runs (ppo, grpo, dapo, rloo, reinforce_pp, remax, prime, dpo, spin, sppo, sft), or the
    path of one of your own. It sets other defaults for some keys below."""
    run: Run = field(default_factory=Run)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    training: Training = field(default_factory=Training)
    rollout: Rollout = field(default_factory=Rollout)
    reward: Reward = field(default_factory=Reward)
    objective: Objective = field(default_factory=Objective)
    rollout_correction: RolloutCorrection = field(default_factory=RolloutCorrection)
    critic: Critic = field(default_factory=Critic)
    implicit_reward: ImplicitReward = field(default_factory=ImplicitReward)
    preference: Preference = field(default_factory=Preference)
    dynamic_sampling: DynamicSampling = field(default_factory=DynamicSampling)
    validation: Validation = field(default_factory=Validation)
    refit: Refit = field(default_factory=Refit)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    logging: Logging = field(default_factory=Logging)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    agreement: AgreementConfig = field(default_factory=AgreementConfig)
    memory: Memory = field(default_factory=Memory)


def load_config(path: str | None, overrides: Sequence[str] = ()) -> Config:
    """Dataclass defaults <- the algorithm's <- the YAML file <- overrides, with derived values filled in.

    Raises ConfigError for an unknown key, a wrong type or an unknown algorithm.
    """
    raw = read(path, overrides)
    named = build(Config, raw).algorithm
    return resolve(build(Config, raw, describe(named).defaults))


def resolve(config: Config) -> Config:
    """The config with derived values filled in: `run.dir`. The argument is left as it is."""
    return replace(config, run=replace(config.run, dir=config.run.dir or f"runs/{config.run.name}"))


def algorithm_of(config: Config) -> Algorithm:
    """What the algorithm's file declares."""
    return describe(config.algorithm)


def learns_from_samples(config: Config) -> bool:
    """Whether the algorithm trains on responses that the policy generates."""
    return "samples" in algorithm_of(config).needs


def needs_engine(config: Config) -> bool:
    """Whether a generation engine is built: for training, or for validation alone."""
    return learns_from_samples(config) or bool(config.data.val and config.validation.every)


def needs_reward(config: Config) -> bool:
    """Whether responses are scored: in training, or in validation alone."""
    return "reward" in algorithm_of(config).needs or bool(config.data.val and config.validation.every)


def needs_reference(config: Config) -> bool:
    """Whether the policy that the run starts from is kept."""
    objective = config.objective
    return "reference" in algorithm_of(config).needs or objective.kl_coef > 0 or objective.reward_kl.coef > 0
