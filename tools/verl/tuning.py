"""verl's supervised fine-tuning, LoRA and distillation in the words of this project."""

from typing import Any

from tools.verl.keys import TARGETS
from tools.verl.script import VerlSettings


def is_tuning(settings: VerlSettings) -> bool:
    """Return whether the settings are for verl's trainer for supervised fine-tuning."""
    return any(key.startswith(("model.", "optim.")) for key in settings.given)


def tuning_data(settings: VerlSettings, notes: list[str]) -> dict[str, Any]:
    """Translate the data of supervised fine-tuning."""
    get = settings.get
    longest = get("data.max_length", 1024)
    pairs = get("data.prompt_key") is not None and not get("data.enable", False)
    cut, padding = get("data.truncation", "error"), get("data.pad_mode", "no_padding")
    if not pairs and cut == "left":
        if padding != "no_padding":
            raise ValueError(
                "data.truncation=left would cut the beginning of a conversation, whose end answers it; use "
                "right, or error."
            )
        notes.append("data.truncation=left cuts the end in verl, whose data.pad_mode=no_padding ignores it.")
        cut = "right"
    ours: dict[str, Any] = {
        "algorithm": "sft",
        "data.train": listed(get("data.train_files", [])),
        "data.val": listed(get("data.val_files", [])),
        "data.prompts_per_step": get("data.train_batch_size", 256),
        "data.max_prompt_tokens": longest,
        "data.overlong_prompts": {"left": "truncate_left", "right": "truncate_right"}.get(cut, "error"),
        "validation.every": get("trainer.test_freq", -1),
    }
    if not pairs:
        return ours | {"data.messages_key": get("data.messages_key", "messages")}
    names = [get("data.response_key", "answer"), *listed(get("data.response_dict_keys", []))]
    get("data.prompt_dict_keys")
    notes.append(
        "data.prompt_key=prompt, the column of verl's RL data, in place of a string to which verl adds the "
        "chat template; data.messages_key takes conversations."
    )
    return ours | {"data.response_key": ".".join(names), "rollout.max_response_tokens": longest}


def uses_megatron(settings: VerlSettings, part: str) -> bool:
    """Return whether verl trains with Megatron. part: prefix of the settings of the engine."""
    engines = {settings.get(key) for key in ("model_engine", "engine", f"{part}model_engine")}
    given = any(key.startswith((f"{part}megatron.", "megatron.")) for key in settings.given)
    return bool({"megatron", "mlite"} & engines) or given


def listed(value: Any) -> list[str]:
    return [str(v) for v in value] if isinstance(value, list) else [str(value)]


def adapter(settings: VerlSettings, notes: list[str]) -> dict[str, Any]:
    """Translate LoRA."""
    part = "model" if is_tuning(settings) else "actor_rollout_ref.model"
    get = settings.get
    rank, path = get(f"{part}.lora_rank", 0), get(f"{part}.lora_adapter_path", "")
    alpha = get(f"{part}.lora_alpha", 32 if uses_megatron(settings, "actor_rollout_ref.actor.") else 16)
    if not (rank or path):
        return {}
    names = listed(get(f"{part}.target_modules", "all-linear"))
    kind = str(get(f"{part}.lora.type", "lora"))
    for key in ("merge", "lora_A_init_method", "lora_B_init_method"):
        get(f"{part}.lora.{key}")  # how the engine holds A and B does not change what is computed
    ours: dict[str, Any] = {
        "adapter.kind": "dora" if kind == "dora" else "lora",
        "adapter.targets": [] if names == ["all-linear"] else [t for n in names for t in TARGETS.get(n, [n])],
    }
    if path:
        ours["adapter.path"] = path
        if not rank:
            notes.append("adapter.rank and adapter.alpha must be those of the adapter in adapter.path.")
    if rank:
        ours |= {"adapter.rank": rank, "adapter.alpha": float(alpha)}
    return ours


def distillation(settings: VerlSettings, notes: list[str]) -> dict[str, Any]:
    """Translate on-policy distillation.

    verl's policy gradient of the one-sample estimate k1 has the gradient of the reverse KL divergence as its
    expectation; algorithm=distill sums that divergence over the vocabulary.
    """
    get, part = settings.get, "distillation.distillation_loss"
    if not get("distillation.enabled", False):
        return {}
    mode, gradient = str(get(f"{part}.loss_mode", "k3")), get(f"{part}.use_policy_gradient", False)
    rewarded = get(f"{part}.use_task_rewards", True)
    top_k = get(f"{part}.topk", 32)
    teachers = {
        key.split(".")[2]: get(key)
        for key in list(settings.given)
        if key.startswith("distillation.teacher_models.") and key.endswith(".model_path")
    }
    sources = {get(f"distillation.teacher_models.{name}.key"): path for name, path in teachers.items()}
    ours: dict[str, Any] = (
        {"teacher.path": next(iter(teachers.values()), "")}
        if len(teachers) < 2
        else {"teacher.sources": sources}
    )
    if get("distillation.teacher_key", "data_source") != "data_source":
        raise ValueError("distillation.teacher_key must be data_source, by which teacher.sources are chosen.")
    notes.append(
        "The teacher is on the GPUs of the training grid; verl's distillation.nnodes are not needed."
    )
    if rewarded and gradient and mode == "k1":
        return ours | {"teacher.advantage_coef": get(f"{part}.distillation_loss_coef", 1.0)}
    if rewarded:
        raise ValueError(
            f"{part}.loss_mode={mode} with use_task_rewards=True: no divergence can be added to the loss of "
            "a reward; use loss_mode=k1 with use_policy_gradient=True (teacher.advantage_coef)."
        )
    ours |= {"algorithm": "distill", "objective.advantage": None, "objective.loss": None}
    if max(0, get("trainer.test_freq", -1)) == 0:
        ours["reward.function"] = ours["reward.sources"] = None  # nothing is scored
    if mode == "forward_kl_topk":
        return ours | {"teacher.divergence": "forward_kl", "teacher.top_k": top_k}
    if mode not in ("k1", "kl") or not gradient:
        raise ValueError(f"{part}.loss_mode={mode} has no counterpart; it must be k1 or forward_kl_topk.")
    notes.append(
        "teacher.divergence=reverse_kl over the whole vocabulary, of which verl's policy gradient of k1 is "
        "an estimate by the sampled token."
    )
    return ours | {"teacher.divergence": "reverse_kl"}
