"""The settings of a verl run in the words of this project."""

import re
from math import ceil
from pathlib import Path
from typing import Any

import yaml

from rl.config.wing import path_of
from tools.verl.generation import generation, read_generation
from tools.verl.keys import (
    BY_CLASS,
    EXPERTS,
    MANAGERS,
    MODELS,
    OFF,
    RAY_TOOLS,
    REFUSED,
    REPLAY,
    SAMPLER,
    SEES,
    SOURCES,
    TEXT_ALONE,
    reason,
)
from tools.verl.objective import objective, pick
from tools.verl.script import VerlSettings
from tools.verl.tuning import adapter, distillation, is_tuning, listed, tuning_data, uses_megatron

MODEL_PATHS = ("actor_rollout_ref.model.path", "model.path")
"""Settings that name the model, of RL and of supervised fine-tuning."""


def translate(settings: VerlSettings, train_rows: int) -> tuple[dict[str, Any], list[str]]:
    """Return this project's settings by dotted key, and notes for the user.

    Raises ValueError for a setting with an unknown value.
    """
    notes: list[str] = []
    generates = read_generation(settings, notes)
    refuse(settings, notes)
    ours: dict[str, Any] = {}
    tunes = is_tuning(settings)
    rl = (objective, data, layout, images, rollout, agents, reward, adapter, distillation)
    for part in (*((tuning_layout, images, adapter) if tunes else rl), trainer):
        ours |= part(settings, notes)
    ours |= steps(settings, notes, ours, train_rows, epochs=4 if tunes else 30)
    if generates:
        ours |= generation(settings, notes, train_rows)
    optimizers = [("training.optimizer", "optim" if tunes else "actor_rollout_ref.actor.optim")]
    if ours["algorithm"] == "ppo":
        optimizers.append(("critic.optimizer", "critic.optim"))
    for target, source in optimizers:
        ours |= optimizer(settings, target, source, ours.get("run.max_steps"), notes)
    return ours, notes


def refuse(settings: VerlSettings, notes: list[str]) -> None:
    """Raise ValueError for a setting or a model that this project cannot run, with what would be needed."""
    for key in MODEL_PATHS:
        if why := reason(str(settings.given.get(key, "")), MODELS):
            raise ValueError(f"{key}={settings.given[key]}: {why}")
    files = str(settings.given.get("data.train_files", ""))
    if "data.video_key" in settings.given or "video" in "/".join(files.split("/")[-2:]):
        raise ValueError(f"data.train_files={files}: videos are not supported; train on text or images.")
    sampler = {f"data.sampler.class_{name}": value for name, value in SAMPLER.items()}
    if sampler.items() <= settings.given.items():
        settings.given |= {**dict.fromkeys(sampler), "data.shuffle": True}
        notes.append("data.shuffle=True, because the sampler of verl's tests shuffles.")
    for key, value in settings.given.items():
        if value not in OFF and (why := reason(key, REFUSED)):
            text = " ".join(str(value).split())
            raise ValueError(f"{key}={text[:80]}{'...' if len(text) > 80 else ''}: {why}")


def agents(settings: VerlSettings, notes: list[str]) -> dict[str, Any]:
    """Translate tools and interactions, which run as verl's own classes.

    Raises ValueError for several turns without either, for another agent of verl, for an interaction about
    images, and for a tool that is an actor of Ray.
    """
    get, part = settings.get, "actor_rollout_ref.rollout.multi_turn"
    loop = get(agent := "actor_rollout_ref.rollout.agent.default_agent_loop")
    names = {"tools": f"{part}.tool_config_path", "interactions": f"{part}.interaction_config_path"}
    files = {name: get(key) for name, key in names.items() if get(key)}
    enabled = get(f"{part}.enable", False)
    if loop and loop != "tool_agent" and (files or loop != "single_turn_agent"):
        raise ValueError(
            f"{agent}={loop}: only tool_agent runs as it is; set it if rows have agent_name=tool_agent, or "
            "write the agent again as an environment (docs/agents.md)."
        )
    if not files:
        if enabled:
            raise ValueError(
                f"{part}.enable=True without tool_config_path or interaction_config_path: the turns are "
                "a class of verl, which has to be written again as an environment (docs/agents.md)."
            )
        return {}
    if "interactions" in files and has_tower(settings):
        raise ValueError(
            f"{names['interactions']}={files['interactions']}: an agent with an interaction cannot read "
            "images; train a text model, or leave the interaction out."
        )
    for name in tool_classes(Path(files["tools"]), notes) if "tools" in files else ():
        if re.search(RAY_TOOLS, name):
            raise ValueError(
                f"{names['tools']}={files['tools']}: {name} is an actor of Ray, which has to be written "
                "again as a tool; docs/agents.md has a search and a sandbox."
            )
    policy, user = get(f"{part}.max_assistant_turns"), get(f"{part}.max_user_turns")
    limits = [*([policy] if policy else []), *([user + 1] if user else [])]
    calls, kwargs = get(f"{part}.max_parallel_calls", 1), dict(files)
    for name, key, default in (
        ("cut_to", "max_tool_response_length", 256),
        ("cut", "tool_response_truncate_side", "middle"),
    ):
        if (value := get(f"{part}.{key}", default)) != default:
            kwargs[name] = value
    if "interactions" in files and calls != 1:
        kwargs["max_calls"] = calls
    elif "interactions" not in files:
        notes.append(f"{part}.max_parallel_calls={calls}: all calls of a turn are made, in order.")
    notes.append(
        "agents.interpreter must name a Python with verl, whose classes run as they are; reward.function "
        "judges the last answer, verl's the text of all turns. All rows run so, in verl those with "
        "agent_name=tool_agent."
    )
    kind = "ToolAgent" if "interactions" in files else "Tools"
    return {
        "agents.environment": f"{path_of('agents', 'verl', needed_by=names[min(files)])}:{kind}",
        "agents.kwargs": kwargs,
        "agents.max_turns": min(limits, default=get("data.max_response_length", 512)),
    }


