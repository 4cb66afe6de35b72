"""The settings of a verl run in the words of this project."""

from math import ceil, log
from pathlib import Path
from typing import Any

from tools.verl.keys import (
    AGGREGATIONS,
    ALGORITHMS,
    KL_ESTIMATORS,
    LOSSES,
    MODELS,
    OFF,
    REFUSED,
    REPLAY,
    SOURCES,
    WEIGHTS,
    reason,
)
from tools.verl.script import Settings
from tools.verl.tuning import adapter, distillation, is_tuning, listed, tuning_data

ALWAYS_SEQUENCE_MEAN = ("sapo", "geo_mean")
"""Losses that verl averages as seq-mean-token-mean whatever `loss_agg_mode` says."""


def translate(settings: Settings, train_rows: int) -> tuple[dict[str, Any], list[str]]:
    """Return this project's settings by dotted key, and notes for the user.

    Raises ValueError for a setting whose value is unknown.
    """
    refuse(settings)
    notes: list[str] = []
    ours: dict[str, Any] = {}
    tunes = is_tuning(settings)
    rl = (objective, data, layout, rollout, reward, adapter, distillation)
    for part in (*((tuning_layout, adapter) if tunes else rl), trainer):
        ours |= part(settings, notes)
    ours |= steps(settings, notes, ours["data.prompts_per_step"], train_rows, epochs=4 if tunes else 30)
    optimizers = [("training.optimizer", "optim" if tunes else "actor_rollout_ref.actor.optim")]
    if ours["algorithm"] == "ppo":
        optimizers.append(("critic.optimizer", "critic.optim"))
    for target, source in optimizers:
        ours |= optimizer(settings, target, source, ours.get("run.max_steps"), notes)
    return ours, notes


def refuse(settings: Settings) -> None:
    """Raise ValueError for a setting or a model that this project cannot run, with what would be needed."""
    for key, value in settings.given.items():
        if value not in OFF and (why := reason(key, REFUSED)):
            raise ValueError(f"{key}={value}: {why}")
    for key in ("actor_rollout_ref.model.path", "model.path"):
        if why := reason(str(settings.given.get(key, "")), MODELS):
            raise ValueError(f"{key}={settings.given[key]}: {why}")


def pick(settings: Settings, key: str, default: str, table: dict[str, Any]) -> Any:
    """Return the table's entry for a setting. Raises ValueError if it has none."""
    value = str(settings.get(key, default))
    if value not in table:
        raise ValueError(
            f"{key}={value} has no counterpart; it must be one of {', '.join(table)}. Choose another, or "
            "write rl/objectives or rl/algorithms (docs/extending.md)."
        )
    return table[value]


