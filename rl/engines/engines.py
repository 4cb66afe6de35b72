"""The models of a run on this rank: those of the training grid and those that generate."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rl.config.adapter import Adapter
from rl.config.options import ConfigError
from rl.config.schema import (
    Config,
    algorithm_of,
    keeps_reference,
    learns_from_samples,
    needs_engine,
    needs_reward,
    needs_sampling_masks,
    uses_teacher,
)
from rl.data.held import SAMPLING_MASKS
from rl.engines.inputs import Inputs
from rl.rollout import cpu_support
from rl.rollout.engine import RolloutEngine
from rl.runtime import start_up
from rl.runtime.device import Device
from rl.training.engine import TrainingEngine
from rl.training.grid import Grid


@dataclass
class Engines:
    """The models of a run. A model that the run does not need is None."""

    policy: TrainingEngine
    critic: TrainingEngine | None = None
    implicit_reward: TrainingEngine | None = None
    reward_model: TrainingEngine | None = None
    rollout: RolloutEngine | None = None
    judge: RolloutEngine | None = None
    teachers: dict[str, TrainingEngine] = field(default_factory=dict)
    """Teachers by path. Their weights are on the device only while they compute (`MemorySharing.lent`)."""
    teacher_engine: RolloutEngine | None = None
    """Generates with the teacher (`teacher.teacher_share`)."""

    @property
    def learning(self) -> dict[str, TrainingEngine]:
        """The models whose weights change, by their name in checkpoints."""
        models = {"policy": self.policy, "critic": self.critic, "implicit_reward": self.implicit_reward}
        return {name: model for name, model in models.items() if model is not None}

    @property
    def training(self) -> list[TrainingEngine]:
        """All models of the training grid, including the reward model, which does not learn."""
        return [*self.learning.values(), *([self.reward_model] if self.reward_model is not None else [])]

    def offload(self, *, weights: bool) -> None:
        """Release the device memory of gradients and optimizer states of all training models.

        weights: also release the memory of the weights.
        """
        for model in self.training:
            model.offload(weights=weights)

    def reload(self) -> None:
        """Restore what `offload` released."""
        for model in self.training:
            model.reload()

    def close(self) -> None:
        """Destroy vLLM's groups. Collective over the world."""
        engines = (self.rollout, self.judge, self.teacher_engine)
        generating = [engine for engine in engines if engine is not None]
        if generating:
            generating[0].close()  # all use the same groups


def finish_imports(config: Config, *, generate: bool) -> None:
    """Import vLLM if the run needs it, then enable garbage collection again (`start_up.pause_collection`).

    generate: whether models that generate are built.
    """
    if generate and needs_engine(config):
        import vllm.entrypoints.llm
        import vllm.v1.worker.gpu_worker  # noqa: F401

        cpu_support.install()
        start_up.mark("vLLM")
    start_up.resume_collection()


def build_policy(
    config: Config, hf: dict, grid: Grid, device: Device, *, base_of: TrainingEngine | None = None
) -> TrainingEngine:
    """Return the policy in training. Collective over the world. base_of: see `TrainingEngine`."""
    policy = TrainingEngine(
        config.model.path,
        hf,
        training=config.training,
        dtype=config.model.dtype,
        grid=grid,
        device=device,
        optimizer=config.training.optimizer,
        temperature=config.rollout.temperature if learns_from_samples(config) else 1.0,
        keep_reference=keeps_reference(config),
        router_replay=config.training.router_replay,
        bitwise=config.model.numerics == "bitwise",
        adapter=config.adapter,
        seed=config.run.seed,
        base_of=base_of,
    )
    if needs_sampling_masks(config):
        policy.needs |= dict.fromkeys(
            SAMPLING_MASKS, lambda stage: slice(None) if stage == grid.pp - 1 else None
        )
    return policy


