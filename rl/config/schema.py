"""The configuration tree: every key of a run, with its unit, its default and the reason for it, and its
range.

A configuration is built by `rl.config.options` from dataclass defaults <- the algorithm's own <- the YAML
file <- dotted overrides; `rl.config.checks` rejects what does not fit together, and `rl.config.needs` says
what a run needs. This module imports neither torch nor Megatron nor vLLM, so that `--help` and a config error
take a fraction of a second.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from rl.config.adapter import Adapter
from rl.config.agents import Agents
from rl.config.consequences import Consequence, consequences
from rl.config.correction import RolloutCorrection
from rl.config.declarations import describe
from rl.config.elastic import Elastic, JobLimits
from rl.config.limits import AgreementConfig, Memory, WatchdogConfig
from rl.config.objective import Objective
from rl.config.options import ConfigError, Files, build, flatten, last_file, read
from rl.config.paths import expand_paths
from rl.config.ranges import AT_LEAST_ONE, FRACTION, NOT_NEGATIVE, PORT, POSITIVE, TEMPERATURE
from rl.config.reward import Reward
from rl.config.roles import Roles
from rl.config.rollout import Rollout
from rl.config.sweep import Sweep
from rl.config.teachers import Teacher
from rl.config.terms import Preference
from rl.config.trace import Trace
from rl.config.training import Optimizer, Training


@dataclass
class Run:
    name: str = "run"
    """Name of the run, and the last part of the default `run.dir`. Default: the name of the last config file,
    without its extension."""
    dir: str = ""
    """Directory for metrics, checkpoints, the resolved config and the code. Empty: `runs/<run.name>`."""
    mode: Literal["train", "check", "evaluate", "rollout_only", "score_only", "train_only"] = "train"
    """check: take one step in `<run.dir>-check`, print a verdict on each part of it, and end
    (docs/first_step.md). evaluate: validate the checkpoints of run.dir, or those that checkpoint.resume
    names, into `<run.dir>-eval` (docs/evaluation.md). rollout_only: generate, score and store samples without
    learning. score_only: apply the reward function to stored samples and print the differences, in one
    process without a model. train_only: learn from stored samples without an engine; nothing is generated or
    validated. docs/report.md has examples."""
    rollouts: str = ""
    """Run directory with the stored samples that `mode` score_only (empty: `dir`) or train_only reads."""
    max_steps: Annotated[int, AT_LEAST_ONE] = 100
    """Training steps (policy updates from one batch of prompts; for sft, optimizer steps)."""
    seed: Annotated[int, NOT_NEGATIVE] = 1
    """Seed of everything random: prompt order and sampling."""
    max_time: str = ""
    """Maximum run time of the process, as hours:minutes:seconds or another form of sbatch's --time. After it
    the run stops between two steps, saves, and exits with code 75. Empty: no limit but the end of the Slurm
    job."""
    on_stop_in_generation: Literal["redo", "finish"] = "redo"
    """Effect of a stop request during generation. redo: the samples are dropped, and the next start repeats
    the step from the same prompts. finish: the step is completed first."""
    elastic: Elastic = field(default_factory=Elastic)
    limits: JobLimits = field(default_factory=JobLimits)


@dataclass
class Model:
    path: str = ""
    """Hugging Face checkpoint directory (config.json, *.safetensors, tokenizer.json). Required."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the weights in training and generation. Master weights and gradient sums are float32 in any
    case."""
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    """Rotary scaling of this model in place of config.json's, for sequences beyond its window
    (docs/models.md). For example, Qwen3:
    {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768}.
    Empty: as in config.json."""
    vision: Literal["frozen", "train"] = "frozen"
    """Whether the vision tower of a model that reads images (`data.image_key`) learns."""
    numerics: Literal["fast", "bitwise"] = "fast"
    """Kernels of the policy's forward passes. bitwise: slower ones, with which the trainer and the engine
    compute bitwise equal log-probs. The run ends if they differ (docs/fidelity.md)."""


@dataclass
class Data:
    train: list[str] = field(default_factory=list)
    """Files with training prompts: parquet, JSON (lines or an array), Arrow, or a directory of datasets'
    save_to_disk. Required."""
    train_weights: list[float] = field(default_factory=list)
    """Share of the prompts that each file of `train` provides, in the same order; each file then has its own
    epochs. Empty: all files are one data set."""
    curriculum: str = ""
    """Function `order(epoch, prompts, rng) -> indices`, as `package.module:name` or `path/to/file.py:name`,
    that returns the prompts of an epoch in their order, int [number of prompts]. Empty: `shuffle`
    decides."""
    val: list[str] = field(default_factory=list)
    """Files with held-out prompts, as for `train`. Empty: no validation."""
    prompt_key: str = "prompt"
    """Column with the prompt: a list of {role, content} messages (chat template applied, with the tools of
    column `tools`) or a string (`string_prompts`)."""
    string_prompts: Literal["plain", "user"] = "plain"
    """How prompts that are strings are read. plain: without the chat template. user: as the message of a
    user, rendered by the chat template like a list of messages."""
    ground_truth_key: str = ""
    """Column with the reference answer, or a dotted path into a column. The file's other columns then reach
    the reward function as entries of `extra_info`. Empty: `reward_model.ground_truth`, and only verl's
    columns are read."""
    max_rows: Annotated[int, NOT_NEGATIVE] = 0
    """Number of rows of `train` that are read, the first ones. 0: all."""
    image_key: str = ""
    """Column with a prompt's images, for a model with a vision tower: a list of {bytes, path}, paths or data
    URIs, one for each anchor <image> in the messages (docs/vision.md). Empty: text only."""
    max_pixels: Annotated[int, NOT_NEGATIVE] = 0
    """Maximum pixels of an image; larger ones are scaled down. 0: the limit of preprocessor_config.json."""
    response_key: str = ""
    """sft, spin and distill with a share of the data: column with the target response. Empty:
    `reward_model.ground_truth`. kto: column with the response; empty: completion."""
    messages_key: str = ""
    """sft: column with a conversation, a list of {role, content} messages, to train on in place of a prompt
    and a response; column `tools` may have the schemas of its tools (docs/sft.md). Empty: none."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Tokens of a conversation that have a loss: every turn of the assistant with its end-of-turn token, only
    the last one, or all tokens."""
    label_key: str = "label"
    """kto: column that says whether the response is desirable: true or false, or 1 or 0."""
    chosen_key: str = "chosen"
    """dpo, orpo and simpo: column with the preferred response."""
    rejected_key: str = "rejected"
    """dpo, orpo and simpo: column with the rejected response."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the policy's chat template, for example {enable_thinking: false}. Variables for
    trajectories are in `agents.template_kwargs`."""
    allow_special_tokens: bool = False
    """Whether text in messages and answers of environments may become special tokens; otherwise only the chat
    template writes them. In a prompt that is a string they are always read as such."""
    max_prompt_tokens: Annotated[int, AT_LEAST_ONE] = 1024
    """Maximum tokens of a prompt after the chat template; with `messages_key` of a conversation."""
    overlong_prompts: Literal["error", "drop", "truncate_left", "truncate_right"] = "error"
    """How to treat a prompt of more than `max_prompt_tokens`: error refuses the run, drop leaves the prompt
    out, truncate_left keeps its last tokens, and truncate_right keeps the first tokens of a conversation
    (sft). In dpo, orpo, simpo and kto the key also applies to a response of more than
    `rollout.max_response_tokens`; truncate_left then keeps its first tokens."""
    shuffle: bool = True
    """Shuffle the prompts in each epoch, with the seed (run.seed, epoch)."""
    prompts_per_step: Annotated[int, AT_LEAST_ONE] = 64
    """Prompts drawn per training step, over all ranks."""


@dataclass
class Critic:
    """ppo: the value model."""

    path: str = ""
    """Hugging Face checkpoint that the critic starts from: a sequence classifier with one label, or a causal
    language model (a value head that starts at 0 replaces its head). Empty: `model.path`."""
    share_base: bool = False
    """With the section `adapter`: the critic uses the policy's frozen weights, with adapters and a value head
    of its own. Otherwise it is a second model, and all its weights learn."""
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(lr=1e-5))
    """The critic's optimizer. Its learning rate is ten times the policy's, because it learns a regression."""
    warmup_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Number of first steps that train only the critic; the policy's learning rate starts after them."""
    value_clip: Annotated[float, NOT_NEGATIVE] = 0.5
    """Values move at most this far from the values before the step's updates. 0: no clipping."""


