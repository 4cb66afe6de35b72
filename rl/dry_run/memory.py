"""What lies in a GPU's memory at the two ends of a step: in training and in generation, by kind, for each pipeline stage.

Weights, gradients and optimizer state are exact (tests/dry_run). Activations are counted from the widths of the layers: what
the backward pass of the packed rows needs, with 16 bits per number where the model has 16. What cannot be counted is
`Hardware.reserve`. `T` are the tokens of a micro-batch; a tensor parallel rank keeps T/tp of what lies between the tensor
parallel regions if the sequence is parallel.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rl.config.schema import Config, algorithm_of, needs_engine
from rl.dry_run.hardware import Hardware
from rl.dry_run.parameters import StageCount, buffer_elements, count_engine, count_stages
from rl.dry_run.shape import Model
from rl.models.layout import padded_vocab, vocab_multiple
from rl.models.placement import TrainingPlacement, training_ranges

ITEMSIZE = {"bfloat16": 2, "float32": 4}
BATCHED_TOKENS = 16384
"""Tokens of one step of the engine at most: vLLM's max_num_batched_tokens for `LLM` on a GPU of 70 GiB or more."""
HEAD_COPIES = 5
"""float32 arrays of the size of a chunk's logits that live at once in rl.training.logprobs' backward pass."""


@dataclass(frozen=True)
class Layout:
    """The grids of a run."""

    world_size: int
    tp: int
    pp: int
    ep: int
    etp: int
    rollout_tp: int
    sequence_parallel: bool

    @property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.pp)

    @property
    def expert_dp(self) -> int:
        """Replicas of a routed expert within a stage."""
        return self.world_size // (self.etp * self.ep * self.pp)

    @property
    def replicas(self) -> int:
        return self.world_size // self.rollout_tp

    def placement(self, model: Model) -> TrainingPlacement:
        """Where the model's weights lie in training."""
        etp = self.etp if model.num_experts else None
        return TrainingPlacement(
            self.world_size,
            self.tp,
            self.pp,
            model.num_layers,
            ep=self.ep,
            etp=etp,
            num_experts=model.num_experts,
        )


