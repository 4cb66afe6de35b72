"""A rough time of each phase of a step on the training grid, and of the whole step.

A pass computes 2 operations per parameter and token forward, 4 backward and 2 for recomputation, and causal
attention. A micro-batch takes at least as long as reading the weights and launching the kernels. Messages
(tensor, context, expert and pipeline parallel) are added, as if nothing overlapped them, and the pipeline's
idle time. The estimate excludes reward functions, packing, start-up and slow replicas.
`rl.dry_run.generation` has generation, `rl.dry_run.hardware` the constants.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rl.config.needs import algorithm_of, needs_early_logprobs, needs_reference, uses_teacher
from rl.config.schema import Config
from rl.dry_run.activations import gathered_bytes
from rl.dry_run.generation import Lengths, engines_of, generation_seconds, work_of
from rl.dry_run.grids import Layout
from rl.dry_run.hardware import Hardware
from rl.dry_run.images import encoding_seconds, images_of
from rl.dry_run.memory import MemoryEstimate, State
from rl.dry_run.parameters import ITEMSIZE, CountedWeight, count_parameters
from rl.dry_run.recompute import attention_again, computed_again
from rl.dry_run.rows import num_micro_batches, sequences_per_prompt
from rl.dry_run.shape import ModelShape, with_output_head


@dataclass(frozen=True)
class PassTime:
    """Seconds of a pass of all sequences of a step through a model, on the busiest rank."""

    work: float
    """Arithmetic, reading of weights and launches."""
    messages: float
    """Messages of tensor, context, expert and pipeline parallel ranks."""
    idle: float
    """Waiting for other pipeline stages."""

    @property
    def total(self) -> float:
        return self.work + self.messages + self.idle


def assumed_lengths(
    config: Config, prompt: float = 0.0, response: float = 0.0, sigma: float = 0.7
) -> Lengths:
    """Return the given lengths; a mean of 0 is replaced by half of the maximum."""
    longest = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    return Lengths(prompt or longest[0] / 2, response or longest[1] / 2, sigma)


def estimate_seconds(
    config: Config,
    layout: Layout,
    models: Mapping[str, ModelShape],
    memory: MemoryEstimate,
    lengths: Lengths,
    hardware: Hardware,
    *,
    points: int = 1,
) -> tuple[dict[str, float], dict[str, float]]:
    """Return (seconds, idle seconds) of each phase of a step except the refit, by its name in timing_s/*.

    The idle seconds are included in the seconds. Pipeline stages wait for others; in gen, replicas wait for
    the longest response with an almost empty batch. points: number of adapters on one base; each learns from
    samples of its own, generated together.
    """
    needs, policy = algorithm_of(config).needs, models["policy"]
    sequences = points * config.data.prompts_per_step * sequences_per_prompt(config)
    seconds: dict[str, float] = {}
    idle: dict[str, float] = {}

    def add(phase: str, model: ModelShape, per_parameter: float, times: float = 1.0) -> None:
        one = training_pass(config, layout, model, sequences, lengths, per_parameter, hardware)
        seconds[phase] = seconds.get(phase, 0.0) + times * one.total
        idle[phase] = idle.get(phase, 0.0) + times * one.idle

    def update(phase: str, name: str, epochs: int = 1) -> None:
        """Add an update; frozen weights have no gradient."""
        model = models[name]
        add(
            phase,
            model,
            4 + 2 * computed_again(config.training, model, lengths.total) + 2 * (not model.adapters),
            epochs,
        )
        steps = (optimizer_seconds(stage.states[name], layout, hardware) for stage in memory.stages)
        seconds[phase] += epochs * _minibatches(config) * points * max(steps)

    if "samples" in needs:
        assert memory.engine is not None
        work = work_of(config, lengths, points)
        engines = engines_of(config, layout, models, memory.engine, lengths, hardware)
        images, groups = images_of(config, policy, lengths), points * config.data.prompts_per_step
        ranks = layout.replicas * layout.rollout_tp
        encoding = encoding_seconds(images, groups, ranks, hardware) if images else 0.0
        seconds["gen"] = generation_seconds(work, engines) + encoding
        idle["gen"] = max(
            0.0, seconds["gen"] - encoding - generation_seconds(replace(work, sigma=0.0), engines)
        )
        if not config.rollout_correction.bypass and _passes_for_old_logprobs(config):
            add("old_log_prob", policy, 2)
    if needs_reference(config):
        add("ref", policy, 2)
        # One transfer: the reference weights go to the GPU, into the memory of the gradients.
        copied = held_parameters(policy.adapter_parts or policy.parts, layout)
        seconds["ref"] += ITEMSIZE[config.model.dtype] * copied / (hardware.pcie_gb_s * 1e9)
    if "critic" in models:
        add("values", models["critic"], 2)
        update("update_critic", "critic", config.training.epochs)
    if "implicit_reward" in models:
        add("implicit_reward", models["implicit_reward"], 2, 2)
        update("update_implicit_reward", "implicit_reward")
    if "reward_model" in models:
        add("reward", models["reward_model"], 2)
    if uses_teacher(config):
        teachers = [model for name, model in models.items() if name.startswith("teacher")] or [policy]
        for model in teachers:
            add("teacher", model, 2, 1 / len(teachers))
    update("update_actor", "policy", config.training.epochs)
    if "mtp" in models and models["mtp"].run.learns:
        one = prediction_seconds(config, layout, models, memory, sequences, lengths, hardware)
        seconds["update_actor"] += config.training.epochs * one
    return seconds, idle


def held_parameters(parts: Sequence[CountedWeight], layout: Layout) -> float:
    """Return the mean number of parameters on a rank."""
    routed = sum(part.elements for part in parts if part.weight.expert is not None)
    others = count_parameters(parts) - routed
    return (others / layout.tp + routed / (layout.ep * layout.etp)) / layout.pp


def _passes_for_old_logprobs(config: Config) -> bool:
    """Return whether old log-probs need a separate pass: the only update of a step gives them itself."""
    prompts = config.data.prompts_per_step
    is_only = (config.training.prompts_per_minibatch or prompts) >= prompts and config.training.epochs == 1
    return needs_early_logprobs(config) or not is_only


def training_pass(
    config: Config,
    layout: Layout,
    model: ModelShape,
    sequences: float,
    lengths: Lengths,
    per_parameter: float,
    hardware: Hardware,
) -> PassTime:
    """Return the seconds of one pass of all sequences of a step through a model on the training grid.

    per_parameter: operations per parameter and token, 2 for a forward pass; attention scales with it.
    """
    operations = per_parameter * model.multiplied * sequences * lengths.total
    if images := images_of(config, model, lengths):
        # Every tensor parallel rank of the first stage computes the tower; the other stages wait.
        operations += images.pass_operations(per_parameter) * sequences * layout.tp * layout.pp
    imbalance = hardware.expert_imbalance if model.num_experts else 1.0
    scores = per_parameter * model.score_products(lengths.total) * sequences * lengths.total
    arithmetic = imbalance * operations / hardware.train_share + scores / hardware.attention_share
    arithmetic /= layout.world_size * hardware.tflops * 1e12
    micro_batches = num_micro_batches(config, layout, lengths.total)
    passes = micro_batches * _minibatches(config)
    directions = per_parameter / 2
    # A backward pass has the products of two forward passes, or of one if the weights are frozen.
    backward = 0 if per_parameter == 2 else 1 if model.adapters else 2
    forward = directions - backward  # with recomputation more than one
    itemsize = ITEMSIZE[config.model.dtype]
    held = held_parameters(model.parts, layout)
    sums = 8 * held if per_parameter > 4 else 0  # float32 sums of gradients are read and written
    reading = passes * (directions * itemsize * held + sums) / (hardware.hbm_gb_s * 1e9 * hardware.hbm_share)
    layers = model.num_layers / layout.pp
    # Embedding and head count as a layer of each stage.
    launched = forward + backward * hardware.backward_launches / 2
    launches = passes * launched * (layers + 1) * hardware.layer_ms / 1e3
    work = max(arithmetic, reading, launches)
    if hardware.is_cpu:
        work = arithmetic + launches
    tokens = sequences * lengths.total / layout.dp  # of the cp ranks of a replica
    own = tokens / layout.cp
    messages = layers * _layer_messages(model, layout, own, itemsize, hardware, passes, forward, backward)
    if layout.cp > 1:
        gathered = gathered_bytes(model, layout, tokens, itemsize) * model.num_layers / layout.pp
        gathered *= _gathers(config, model, per_parameter)
        number = _gathers(config, model, per_parameter) * layers * passes
        messages += hardware.exchange_seconds(gathered, layout.cp, layout.tp, number)
    if layout.pp > 1:
        # A chunk of layers receives its tokens and, in a backward pass, their gradients.
        received = layout.vpp * (1 + min(1, backward))
        stage = layout.world_size // layout.pp
        boundary = received * own * model.hf["hidden_size"] * itemsize / layout.tp
        messages += hardware.exchange_seconds(boundary, layout.pp, stage, received * passes)
    waits = idle_share(config, layout, lengths)
    # Ranks that share a core take turns, and one that waits leaves its turn to others.
    turns = hardware.turns
    busy, idle = (work + messages) * turns, (work + messages) * max(0.0, 1 + waits - turns)
    return PassTime(work * turns, busy - work * turns, idle)


def prediction_seconds(
    config: Config,
    layout: Layout,
    models: Mapping[str, ModelShape],
    memory: MemoryEstimate,
    sequences: float,
    lengths: Lengths,
    hardware: Hardware,
) -> float:
    """Return the seconds that the head for multi-token prediction takes to learn from a step's sequences.

    Only the last pipeline stage computes it, and the others wait. The output head has three products: the
    policy's distribution, the head's own, and the gradient of its states.
    """
    head = with_output_head(models["mtp"], models["policy"])
    last = replace(layout, pp=1, vpp=1, world_size=layout.world_size // layout.pp)
    one = training_pass(config, last, head, sequences, lengths, 6, hardware)
    state = memory.stages[-1].states["mtp"]
    steps = _minibatches(config) * optimizer_seconds(state, layout, hardware)
    return one.total * (1 + idle_share(config, layout, lengths)) + steps


def _minibatches(config: Config) -> int:
    """Return the number of mini-batches of a step."""
    prompts = config.data.prompts_per_step
    return math.ceil(prompts / (config.training.prompts_per_minibatch or prompts))


def _layer_messages(
    model: ModelShape,
    layout: Layout,
    tokens: float,
    itemsize: int,
    hardware: Hardware,
    count: float,
    forward: float,
    backward: int,
) -> float:
    """Return the seconds of a rank's messages in a layer, for `count` micro-batches.

    Tensor parallel ranks gather and scatter the tokens at both halves of the layer in each direction. The
    gradients of the weights need the gathered input again (arXiv:2205.05198, section 4.2.2). Expert parallel
    ranks send each token to the ranks of its experts, and get the results back.

    forward: number of forward passes. backward: products of a backward pass / products of a forward pass, for
    example 2.
    """
    width = tokens * model.hf["hidden_size"] * itemsize
    number = 4 * forward + (0, 4, 6)[backward]
    tensor = hardware.exchange_seconds(
        number * width * (layout.tp - 1) / layout.tp, layout.tp, count=number * count
    )
    routed = 2 * width / layout.tp * model.experts_per_token * (layout.ep - 1) / layout.ep
    number = forward + min(1, backward)
    return tensor + hardware.exchange_seconds(number * routed, layout.ep, count=2 * number * count)


def optimizer_seconds(state: State, layout: Layout, hardware: Hardware) -> float:
    """Return the seconds of an optimizer step: gradients are reduced, the state is updated, weights gathered.

    What is in host memory is updated there, while the GPU updates the rest.
    """
    replicas = layout.sharded_over
    reduced = (state.gradients + state.weights) * (replicas - 1) / replicas
    messages = hardware.exchange_seconds(reduced, replicas, layout.tp * layout.cp) if replicas > 1 else 0.0
    device = (2 * state.optimizer + state.gradients) / (hardware.hbm_gb_s * 1e9 * hardware.hbm_share)
    host = 2 * state.in_host / (hardware.host_gb_s * 1e9)
    return (messages + max(device, host) + hardware.update_ms / 1e3) * hardware.turns


def idle_share(config: Config, layout: Layout, lengths: Lengths) -> float:
    """Return the time for which a pipeline rank waits in a pass, in units of its own work.

    (pp - 1) / (vpp m) for m micro-batches of a mini-batch (arXiv:2104.04473, section 2.2).
    """
    return (layout.pp - 1) / (layout.vpp * num_micro_batches(config, layout, lengths.total))


def _gathers(config: Config, model: ModelShape, per_parameter: float) -> float:
    """Return the number of gathers and scatters of keys and values per layer in a pass."""
    again = attention_again(config.training)
    if config.training.recompute == "selective" and model.hf.get("kv_lora_rank"):
        again = 0.0  # latents are gathered before the attention that is computed again
    return 1 if per_parameter == 2 else 2 + again