@dataclass
class ImplicitReward:
    """prime: the reward model that learns during the run."""

    path: str = ""
    """Hugging Face checkpoint of the causal language model that it starts from, which is also its reference.
    Empty: `model.path`."""
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(lr=1e-6))
    """The model's optimizer."""
    beta: Annotated[float, POSITIVE] = 0.05
    """Scale of the implicit reward beta * log(pi / pi_ref)."""
    process_coef: Annotated[float, NOT_NEGATIVE] = 5.0
    """Weight of the advantage from process rewards. Both weights have the values of the authors' code."""
    outcome_coef: Annotated[float, NOT_NEGATIVE] = 5.0
    """Weight of the advantage from outcome rewards."""
    min_accuracy: Annotated[float, FRACTION] = 0.2
    """Minimum share of correct samples of a prompt. A prompt with a lower share is left out of the step."""
    max_accuracy: Annotated[float, FRACTION] = 0.8
    """Maximum share of correct samples of a prompt. A prompt with a higher share is left out of the step."""


@dataclass
class DynamicSampling:
    """dapo: groups of samples with equal scores have no advantage and are replaced."""

    max_rounds: Annotated[int, AT_LEAST_ONE] = 10
    """Maximum number of rounds of generation in a step. After them the step continues with the groups that it
    has."""
    prompts_per_round: Annotated[int, NOT_NEGATIVE] = 0
    """Prompts drawn per round. 0: `data.prompts_per_step`."""