def objective(settings: Settings, notes: list[str]) -> dict[str, Any]:
    """Translate the algorithm, its loss and its KL terms."""
    get, actor = settings.get, "actor_rollout_ref.actor"
    algorithm, advantage = pick(settings, "algorithm.adv_estimator", "gae", ALGORITHMS)
    loss_mode = str(get(f"{actor}.policy_loss.loss_mode", "vanilla"))
    loss = pick(settings, f"{actor}.policy_loss.loss_mode", "vanilla", LOSSES)
    aggregation = pick(settings, f"{actor}.loss_agg_mode", "token-mean", AGGREGATIONS)
    clip = get(f"{actor}.clip_ratio", 0.2)
    ours: dict[str, Any] = {"algorithm": algorithm, "objective.loss": loss}
    if advantage:
        ours["objective.advantage"] = advantage
    if get("algorithm.filter_groups.enable", False):
        get("algorithm.filter_groups.metric")
        ours |= {
            "algorithm": "dapo",
            "dynamic_sampling.max_rounds": get("algorithm.filter_groups.max_num_gen_batches", 10) or 10,
            "dynamic_sampling.prompts_per_round": get("data.gen_batch_size", 0),
        }
    ours |= {
        "objective.aggregation": "seq-mean-token-mean" if loss_mode in ALWAYS_SEQUENCE_MEAN else aggregation,
        # A ratio is positive, so that a bound below 0 is one of 0.
        "objective.clip_low": min(get(f"{actor}.clip_ratio_low", clip), 1.0),
        "objective.clip_high": get(f"{actor}.clip_ratio_high", clip),
        "objective.entropy_coef": get(f"{actor}.entropy_coeff", 0),
        "objective.kl_coef": 0.0,
        "objective.reward_kl.coef": 0.0,
    }
    if loss == "gspo" and aggregation != "seq-mean-token-mean":
        notes.append(
            f"objective.aggregation={aggregation}, as in verl 0.9.1; verl up to 0.9.0 averaged gspo as "
            "seq-mean-token-mean whatever loss_agg_mode said."
        )
    dual_clip = get(f"{actor}.clip_ratio_c", 3.0)
    if loss == "ppo":
        ours["objective.dual_clip"] = dual_clip
    if loss.startswith("dppo"):
        ours["objective.dppo_max_ratio"] = dual_clip
    if loss == "sapo":
        ours["objective.sapo_tau_positive"] = get(f"{actor}.tau_pos", 1.0)
        ours["objective.sapo_tau_negative"] = get(f"{actor}.tau_neg", 1.05)
    if loss in ("clip-cov", "kl-cov"):
        part = f"{actor}.policy_loss.{loss_mode}"
        ours["objective.cov_fraction"] = get(f"{part}_ratio", 0.0002)
    if loss == "clip-cov":
        ours["objective.cov_low"] = get(f"{actor}.policy_loss.clip_cov_lb", 1.0)
        ours["objective.cov_high"] = get(f"{actor}.policy_loss.clip_cov_ub", 5.0)
    if loss == "kl-cov":
        ours["objective.kl_cov_coef"] = get(f"{actor}.policy_loss.ppo_kl_coef", 0.1)
    if algorithm == "ppo":
        ours |= {
            "objective.gamma": get("algorithm.gamma", 1.0),
            "objective.lam": get("algorithm.lam", 1.0),
            "critic.warmup_steps": get("trainer.critic_warmup", 0),
            "critic.value_clip": get("critic.cliprange_value", 0.5),
            "critic.path": get("critic.model.path", ""),
        }
        if ours["critic.path"] == get("actor_rollout_ref.model.path"):
            ours["critic.path"] = ""
    if advantage in (None, "grpo") and algorithm == "grpo":
        ours["objective.normalize_by_std"] = get("algorithm.norm_adv_by_std_in_grpo", True)
    return ours | kl_terms(settings, algorithm) | correction(settings)


def kl_terms(settings: Settings, algorithm: str) -> dict[str, Any]:
    """Translate the KL divergence from the reference policy, in the loss and in the reward."""
    get, actor = settings.get, "actor_rollout_ref.actor"
    ours: dict[str, Any] = {}
    if get(f"{actor}.use_kl_loss", False):
        ours["objective.kl_coef"] = get(f"{actor}.kl_loss_coef", 0.001)
        kind = str(get(f"{actor}.kl_loss_type", "low_var_kl"))
        plus = "+" if kind.endswith("+") else ""
        settings.given[f"{actor}.kl_loss_type"] = kind.removesuffix("+")
        name = pick(settings, f"{actor}.kl_loss_type", "", KL_ESTIMATORS) + plus
        ours["objective.kl_estimator"] = name
    if get("algorithm.use_kl_in_reward", False):
        if algorithm == "remax":
            raise ValueError(
                "algorithm.use_kl_in_reward=True with adv_estimator=remax: the greedy baseline has no such "
                f"term here; use {actor}.use_kl_loss=True."
            )
        ours |= {
            "objective.reward_kl.coef": get("algorithm.kl_ctrl.kl_coef", 0.001),
            "objective.reward_kl.estimator": pick(settings, "algorithm.kl_penalty", "kl", KL_ESTIMATORS),
            "objective.reward_kl.controller": get("algorithm.kl_ctrl.type", "fixed"),
            "objective.reward_kl.horizon": get("algorithm.kl_ctrl.horizon", 10000),
            "objective.reward_kl.target": get("algorithm.kl_ctrl.target_kl", 0.1),
        }
    return ours


