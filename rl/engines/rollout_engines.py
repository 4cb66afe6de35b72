"""The engines that generate: with the policy, and with frozen models, for example a judge."""

from collections.abc import Sequence
from dataclasses import replace

from rl.config import wing
from rl.config.adapter import Adapter
from rl.config.needs import needs_reward
from rl.config.options import ConfigError
from rl.config.rollout import Rollout
from rl.config.schema import Config
from rl.models import read_hf_config
from rl.models.sizes import has_delta_nets, num_experts
from rl.rollout.engine import RolloutEngine
from rl.rollout.parts import EnginePart
from rl.rollout.vllm_model import ServedModel
from rl.runtime.device import Device


def check_device(config: Config, device: Device) -> None:
    """Raise ConfigError for options that an engine on a GPU does not support."""
    if device.is_cuda and config.training.cp > 1 and config.model.dtype == "float32":
        raise ConfigError(
            f"training.cp={config.training.cp} with model.dtype=float32 is for CPU: on a GPU attention "
            "over parts of a row requires 16 bits; use model.dtype=bfloat16."
        )
    if device.is_cuda and config.rollout.carry_over_cache == "keep":
        raise ConfigError(
            "rollout.carry_over_cache=keep is for CPU: on a GPU the engine's KV cache is released while the "
            "trainer works (vLLM's sleep mode discards it); use recompute."
        )
    if device.is_cuda and config.model.numerics == "bitwise" and config.rollout.temperature != 1.0:
        raise ConfigError(
            f"model.numerics=bitwise with rollout.temperature={config.rollout.temperature} is for CPU: on a "
            "GPU vLLM's kernel divides by it with another rounding than torch; use 1.0."
        )


def build_rollout(config: Config, device: Device, *, adapters: Sequence[Adapter] = ()) -> RolloutEngine:
    """Return the engine that generates with the policy. Collective over the world.

    adapters: the adapters of a sweep's points; by default the adapter of `config`, if the engine holds
    adapters beside the weights.
    """
    adapter = config.adapter
    if not adapters and adapter.is_on and adapter.in_engine == "adapter":
        adapters = [adapter]
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    own = config.model
    model = ServedModel(own.path, own.dtype, longest, rope_scaling=own.rope_scaling)
    parts = parts_of(config, adapters)
    return RolloutEngine(model, config.rollout, seed=config.run.seed, device=device, parts=parts)


def parts_of(config: Config, adapters: Sequence[Adapter]) -> list[EnginePart]:
    """Return the parts of the policy's engine. A run imports only the parts that it uses."""
    parts = model_parts(config.rollout, read_hf_config(config.model.path))
    for parts_of_option in wing.doors(config, "engine"):
        parts += parts_of_option(config, adapters)
    return parts


def frozen_engines(config: Config) -> dict[str, tuple[ServedModel, float]]:
    """Return each model that generates and does not learn, with its engine's fraction of a GPU's memory.

    The engines of these models run on the ranks that train, also with roles (section `roles`).
    """
    frozen, dtype = {}, config.model.dtype
    if needs_reward(config) and (judge := config.reward.judge).path:
        longest = judge.max_prompt_tokens + judge.max_response_tokens
        model = ServedModel(judge.path, dtype, longest, frozen=True)
        frozen["judge"] = (model, judge.gpu_memory_utilization)
    if config.teacher.teacher_share and config.run.mode != "train_only":
        longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
        model = ServedModel(config.teacher.paths[0], dtype, longest, frozen=True)
        frozen["teacher"] = (model, config.teacher.gpu_memory_utilization)
    return frozen


def model_parts(rollout: Rollout, hf: dict) -> list[EnginePart]:
    """Return the parts that an engine needs for a model's layers, for example for gated delta nets.

    hf: the model's config.json.
    """
    parts: list[EnginePart] = []
    if has_delta_nets(hf):
        from rl.rollout.delta_nets import DeltaNets

        parts.append(DeltaNets())
    if rollout.dp_attention and num_experts(hf):
        from rl.rollout.dp_attention import DataParallelAttention

        parts.append(DataParallelAttention())
    elif rollout.ep > 1 and num_experts(hf):
        from rl.rollout.expert_parallel import ExpertParallel

        parts.append(ExpertParallel())
    return parts


def build_frozen(
    config: Config, device: Device, name: str, model: ServedModel, memory_share: float
) -> RolloutEngine:
    """Return a sleeping engine with fixed weights. Collective over the world."""
    rollout = replace(config.rollout, gpu_memory_utilization=memory_share)
    parts = model_parts(rollout, read_hf_config(model.path))
    engine = RolloutEngine(model, rollout, seed=config.run.seed, device=device, name=name, parts=parts)
    engine.sleep()
    return engine