@dataclass
class Validation:
    every: Annotated[int, NOT_NEGATIVE] = 10
    """Steps between validations; one more at the end. 0: never."""
    before_training: bool = True
    """Validate also before the first step."""
    loss: bool = False
    """sft: loss and perplexity of the held-out responses, without an engine: val/loss, val/perplexity,
    val-core/<data_source>/loss, ..."""
    greedy: bool = True
    """One greedy response per held-out prompt: val-core/<data_source>/acc/mean@1."""
    samples_per_prompt: Annotated[int, NOT_NEGATIVE] = 0
    """Sampled responses per held-out prompt: mean@k, best@k (pass@k) and maj@k. 0: none."""
    temperature: Annotated[float, TEMPERATURE] = 1.0
    """Temperature of the sampled responses; their min_p is `rollout.min_p`."""
    top_p: Annotated[float, FRACTION] = 0.0
    """top_p of the sampled responses. 0: rollout.top_p."""
    top_k: Annotated[int, NOT_NEGATIVE] = 0
    """top_k of the sampled responses. 0: rollout.top_k."""
    max_prompts: Annotated[int, NOT_NEGATIVE] = 0
    """Number of held-out prompts used, the first ones. 0: all."""


@dataclass
class Refit:
    check_every: Annotated[int, NOT_NEGATIVE] = 0
    """Steps between comparisons of every element of the weights in engine and trainer. 0: only after the
    first refit, which is always checked. Checksums of all weights are compared before each step and
    validation."""
    buffer_mib: Annotated[int, AT_LEAST_ONE] = 512
    """Memory for the messages of a refit, per rank; larger weights are sent in parts. It is released before
    generation."""
    changed_only: bool = False
    """roles: send only elements that changed since the last refit, with their positions, if this is smaller.
    Each trainer keeps a copy of what it sent in host memory. For slow links between the roles, with bfloat16
    weights and a small learning rate."""


@dataclass
class Checkpoint:
    every: Annotated[int, NOT_NEGATIVE] = 0
    """Steps between checkpoints; one more at the end. 0: none but when the run is stopped before its end."""
    keep_last: Annotated[int, NOT_NEGATIVE] = 2
    """Number of newest checkpoints to keep. 0: all."""
    keep_every: Annotated[int, NOT_NEGATIVE] = 0
    """Checkpoints of steps that are multiples of this are never deleted. 0: none."""
    keep_best: Annotated[int, NOT_NEGATIVE] = 0
    """Number of checkpoints to keep for their `best_metric`, among steps that logged it. 0: none."""
    best_metric: str = ""
    """Name of a metric of the step, such as val-core/openai/gsm8k/acc/mean@1."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Whether the highest or the lowest value of `best_metric` is best."""
    background: bool = False
    """Copy to host memory (over all ranks 14 bytes per parameter in bfloat16, 12 in float32) and write during
    the next steps. The checkpoint becomes valid at the first end of a step at which all ranks have written
    it."""
    resume: str = "auto"
    """auto: continue from the newest complete checkpoint in `run.dir`, if there is one. never: begin at step
    0; after a stop, continue the run's own checkpoints. Refused if `run.dir` holds checkpoints of a run
    without `never`. A path: as auto, but without a checkpoint in `run.dir` the run begins with the named one,
    or with the newest of the named run directory."""
    accept_changes: bool = False
    """Continue from checkpoints in `run.dir` of a run with another name, algorithm, reward, data or model.
    false: refuse. Other changed keys are only printed (docs/checkpoints.md)."""
    weights_only: bool = False
    """With a path in `resume`: load only the weights and begin at step 0, with a new optimizer. They are then
    the reference policy too, so the path must remain."""
    verify: bool = True
    """Compare the checksum of every file before a checkpoint is loaded, distributed over the ranks. false:
    compare only sizes."""
    export_hf: bool = False
    """At the end write the policy as a Hugging Face checkpoint to `<run.dir>/hf`. With the section `adapter`
    its weights are the merged ones, and the adapters alone are in `<run.dir>/adapter`, in peft's format."""


