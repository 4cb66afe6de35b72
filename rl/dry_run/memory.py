"""Memory of a rank in training, refit and generation, by kind, for each pipeline stage.

Weights, gradients and optimizer state are exact (tests/ranks/dry_run). `rl.dry_run.activations` estimates the
training passes. `Hardware` has figures for NCCL's communicators and for the rest. Ranks on CPUs keep all
models and the engine's weights in all phases.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rl.config.adapter import Adapter
from rl.config.draft import Draft
from rl.config.features import CLASS, is_on
from rl.config.needs import needs_engine, validates
from rl.config.schema import Config, Optimizer
from rl.dry_run.activations import Passes, head_rows, passes_of
from rl.dry_run.grids import Layout, layout_of
from rl.dry_run.hardware import Hardware
from rl.dry_run.images import without_frozen_tower
from rl.dry_run.parameters import (
    ITEMSIZE,
    CountedWeight,
    StageCount,
    buffer_elements,
    count_engine,
    count_stages,
)
from rl.dry_run.rows import longest_sequence, sequences_per_prompt, with_actual_rows
from rl.dry_run.shape import DRAFTERS, ModelShape
from rl.faults.process import TRIM_GROWTH
from rl.models.adapters import adapters as adapters_of
from rl.models.fp8_blocks import REFIT_GROUPS, quantised_weights
from rl.models.layout import FP8_BLOCK
from rl.models.placement import num_step_groups
from rl.models.sizes import ffn_width, is_tied

BATCHED_TOKENS = 16384
"""Maximum tokens of one engine step: vLLM's default max_num_batched_tokens on a GPU of 70 GiB or more."""
BATCHED_TOKENS_ON_CPU = 4096
"""Maximum tokens of one engine step per tensor parallel rank: vLLM's default on CPUs."""


@dataclass(frozen=True)
class State:
    """Bytes of one model on a rank."""

    weights: int
    gradients: int = 0
    optimizer: int = 0
    in_host: int = 0
    """Optimizer state in host memory all the time."""
    returned: int = 0
    """Master weights of it that are on the GPU while the model is updated."""
    moments: int = 0
    """Bytes of `optimizer` that the first update allocates."""

    @property
    def total(self) -> int:
        """Bytes on the GPU, without `returned`."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class StageMemory:
    """Bytes on a rank of one pipeline stage."""

    states: Mapping[str, State]
    """States by model."""
    activations: float
    """Bytes saved for the backward passes of all micro-batches in flight, and a layer's workspace."""
    head: float
    """Bytes of the log-prob computation on the last stage, if the pass has its peak there; else 0."""

    @property
    def state(self) -> int:
        return sum(state.total for state in self.states.values())