def correction(settings: Settings) -> dict[str, Any]:
    """Translate the rollout correction."""
    get, part = settings.get, "algorithm.rollout_correction"
    ours: dict[str, Any] = {}
    if get(f"{part}.rollout_is"):
        key = pick(settings, f"{part}.rollout_is", "", WEIGHTS)
        low, _, high = str(get(f"{part}.rollout_is_threshold", 2.0)).partition("_")
        if high:
            level = {"truncate_tokens": "token", "truncate_samples": "sample"}[key]
            bounds = {"icepop_low": float(low), "icepop_high": float(high), "icepop_level": level}
            ours |= {f"rollout_correction.{name}": value for name, value in bounds.items()}
        else:
            ours[f"rollout_correction.{key}"] = float(low)
    if get(f"{part}.bypass_mode", False):
        settings.used -= {f"{part}.rollout_is", f"{part}.rollout_is_threshold"}
        return {"rollout_correction.bypass": True}
    criteria = str(get(f"{part}.rollout_rs", "")).split(",")
    if criteria != [""]:
        bounds = str(get(f"{part}.rollout_rs_threshold", "2.0")).split(",")
        if len(bounds) != len(criteria):
            raise ValueError(
                f"{part}.rollout_rs has {len(criteria)} criteria and rollout_rs_threshold {len(bounds)} "
                "bounds; give one for each, separated by commas."
            )
        names, lows, highs = [], [], []
        for name, bound in zip(criteria, bounds, strict=True):
            kind, _, statistic = name.strip().rpartition("_")
            if kind not in ("token", "seq_mean"):
                settings.given[f"{part}.rollout_rs: {name.strip()}"] = bound.strip()
                continue
            low, _, high = bound.strip().partition("_")
            names.append(("token-" if kind == "token" else "sample-") + statistic)
            if statistic == "k1":  # verl's bounds of k1 are ratios
                upper = float(high or low)
                lows.append(log(float(low) if high else 1 / upper))
                highs.append(log(upper))
            else:
                lows.append(0.0)
                highs.append(float(high or low))
        if names:
            ours["rollout_correction.reject"] = ",".join(names)
            ours["rollout_correction.reject_low"] = lows
            ours["rollout_correction.reject_high"] = highs
    return ours


def data(settings: Settings, notes: list[str]) -> dict[str, Any]:
    """Translate the data, its lengths and its batches."""
    get = settings.get
    per_step = get("data.train_batch_size", 1024)
    per_update = get("actor_rollout_ref.actor.ppo_mini_batch_size", 256)
    get("critic.ppo_mini_batch_size")
    overlong = "error"
    if get("data.filter_overlong_prompts", False):
        overlong = "drop"
    elif get("data.truncation", "error") == "left":
        overlong = "truncate_left"
    get("data.truncation")
    return {
        "data.train": listed(get("data.train_files", [])),
        "data.val": listed(get("data.val_files", [])),
        "data.prompt_key": get("data.prompt_key", "prompt"),
        "data.max_prompt_tokens": get("data.max_prompt_length", 512),
        "rollout.max_response_tokens": get("data.max_response_length", 512),
        "data.overlong_prompts": overlong,
        "data.shuffle": get("data.shuffle", True),
        "data.prompts_per_step": per_step,
        "training.prompts_per_minibatch": 0 if per_update == per_step else per_update,
        "training.epochs": get("actor_rollout_ref.actor.ppo_epochs", 1),
        "validation.max_prompts": max(0, get("data.val_max_samples", -1)),
    } | ({"run.seed": get("data.seed")} if get("data.seed") is not None else {})


def layout(settings: Settings, notes: list[str]) -> dict[str, Any]:
    """Translate the model, the training grid and the sizes of micro-batches."""
    get, actor = settings.get, "actor_rollout_ref.actor"
    longest = get("data.max_prompt_length", 512) + get("data.max_response_length", 512)
    sequences = settings.first(f"{actor}.ppo_micro_batch_size_per_gpu", f"{actor}.ppo_micro_batch_size")
    tokens = get(f"{actor}.ppo_max_token_len_per_gpu", 16384)
    dynamic = get(f"{actor}.use_dynamic_bsz", False)
    recompute = get("actor_rollout_ref.model.enable_gradient_checkpointing", True)
    inside = get("actor_rollout_ref.rollout.tensor_model_parallel_size", 2)
    ours = {"model.path": get("actor_rollout_ref.model.path", "")}
    if not ours["model.path"]:
        notes.append("model.path is empty in the script; set it to a directory with a checkpoint.")
    ours |= grid(settings, f"{actor}.", notes, recompute=recompute, at_least=inside)
    sharing = get(f"{actor}.ulysses_sequence_parallel_size", 1)
    cp = ours.get("training.cp", 1)
    ours["training.micro_batch_tokens"] = (
        tokens * sharing if dynamic else ceil((sequences or 1) * longest / cp)
    )
    mode = pick(settings, f"{actor}.router_replay.mode", "disabled", REPLAY)
    get("actor_rollout_ref.rollout.enable_rollout_routing_replay")
    if mode != "none":
        ours["training.router_replay"] = mode
    return ours


