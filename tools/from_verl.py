"""Turn the command line or YAML of a verl run into a config of this project.

    python tools/from_verl.py run_qwen3-8b.sh --train-rows 7473 --out my.yaml
    python tools/from_verl.py ppo.yaml actor_rollout_ref.actor.optim.lr=2e-6
    python train_rl.py --config my.yaml --dry-run --world-size 8

Writes the config, with the settings in which it differs from this project's defaults; settings that the verl
run leaves at verl's defaults are translated too. Then lists on stderr, with the reason, each setting that has
no counterpart, and each one that needs none.

A .sh file is executed by bash, so that its variables, arithmetic and $@ have their values. Its PATH has no
programs but python, torchrun and ray, which only report their arguments. Redirections and programs named by
their whole path still work, so pass only scripts that you trust. Names and defaults of settings are
those of verl 0.7 (commit b178a3cd, January 2026); tools/verl_keys.py has the tables.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import Any

# Python searches only tools/ for modules when it runs this file as a script.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml  # noqa: E402

from rl.config.options import Dumper, flatten  # noqa: E402
from rl.config.schema import load_config  # noqa: E402
from tools.verl_keys import (  # noqa: E402
    AGGREGATIONS,
    ALGORITHMS,
    KL_ESTIMATORS,
    LOSSES,
    MISSING,
    NOT_NEEDED,
    OFF,
    REPLAY,
    SOURCES,
    WEIGHTS,
    reason,
)

PROGRAMS = ("python", "python3", "torchrun", "ray")
ALWAYS_SEQUENCE_MEAN = ("sapo", "geo_mean")
"""Losses that verl averages as seq-mean-token-mean whatever `loss_agg_mode` says."""


class Settings:
    """The settings of a verl run by dotted key; notes which of them were translated."""

    def __init__(self, given: dict[str, Any]):
        self.given = given
        self.used: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Return a setting, or verl's default."""
        self.used.add(key)
        value = self.given.get(key)
        return default if value is None else value

    def first(self, *keys: str, default: Any = None) -> Any:
        """Return the first of these settings that is given, or verl's default."""
        values = [self.get(key) for key in keys]
        return next((value for value in values if value is not None), default)

    def rest(self) -> dict[str, Any]:
        """Return the settings that nothing read and that are not switched off."""
        return {key: value for key, value in self.given.items() if key not in self.used and value not in OFF}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("file", metavar="FILE", help="verl's script (.sh) or its config (.yaml)")
    add("overrides", metavar="key=value", nargs="*", help="further settings of verl, as after the script")
    add("--out", metavar="FILE", help="file to write (default: standard output)")
    add("--train-rows", metavar="N", type=int, default=0, help="rows of the training data, for total_epochs")
    args = parser.parse_intermixed_args(argv)
    try:
        settings = Settings(read_settings(Path(args.file), args.overrides))
        ours, notes = translate(settings, args.train_rows)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    tree = yaml.dump(only_changes(ours), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
    text = f"# From {Path(args.file).name} by tools/from_verl.py.\n{tree}"
    if args.out:
        Path(args.out).write_text(text)
    else:
        print(text, end="")
    print(report(settings.rest(), notes), file=sys.stderr)
    return 0


# Input ----------------------------------------------------------------------------------------------------


def read_settings(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return verl's settings by dotted key. Raises ValueError if the file does not start verl."""
    if path.suffix in (".yaml", ".yml"):
        arguments, settings = list(overrides), flat(yaml.safe_load(path.read_text()))
    else:
        arguments, settings = arguments_of_script(path, overrides), {}
    for argument in arguments:
        key, is_setting, value = argument.lstrip("+~").partition("=")
        if is_setting and not argument.startswith("-"):
            settings[key] = parse(value)
    return settings


def flat(tree: dict, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by dotted key, without references such as ${a.b}."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            found |= flat(value, f"{key}.")
        elif not (isinstance(value, str) and value.startswith("${")) and name != "_target_":
            found[key] = parse(value) if isinstance(value, str) else value
    return found


def parse(text: str) -> Any:
    """Return the value that Hydra gives to the text of an override."""
    try:
        value = yaml.safe_load(text.strip("'\""))
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        try:
            return float(value)  # YAML 1.1 reads 1e-6 as a string
        except ValueError:
            return value
    return value


def arguments_of_script(path: Path, overrides: Sequence[str]) -> list[str]:
    """Return the arguments with which a script starts verl. Raises ValueError if it does not."""
    with tempfile.TemporaryDirectory() as directory:
        calls = Path(directory, "calls")
        programs = Path(directory, "bin")
        programs.mkdir()
        for name in PROGRAMS:
            program = programs / name
            program.write_text(f"#!/bin/bash\nprintf '%s\\0' \"$@\" $'\\n' >> '{calls}'\n")
            program.chmod(0o755)
        start = Path(directory, "start")
        start.write_text("command_not_found_handle() { return 0; }\n")
        environment = os.environ | {"PATH": str(programs), "BASH_ENV": str(start)}
        done = subprocess.run(
            ["/bin/bash", path.resolve(), *overrides],
            env=environment,
            cwd=directory,
            capture_output=True,
            text=True,
        )
        text = calls.read_text() if calls.exists() else ""
    for call in text.split("\n\0"):
        arguments = call.split("\0")
        if any(a.startswith("verl.trainer") or ".main_" in a for a in arguments):
            return arguments
    lines = done.stderr.strip().splitlines() or ["no error"]
    raise ValueError(
        f"{path} did not start verl.trainer (bash: {lines[-1]}); export the variables that it requires, or "
        "pass a file with the command alone."
    )


# Translation ----------------------------------------------------------------------------------------------


def translate(settings: Settings, train_rows: int) -> tuple[dict[str, Any], list[str]]:
    """Return this project's settings by dotted key, and notes for the user.

    Raises ValueError for a setting whose value is unknown.
    """
    notes: list[str] = []
    ours: dict[str, Any] = {}
    for part in (objective, data, layout, rollout, reward, trainer):
        ours |= part(settings, notes)
    ours |= steps(settings, notes, ours["data.prompts_per_step"], train_rows)
    optimizers = [("training.optimizer", "actor_rollout_ref.actor")]
    if ours["algorithm"] == "ppo":
        optimizers.append(("critic.optimizer", "critic"))
    for target, source in optimizers:
        ours |= optimizer(settings, target, source, ours.get("run.max_steps"), notes)
    return ours, notes


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
        "objective.clip_low": get(f"{actor}.clip_ratio_low", clip),
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
    if get(f"{actor}.use_kl_loss", False):
        ours["objective.kl_coef"] = get(f"{actor}.kl_loss_coef", 0.001)
        kind = str(get(f"{actor}.kl_loss_type", "low_var_kl"))
        plus = "+" if kind.endswith("+") else ""
        settings.given[f"{actor}.kl_loss_type"] = kind.removesuffix("+")
        name = pick(settings, f"{actor}.kl_loss_type", "", KL_ESTIMATORS) + plus
        ours["objective.kl_estimator"] = name
    if get("algorithm.use_kl_in_reward", False):
        ours |= {
            "objective.reward_kl.coef": get("algorithm.kl_ctrl.kl_coef", 0.001),
            "objective.reward_kl.estimator": pick(settings, "algorithm.kl_penalty", "kl", KL_ESTIMATORS),
            "objective.reward_kl.controller": get("algorithm.kl_ctrl.type", "fixed"),
            "objective.reward_kl.horizon": get("algorithm.kl_ctrl.horizon", 10000),
            "objective.reward_kl.target": get("algorithm.kl_ctrl.target_kl", 0.1),
        }
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
    return ours | correction(settings)


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


def listed(value: Any) -> list[str]:
    return [str(v) for v in value] if isinstance(value, list) else [str(value)]


def layout(settings: Settings, notes: list[str]) -> dict[str, Any]:
    """Translate the model, the training grid and the sizes of micro-batches."""
    get, actor = settings.get, "actor_rollout_ref.actor"
    megatron = f"{actor}.megatron"
    longest = get("data.max_prompt_length", 512) + get("data.max_response_length", 512)
    sequences = settings.first(f"{actor}.ppo_micro_batch_size_per_gpu", f"{actor}.ppo_micro_batch_size")
    tokens = get(f"{actor}.ppo_max_token_len_per_gpu", 16384)
    sharing = get(f"{actor}.ulysses_sequence_parallel_size", 1)
    if not get(f"{actor}.use_dynamic_bsz", False):
        tokens, sharing = (sequences or 1) * longest, 1
    recompute = get("actor_rollout_ref.model.enable_gradient_checkpointing", True)
    ours = {
        "model.path": get("actor_rollout_ref.model.path", ""),
        "training.micro_batch_tokens": tokens * sharing,
    }
    if any(key.startswith(f"{megatron}.") for key in settings.given):
        granularity = get(f"{megatron}.override_transformer_config.recompute_granularity")
        ours |= {
            "training.tp": get(f"{megatron}.tensor_model_parallel_size", 1),
            "training.cp": get(f"{megatron}.context_parallel_size", 1),
            "training.pp": get(f"{megatron}.pipeline_model_parallel_size", 1),
            "training.ep": get(f"{megatron}.expert_model_parallel_size", 1),
            "training.etp": get(f"{megatron}.expert_tensor_parallel_size", 0),
            "training.sequence_parallel": get(f"{megatron}.sequence_parallel", True),
            "training.recompute": granularity == "full",
        }
    else:
        gpus = get("trainer.n_gpus_per_node", 8)
        tp = min(gpus, max(sharing, get("actor_rollout_ref.rollout.tensor_model_parallel_size", 2)))
        ours |= {"training.tp": tp, "training.recompute": bool(recompute)}
        notes.append(
            f"training.tp={tp} replaces FSDP: Megatron shards weights over tp and pp, and the optimizer "
            "also over dp. train_rl.py --dry-run says whether it fits, and which change is cheapest."
        )
    mode = pick(settings, f"{actor}.router_replay.mode", "disabled", REPLAY)
    get("actor_rollout_ref.rollout.enable_rollout_routing_replay")
    if mode != "none":
        ours["training.router_replay"] = mode
    return ours | adapter(settings)


def adapter(settings: Settings) -> dict[str, Any]:
    """Translate low-rank adapters. Those of `model.lora` have Megatron's names, which have no counterpart."""
    get, model = settings.get, "actor_rollout_ref.model"
    rank, alpha = get(f"{model}.lora_rank", 0), get(f"{model}.lora_alpha", 16)
    targets = get(f"{model}.target_modules", "all-linear")
    if not rank:
        return {}
    ours = {"adapter.kind": "lora", "adapter.rank": rank, "adapter.alpha": alpha}
    return ours | ({} if targets == "all-linear" else {"adapter.targets": listed(targets)})


def rollout(settings: Settings, notes: list[str]) -> dict[str, Any]:
    """Translate generation and validation."""
    get, part = settings.get, "actor_rollout_ref.rollout"
    engine = get(f"{part}.name", "vllm")
    if engine != "vllm":
        notes.append(f"{part}.name={engine}: vLLM generates instead.")
    ours = {
        "rollout.tp": get(f"{part}.tensor_model_parallel_size", 2),
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


def steps(settings: Settings, notes: list[str], per_step: int, rows: int) -> dict[str, Any]:
    """Translate the length of the run."""
    total, epochs = settings.get("trainer.total_training_steps"), settings.get("trainer.total_epochs", 30)
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


def optimizer(settings: Settings, target: str, source: str, max_steps: int | None, notes: list[str]) -> dict:
    """Translate an optimizer."""
    get, part = settings.get, f"{source}.optim"
    betas = get(f"{part}.betas", [0.9, 0.999])
    lr = get(f"{part}.lr", 1e-6 if source.endswith("actor") else 1e-5)
    warmup, ratio = get(f"{part}.lr_warmup_steps", -1), get(f"{part}.lr_warmup_steps_ratio", 0.0)
    if warmup < 0:
        warmup = int(ratio * (max_steps or 0))
        if ratio and not max_steps:
            notes.append(f"{target}.warmup_steps is not set: it is {ratio} x run.max_steps.")
    schedule = settings.first(
        f"{part}.lr_scheduler_type", f"{part}.warmup_style", f"{part}.lr_decay_style", default="constant"
    )
    if schedule not in ("constant", "linear", "cosine"):
        raise ValueError(
            f"{part}: the schedule {schedule} has no counterpart; use constant, linear or cosine."
        )
    return {
        f"{target}.lr": lr,
        f"{target}.min_lr": get(f"{part}.min_lr", (get(f"{part}.min_lr_ratio", 0.0) or 0.0) * lr),
        f"{target}.warmup_steps": warmup,
        f"{target}.schedule": schedule,
        f"{target}.weight_decay": get(f"{part}.weight_decay", 0.01),
        f"{target}.beta1": betas[0],
        f"{target}.beta2": betas[1],
        f"{target}.clip_grad": settings.first(f"{source}.grad_clip", f"{part}.clip_grad", default=1.0),
    }


# Output ---------------------------------------------------------------------------------------------------


def only_changes(ours: dict[str, Any]) -> dict[str, Any]:
    """Return the nested settings that differ from the defaults of the algorithm and of its loss."""
    chosen = [f"{key}={ours[key]}" for key in ("algorithm", "objective.loss") if ours.get(key)]
    defaults = flatten(load_config(None, chosen))
    defaults |= {"objective.loss": flatten(load_config(None, chosen[:1]))["objective.loss"]}
    tree: dict[str, Any] = {"algorithm": ours["algorithm"]}
    for key, value in ours.items():
        if value in (None, "", {}) or (key in defaults and defaults[key] == value) or key == "algorithm":
            continue
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree


def report(rest: dict[str, Any], notes: list[str]) -> str:
    """Return the text about settings that were not translated."""
    lines = [*notes]
    missing = {key: reason(key, MISSING) for key in rest if not reason(key, NOT_NEEDED)}
    if missing:
        lines.append("\nno counterpart:")
        lines += [f"  {key}={rest[key]}: {why or 'unknown to this tool'}" for key, why in missing.items()]
    needless: dict[str, list[str]] = {}
    for key in rest:
        if why := reason(key, NOT_NEEDED):
            needless.setdefault(why, []).append(key)
    if needless:
        lines.append("\nnot needed:")
        lines += [f"  {why}:\n    " + "\n    ".join(keys) for why, keys in needless.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