def tool_classes(file: Path, notes: list[str]) -> list[str]:
    """Return the classes in a file of tools, [] if it is not here. Raises ValueError if it has none."""
    if not file.is_file():
        notes.append(f"{file} is not here and was not read; its tools must not be actors of Ray.")
        return []
    try:
        return [str(tool["class_name"]) for tool in yaml.safe_load(file.read_bytes())["tools"]]
    except (yaml.YAMLError, KeyError, TypeError):
        raise ValueError(f"{file} names no tools; it must have tools: [{{class_name: ...}}].") from None


def reads_images(settings: VerlSettings) -> bool:
    """Return whether the script's data have images: it names their column, or verl's data set of images."""
    return "data.image_key" in settings.given or "geo3k" in str(settings.given.get("data.train_files", ""))


def data(settings: VerlSettings, notes: list[str]) -> dict[str, Any]:
    """Translate the data, its lengths and its batches."""
    get = settings.get
    per_step = get("data.train_batch_size", 1024)
    per_update = get("actor_rollout_ref.actor.ppo_mini_batch_size", 256)
    epochs = get("actor_rollout_ref.actor.ppo_epochs", 1)
    for name, value in (("ppo_mini_batch_size", per_update), ("ppo_epochs", epochs)):
        if get("algorithm.adv_estimator", "gae") == "gae" and get(f"critic.{name}", value) != value:
            raise ValueError(
                f"critic.{name}={get(f'critic.{name}')}: the critic learns from the same mini-batches as the "
                f"policy; use {value}, the value of actor_rollout_ref.actor.{name}."
            )
    overlong, cut = "error", get("data.truncation", "error")
    if get("data.filter_overlong_prompts", False):
        overlong = "drop"
    elif cut == "left":
        overlong = "truncate_left"
    elif cut != "error":
        raise ValueError(
            f"data.truncation={cut} would cut a prompt's end or its middle; use left, error or "
            "data.filter_overlong_prompts=True."
        )
    return (
        template_variables(settings)
        | {
            "data.train": listed(get("data.train_files", [])),
            "data.val": listed(get("data.val_files", [])),
            "data.prompt_key": get("data.prompt_key", "prompt"),
            "data.max_prompt_tokens": get("data.max_prompt_length", 512),
            "rollout.max_response_tokens": get("data.max_response_length", 512),
            "data.overlong_prompts": overlong,
            "data.shuffle": get("data.shuffle", True),
            "data.prompts_per_step": per_step,
            "training.prompts_per_minibatch": 0 if per_update == per_step else per_update,
            "training.epochs": epochs,
            "validation.max_prompts": max(0, get("data.val_max_samples", -1)),
        }
        | ({"run.seed": get("data.seed")} if get("data.seed") is not None else {})
    )


def template_variables(settings: VerlSettings) -> dict[str, Any]:
    """Translate the variables of the chat template."""
    name = "data.apply_chat_template_kwargs"
    variables = dict(settings.get(name, {}))
    for key in list(settings.given):
        if key.startswith(f"{name}."):
            variables[key.removeprefix(f"{name}.")] = settings.given[key]
            settings.used.add(key)
    return {"data.template_kwargs": variables} if variables else {}