def tuning_layout(settings: Settings, notes: list[str]) -> dict[str, Any]:
    """Translate supervised fine-tuning: its model and data, and the grid."""
    get = settings.get
    longest = get("data.max_length", 1024)
    sequences = settings.first("data.micro_batch_size_per_gpu", "data.micro_batch_size", default=4)
    tokens = get("data.max_token_len_per_gpu", 8192)
    if not get("data.use_dynamic_bsz", True) or "data.max_token_len_per_gpu" not in settings.given:
        tokens = sequences * longest
    recompute = settings.first(
        "model.enable_gradient_checkpointing", "engine.activation_checkpointing", default=True
    )
    ours = tuning_data(settings, notes) | grid(settings, "", notes, recompute=recompute, at_least=1)
    return ours | {"training.micro_batch_tokens": max(1, tokens)}


def grid(
    settings: Settings, part: str, notes: list[str], *, recompute: bool, at_least: int
) -> dict[str, Any]:
    """Translate the parallel sizes of the training engine.

    part: prefix of its settings. recompute: whether an engine other than Megatron checkpoints activations.
    at_least: smallest tensor parallel size in place of FSDP, which shards weights over all ranks.
    """
    get, megatron = settings.get, f"{part}megatron"
    engines = (get("model_engine"), get("engine"), get(f"{part}model_engine"))
    if {"megatron", "mlite"} & set(engines) or any(key.startswith(f"{megatron}.") for key in settings.given):
        return {
            "training.tp": get(f"{megatron}.tensor_model_parallel_size", 1),
            "training.pp": get(f"{megatron}.pipeline_model_parallel_size", 1),
            "training.vpp": get(f"{megatron}.virtual_pipeline_model_parallel_size") or 1,
            "training.cp": get(f"{megatron}.context_parallel_size", 1),
            "training.ep": get(f"{megatron}.expert_model_parallel_size", 1),
            "training.etp": get(f"{megatron}.expert_tensor_parallel_size", 0),
            "training.sequence_parallel": get(f"{megatron}.sequence_parallel", True),
            **recomputation(settings, f"{megatron}.override_transformer_config.recompute", notes),
        }
    sharing = get(f"{part}ulysses_sequence_parallel_size", 1)
    tp = min(get("trainer.n_gpus_per_node", 8), max(sharing, at_least))
    notes.append(
        f"training.tp={tp} replaces FSDP: Megatron shards weights over tp and pp, and the optimizer "
        "also over dp. train_rl.py --dry-run says whether it fits, and which change is cheapest."
    )
    ep = get(f"{part}veomni.expert_parallel_size", 1)
    return {"training.tp": tp, "training.ep": ep, "training.recompute": "full" if recompute else "none"}


def recomputation(settings: Settings, part: str, notes: list[str]) -> dict[str, Any]:
    """Translate what Megatron's backward pass computes again. part: prefix of its settings."""
    granularity, modules, method, number = (
        settings.get(f"{part}_{name}") for name in ("granularity", "modules", "method", "num_layers")
    )
    if granularity == "selective":
        modules = listed(["core_attn"] if modules is None else modules)
        return {"training.recompute": "selective", "training.recompute_modules": modules}
    if granularity == "full" and method == "block":
        notes.append(
            f"{part}_num_layers={number}: all layers of a stage are computed again; "
            "training.recompute_every=n does it for one of n."
        )
    return {"training.recompute": granularity or "none"}