@dataclass
class Logging:
    tensorboard: bool = True
    """Write TensorBoard event files to `<run.dir>/tensorboard`."""
    wandb: Literal["none", "offline", "online"] = "none"
    """Send metrics to Weights & Biases. offline: to files in `<run.dir>/wandb`, which `wandb sync` uploads
    from a host with internet access."""
    mlflow: str = ""
    """Tracking URI of MLflow, such as file:runs/mlflow, sqlite:///runs/mlflow.db or http://host:5000.
    Empty: none."""
    trackio: bool = False
    """Send metrics to trackio's local database (environment variable TRACKIO_DIR)."""
    project: str = "lockstep"
    """Project, or experiment, of the run in wandb, MLflow and trackio. The run is named run.name there."""
    prometheus: str = ""
    """Directory of the textfile collector of Prometheus's node_exporter; rank 0 writes
    lockstep_<run.name>.prom there. Empty: none."""
    prometheus_port: Annotated[int, PORT] = 0
    """Port on which rank 0 answers GET /metrics for Prometheus, if the request has the token of
    `<run.dir>/prometheus_token` (`authorization: {credentials_file: ...}`). 0: none."""
    prometheus_host: str = "127.0.0.1"
    """Address of rank 0's host on which `prometheus_port` listens. 0.0.0.0: all addresses."""
    rollouts: Literal["none", "sample", "all"] = "sample"
    """Samples that each step writes to `<run.dir>/rollouts` as parquet, with token ids, log-probs, advantages
    and scores. sample: samples of four groups; all: every sample, as replays of a run need; about 13 bytes
    per token."""


@dataclass
class Config:
    algorithm: str = "grpo"
    """Name of a file of rl/algorithms (ppo, grpo, dapo, rloo, reinforce_pp, remax, prime, dpo, spin, sppo,
    kto, orpo, simpo, sft, distill), or the path of your own file. It sets other defaults for some keys
    below."""
    run: Run = field(default_factory=Run)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    training: Training = field(default_factory=Training)
    adapter: Adapter = field(default_factory=Adapter)
    sweep: Sweep = field(default_factory=Sweep)
    rollout: Rollout = field(default_factory=Rollout)
    roles: Roles = field(default_factory=Roles)
    reward: Reward = field(default_factory=Reward)
    agents: Agents = field(default_factory=Agents)
    objective: Objective = field(default_factory=Objective)
    rollout_correction: RolloutCorrection = field(default_factory=RolloutCorrection)
    critic: Critic = field(default_factory=Critic)
    implicit_reward: ImplicitReward = field(default_factory=ImplicitReward)
    preference: Preference = field(default_factory=Preference)
    teacher: Teacher = field(default_factory=Teacher)
    dynamic_sampling: DynamicSampling = field(default_factory=DynamicSampling)
    validation: Validation = field(default_factory=Validation)
    refit: Refit = field(default_factory=Refit)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    logging: Logging = field(default_factory=Logging)
    trace: Trace = field(default_factory=Trace)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    agreement: AgreementConfig = field(default_factory=AgreementConfig)
    memory: Memory = field(default_factory=Memory)