def layout(settings: VerlSettings, notes: list[str]) -> dict[str, Any]:
    """Translate the model, the training grid and the sizes of micro-batches."""
    get, actor = settings.get, "actor_rollout_ref.actor"
    longest = get("data.max_prompt_length", 512) + get("data.max_response_length", 512)
    sequences = settings.first(f"{actor}.ppo_micro_batch_size_per_gpu", f"{actor}.ppo_micro_batch_size")
    tokens = get(f"{actor}.ppo_max_token_len_per_gpu", 16384)
    dynamic = get(f"{actor}.use_dynamic_bsz", False)
    recompute = get("actor_rollout_ref.model.enable_gradient_checkpointing", True)
    inside = get("actor_rollout_ref.rollout.tensor_model_parallel_size", 2)
    ours: dict[str, Any] = {"model.path": model_path(settings, "actor_rollout_ref.model.path", notes)}
    if not ours["model.path"]:
        notes.append("model.path is empty in the script; set it to a directory with a checkpoint.")
    ours |= grid(settings, f"{actor}.", notes, recompute=recompute, at_least=inside)
    sharing = get(f"{actor}.ulysses_sequence_parallel_size", 1)
    if ours.get("training.cp", 1) > 1 and has_tower(settings):
        sharing = ours.pop("training.cp")
        notes.append(f"training.cp=1, because a rank cannot divide images (context_parallel_size={sharing}).")
    if ours.get("training.vpp", 1) > 1 and has_tower(settings):
        chunks = ours.pop("training.vpp")
        notes.append(f"training.vpp=1, because chunks would wait for images (vpp={chunks}).")
    cp = ours.get("training.cp", 1)
    ours["training.micro_batch_tokens"] = (
        tokens * sharing if dynamic else ceil((sequences or 1) * longest / cp)
    )
    mode = pick(settings, f"{actor}.router_replay.mode", "disabled", REPLAY)
    get("actor_rollout_ref.rollout.enable_rollout_routing_replay")
    if mode != "none":
        ours["training.router_replay"] = mode
    return ours


def has_tower(settings: VerlSettings) -> bool:
    """Return whether the model reads images: its name says so, or the script's data have some."""
    paths = [str(settings.given.get(key, "")) for key in MODEL_PATHS]
    return reads_images(settings) or any(re.search(SEES, path) for path in paths)


def model_path(settings: VerlSettings, key: str, notes: list[str]) -> str:
    """Return the model's path, or the path of its text model if the script trains only the text part of a
    model with a vision tower."""
    path = str(settings.get(key, "")).rstrip("/")
    if settings.get(template := key.replace(".path", ".custom_chat_template")):
        notes.append(f"Copy {path} to {path}-chat, and write {template} into its chat_template.jinja.")
        path += "-chat"
    if has_tower(settings) or not re.search(TEXT_ALONE, path):
        return path
    notes.append(
        f"The script names no column of images, so only the text is trained: lockstep model text {path} "
        f"--out {path}-text. If the data has images, set model.path={path}, and data.image_key."
    )
    return f"{path}-text"


def images(settings: VerlSettings, notes: list[str]) -> dict[str, Any]:
    """Translate the images of a model that reads them; verl trains the tower unless it is frozen.

    Adapters freeze it.
    """
    get, part = settings.get, "model" if is_tuning(settings) else "actor_rollout_ref.model"
    frozen = get("actor_rollout_ref.actor.freeze_vision_tower", False)
    if not has_tower(settings):
        return {}
    adapts = get(f"{part}.lora_rank", 0) or get(f"{part}.lora_adapter_path", "")
    excludes = f"{part}.exclude_modules"
    if "visual" in str(settings.given.get(excludes)):
        get(excludes)
    elif adapts:
        notes.append("verl adapts layers of the vision tower, too, which have no adapters here.")
    return {
        "data.image_key": get("data.image_key", "images"),
        "model.vision": "frozen" if frozen or adapts else "train",
    }


def tuning_layout(settings: VerlSettings, notes: list[str]) -> dict[str, Any]:
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
    ours = tuning_data(settings, notes) | template_variables(settings)
    ours["model.path"] = model_path(settings, "model.path", notes)
    ours |= grid(settings, "", notes, recompute=recompute, at_least=1)
    return ours | {"training.micro_batch_tokens": max(1, tokens)}