def rollout(settings: Settings, notes: list[str]) -> dict[str, Any]:
    """Translate generation and validation."""
    get, part = settings.get, "actor_rollout_ref.rollout"
    engine = get(f"{part}.name", "vllm")
    if engine != "vllm":
        notes.append(f"{part}.name={engine}: vLLM generates instead.")
    experts, attention = get(f"{part}.expert_parallel_size", 1), get(f"{part}.data_parallel_size", 1)
    tp = get(f"{part}.tensor_model_parallel_size", 2)
    ours = {
        "rollout.tp": tp,
        # vLLM spreads the experts over all ranks of an engine, whatever the number is.
        "rollout.ep": tp * attention if experts > 1 else 1,
        "rollout.dp_attention": experts > 1 and attention > 1,
        "rollout.samples_per_prompt": get(f"{part}.n", 1),
        "rollout.temperature": get(f"{part}.temperature", 1.0),
        "rollout.top_p": get(f"{part}.top_p", 1.0),
        "rollout.top_k": max(0, get(f"{part}.top_k", -1)),
        "rollout.gpu_memory_utilization": get(f"{part}.gpu_memory_utilization", 0.5),
        "rollout.enforce_eager": get(f"{part}.enforce_eager", False),
        "rollout.max_concurrent_samples": get(f"{part}.max_num_seqs", 1024),
        "validation.every": max(0, get("trainer.test_freq", -1)),
        "validation.before_training": get("trainer.val_before_train", True),
    }
    val = f"{part}.val_kwargs"
    if get(f"{val}.do_sample", False):
        ours["validation.greedy"] = False
        ours["validation.samples_per_prompt"] = get(f"{val}.n", 1)
        ours["validation.temperature"] = get(f"{val}.temperature", 0) or 1.0
    else:
        for name in ("n", "temperature", "top_p", "top_k"):
            get(f"{val}.{name}")
    for name, used in (("top_p", ours["rollout.top_p"]), ("top_k", ours["rollout.top_k"] or -1)):
        if settings.given.get(f"{val}.{name}") == used:
            get(f"{val}.{name}")
    return ours


def reward(settings: Settings, notes: list[str]) -> dict[str, Any]:
    """Translate the reward function, the overlong punishment and the reward model."""
    get = settings.get
    ours: dict[str, Any] = {}
    path = get("custom_reward_function.path")
    if path:
        ours["reward.function"] = f"{path}:{get('custom_reward_function.name', 'compute_score')}"
        notes.append(
            f"reward.function={ours['reward.function']} must accept (prompt, response, ground_truth, "
            "**extra) instead of (data_source, solution_str, ground_truth, extra_info); extra holds "
            "data_source and extra_info."
        )
    else:
        ours["reward.function"] = "rl.rewards.math:score"
        ours["reward.sources"] = {source: [{"function": f}] for source, f in SOURCES.items()}
    kwargs = {
        key.rpartition(".")[2]: get(key)
        for key in list(settings.given)
        if key.startswith("custom_reward_function.reward_kwargs.")
    }
    if kwargs:
        ours["reward.kwargs"] = kwargs
    name = settings.first("reward_model.reward_manager", "reward_manager.name", default="naive")
    overlong = "reward_model.reward_kwargs.overlong_buffer_cfg"
    if name == "dapo" and not path:
        ours["reward.function"] = "rl.rewards.dapo:score"
        ours["reward.sources"] = {}
    if get(f"{overlong}.enable", False):
        ours["reward.overlong_buffer_tokens"] = get(f"{overlong}.len", 0)
        ours["reward.overlong_penalty"] = get(f"{overlong}.penalty_factor", 1.0)
        get("reward_model.reward_kwargs.max_resp_len")
    if get("reward_model.enable", False):
        ours["reward.model.path"] = get("reward_model.model.path", "")
    else:
        get("reward_model.model.path")
    return ours


def trainer(settings: Settings, notes: list[str]) -> dict[str, Any]:
    """Translate names, checkpoints and logs; note the number of ranks."""
    get = settings.get
    nodes, gpus = get("trainer.nnodes", 1), get("trainer.n_gpus_per_node", 8)
    notes.append(
        f"{nodes} x {gpus} GPUs: sbatch --nodes={nodes} --gpus-per-node={gpus} slurm/train.sbatch FILE"
    )
    ours = {
        "run.name": str(get("trainer.experiment_name", "gsm8k")),
        "run.dir": str(get("trainer.default_local_dir", "")),
        "checkpoint.every": max(0, get("trainer.save_freq", -1)),
        "checkpoint.keep_last": get("trainer.max_actor_ckpt_to_keep", 0),
        "logging.tensorboard": "tensorboard" in listed(get("trainer.logger", ["console", "wandb"])),
    }
    others = set(listed(get("trainer.logger", []))) - {"console", "tensorboard"}
    if others:
        notes.append(
            f"trainer.logger={', '.join(sorted(others))}: metrics are in <run.dir>/metrics.jsonl and in "
            "TensorBoard's files; logging.wandb, logging.mlflow and logging.trackio send them elsewhere."
        )
        ours["logging.tensorboard"] = True
    if get("trainer.resume_mode", "auto") == "disable":
        ours["checkpoint.resume"] = "never"
    return ours


