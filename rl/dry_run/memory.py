"""Memory of a rank in training, refit and generation, by kind, for each pipeline stage.

Weights, gradients and optimizer state are exact (tests/ranks/dry_run). Activations are estimated from the
widths of the layers: the elements that the backward pass of packed rows needs, in the model's dtype.
`Hardware` has figures for NCCL's communicators and for the rest. Under sequence parallelism a tensor parallel
rank keeps T/tp of the T tokens of a micro-batch between the tensor parallel regions.

Ranks on CPUs keep all models and the engine's weights in all phases. Their activations are those of
unfused layers, and glibc keeps a share of the freed memory.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rl.config.features import CLASS, is_on
from rl.config.needs import needs_engine
from rl.config.schema import Config, Optimizer
from rl.config.wing import door
from rl.dry_run.grids import Layout, layout_of
from rl.dry_run.hardware import Hardware
from rl.dry_run.images import tower_bytes, without_frozen_tower
from rl.dry_run.parameters import CountedWeight, StageCount, buffer_elements, count_engine, count_stages
from rl.dry_run.recompute import EVERYTHING, Kept, kept_and_computed_again, kept_parts
from rl.dry_run.rows import (
    longest_row,
    longest_sequence,
    micro_batches_in_flight,
    num_micro_batches,
    with_actual_rows,
)
from rl.dry_run.shape import DRAFTERS, ModelShape
from rl.models.adapters import adapters as adapters_of
from rl.models.fp8_blocks import REFIT_GROUPS, quantised_weights
from rl.models.layout import FP8_BLOCK, padded_vocab, vocab_multiple
from rl.models.placement import chunk_ranges, num_step_groups
from rl.models.sizes import ffn_width, is_tied, layer_kinds, num_kv_heads

ITEMSIZE = {"bfloat16": 2, "float32": 4}
BATCHED_TOKENS = 16384
"""Maximum tokens of one engine step: vLLM's default max_num_batched_tokens on a GPU of 70 GiB or more."""
BATCHED_TOKENS_ON_CPU = 4096
"""Maximum tokens of one engine step per tensor parallel rank: vLLM's default on CPUs."""
RETAINED = 0.75
"""Freed memory that glibc can neither use for the next micro-batch nor return / activations of a micro-batch
(0.64 to 0.84 with SmolLM2-135M): small objects are between tensors, and blocks of aligned memory do not fit
again. The first micro-batches of a phase find none, because freed memory is returned between phases;
those of its later updates find little (with SmolLM2-135M and two updates 0.03 of the peak)."""
HEAD_COPIES = 2
"""Number of arrays of a chunk's logits, in the weights' dtype, that coexist in rl.training.logprobs on CUDA:
the current chunk's, and the previous chunk's, which is still referenced."""


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

    @property
    def total(self) -> int:
        """Bytes on the GPU, without `returned`."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class Passes:
    """Memory of the training passes of a model on a rank of one stage."""

    kept: float
    """Bytes that all micro-batches in flight save for their backward passes."""
    retained: float
    """Bytes that glibc still holds of earlier micro-batches (RETAINED)."""
    working: float
    """Bytes that the computation of one layer needs."""
    head: float
    """Bytes that the computation of the head needs. Layer and head do not compute at the same time."""

    @property
    def of_head(self) -> float:
        """The head's bytes if the peak is there, else 0."""
        return self.head if self.head > self.working else 0.0

    @property
    def peak(self) -> float:
        return self.kept + self.retained + max(self.working, self.head)


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
    judge: float
    """Bytes of the judge, in all phases."""
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
        stays = states + self.judge + self.connections + self.in_communicators + self.hardware.reserve
        if self.hardware.is_cpu:
            stays += self.away + self.reference + self.optimizer_in_host + self.idle_engine(phase)
        if phase == "training" or self.engine is None:
            returned = max(state.returned for state in stage.states.values())
            return stays + max(stage.activations + stage.head, returned)
        if phase == "refit":
            weights = 0 if self.is_split else self.engine.weights + self.engine.staged
            return stays + weights + self.refit_buffers
        return stays + self.engine.budget

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
        if self.engine is not None and self.engine.cache_tokens < self.engine.max_tokens:
            out.append(
                f"the engine's share of {_gib(self.engine.budget)} GiB leaves "
                f"{_gib(max(0, self.engine.cache))} GiB for the KV cache, {self.engine.cache_tokens} "
                f"tokens, but one sequence may have {self.engine.max_tokens} tokens"
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
        passes = [_activations(config, layout, model, stage, hardware, head) for model in learning]
        work = max(passes, key=lambda own: own.peak, default=Passes(0.0, 0.0, 0.0, 0.0))  # or nothing learns
        if hardware.is_cpu:  # gloo reduces a copy of the gradients when the last pass has freed its memory
            freed = work.kept - max(0.0, RETAINED * work.kept - work.retained)
            copied = max(state.gradients for state in states.values()) - freed
            work = replace(work, head=max(work.head, copied))
        stages.append(StageMemory(states, work.peak - work.of_head, work.of_head))
    references = [
        adapters.get(name, counts[name])[0 if layout.pp == 1 else 1]
        for name, model in on_grid.items()
        if model.run.keeps_reference
    ]
    judge = models["judge"] if "judge" in models else None
    auto = "none" if hardware.is_cpu else "all"
    return MemoryEstimate(
        stages,
        engine_memory(config, layout, models, hardware, points=points) if needs_engine(config) else None,
        judge=hardware.memory * config.reward.judge.gpu_memory_utilization if judge else 0.0,
        refit_buffers=config.refit.buffer_mib << 20,
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
        )
    if adam is None:
        return State(itemsize * (count.parameters + frozen) + 4 * count.buffers)
    shared = buffer_elements(count.shared, layout.sharded_over)
    if count.tied:
        shared += buffer_elements([count.tied], layout.sharded_over)
    experts = buffer_elements(count.experts, layout.expert_dp)
    master = 0 if itemsize == 4 else 4
    sharded = shared // layout.sharded_over + experts // layout.expert_dp
    optimizer = (master + 2 * ITEMSIZE[adam.moments]) * sharded
    in_host = round(adam.host_share * optimizer)
    return State(
        itemsize * (shared + experts + frozen) + 4 * count.buffers,
        4 * (shared + experts),
        optimizer - in_host,
        in_host,
        round(adam.host_share * master * sharded),
    )


def _activations(
    config: Config,
    layout: Layout,
    model: ModelShape,
    stage: int,
    hardware: Hardware,
    predictor: ModelShape | None,
) -> Passes:
    """Return the bytes of the training passes of one stage.

    The peak is in the backward pass of a layer or of a head: the head for log-probs, or the policy's head for
    multi-token prediction (`predictor`), which computes after the last layer's forward pass.
    """
    itemsize, row = ITEMSIZE[config.model.dtype], longest_row(config, layout)
    tokens = math.ceil(row / layout.cp)
    kept_tokens = tokens / layout.tp if layout.sequence_parallel else tokens
    number = num_micro_batches(config, layout, longest_sequence(config))
    in_flight = micro_batches_in_flight(layout, stage, number)
    hidden, imbalance = model.hf["hidden_size"], hardware.expert_imbalance
    chunks = chunk_ranges(model.num_layers, layout.pp, layout.vpp)[stage]
    own = [layer for first, stop in chunks for layer in range(first, stop)]

    def elements(parts: Kept) -> list[float]:
        more = unfused_elements if hardware.is_cpu else lambda *_: 0.0
        return [
            layer_elements(model, layer, layout, tokens, imbalance, parts)
            + more(model, layer, layout, tokens, itemsize, parts)
            for layer in own
        ]

    saved, working, kept_keys = kept_and_computed_again(
        config.training, elements(EVERYTHING), elements(kept_parts(config.training)), hidden * kept_tokens
    )
    saved, working = saved * itemsize, working * itemsize
    # The gathered input of a tensor parallel region and the gradient of the widest activation.
    working += (hidden + max(_widest(model, layout), hidden / layout.tp)) * tokens * itemsize
    if stage == 0:
        of_images, while_encoding = tower_bytes(config, model, row, itemsize)
        saved, working = saved + of_images, max(working, while_encoding)
    keys = _key_elements(model) / layout.tp * row * itemsize
    if model.hf.get("kv_lora_rank"):
        working += keys  # with the rotary part, and values of the width of keys
    if layout.cp > 1:
        # Keys and values of the whole row for the backward pass, and a copy in another order.
        saved += keys * max(1, kept_keys)
        working += keys
    head = 0.0
    if stage == layout.pp - 1:
        head = _head(config, layout, model, tokens, itemsize, is_cpu=hardware.is_cpu)
        if predictor is not None and predictor.run.learns and model.run.name == "policy":
            head = max(head, _prediction(config, layout, predictor, tokens, imbalance, itemsize))
    if (own_bytes := door(config, "pass_bytes")) is not None:
        found = own_bytes(
            json.dumps(model.hf, sort_keys=True),
            config.training.recompute,
            config.model.dtype,
            values=not model.has_head,
            rank=config.adapter.rank if model.adapters else 0,
            shard=layout.shard,
            tokens=tokens,
            length=min(tokens, longest_sequence(config)),
            is_cpu=hardware.is_cpu,
            targets=tuple(config.adapter.targets),
        )
        saved, working = found or (saved, working)
        if layout.shard > 1:  # the whole head
            head += itemsize * _head_rows(layout, model) * hidden
    retained = RETAINED * saved * in_flight * (hardware.is_cpu and number > in_flight)
    return Passes(saved * in_flight, retained, working, head)


def layer_elements(
    model: ModelShape,
    layer: int | None,
    layout: Layout,
    tokens: float,
    imbalance: float,
    parts: Kept = EVERYTHING,
) -> float:
    """Return the number of elements that the backward pass of a layer needs on one rank.

    These are input and output of every matrix product, and queries and keys after the rotary embedding, or
    what a gated delta net computes from.
    parts: the parts that keep their activations. Of an MLP, of experts and of up-projections that are
    computed again, the input is kept; queries and keys are the attention's own copies.
    """
    tp, shared, experts = layout.tp, 0.0, 0.0
    cut_in = tp if layout.sequence_parallel else 1
    for weight in model.matrices.get(layer, ()):
        rows, columns = sum(shape[0] for shape in weight.shapes), weight.shapes[0][-1]
        if not parts.holds(weight):
            is_input = "linear_fc1" in weight.megatron and columns == model.hf["hidden_size"]
            if weight.expert is None and (is_input or "_up_proj." in weight.megatron):
                shared += columns / cut_in
            continue
        if weight.expert is not None:
            # Whole experts, or with etp a part of each for the tokens of etp ranks.
            is_down = "linear_fc2" in weight.megatron
            inner, outer = (columns, rows) if is_down else (rows, columns)
            experts += outer * layout.etp + inner
        elif weight.is_routed and model.num_experts:
            experts += weight.num_elements / columns / model.num_experts + columns
        elif not weight.cut.split:
            shared += (rows + columns) / cut_in
        elif len(weight.shapes) == 1 and rows == model.hf["hidden_size"]:
            shared += columns / tp + rows / cut_in
        else:
            shared += columns / cut_in + rows / tp
    query, value = model.heads_width
    rotated = (query + num_kv_heads(model.hf) * query // model.hf["num_attention_heads"]) / tp
    if model.num_recurrent and layer is not None and layer_kinds(model.hf)[layer] == "linear_attention":
        # Of the whole row: normed queries and keys per value head, values, a chunk's scores, outputs.
        heads, keys, values = model.recurrence
        rotated = heads * (2 * keys + 2 * values + 64) / tp * layout.cp
    per_rank = tokens / tp if layout.sequence_parallel else tokens
    # Inputs of the norms: the residual stream before the attention and before the MLP.
    norms = 2 * model.hf["hidden_size"] / cut_in
    return (shared + rotated + norms) * tokens + experts * model.experts_per_token * per_rank * imbalance


def unfused_elements(
    model: ModelShape, layer: int | None, layout: Layout, tokens: float, itemsize: int, parts: Kept
) -> float:
    """Return the elements that a dense layer keeps on a CPU beyond `layer_elements`.

    A gated MLP also keeps the activated gate and a copy of its other half. A norm also keeps its normalised
    input; with 16 bits it keeps this and its input in float32 instead of the input. The outputs of the last
    products of the attention and of the MLP are not kept.
    """
    cut_in, hidden = layout.tp if layout.sequence_parallel else 1, model.hf["hidden_size"]
    found = (2 if itemsize == 4 else 6) * hidden / cut_in
    for weight in filter(parts.holds, model.matrices.get(layer, ())):
        rows = sum(shape[0] for shape in weight.shapes)
        if "linear_fc1" in weight.megatron and len(weight.shapes) == 2:
            found += rows / layout.tp * (1 if weight.expert is None else model.experts_per_token)
        elif weight.expert is None and len(weight.shapes) == 1 and rows == hidden:
            found -= rows / cut_in
    return found * tokens


def _key_elements(model: ModelShape) -> float:
    """Return the elements of keys and values per token and layer, over all heads (MLA: after projection)."""
    heads = num_kv_heads(model.hf) / model.hf["num_attention_heads"]
    return sum(model.heads_width) * (1 if model.hf.get("kv_lora_rank") else heads)


def gathered_elements(model: ModelShape, layout: Layout) -> float:
    """Return the elements per token and layer that context parallel ranks gather.

    These are keys and values, for MLA the latent and the rotary key (`rl.training.gathered_latents`).
    """
    hf, tp = model.hf, layout.tp
    if not hf.get("kv_lora_rank"):
        return _key_elements(model) / tp
    return hf["kv_lora_rank"] / (tp if layout.sequence_parallel else 1) + hf["qk_rope_head_dim"]


def gathered_bytes(model: ModelShape, layout: Layout, tokens: float, itemsize: int) -> float:
    """Return the bytes that a rank receives in the attention of one layer in one pass of a row of tokens."""
    return tokens * (layout.cp - 1) / layout.cp * gathered_elements(model, layout) * itemsize


def _widest(model: ModelShape, layout: Layout) -> float:
    """Return the number of elements per token of the widest activation of a dense layer."""
    query, _ = model.heads_width
    return max(2 * ffn_width(model.hf), 3 * query) / layout.tp


def _head(
    config: Config, layout: Layout, model: ModelShape, tokens: int, itemsize: int, *, is_cpu: bool
) -> float:
    """Return the bytes of the head's computation on the last stage.

    These are the hidden states of all tokens, gathered and selected, and their gradient. Log-probs add a
    chunk's logits and the gradient of the head's weights, unless they are frozen, which is summed over chunks
    in float32.
    """
    hidden = model.hf["hidden_size"]
    states = 3 * hidden * tokens * itemsize
    if not model.has_head:
        return states
    rows = _head_rows(layout, model)
    chunk = min(config.training.head_chunk(rows), tokens)
    gradient = 0 if model.adapters else (4 + itemsize) * rows * hidden
    if is_cpu:  # logits, a copy relative to the largest one and its exponentials, both in float32
        return states + max((itemsize + 8) * chunk * rows, 8 * chunk * rows + gradient)
    return states + HEAD_COPIES * itemsize * chunk * rows + gradient


def _prediction(
    config: Config, layout: Layout, head: ModelShape, tokens: int, imbalance: float, itemsize: int
) -> float:
    """Return the bytes of the forward and backward pass of the head for multi-token prediction.

    These are its layer's activations, the embedding that it received, and six arrays of a quarter of a
    chunk's logits in float32.
    """
    hidden, rows = head.hf["hidden_size"], _head_rows(layout, head)
    layer = layer_elements(head, None, layout, tokens, imbalance)
    embedding = rows * hidden if layout.pp > 1 else 0
    chunk = min(config.training.head_chunk(rows) // 4, tokens)
    return itemsize * (layer + 3 * hidden * tokens + embedding) + 6 * 4 * chunk * rows


def _head_rows(layout: Layout, model: ModelShape) -> int:
    """Return the number of rows of an output head on a rank."""
    return padded_vocab(model.hf["vocab_size"], vocab_multiple(layout.tp)) // layout.tp


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
    sampler = 3 * 4 * rollout.max_concurrent_samples * vocab
    step_tokens = BATCHED_TOKENS_ON_CPU * rollout.tp if hardware.is_cpu else BATCHED_TOKENS
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
    budget = rollout.gpu_memory_utilization * hardware.memory
    if hardware.is_cpu:
        workspace += itemsize * count_engine(linear_parts(model), placement)[0]  # oneDNN's packed copies
        budget = weights + workspace + states + (rollout.cpu_kv_cache_mib << 20)
    return EngineMemory(
        budget,
        weights,
        workspace,
        itemsize * sum(cached),
        longest_sequence(config),
        staged=itemsize * in_fp8 / REFIT_GROUPS,
        states=states,
    )


def parts_in_fp8(config: Config, model: ModelShape) -> list[CountedWeight]:
    """Return the weights that the policy's engine holds in FP8."""
    if config.rollout.quantization == "none":
        return []
    names = {weight.hf for weight in quantised_weights([part.weight for part in model.parts])}
    return [part for part in model.parts if part.weight.hf in names]