@dataclass(frozen=True)
class State:
    """Bytes of one model on a rank."""

    weights: int
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class StageMemory:
    """Bytes on a rank of one pipeline stage."""

    states: Mapping[str, State]
    """By model."""
    activations: float
    """Saved for the backward pass, of all micro-batches under way, and the working space of a layer."""
    head: float
    """Of the log-prob computation, on the last stage; with the saved activations the other end of the same pass."""

    @property
    def state(self) -> int:
        return sum(state.total for state in self.states.values())


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of the generation engine on a rank, and tokens."""

    budget: float
    """gpu_memory_utilization times the GPU's memory: all that follows."""
    weights: int
    workspace: float
    """Activations of a step's tokens and the sampler's logits."""
    bytes_per_token: int
    max_tokens: int
    """Of a sequence."""

    @property
    def cache(self) -> float:
        return self.budget - self.weights - self.workspace

    @property
    def cache_tokens(self) -> int:
        return max(0, int(self.cache // self.bytes_per_token))


@dataclass(frozen=True)
class Memory:
    """Of the whole run."""

    stages: list[StageMemory]
    engine: EngineMemory | None
    judge: float
    """The judge's share, which stays."""
    refit_buffers: float
    offload: str
    """What leaves the GPU while the engine has its turn, `training.offload`: none, optimizer or all."""
    reference: int
    """Bytes of host memory on a rank for reference weights, while they are in use."""
    hardware: Hardware = field(repr=False)

    @property
    def away(self) -> int:
        """Bytes of host memory on a rank that offloading takes; gradients are not kept."""
        if self.offload == "none" or self.engine is None:
            return 0
        return max(
            sum(
                state.optimizer + (state.weights if self.offload == "all" else 0)
                for state in stage.states.values()
            )
            for stage in self.stages
        )

    def stays(self, phase: str, state: State) -> State:
        """What of a model is on the GPU in a phase. A refit reads weights."""
        if phase == "training" or self.offload == "none" or self.engine is None:
            return state
        return State(state.weights if phase == "refit" or self.offload == "optimizer" else 0)

    def peak(self, phase: str) -> tuple[float, int]:
        """Bytes at the worst stage in a phase, reserve included, and that stage: training, refit or generation."""
        totals = [self.at(phase, stage) for stage in self.stages]
        return max(totals), totals.index(max(totals))

    def at(self, phase: str, stage: StageMemory) -> float:
        """Bytes on a rank of the stage in a phase."""
        stays = (
            sum(self.stays(phase, state).total for state in stage.states.values())
            + self.judge
            + self.hardware.reserve
        )
        if phase == "training" or self.engine is None:
            return stays + stage.activations + stage.head
        if phase == "refit":
            return stays + self.engine.weights + self.refit_buffers
        return stays + self.engine.budget

    def problems(self) -> list[str]:
        """What does not fit, one sentence each."""
        out = []
        for phase in ("training", "refit", "generation") if self.engine else ("training",):
            total, stage = self.peak(phase)
            if total > self.hardware.memory:
                out.append(
                    f"{phase} needs {_gib(total)} GiB on stage {stage}, but a GPU has {self.hardware.gpu_memory_gib:g} GiB: "
                    f"{_gib(total - self.hardware.memory)} GiB too much"
                )
        if self.engine is not None and self.engine.cache_tokens < self.engine.max_tokens:
            out.append(
                f"the engine's share of {_gib(self.engine.budget)} GiB leaves {_gib(max(0, self.engine.cache))} GiB for the KV "
                f"cache, {self.engine.cache_tokens} tokens, but one sequence may have {self.engine.max_tokens}"
            )
        return out


def _gib(number: float) -> str:
    return f"{number / (1 << 30):.1f}"


def layout_of(config: Config, world_size: int) -> Layout:
    training = config.training
    return Layout(
        world_size,
        training.tp,
        training.pp,
        training.ep,
        training.expert_tp,
        config.rollout.tp,
        training.sequence_parallel,
    )


def estimate_memory(
    config: Config, world_size: int, models: Mapping[str, Model], hardware: Hardware
) -> Memory:
    """The memory of a run with a layout that is valid."""
    layout, itemsize = layout_of(config, world_size), ITEMSIZE[config.model.dtype]
    on_grid = {name: model for name, model in models.items() if model.trained_layout}
    counts = {name: count_stages(model.parts, layout.placement(model)) for name, model in on_grid.items()}
    stages = []
    for stage in range(layout.pp):
        states = {
            name: model_state(counts[name][stage], layout, itemsize, learns=on_grid[name].learns)
            for name in counts
        }
        learning = [model for model in on_grid.values() if model.learns]
        # One model at a time: the largest counts.
        work = max(_activations(config, layout, model, stage, hardware) for model in learning)
        stages.append(StageMemory(states, *work))
    references = [
        counts[name][0 if layout.pp == 1 else 1] for name, model in on_grid.items() if model.keeps_reference
    ]
    judge = models["judge"] if "judge" in models else None
    return Memory(
        stages,
        engine_memory(config, models["policy"], hardware) if needs_engine(config) else None,
        judge=hardware.memory * config.reward.judge.gpu_memory_utilization if judge else 0.0,
        refit_buffers=config.refit.buffer_mib << 20,
        offload="all" if config.training.offload == "auto" else config.training.offload,
        # The copy, and the model's own weights while the two have changed places.
        reference=sum(2 * itemsize * count.parameters for count in references),
        hardware=hardware,
    )


def model_state(count: StageCount, layout: Layout, itemsize: int, *, learns: bool) -> State:
    """Weights, float32 gradient sums, and Adam's two moments (with a float32 copy of 16-bit weights), which the data
    parallel ranks share."""
    if not learns:
        return State(itemsize * count.parameters + 4 * count.buffers)
    shared = buffer_elements(count.shared, layout.dp)
    if count.tied:
        shared += buffer_elements([count.tied], layout.dp)
    experts = buffer_elements(count.experts, layout.expert_dp)
    moments = 8 if itemsize == 4 else 12
    return State(
        itemsize * (shared + experts) + 4 * count.buffers,
        4 * (shared + experts),
        moments * (shared // layout.dp + experts // layout.expert_dp),
    )


def longest_row(config: Config) -> int:
    """Most tokens of a micro-batch: a longer sequence forms one of its own."""
    return max(
        config.training.micro_batch_tokens, config.data.max_prompt_tokens + config.rollout.max_response_tokens
    )


def num_micro_batches(config: Config, layout: Layout, tokens_per_sequence: float) -> int:
    """Of one mini-batch on one data parallel rank."""
    prompts = config.training.prompts_per_minibatch or config.data.prompts_per_step
    tokens = prompts * sequences_per_prompt(config) * tokens_per_sequence / layout.dp
    return max(1, math.ceil(tokens / config.training.micro_batch_tokens))


def sequences_per_prompt(config: Config) -> int:
    """Sequences that the algorithm trains on for each prompt: its samples and the data's own responses."""
    needs = algorithm_of(config).needs
    given = {"responses": 1, "pairs": 2}
    return (
        sum(given.get(need, 0) for need in needs) + ("samples" in needs) * config.rollout.samples_per_prompt
    )


def _activations(
    config: Config, layout: Layout, model: Model, stage: int, hardware: Hardware
) -> tuple[float, float]:
    """Bytes of (activations, head) of one stage in a training pass, the larger of the two ends: the backward pass of a
    layer, and of the head."""
    itemsize, tokens = ITEMSIZE[config.model.dtype], longest_row(config)
    kept_tokens = tokens / layout.tp if layout.sequence_parallel else tokens
    longest_sample = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    # 1F1B: an earlier stage has as many micro-batches under way as there are stages from it on.
    under_way = min(layout.pp - stage, num_micro_batches(config, layout, longest_sample))
    hidden = model.hf["hidden_size"]
    layers = [
        layer_elements(model, layer, layout, tokens, hardware.expert_imbalance)
        for layer in _layers_of(layout.placement(model), stage)
    ]
    if config.training.recompute:
        saved = len(layers) * hidden * kept_tokens * itemsize
        working = max(layers) * itemsize
    else:
        saved, working = sum(layers) * itemsize, 0.0
    # The gathered input of a tensor parallel region and the gradient of the widest activation.
    working += (hidden + max(_widest(model, layout), hidden / layout.tp)) * tokens * itemsize
    is_last = stage == layout.pp - 1
    head = _head(config, layout, model, tokens, itemsize) if is_last else 0.0
    if head > working:
        return saved * under_way, head
    return saved * under_way + working, 0.0


def _layers_of(placement: TrainingPlacement, stage: int) -> range:
    return range(*training_ranges(placement.num_layers, placement.pp)[stage])


def layer_elements(model: Model, layer: int, layout: Layout, tokens: float, imbalance: float) -> float:
    """Numbers that the backward pass of a layer needs, on one rank: input and output of every matrix product, and queries
    and keys again after the rotary embedding."""
    tp, shared, experts = layout.tp, 0.0, 0.0
    cut_in = tp if layout.sequence_parallel else 1
    for part in _parts_of_layer(model, layer):
        weight = part.weight
        if len(weight.shapes[0]) < 2:
            continue
        rows, columns = sum(shape[0] for shape in weight.shapes), weight.shapes[0][1]
        if weight.expert is not None:
            # Whole experts, or a part of each for the tokens of etp ranks.
            is_down = len(weight.shapes) == 1
            inner, outer = (columns, rows) if is_down else (rows, columns)
            experts += outer * layout.etp + inner
        elif not weight.cut.split:
            shared += (rows + columns) / cut_in
        elif len(weight.shapes) == 1 and rows == model.hf["hidden_size"]:
            shared += columns / tp + rows / cut_in
        else:
            shared += columns / cut_in + rows / tp
    query, value = model.heads_width
    rotated = (
        query + (model.hf.get("num_key_value_heads") or query) * query // model.hf["num_attention_heads"]
    ) / tp
    per_rank = tokens / tp if layout.sequence_parallel else tokens
    # Norms keep their inputs: the residual stream before the attention and before the MLP.
    norms = 2 * model.hf["hidden_size"] / cut_in
    return (shared + rotated + norms) * tokens + experts * model.experts_per_token * per_rank * imbalance


def _parts_of_layer(model: Model, layer: int):
    return [part for part in model.parts if part.weight.layer == layer]


def _widest(model: Model, layout: Layout) -> float:
    """Numbers per token of the widest activation of a dense layer."""
    query, _ = model.heads_width
    return max(2 * model.hf["intermediate_size"], 3 * query) / layout.tp


def _head(config: Config, layout: Layout, model: Model, tokens: int, itemsize: int) -> float:
    """Hidden states of all tokens, gathered and picked, and their gradient; for log-probs also a chunk's logits and the
    gradient of the head's weights, which chunks add up in float32."""
    hidden = model.hf["hidden_size"]
    states = 3 * hidden * tokens * itemsize
    if not model.has_head:
        return states
    rows = padded_vocab(model.hf["vocab_size"], vocab_multiple(layout.tp)) // layout.tp
    chunk = min(config.training.head_chunk_tokens, tokens)
    gradient = (4 + itemsize) * rows * hidden
    return states + HEAD_COPIES * 4 * chunk * rows + gradient


def engine_memory(config: Config, model: Model, hardware: Hardware) -> EngineMemory:
    """Of the policy's engine."""
    rollout, itemsize = config.rollout, ITEMSIZE[config.model.dtype]
    elements, float32 = count_engine(model.parts, rollout.tp)
    hidden, vocab = model.hf["hidden_size"], model.hf["vocab_size"]
    query, _ = model.heads_width
    width = 3 * hidden + max(3 * model.hf["intermediate_size"], 3 * query) / rollout.tp
    if model.num_experts:
        width += model.experts_per_token * 2 * hidden
    sampler = 3 * 4 * rollout.max_concurrent_samples * vocab
    return EngineMemory(
        rollout.gpu_memory_utilization * hardware.memory,
        itemsize * (elements + model.derived_elements(rollout.tp)) + 4 * float32,
        BATCHED_TOKENS * width * itemsize + sampler,
        itemsize * model.cache_elements(rollout.tp),
        config.data.max_prompt_tokens + rollout.max_response_tokens,
    )