def offload_of(config: Config, device: Device) -> str:
    """Return `training.offload` with auto resolved for this device."""
    if config.roles.is_on:
        return "none"  # no engine shares the memory
    if config.training.offload == "auto":
        return "all" if device.is_cuda else "none"
    return config.training.offload


def build_rollout(config: Config, device: Device, *, adapters: Sequence[Adapter] = ()) -> RolloutEngine:
    """Return the engine that generates with the policy. Collective over the world.

    adapters: those of a sweep's points; by default that of `config`, if the engine holds it.
    """
    adapter = config.adapter
    return RolloutEngine(
        config.model.path,
        config.rollout,
        dtype=config.model.dtype,
        max_tokens=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
        seed=config.run.seed,
        device=device,
        returns_masks=needs_sampling_masks(config),
        routes=config.training.router_replay == "engine",
        bitwise=config.model.numerics == "bitwise",
        adapters=adapters or ([adapter] if adapter.is_on and adapter.in_engine == "adapter" else []),
    )


def build_engines(config: Config, inputs: Inputs, grid: Grid, device: Device, *, generate: bool) -> Engines:
    """Build all models that the configuration needs. Collective over the world.

    generate: also build the models that generate or score; with roles, those that score.
    """
    needs = algorithm_of(config).needs
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
    engines = Engines(build_policy(config, inputs.models["policy"].hf, grid, device))

    def build(name: str, **options) -> TrainingEngine:
        model = inputs.models[name]
        return TrainingEngine(
            model.path,
            model.hf,
            training=config.training,
            dtype=config.model.dtype,
            grid=grid,
            device=device,
            bitwise=config.model.numerics == "bitwise",
            **options,
        )

    if "critic" in needs:
        options = dict(adapter=replace(config.adapter, path=""), base_of=engines.policy)
        engines.critic = build(
            "critic",
            values=True,
            optimizer=config.critic.optimizer,
            seed=config.run.seed,
            **(options if config.critic.share_base else {}),
        )
    if "implicit_reward" in needs:
        engines.implicit_reward = build(
            "implicit_reward", optimizer=config.implicit_reward.optimizer, keep_reference=True
        )
    if generate and config.reward.model.path and needs_reward(config):
        engines.reward_model = build("reward_model", values=True)
    away = offload_of(config, device)
    if generate and uses_teacher(config):
        for path in config.teacher.paths:
            engines.teachers[path] = build(f"teacher {path}", temperature=config.rollout.temperature)
            if away == "all":
                engines.teachers[path].offload(weights=True)
    if away != "none" and generate:
        # vLLM requires its memory fraction to be free while it initialises.
        engines.offload(weights=away == "all")
    start_up.mark("trainer")
    if generate and needs_engine(config) and not config.roles.is_on:
        engines.rollout = build_rollout(config, device)
    judge = config.reward.judge

    def build_frozen(name: str, path: str, share: float, max_tokens: int) -> RolloutEngine:
        """Return an engine whose weights stay; it sleeps."""
        if engines.rollout is not None and engines.rollout.awake:
            engines.rollout.sleep()
        engine = RolloutEngine(
            path,
            replace(config.rollout, gpu_memory_utilization=share),
            dtype=config.model.dtype,
            max_tokens=max_tokens,
            seed=config.run.seed,
            device=device,
            name=name,
            frozen=True,
        )
        engine.sleep()
        return engine

    if generate and judge.path and needs_reward(config):
        longest = judge.max_prompt_tokens + judge.max_response_tokens
        engines.judge = build_frozen("judge", judge.path, judge.gpu_memory_utilization, longest)
    teacher = config.teacher
    if generate and teacher.teacher_share:
        longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
        [path] = teacher.paths
        engines.teacher_engine = build_frozen("teacher", path, teacher.gpu_memory_utilization, longest)
    if away != "none" and engines.rollout is not None and engines.rollout.awake:
        engines.rollout.sleep()
    engines.reload()
    start_up.mark("engine")
    return engines