def steps(settings: Settings, notes: list[str], per_step: int, rows: int, *, epochs: int) -> dict[str, Any]:
    """Translate the length of the run. epochs: verl's default."""
    total, epochs = settings.get("trainer.total_training_steps"), settings.get("trainer.total_epochs", epochs)
    rows = rows or sum(map(count_rows, listed(settings.get("data.train_files", []))))
    if rows:
        in_epochs = epochs * (rows // per_step)
        total = min(total, in_epochs) if total else in_epochs
    elif not total:
        notes.append(
            f"run.max_steps is not set: trainer.total_epochs={epochs} is {epochs} x (rows // {per_step}) "
            "steps. Give --train-rows."
        )
    if total is not None and total < 1:
        raise ValueError(
            f"--train-rows={rows} is less than data.train_batch_size={per_step}, so there is no step; "
            "lower the batch size."
        )
    return {"run.max_steps": total} if total else {}


def count_rows(file: str) -> int:
    """Return the number of rows of a parquet file, 0 if it is not here."""
    if not file.endswith(".parquet") or not Path(file).is_file():
        return 0
    import pyarrow.parquet as pq

    return pq.read_metadata(file).num_rows


def optimizer(settings: Settings, target: str, part: str, max_steps: int | None, notes: list[str]) -> dict:
    """Translate an optimizer."""
    get = settings.get
    kind = str(get(f"{part}.optimizer", "adamw"))
    if "adam" not in kind.lower():
        raise ValueError(f"{part}.optimizer={kind}: Adam is the only optimizer here.")
    supervised = part == "optim"
    betas = get(f"{part}.betas", [0.9, 0.95] if supervised else [0.9, 0.999])
    lr = get(f"{part}.lr", 1e-6 if "actor" in part else 1e-5)
    warmup, ratio = get(f"{part}.lr_warmup_steps", -1), get(f"{part}.lr_warmup_steps_ratio", 0.0)
    if warmup < 0:
        warmup = int(ratio * (max_steps or 0))
        if ratio and not max_steps:
            notes.append(f"{target}.warmup_steps is not set: it is {ratio} x run.max_steps.")
    names = ("lr_scheduler_type", "warmup_style", "lr_decay_style", "lr_scheduler")
    schedule = settings.first(*(f"{part}.{name}" for name in names), default="constant")
    if schedule not in ("constant", "linear", "cosine"):
        raise ValueError(
            f"{part}: the schedule {schedule} has no counterpart; use constant, linear or cosine."
        )
    special = f"{part}.override_optimizer_config"
    fraction = settings.first(
        f"{special}.optimizer_offload_fraction", f"{special}.offload_fraction", default=1.0
    )
    narrow = {str(get(f"{part}.{name}_dtype", "fp32")) for name in ("exp_avg", "exp_avg_sq")}
    return {
        f"{target}.host_share": float(fraction) if get(f"{special}.optimizer_cpu_offload", False) else 0.0,
        f"{target}.moments": "bfloat16" if narrow == {"bf16"} else "float32",
        f"{target}.lr": lr,
        f"{target}.min_lr": get(f"{part}.min_lr", (get(f"{part}.min_lr_ratio", 0.0) or 0.0) * lr),
        f"{target}.warmup_steps": warmup,
        f"{target}.schedule": schedule,
        f"{target}.weight_decay": get(f"{part}.weight_decay", 0.01),
        f"{target}.beta1": betas[0],
        f"{target}.beta2": betas[1],
        f"{target}.clip_grad": settings.first(
            f"{part.removesuffix('optim')}grad_clip", f"{part}.clip_grad", default=1.0
        ),
    }
