"""One call for everything that a dry run says about a configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rl.config.schema import Config, needs_engine
from rl.dry_run.hardware import Hardware
from rl.dry_run.memory import ITEMSIZE, Layout, Memory, estimate_memory, layout_of, sequences_per_prompt
from rl.dry_run.shape import Model, check_layouts, models_of
from rl.dry_run.timing import Lengths, assumed_lengths, estimate_seconds
from rl.models.placement import RolloutPlacement
from rl.refit.traffic import survey_refit


@dataclass(frozen=True)
class Refit:
    """What a refit moves, and how long its messages take at the links' speeds."""

    all_ranks: int
    """Bytes received, of all ranks."""
    busiest: int
    """Bytes that one rank receives at most."""
    largest_batch: int
    """Bytes of the messages of a rank at a time."""
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """Of a run on a number of ranks."""

    config: Config
    layout: Layout
    models: Mapping[str, Model]
    memory: Memory
    lengths: Lengths
    seconds: Mapping[str, float]
    """By phase; with `update_weights` once the refit is planned."""
    refit: Refit | None
    notes: list[str]
    hardware: Hardware

    @property
    def problems(self) -> list[str]:
        return self.memory.problems()

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def max_tokens(self) -> int:
        """Of a step, if every prompt and response is as long as may be."""
        config = self.config
        longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
        return config.data.prompts_per_step * sequences_per_prompt(config) * longest

    @property
    def gpu_hours(self) -> float:
        """Of run.max_steps steps, without validation and checkpoints."""
        return self.config.run.max_steps * self.step_seconds * self.layout.world_size / 3600


def estimate(
    config: Config,
    world_size: int,
    hardware: Hardware,
    *,
    shape: str = "",
    prompt: float = 0.0,
    response: float = 0.0,
    plan: bool = True,
) -> Estimate:
    """The estimate for a config that `rl.config.checks.check` accepts.

    shape: a config.json in the place of model.path's. prompt, response: mean tokens, 0 for half of the longest. plan: plan
    the refit too, seconds for the largest models. Raises ConfigError for a layout that cannot work.
    """
    models, notes = models_of(config, shape=shape)
    check_layouts(config, world_size, models)
    return _estimate(
        config, world_size, hardware, models, notes, assumed_lengths(config, prompt, response), plan
    )


def changed(before: Estimate, config: Config, world_size: int) -> Estimate:
    """The estimate for another config of the same models, without planning the refit. Raises ConfigError as `estimate`."""
    check_layouts(config, world_size, before.models)
    return _estimate(config, world_size, before.hardware, before.models, [], before.lengths, False)


def _estimate(config, world_size, hardware, models, notes, lengths, plan) -> Estimate:
    layout = layout_of(config, world_size)
    memory = estimate_memory(config, world_size, models, hardware)
    refit = None
    if plan and needs_engine(config):
        refit = plan_refit(config, layout, models["policy"], hardware)
        # The plan's own, which the buffer bounds unless a row of a weight is larger.
        memory = replace(memory, refit_buffers=refit.largest_batch)
    seconds = estimate_seconds(config, layout, models, memory.engine, lengths, hardware)
    if memory.away and "gen" in seconds:
        seconds["offload"] = 2 * memory.away / (hardware.pcie_gb_s * 1e9)
    if refit is not None:
        seconds["update_weights"] = refit.seconds
    return Estimate(config, layout, models, memory, lengths, seconds, refit, notes, hardware)


def plan_refit(config: Config, layout: Layout, model: Model, hardware: Hardware) -> Refit:
    """The plan that the run would make, of all ranks."""
    survey = survey_refit(
        list(model.weights),
        layout.placement(model),
        RolloutPlacement(layout.world_size, layout.rollout_tp, model.num_layers),
        ranks_per_node=hardware.ranks_per_node,
        itemsize=ITEMSIZE[config.model.dtype],
        buffer_bytes=config.refit.buffer_mib << 20,
    )
    near, far = (
        hardware.nvlink_gb_s * 1e9 * hardware.link_share,
        hardware.nic_gb_s * 1e9 * hardware.link_share,
    )

    def seconds(batch) -> float:
        _, near_in, far_in, near_out, far_out = batch
        return float(
            max(near_in.max() / near, near_out.max() / near, far_in.max() / far, far_out.max() / far)
        )

    received = survey.near_in + survey.far_in
    return Refit(
        int(received.sum()),
        int(received.max()),
        int(survey.peak_buffer.max()),
        sum(seconds(batch) for batch in survey.batches),
    )