def grid(
    settings: VerlSettings, part: str, notes: list[str], *, recompute: bool, at_least: int
) -> dict[str, Any]:
    """Translate the parallel sizes of the training engine.

    part: prefix of its settings. recompute: whether an engine other than Megatron checkpoints activations.
    at_least: smallest tensor parallel size in place of FSDP, which shards weights over all ranks.
    """
    get, megatron = settings.get, f"{part}megatron"
    paths = [str(settings.given.get(key, "")) for key in MODEL_PATHS]
    by_class = any(re.search(BY_CLASS, path) for path in paths)
    if by_class:
        notes.append("The model trains as its class in transformers, sharded over the ranks of a node.")
    if uses_megatron(settings, part):
        recomputed = recomputation(settings, f"{megatron}.override_transformer_config.recompute", notes)
        sizes = {
            "training.tp": get(f"{megatron}.tensor_model_parallel_size", 1),
            "training.pp": get(f"{megatron}.pipeline_model_parallel_size", 1),
            "training.vpp": get(f"{megatron}.virtual_pipeline_model_parallel_size") or 1,
            "training.cp": get(f"{megatron}.context_parallel_size", 1),
            "training.ep": get(f"{megatron}.expert_model_parallel_size", 1),
            "training.etp": get(f"{megatron}.expert_tensor_parallel_size", 0),
            "training.sequence_parallel": get(f"{megatron}.sequence_parallel", True),
        }
        if by_class:
            full = "none" if recomputed["training.recompute"] == "none" else "full"
            return {"training.backend": "transformers", "training.recompute": full}
        return sizes | recomputed
    sharing = get(f"{part}ulysses_sequence_parallel_size", 1)
    recomputed = {"training.recompute": "full" if recompute else "none"}
    if by_class:
        return {"training.backend": "transformers"} | recomputed
    tp = min(get("trainer.n_gpus_per_node", 8), max(sharing, at_least))
    notes.append(
        f"training.tp={tp} replaces FSDP: Megatron shards weights over tp and pp, and the optimizer "
        "also over dp. train_rl.py --dry-run says whether it fits, and which change is cheapest."
    )
    has_experts = any(re.search(EXPERTS, path) for path in paths)
    ep = max(get(f"{part}veomni.expert_parallel_size", 1), get("trainer.n_gpus_per_node", 8) * has_experts)
    experts = {"training.ep": ep, "training.etp": 1} if ep > 1 else {}
    return {"training.tp": tp, **experts} | recomputed


def recomputation(settings: VerlSettings, part: str, notes: list[str]) -> dict[str, Any]:
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


def rollout(settings: VerlSettings, notes: list[str]) -> dict[str, Any]:
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
        "rollout.max_concurrent_samples": get(f"{part}.max_num_seqs", 256),
        "validation.every": get("trainer.test_freq", -1),
        "validation.before_training": get("trainer.val_before_train", True),
    }
    return ours | validation_sampling(settings, notes, ours)


def validation_sampling(settings: VerlSettings, notes: list[str], ours: dict[str, Any]) -> dict[str, Any]:
    """Translate the sampling of validation. ours: the sampling of training.

    verl's engine reads the temperature, which is 0 by default; do_sample has no effect.
    """
    val = "actor_rollout_ref.rollout.val_kwargs"
    number, temperature, sampled = (
        settings.get(f"{val}.{name}", value)
        for name, value in (("n", 1), ("temperature", 0), ("do_sample", False))
    )
    if bool(sampled) != (temperature > 0):
        notes.append(
            f"{val}.do_sample={sampled} has no effect in verl; its temperature={temperature} decides."
        )
    if temperature <= 0:
        for name in ("top_p", "top_k"):
            settings.get(f"{val}.{name}")
        if number > 1:
            notes.append(f"{val}.n={number}: greedy responses to a prompt are equal, so there is one.")
        return {}
    top_p, top_k = settings.get(f"{val}.top_p", 1.0), max(0, settings.get(f"{val}.top_k", -1))
    if ours["rollout.top_k"] and not top_k:
        notes.append(
            f"validation.top_k is rollout.top_k={ours['rollout.top_k']}; verl's is that of {val}, -1."
        )
    return {
        "validation.greedy": False,
        "validation.samples_per_prompt": number,
        "validation.temperature": temperature,
        "validation.top_p": 0.0 if top_p == ours["rollout.top_p"] else top_p,
        "validation.top_k": 0 if top_k == ours["rollout.top_k"] else top_k,
    }