@dataclass(frozen=True)
class EngineMemory:
    """Bytes and tokens of the generation engine on a rank."""

    budget: float
    """Bytes for weights, workspace and cache: gpu_memory_utilization times the GPU's memory, or on CPUs what
    they take with rollout.cpu_kv_cache_mib."""
    weights: int
    workspace: float
    """Activations of a step's tokens and the sampler's logits."""
    bytes_per_token: int
    max_tokens: int
    """Maximum tokens of a sequence."""
    staged: float = 0.0
    """Weights of one group on their way into FP8, during a refit."""
    states: float = 0.0
    """Recurrent states of the samples that run at once."""
    unused: float = 0.0
    """Bytes of the cache that no step writes; on CPUs they take no memory after the start."""

    @property
    def cache(self) -> float:
        return self.budget - self.weights - self.workspace - self.states

    @property
    def cache_tokens(self) -> int:
        return max(0, int(self.cache // self.bytes_per_token))


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of the whole run."""

    stages: list[StageMemory]
    engine: EngineMemory | None
    frozen: Mapping[str, EngineMemory]
    """Engines with fixed weights by name, of a judge and of a teacher that responds. Their budgets are taken
    in all phases, on CPUs only their weights; one generates while the policy's engine sleeps."""
    refit_buffers: float
    connections: float
    """NCCL's buffers for a refit's messages, in bytes, in all phases."""
    communicators: int
    """Number of NCCL communicators of a rank, which take memory in all phases."""
    offload: str
    """`training.offload`: what is moved to the host during generation (none, optimizer or all)."""
    reference: int
    """Host memory of a rank for reference weights, in bytes. In use they are in the gradients' memory."""
    is_split: bool
    """Whether trainer and engine are on different GPUs; nothing is then moved to the host."""
    hardware: Hardware = field(repr=False)

    @property
    def away(self) -> int:
        """Host memory of a rank for offloading, in bytes; gradients are discarded."""
        if self.offload == "none" or self.engine is None or self.is_split:
            return 0
        both = self.offload == "all"
        states = (stage.states.values() for stage in self.stages)
        return max(sum(state.optimizer + both * state.weights for state in stage) for stage in states)

    @property
    def optimizer_in_host(self) -> int:
        """Host memory of a rank for the optimizer's share there, in bytes."""
        return max(sum(state.in_host for state in stage.states.values()) for stage in self.stages)

    @property
    def in_communicators(self) -> float:
        """Bytes of a rank's NCCL communicators."""
        return self.communicators * self.hardware.communicator_gib * (1 << 30)

    def stays(self, phase: str, state: State) -> State:
        """Return the part of a model's state that is on the GPU in a phase; weights always in a refit."""
        if self.is_split and phase == "generation":
            return State(0)
        if phase == "training" or self.offload == "none" or self.engine is None or self.is_split:
            return state
        return State(state.weights if phase == "refit" or self.offload == "optimizer" else 0)

    def peak(self, phase: str) -> tuple[float, int]:
        """Return (bytes, index) of the fullest stage in a phase: training, refit or generation.

        The bytes include the reserve.
        """
        totals = [self.at(phase, stage) for stage in self.stages]
        return max(totals), totals.index(max(totals))

    def at(self, phase: str, stage: StageMemory) -> float:
        """Return the bytes on a rank of the stage in a phase."""
        states = sum(self.stays(phase, state).total for state in stage.states.values())
        stays = states + self.connections + self.in_communicators + self.hardware.reserve
        stays += sum(map(self.of_frozen, self.frozen.values()))
        if self.hardware.is_cpu:
            stays += self.away + self.reference + self.optimizer_in_host + self.idle_engine(phase)
        if phase == "training" or self.engine is None:
            returned = max(state.returned for state in stage.states.values())
            generating = (own.budget - own.unused - self.of_frozen(own) for own in self.frozen.values())
            return stays + max(stage.activations + stage.head, returned, *generating)
        if phase == "refit":
            weights = 0 if self.is_split else self.engine.weights + self.engine.staged
            return stays + weights + self.refit_buffers
        # At its start vLLM fills the whole cache with zeros, but has no workspace yet, and Adam no moments.
        moments = sum(self.stays(phase, state).moments for state in stage.states.values())
        at_start = self.engine.weights + self.engine.cache - moments
        return stays + max(self.engine.budget - self.engine.unused, at_start)

    def of_frozen(self, engine: EngineMemory) -> float:
        """Return the bytes that an engine with fixed weights takes in all phases."""
        return engine.weights if self.hardware.is_cpu else engine.budget

    def idle_engine(self, phase: str) -> int:
        """Return the bytes of the engine's weights while the rank trains; 0 on a GPU, which discards them."""
        is_idle = self.hardware.is_cpu and phase == "training" and not self.is_split
        return self.engine.weights if self.engine is not None and is_idle else 0

    def problems(self) -> list[str]:
        """Return one sentence for each thing that does not fit."""
        out, available = [], self.hardware.memory
        owner = "a rank's share of the host" if self.hardware.is_cpu else "a GPU"
        for phase in ("training", "refit", "generation") if self.engine else ("training",):
            total, stage = self.peak(phase)
            if total > available:
                out.append(
                    f"{phase} needs {_gib(total)} GiB on stage {stage}, {_gib(total - available)} GiB more "
                    f"than the {self.hardware.memory_gib:g} GiB of {owner}"
                )
        engines = {} if self.engine is None else {"engine": self.engine}
        for name, engine in (engines | dict(self.frozen)).items():
            if engine.cache_tokens < engine.max_tokens:
                out.append(
                    f"the {name}'s share of {_gib(engine.budget)} GiB leaves "
                    f"{_gib(max(0, engine.cache))} GiB for the KV cache, {engine.cache_tokens} "
                    f"tokens, but one sequence may have {engine.max_tokens} tokens"
                    f"{'; raise rollout.cpu_kv_cache_mib' if self.hardware.is_cpu else ''}"
                )
        return out


def _gib(number: float) -> str:
    return f"{number / (1 << 30):.1f}"


def estimate_memory(
    config: Config, world_size: int, models: Mapping[str, ModelShape], hardware: Hardware, *, points: int = 1
) -> MemoryEstimate:
    """Return the memory of a run with a valid layout. points: number of adapters on the same base."""
    config = with_actual_rows(config, models["policy"], hardware)
    layout = layout_of(config, world_size, hardware.ranks_per_node, models)
    itemsize = ITEMSIZE[config.model.dtype]
    on_grid = {name: model for name, model in models.items() if model.run.on_training_grid}
    counts, frozen = {}, {}
    for name, model in on_grid.items():
        parts = without_frozen_tower(config, model)
        counts[name], frozen[name] = (count_stages(own, layout.placement(model)) for own in parts)
    adapters = {
        name: count_stages(model.adapter_parts, layout.placement(model))
        for name, model in on_grid.items()
        if model.adapters
    }
    in_fp8 = {
        name: count_stages(linear_parts(model), layout.placement(model))
        for name, model in on_grid.items()
        if model.adapters and config.adapter.base == "fp8"
    }
    head = models.get("mtp")
    engine = engine_memory(config, layout, models, hardware, points=points) if needs_engine(config) else None
    stages = []
    for stage in range(layout.pp):
        states = {
            name: model_state(
                counts[name][stage],
                layout,
                itemsize,
                on_grid[name].run.optimizer,
                adapters=adapters[name][stage] if name in adapters else None,
                points=points,
                shares_base=on_grid[name].run.shares_base,
                in_fp8=in_fp8[name][stage].parameters if name in in_fp8 else 0,
                frozen=frozen[name][stage].parameters,
            )
            for name in counts
        }
        if head is not None:
            own = count_stages(head.parts, layout.placement(models["policy"]))[stage]
            states["mtp"] = model_state(own, layout, itemsize, head.run.optimizer)
        learning = [model for model in on_grid.values() if model.run.learns]
        # One model computes at a time, so the largest counts.
        passes = [passes_of(config, layout, model, stage, hardware, head) for model in learning]
        work = max(passes, key=lambda own: own.peak, default=Passes())  # or nothing learns
        if hardware.is_cpu and engine is not None and not layout.is_split:  # freed, but not returned
            held = sum(state.total for state in states.values()) + engine.weights + hardware.reserve
            left = min(engine.workspace, (TRIM_GROWTH - 1) * held)
            work = replace(work, retained=max(work.retained, left - work.kept))
        if hardware.is_cpu:  # gloo reduces a copy of the gradients, beside what glibc holds of the passes
            copied = max(state.gradients for state in states.values())
            kept = max(work.working, work.head - work.returned)
            work = replace(work, head=max(work.head, kept + copied))
        stages.append(StageMemory(states, work.peak - work.of_head, work.of_head))
    references = [
        adapters.get(name, counts[name])[0 if layout.pp == 1 else 1]
        for name, model in on_grid.items()
        if model.run.keeps_reference
    ]
    buffers = config.refit.buffer_mib << 20
    if engine is not None and config.rollout.quantization == "none":  # a rank sends and receives no more
        held = max(sum(state.weights for state in stage.states.values()) for stage in stages)
        buffers = min(buffers, held + engine.weights) if layout.num_ranks > 1 else 0
    auto = "none" if hardware.is_cpu else "all"
    return MemoryEstimate(
        stages,
        engine,
        frozen=frozen_memory(config, layout, models, hardware),
        refit_buffers=buffers,
        connections=0,
        communicators=0 if hardware.is_cpu else num_communicators(config, layout, models),
        offload=auto if config.training.offload == "auto" else config.training.offload,
        reference=points * sum(itemsize * count.parameters for count in references),
        is_split=layout.is_split,
        hardware=hardware,
    )


def num_communicators(config: Config, layout: Layout, models: Mapping[str, ModelShape]) -> int:
    """Return the number of NCCL communicators of a rank: a training step's, and those of vLLM's groups."""
    trained = num_training_groups(config, layout, models)
    if not needs_engine(config):
        return trained
    sizes = [layout.rollout_tp]
    if models["policy"].num_experts:  # vLLM's groups ep and dp
        sizes += [max(layout.rollout_tp, layout.rollout_ep), layout.rollout_sharing]
    served = sum(size > 1 for size in sizes)
    return max(trained, 1 + served) if layout.is_split else trained + served


def num_training_groups(config: Config, layout: Layout, models: Mapping[str, ModelShape]) -> int:
    """Return the number of groups of several ranks on which a rank communicates in a training step."""
    on_grid = [model for model in models.values() if model.run.on_training_grid]
    # The ranks of a copy take the place of a tensor parallel group; a class holds rows of its experts.
    return num_step_groups(
        layout.world_size,
        **dict(tp=layout.tp * layout.shard, pp=layout.pp, cp=layout.cp, ep=layout.ep, etp=layout.etp),
        has_experts=not is_on(config, CLASS) and any(model.num_experts for model in on_grid),
        ties_embedding=any(is_tied(model.hf) for model in on_grid),
    )


def linear_parts(model: ModelShape) -> list[CountedWeight]:
    """Return the weights of linear layers, without routers, embedding and head."""
    layers = {pair.base.hf for pair in adapters_of(model.weights, rank=1)}
    return [part for part in model.parts if part.weight.hf in layers]


def model_state(
    count: StageCount,
    layout: Layout,
    itemsize: int,
    adam: Optimizer | None,
    *,
    adapters: StageCount | None = None,
    points: int = 1,
    shares_base: bool = False,
    in_fp8: int = 0,
    frozen: int = 0,
) -> State:
    """Return the bytes of weights, gradients and optimizer state of one model on a rank.

    Gradient sums are float32. The optimizer state is Adam's two moments and a float32 copy of 16-bit weights;
    the data parallel ranks shard it, and `host_share` of it is in host memory.

    adam: None for a frozen model. adapters: the weights that learn, if the others are frozen. points: number
    of such sets on the same base. shares_base: another model holds the frozen ones. in_fp8: number of frozen
    weights in FP8, with a float32 factor per block. frozen: number of further weights that never learn.
    """
    if adapters is not None:
        own = model_state(adapters, layout, itemsize, adam)
        lengths = adapters.buffers  # DoRA's, which learn in float32
        base = 0 if shares_base else model_state(count, layout, itemsize, None, frozen=frozen).weights
        base -= in_fp8 * (itemsize - 1) - 4 * in_fp8 // FP8_BLOCK**2
        return State(
            base + points * own.weights,
            points * (own.gradients + 4 * lengths),
            points * (own.optimizer + 8 * lengths // layout.dp),
            points * own.in_host,
            own.returned,
            points * own.moments,
        )
    if adam is None:
        return State(itemsize * (count.parameters + frozen) + 4 * count.buffers)
    shared = buffer_elements(count.shared, layout.sharded_over)
    if count.tied:
        shared += buffer_elements([count.tied], layout.sharded_over)
    experts = buffer_elements(count.experts, layout.expert_dp)
    master = 0 if itemsize == 4 else 4
    sharded = shared // layout.sharded_over + experts // layout.expert_dp
    moments = 2 * ITEMSIZE[adam.moments] * sharded
    optimizer = master * sharded + moments
    in_host = round(adam.host_share * optimizer)
    return State(
        itemsize * (shared + experts + frozen) + 4 * count.buffers,
        4 * (shared + experts),
        optimizer - in_host,
        in_host,
        round(adam.host_share * master * sharded),
        moments - round(adam.host_share * moments),
    )


def engine_memory(
    config: Config, layout: Layout, models: Mapping[str, ModelShape], hardware: Hardware, *, points: int = 1
) -> EngineMemory:
    """Return the memory of the policy's engine, with what proposes draft tokens.

    It holds `points` adapters if it holds them unmerged.
    """
    rollout, itemsize = config.rollout, ITEMSIZE[config.model.dtype]
    model, drafter = models["policy"], models.get(DRAFTERS[rollout.draft.method])
    placement = layout.rollout_placement(model)
    elements, float32 = count_engine(model.parts, placement)
    if config.adapter.in_engine == "adapter":
        elements += points * count_engine(model.adapter_parts, placement)[0]
    hidden, vocab = model.hf["hidden_size"], model.hf["vocab_size"]
    query, _ = model.heads_width
    width = 3 * hidden + max(3 * ffn_width(model.hf), 3 * query) / rollout.tp
    # A step of replicas that share experts has as many tokens as one of a replica that has its own.
    width /= layout.rollout_sharing
    if model.num_experts:
        width += model.experts_per_token * 2 * hidden
    generated = points * step_samples(config, layout)
    samples, step_tokens = float(rollout.max_concurrent_samples), float(BATCHED_TOKENS)
    if hardware.is_cpu:  # it allocates for the samples that it has
        samples = min(samples, generated)
        step_tokens = min(BATCHED_TOKENS_ON_CPU * rollout.tp, generated * longest_sequence(config))
    rows = 1 + rollout.draft.tokens if rollout.draft.is_on else 1
    sampler = 3 * 4 * samples * rows * vocab
    in_fp8 = count_engine(parts_in_fp8(config, model), placement)[0]
    saved = in_fp8 * (itemsize - 1) - 4 * in_fp8 // FP8_BLOCK**2
    cached = [model.cache_elements(rollout.tp)]
    elements += model.derived_elements(rollout.tp)
    if drafter is not None:
        own, in_float32 = count_engine(drafter.parts, layout.rollout_placement(drafter))
        elements, float32 = elements + own + drafter.derived_elements(rollout.tp), float32 + in_float32
        cached.append(drafter.cache_elements(rollout.tp))
    weights, workspace = itemsize * elements + 4 * float32 - saved, step_tokens * width * itemsize + sampler
    states = rollout.max_concurrent_samples * model.state_bytes(rollout.tp, itemsize)
    budget, unused = rollout.gpu_memory_utilization * hardware.memory, 0.0
    if hardware.is_cpu:  # with oneDNN's packed copies of linear layers and of the head
        packed = count_engine(linear_parts(model), placement)[0] + head_rows(rollout.tp, model) * hidden
        workspace, cache = workspace + itemsize * packed, rollout.cpu_kv_cache_mib << 20
        budget = weights + workspace + states + cache
        unused = max(0.0, cache - itemsize * sum(cached) * generated * longest_sequence(config))
    return EngineMemory(
        budget,
        weights,
        workspace,
        itemsize * sum(cached),
        longest_sequence(config),
        staged=itemsize * in_fp8 / REFIT_GROUPS,
        states=states,
        unused=unused,
    )


def frozen_memory(
    config: Config, layout: Layout, models: Mapping[str, ModelShape], hardware: Hardware
) -> dict[str, EngineMemory]:
    """Return the memory of the engines with fixed weights, which `rl.engines.rollout_engines` builds."""
    judge, teacher, data, found = config.reward.judge, config.teacher, config.data, {}

    def add(name: str, model: ModelShape, share: float, prompt: int, response: int) -> None:
        rollout = replace(
            config.rollout,
            gpu_memory_utilization=share,
            max_response_tokens=response,
            quantization="none",
            draft=Draft(),
        )
        own = replace(
            config, adapter=Adapter(), rollout=rollout, data=replace(data, max_prompt_tokens=prompt)
        )
        found[name] = engine_memory(own, layout, {"policy": model}, hardware)

    if "judge" in models:
        tokens = judge.max_prompt_tokens, judge.max_response_tokens
        add("judge", models["judge"], judge.gpu_memory_utilization, *tokens)
    if teacher.teacher_share and config.run.mode != "train_only":
        tokens = data.max_prompt_tokens, config.rollout.max_response_tokens
        add("teacher", models["teacher 1"], teacher.gpu_memory_utilization, *tokens)
    return found


def step_samples(config: Config, layout: Layout) -> float:
    """Return the number of samples that a replica generates before its cache is released; inf if unknown.

    Replicas draw whole prompts. An agent may repeat a trajectory, and drafts are tested with more samples.
    """
    repeats = config.rollout.carry_over or is_on(config, "needs dynamic_sampling") or validates(config)
    unknown = config.run.mode != "train" or config.agents.is_on or config.rollout.draft.is_on
    if repeats or unknown or layout.is_split:
        return math.inf
    of_prompt = sequences_per_prompt(config) + is_on(config, "greedy baselines")
    return math.ceil(config.data.prompts_per_step / layout.replicas) * of_prompt


def parts_in_fp8(config: Config, model: ModelShape) -> list[CountedWeight]:
    """Return the weights that the policy's engine holds in FP8."""
    if config.rollout.quantization == "none":
        return []
    names = {weight.hf for weight in quantised_weights([part.weight for part in model.parts])}
    return [part for part in model.parts if part.weight.hf in names]