FIRST_KEYS = (
    "algorithm",
    "run.name",
    "run.dir",
    "run.max_steps",
    "model.path",
    "data.train",
    "data.val",
    "data.prompts_per_step",
    "data.max_prompt_tokens",
    "training.tp",
    "training.prompts_per_minibatch",
    "training.optimizer.lr",
    "rollout.samples_per_prompt",
    "rollout.max_response_tokens",
    "rollout.temperature",
    "rollout.tp",
    "reward.function",
    "objective.kl_coef",
    "validation.every",
    "checkpoint.every",
)
"""The keys that people change first, which `--help` shows."""
OTHERS = {
    "actor_rollout_ref": "verl; translate it with lockstep convert {file}",
    "model_name_or_path": "TRL; docs/trl.md lists the keys of both",
    "loss_fn": "NeMo-RL; docs/nemo_rl.md lists the keys of both",
    "pretrain": "OpenRLHF; docs/openrlhf.md lists the keys of both",
}
"""Key at the top level of another program's config -> the program, and the remedy."""
SUFFIXES = {"check": "-check", "evaluate": "-eval"}
"""Suffix of the directory of a mode: for example, run.mode=check writes runs/x-check beside runs/x."""


def load_config(path: Files, overrides: Sequence[str] = ()) -> Config:
    """Return the config from dataclass defaults <- the algorithm's <- defaults that follow from keys
    (`consequences`) <- the YAML file, or several in their order <- overrides.

    Raises ConfigError for an unknown key, a wrong type or an unknown algorithm.
    """
    return resolve(expand_paths(_load(path, overrides)[0]))


def changed(config: Config) -> dict[str, Any]:
    """Return the keys of a resolved config that differ from the algorithm's defaults, by section."""
    tree: dict[str, Any] = {"algorithm": config.algorithm}
    for key, value in changed_keys(config).items():
        *sections, name = key.split(".")
        section = tree
        for each in sections:
            section = section.setdefault(each, {})
        section[name] = value
    return tree


def changed_keys(config: Config) -> dict[str, Any]:
    """Return key -> value of the keys that differ from the algorithm's defaults."""
    defaults = flatten(load_config(None, [f"algorithm={config.algorithm}"]))
    return {key: value for key, value in flatten(config).items() if value != defaults[key]}


def derived_keys(path: Files, overrides: Sequence[str] = ()) -> list[str]:
    """Return a sentence for each key that `load_config` has set because of others."""
    after, before, found = _load(path, overrides)
    old, new = flatten(before), flatten(after)
    return [
        f"{each.key}={each.value}, because {each.reason}" for each in found if old[each.key] != new[each.key]
    ]


def _load(path: Files, overrides: Sequence[str]) -> tuple["Config", "Config", list[Consequence]]:
    """Return the config with and without what follows from it, and what follows."""
    raw = read(path, overrides)
    for name, tree in raw.files:
        for key in OTHERS.keys() & tree.keys():
            program = OTHERS[key].format(file=name)
            raise ConfigError(f"{name} is a config of {program} (it has the key {key}).")
    defaults: dict[str, Any] = {"run.name": Path(file).stem} if (file := last_file(path)) else {}
    defaults |= describe(expand_paths(build(Config, raw)).algorithm).defaults
    before = build(Config, raw, defaults)
    found = list(consequences(before))
    return build(Config, raw, defaults | {each.key: each.value for each in found}), before, found


def resolve(config: Config) -> Config:
    """Return a copy of the config with derived values filled in: `run.dir`, and what a check leaves out."""
    run = replace(config.run, dir=config.run.dir or f"runs/{config.run.name}")
    if run.mode not in SUFFIXES:
        return replace(config, run=run)
    suffix = SUFFIXES[run.mode]
    run = replace(run, dir=run.dir.rstrip("/").removesuffix(suffix) + suffix)
    resume = config.checkpoint.resume
    if run.mode == "evaluate":
        validation = replace(config.validation, every=config.validation.every or 1)
        checkpoint = Checkpoint(resume=resume, verify=config.checkpoint.verify)
        return replace(config, run=run, roles=Roles(), validation=validation, checkpoint=checkpoint)
    named = resume if resume not in ("auto", "never") else "never"
    return replace(
        config,
        run=run,
        data=replace(config.data, val=[]),
        checkpoint=Checkpoint(resume=named, weights_only=config.checkpoint.weights_only and named == resume),
    )


def whole_run(config: Config) -> Config:
    """Return the config of the whole run if `run.mode` does a part of it (a check has dropped data.val)."""
    dropped = config.run.mode == "check" and not config.data.val
    return replace(
        config,
        run=replace(config.run, mode="train"),
        data=replace(config.data, val=["dropped"]) if dropped else config.data,
    )