def reward(settings: VerlSettings, notes: list[str]) -> dict[str, Any]:
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
        ours["reward.sources"] = SOURCES
    kwargs = {
        key.rpartition(".")[2]: get(key)
        for key in list(settings.given)
        if key.startswith("custom_reward_function.reward_kwargs.")
    }
    if kwargs:
        ours["reward.kwargs"] = kwargs
    name = settings.first("reward_model.reward_manager", "reward_manager.name", default="naive")
    overlong = "reward_model.reward_kwargs.overlong_buffer_cfg"
    if name not in MANAGERS:
        raise ValueError(
            f"reward_manager={name} has no counterpart; it must be one of {', '.join(MANAGERS)}."
        )
    if name == "dapo" and not path:  # its data sources are mathematics, for example aime_2026
        ours["reward.function"] = "rl.rewards.dapo:score"
    if get(f"{overlong}.enable", False):
        ours["reward.overlong_buffer_tokens"] = get(f"{overlong}.len", 0)
        ours["reward.overlong_penalty"] = get(f"{overlong}.penalty_factor", 1.0)
        get("reward_model.reward_kwargs.max_resp_len")
    if get("reward_model.enable", False):
        if path:
            raise ValueError(
                "reward_model.enable=True with custom_reward_function.path: the function asks the model; "
                "write the question in reward.judge.template, or score with one of both."
            )
        ours["reward.model.path"] = get("reward_model.model.path", "")
        ours |= {"reward.function": "rl.rewards.format:score", "reward.kwargs": {"pattern": "(?!)"}}
        ours["reward.sources"] = {}
        notes.append(
            "reward.function gives 0 (no text has the form of its pattern), because verl scores by the "
            "reward model alone; with another function the score is the sum of both."
        )
    else:
        get("reward_model.model.path")
    return ours


def trainer(settings: VerlSettings, notes: list[str]) -> dict[str, Any]:
    """Translate names, checkpoints and logs; note the number of ranks."""
    get = settings.get
    nodes, gpus = get("trainer.nnodes", 1), get("trainer.n_gpus_per_node", 8)
    mode = get("trainer.v1.trainer_mode", "sync")
    if mode != "sync":
        raise ValueError(
            f"trainer.v1.trainer_mode={mode}: choose the trainers and generators in the section roles, or "
            "rollout.carry_over (docs/asynchrony.md); from sync both are one step away."
        )
    notes.append(
        f"{nodes} x {gpus} GPUs: sbatch --nodes={nodes} --gpus-per-node={gpus} slurm/train.sbatch FILE"
    )
    ours = {
        "run.name": str(get("trainer.experiment_name", "gsm8k")),
        "run.dir": str(get("trainer.default_local_dir", "")),
        "checkpoint.every": get("trainer.save_freq", -1),
        "checkpoint.keep_last": settings.first(
            "trainer.max_actor_ckpt_to_keep", "trainer.max_ckpt_to_keep", default=0
        ),
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


def steps(settings: VerlSettings, notes: list[str], ours: dict[str, Any], rows: int, *, epochs: int) -> dict:
    """Translate the length of the run, and intervals in epochs. epochs: verl's default."""
    per_step = ours["data.prompts_per_step"]
    total, epochs = settings.get("trainer.total_training_steps"), settings.get("trainer.total_epochs", epochs)
    rows = rows or sum(map(count_rows, listed(settings.get("data.train_files", []))))
    if (first := settings.get("data.train_max_samples", -1)) > 0:
        raise ValueError(f"data.train_max_samples={first}: write these rows into a file of their own.")
    if rows:
        in_epochs = epochs * (rows // per_step)
        total = min(total, in_epochs) if total else in_epochs
    elif not total:
        notes.append(
            f"run.max_steps is not set: trainer.total_epochs={epochs} is {epochs} x (rows // {per_step}) "
            "steps. Give --train-rows."
        )
    for key in ("validation.every", "checkpoint.every"):
        if ours[key] == "after_each_epoch" and not rows:
            raise ValueError(f"{key} is after_each_epoch in verl: give --train-rows.")
        ours[key] = rows // per_step if ours[key] == "after_each_epoch" else max(0, ours[key])
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


def optimizer(
    settings: VerlSettings, target: str, part: str, max_steps: int | None, notes: list[str]
) -> dict:
    """Translate an optimizer."""
    get = settings.get
    kind = str(get(f"{part}.optimizer", "adamw"))
    if "adam" not in kind.lower():
        raise ValueError(f"{part}.optimizer={kind}: Adam is the only optimizer here.")
    betas = get(f"{part}.betas", [0.9, 0.999])
    default = {"optim": 1e-3, "critic.optim": 1e-5}.get(part, 1e-6)
    lr = get(f"{part}.lr", default)
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
    cycles = get(f"{part}.num_cycles", 0.5)
    if schedule == "cosine" and cycles != 0.5:
        raise ValueError(f"{part}.num_cycles={cycles}: the cosine falls once, over half a cycle.")
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
