"""The estimate of a dry run: memory, refit and seconds of a configuration on a number of ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from rl.config.adapter_checks import check_layers
from rl.config.exclusions import check_exclusions
from rl.config.needs import needs_engine
from rl.config.options import ConfigError
from rl.config.schema import Config
from rl.dry_run.generation import Lengths
from rl.dry_run.grids import Layout, layout_of
from rl.dry_run.hardware import Hardware
from rl.dry_run.memory import MemoryEstimate, estimate_memory
from rl.dry_run.parameters import ITEMSIZE
from rl.dry_run.rows import sequences_per_prompt, with_actual_rows
from rl.dry_run.shape import ModelShape, check_layouts, models_of
from rl.dry_run.timing import assumed_lengths, estimate_seconds
from rl.refit.connections import connection_bytes
from rl.refit.plan import FAR_IN, FAR_OUT, NEAR_IN, NEAR_OUT
from rl.refit.traffic import refit_traffic


@dataclass(frozen=True)
class RefitEstimate:
    """Bytes that a refit moves, and the seconds of its messages at the links' speeds."""

    all_ranks: int
    """Bytes that all ranks together receive."""
    busiest: int
    """Maximum bytes that one rank receives."""
    largest_batch: int
    """Maximum bytes of a rank's messages in one batch."""
    senders: int
    """Maximum number of ranks from which one rank receives."""
    connections: int
    """Maximum bytes of NCCL's buffers for the messages of a rank, from the first refit on."""
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """The estimate for a run on a number of ranks."""

    config: Config
    layout: Layout
    models: Mapping[str, ModelShape]
    memory: MemoryEstimate
    lengths: Lengths
    seconds: Mapping[str, float]
    """Seconds by phase, with `update_weights` if the refit is planned."""
    idle: Mapping[str, float]
    """Seconds per phase that ranks wait, for example for the longest response or for other pipeline
    stages."""
    refit: RefitEstimate | None
    notes: list[str]
    hardware: Hardware
    points: int = 1
    """Number of adapters that learn in one job on one base."""
    other_refit: RefitEstimate | None = None
    """The refit with the other value of adapter.in_engine; None if the engine cannot hold that form."""

    @property
    def problems(self) -> list[str]:
        return self.memory.problems()

    @property
    def step_seconds(self) -> float:
        generation = self.seconds.get("gen", 0.0)
        rest = sum(self.seconds.values()) - generation
        return max(generation, rest) if self.layout.is_split and self.config.roles.lag else generation + rest

    @property
    def sequences(self) -> int:
        """Number of sequences of a step, of all adapters."""
        return self.points * self.config.data.prompts_per_step * sequences_per_prompt(self.config)

    @property
    def max_tokens(self) -> int:
        """Number of tokens of a step if all prompts and responses have the maximum length."""
        longest = self.config.data.max_prompt_tokens + self.config.rollout.max_response_tokens
        return self.sequences * longest

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of run.max_steps steps, without validation and checkpoints."""
        return self.config.run.max_steps * self.step_seconds * self.layout.num_ranks / 3600


def estimate(
    config: Config,
    world_size: int,
    hardware: Hardware,
    *,
    shape: str = "",
    prompt: float = 0.0,
    response: float = 0.0,
    sigma: float = 0.7,
    plan: bool = True,
    points: int = 1,
    models: tuple[dict[str, ModelShape], list[str]] | None = None,
) -> Estimate:
    """Return the estimate for a config that `rl.config.checks.check` accepts.

    models: what `models_of` returns for the config, which takes a second for the largest models; None: it
    is called. shape: a config.json to use instead of model.path's. prompt, response: mean tokens; 0 means
    half of the maximum. sigma: standard deviation of the logarithm of a response's tokens. plan: whether to
    plan the refit, which takes seconds for the largest models. points: number of adapters of a sweep in one
    job; at least the length of sweep.adapters. Raises ConfigError for an invalid layout.
    """
    points = max(points, len(config.sweep.adapters))
    if points > 1 and config.adapter.in_engine != "adapter":
        raise ConfigError(
            f"--points {points} trains several adapters on one base, but adapter.in_engine=merged holds one "
            "policy in the engine; set adapter.kind=lora adapter.in_engine=adapter."
        )
    shapes, notes = models_of(config, shape=shape) if models is None else models
    lengths = assumed_lengths(config, prompt, response, sigma)
    return _estimate(config, world_size, hardware, shapes, notes, lengths, plan, points)


def changed(before: Estimate, config: Config, world_size: int) -> Estimate:
    """Return the estimate for another config of the same models, without planning the refit.

    It has no seconds if the config does not fit, because they take longer to estimate than memory. The refit
    keeps its connections and seconds. Raises as `estimate`.
    """
    lengths, points = before.lengths, before.points
    found = _estimate(config, world_size, before.hardware, before.models, [], lengths, False, points, False)
    memory, seconds = replace(found.memory, connections=before.memory.connections), dict(found.seconds)
    if seconds and "update_weights" in before.seconds:
        seconds["update_weights"] = before.seconds["update_weights"]
    return replace(found, memory=memory, seconds=seconds)


def planned(before: Estimate) -> Estimate:
    """Return the estimate with a planned refit, without seconds if it then does not fit."""
    config, world_size, models = before.config, before.layout.num_ranks, before.models
    return _estimate(
        config, world_size, before.hardware, models, [], before.lengths, True, before.points, False
    )


def _estimate(
    config: Config,
    world_size: int,
    hardware: Hardware,
    models: Mapping[str, ModelShape],
    notes: list[str],
    lengths: Lengths,
    plan: bool,
    points: int,
    has_seconds: bool = True,
) -> Estimate:
    check_layouts(config, world_size, models)
    config = with_actual_rows(config, models["policy"], hardware)
    layout = layout_of(config, world_size, hardware.ranks_per_node, models)
    memory = estimate_memory(config, world_size, models, hardware, points=points)
    refit = None
    if plan and needs_engine(config):
        policy = models["policy"]
        if config.rollout.draft.method == "mtp":
            policy = replace(policy, weights=policy.weights + models["mtp"].weights)
        refit = plan_refit(config, layout, policy, hardware, points=points)
        # The buffer limit bounds the plan's messages unless one row of a weight is larger.
        connections = 0 if hardware.is_cpu else refit.connections
        memory = replace(memory, refit_buffers=refit.largest_batch, connections=connections)
    other_refit = None
    if refit is not None and config.adapter.is_on:
        other = with_form(config, "merged" if config.adapter.in_engine == "adapter" else "adapter")
        if can_hold_adapters(other, models["policy"]):
            other_refit = plan_refit(other, layout, models["policy"], hardware)
    seconds, idle = dict[str, float](), dict[str, float]()
    if has_seconds or not memory.problems():
        seconds, idle = estimate_seconds(config, layout, models, memory, lengths, hardware, points=points)
    if memory.away and "gen" in seconds:
        seconds["offload"] = 2 * memory.away / (hardware.pcie_gb_s * 1e9)
    if refit is not None:
        seconds["update_weights"] = refit.seconds
    return Estimate(
        config, layout, models, memory, lengths, seconds, idle, refit, notes, hardware, points, other_refit
    )


def can_hold_adapters(config: Config, model: ModelShape) -> bool:
    """Return whether the engine can hold the policy in the form of adapter.in_engine."""
    try:
        check_exclusions(config, of=("adapters in the engine", "merged adapters"))
        check_layers(config, model.hf)
    except ConfigError:
        return False
    return True


def with_form(config: Config, form: Literal["merged", "adapter"]) -> Config:
    """Return the config with another value of adapter.in_engine."""
    return replace(config, adapter=replace(config.adapter, in_engine=form))


def plan_refit(
    config: Config, layout: Layout, model: ModelShape, hardware: Hardware, *, points: int = 1
) -> RefitEstimate:
    """Return the figures of the refit plan that the run would compute, over all ranks.

    points: number of adapters in the engine. With roles, an engine that holds adapters keeps the base after
    its first refit.
    """
    weights = list(model.weights)
    if config.adapter.is_on and config.adapter.in_engine == "adapter":
        weights = [*(() if config.roles.is_on else weights), *points * model.adapters]
    traffic = refit_traffic(
        weights,
        layout.placement(model),
        layout.rollout_placement(model),
        ranks_per_node=hardware.ranks_per_node,
        itemsize=ITEMSIZE[config.model.dtype],
        buffer_bytes=config.refit.buffer_mib << 20,
    )
    received = traffic.near_in + traffic.far_in
    nccl = connection_bytes(traffic.partners, hardware.ranks_per_node, hardware.nic_gb_s)
    return RefitEstimate(
        int(received.sum()),
        int(received.max()),
        int(traffic.peak_buffer.max()),
        int(traffic.partners[:2].sum(0).max()),
        int(nccl.max()),
        sum(
            float(hardware.link_seconds(load[[NEAR_IN, NEAR_OUT]].max(), load[[FAR_IN, FAR_OUT]].max()))
            for load in traffic.batches
        ),
    )
