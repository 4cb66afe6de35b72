"""The models of a run on this rank: models of the training grid, and generating engines.

For example, a run of ppo has the policy and the critic in `training`, and the policy's engine in
`generating`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rl.config.adapter import Adapter
from rl.config.needs import needs_engine
from rl.config.run_models import RunModel, run_models
from rl.config.schema import Config
from rl.engines.inputs import Inputs
from rl.engines.rollout_engines import build_frozen, build_rollout, check_device, frozen_engines
from rl.engines.training_parts import training_parts
from rl.rollout import cpu_support
from rl.rollout.engine import RolloutEngine
from rl.runtime import start_up
from rl.runtime.device import Device
from rl.training.engine import TrainingEngine
from rl.training.grid import Grid
from rl.training.spec import ModelSpec


@dataclass
class Engines:
    """The models of a run on this rank, by their names in `rl.config.run_models`."""

    training: dict[str, TrainingEngine]
    """Models of the training grid, learning and frozen, except teachers."""
    generating: dict[str, RolloutEngine] = field(default_factory=dict)
    """Engines that generate with the policy, with a judge, and with a teacher."""
    teachers: dict[str, TrainingEngine] = field(default_factory=dict)
    """Teachers by path. Their weights are on the device only while they compute (`MemorySharing.lent`)."""

    @property
    def policy(self) -> TrainingEngine:
        return self.training["policy"]

    @property
    def rollout(self) -> RolloutEngine | None:
        """The engine that generates with the policy."""
        return self.generating.get("policy")

    @property
    def learning(self) -> dict[str, TrainingEngine]:
        """The models that learn, by their name in checkpoints."""
        own = [model.parts.models() for model in self.training.values()]
        every = [*self.training.items(), *(pair for models in own for pair in models.items())]
        return {name: model for name, model in every if model.optimizer is not None}

    def offload(self, *, weights: bool) -> None:
        """Release the device memory of gradients and optimizer states of the models in `training`.

        weights: also release the memory of the weights.
        """
        for model in self.training.values():
            model.offload(weights=weights)

    def reload(self) -> None:
        """Restore the memory that `offload` released."""
        for model in self.training.values():
            model.reload()

    def close(self) -> None:
        """Destroy vLLM's groups. Collective over the world."""
        for engine in list(self.generating.values())[:1]:
            engine.close()  # all use the same groups


def finish_imports(config: Config, *, generate: bool) -> None:
    """Import vLLM if the run needs it, then resume garbage collection (`start_up.pause_collection`).

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
    """Return the policy in training. Collective over the world. base_of: see `training_parts`."""
    return _build(config, run_models(config)["policy"], hf, grid, device, base_of)


def _build(
    config: Config,
    model: RunModel,
    hf: dict,
    grid: Grid,
    device: Device,
    base_of: TrainingEngine | None = None,
) -> TrainingEngine:
    """Return a model of the training grid."""
    spec = ModelSpec(
        model.path,
        hf,
        config.model.dtype,
        has_values=bool(model.head),
        optimizer=model.optimizer,
        temperature=model.temperature,
        keeps_reference=model.keeps_reference,
    )
    parts = training_parts(config, model, base_of=base_of)
    return TrainingEngine(spec, config.training, grid, device, parts)


def offload_of(config: Config, device: Device) -> str:
    """Return `training.offload` with auto resolved for this device."""
    if config.roles.is_on:
        return "none"  # no engine shares the memory
    if config.training.offload == "auto":
        return "all" if device.is_cuda else "none"
    return config.training.offload


def build_engines(
    config: Config,
    inputs: Inputs,
    grid: Grid,
    device: Device,
    *,
    generate: bool,
    adapters: Sequence[Adapter] = (),
) -> Engines:
    """Build all models that the configuration needs. Collective over the world.

    generate: also build the models that generate or score; with roles, only the models that score. adapters:
    see `build_rollout`.
    """
    check_device(config, device)
    engines, away = Engines({}), offload_of(config, device)
    for name, model in run_models(config).items():
        if not model.on_training_grid or not (generate or model.learns):
            continue
        base_of = engines.policy if model.shares_base else None
        built = _build(config, model, inputs.models[name].hf, grid, device, base_of)
        if not model.is_teacher:
            engines.training[name] = built
            continue
        engines.teachers[model.path] = built
        if away == "all":
            built.offload(weights=True)
    if away != "none" and generate:
        # vLLM requires its memory fraction to be free while it initialises.
        engines.offload(weights=away == "all")
    start_up.mark("trainer")
    if generate and needs_engine(config) and not config.roles.is_on:
        engines.generating["policy"] = rollout = build_rollout(config, device, adapters=adapters)
        rollout.sleep()  # vLLM has filled the whole cache with zeros
    for name, options in (frozen_engines(config) if generate else {}).items():
        engines.generating[name] = build_frozen(config, device, name, *options)
    engines.reload()
    start_up.mark("engine")
    return engines
