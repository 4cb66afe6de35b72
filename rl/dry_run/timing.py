"""A rough time of each phase of a step: the maximum of arithmetic time and memory time.

The estimate is for comparing layouts and choosing the size of an allocation; the shares of the peak speeds
(`Hardware`) are rules of thumb. It includes 2 operations per parameter and token for a forward pass, 4 for a
backward pass and 2 for recomputation; causal attention; what context parallel ranks gather;
and the pipeline's bubble. For decoding it includes
the weights and caches read from memory, the experts that a batch uses, and two all-reduces per layer. It
excludes reward functions, packing, start-up, the optimizer's step and slow replicas.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rl.config.schema import Config, algorithm_of, needs_early_logprobs, needs_reference, uses_teacher
from rl.dry_run.hardware import Hardware
from rl.dry_run.memory import (
    ITEMSIZE,
    EngineMemory,
    Layout,
    gathered_bytes,
    num_micro_batches,
    sequences_per_prompt,
)
from rl.dry_run.parameters import count_parameters
from rl.dry_run.shape import Model

NEAR_LATENCY, FAR_LATENCY = 15e-6, 50e-6
"""Seconds of an all-reduce of a few tokens within a node, and between nodes."""


@dataclass(frozen=True)
class Lengths:
    """Assumed mean tokens of a sequence."""

    prompt: float
    response: float

    @property
    def total(self) -> float:
        return self.prompt + self.response


def assumed_lengths(config: Config, prompt: float = 0.0, response: float = 0.0) -> Lengths:
    """Return the given mean lengths; a mean of 0 is replaced by half of the maximum."""
    longest = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    return Lengths(prompt or longest[0] / 2, response or longest[1] / 2)


def estimate_seconds(
    config: Config,
    layout: Layout,
    models: Mapping[str, Model],
    engine: EngineMemory | None,
    lengths: Lengths,
    hardware: Hardware,
    *,
    points: int = 1,
) -> dict[str, float]:
    """Return the seconds of each phase of a step except the refit, by its name in timing_s/*.

    points: number of adapters on one base; each learns from samples of its own, generated together.
    """
    needs, policy = algorithm_of(config).needs, models["policy"]
    sequences = points * config.data.prompts_per_step * sequences_per_prompt(config)

    def passes(model: Model, per_parameter: int) -> float:
        return _training_pass(config, layout, model, sequences, lengths, per_parameter, hardware)

    epochs = config.training.epochs

    def backward(model: Model) -> int:
        """Return the operations per parameter and token of an update; frozen weights have no gradient."""
        return 4 + 2 * config.training.recompute + 2 * (not model.adapters)

    seconds = {}
    if "samples" in needs:
        assert engine is not None
        seconds["gen"] = _generation(config, layout, policy, engine, lengths, hardware, points)
        if not config.rollout_correction.bypass and (share := _share_of_old_logprobs(config)):
            seconds["old_log_prob"] = share * passes(policy, 2)
    if needs_reference(config):
        # One transfer: the reference weights go to the GPU, into the memory of the gradients.
        ranks = layout.tp * layout.pp * max(1, layout.ep)
        copied = count_parameters(policy.adapter_parts or policy.parts)
        transfer = ITEMSIZE[config.model.dtype] * copied / ranks
        seconds["ref"] = passes(policy, 2) + transfer / (hardware.pcie_gb_s * 1e9)
    if "critic" in models:
        seconds["values"] = passes(models["critic"], 2)
        seconds["update_critic"] = epochs * passes(models["critic"], backward(models["critic"]))
    if "implicit_reward" in models:
        seconds["implicit_reward"] = 2 * passes(models["implicit_reward"], 2)
        reward = models["implicit_reward"]
        seconds["update_implicit_reward"] = passes(reward, backward(reward))
    if "reward_model" in models:
        seconds["reward"] = passes(models["reward_model"], 2)
    if uses_teacher(config):
        teachers = [model for name, model in models.items() if name.startswith("teacher")] or [policy]
        seconds["teacher"] = sum(passes(model, 2) for model in teachers) / len(teachers)
    seconds["update_actor"] = epochs * passes(policy, backward(policy))
    return seconds


def _share_of_old_logprobs(config: Config) -> float:
    """Return the share of a step's samples whose old log-probs need a separate pass, 0 to 1.

    Unless something reads them earlier, the first mini-batch takes them from its update.
    """
    prompts = config.data.prompts_per_step
    minibatches = math.ceil(prompts / (config.training.prompts_per_minibatch or prompts))
    return 1.0 if needs_early_logprobs(config) else 1 - 1 / minibatches


def _training_pass(
    config: Config,
    layout: Layout,
    model: Model,
    sequences: float,
    lengths: Lengths,
    per_parameter: int,
    hardware: Hardware,
) -> float:
    """Return the seconds of one pass of all sequences of a step through a model on the training grid.

    per_parameter: operations per parameter and token, 2 for a forward pass; attention scales with it.
    """
    query, value = model.heads_width
    attention = model.num_layers * (query + value) * lengths.total / 2  # products per token; half are masked
    operations = per_parameter * (model.multiplied + attention) * sequences * lengths.total
    busiest = hardware.expert_imbalance if model.num_experts else 1.0
    ideal = busiest * operations / (layout.world_size * hardware.tflops * 1e12 * hardware.train_share)
    if layout.cp > 1:
        tokens = sequences * lengths.total / layout.dp
        message = gathered_bytes(model, layout, tokens, ITEMSIZE[config.model.dtype])
        message *= model.num_layers / layout.pp * _gathers(config, per_parameter)
        is_near = layout.tp * layout.cp <= hardware.ranks_per_node
        ideal += hardware.link_seconds(message, 0) if is_near else hardware.link_seconds(0, message)
    bubble = (layout.pp - 1) / num_micro_batches(config, layout, lengths.total)
    return ideal * (1 + bubble)


def _gathers(config: Config, per_parameter: int) -> int:
    """Return the number of gathers and scatters of keys and values per layer in a pass."""
    return 1 if per_parameter == 2 else 2 + config.training.recompute


def seconds_between_nodes(
    config: Config, layout: Layout, model: Model, engine: EngineMemory, lengths: Lengths, hardware: Hardware
) -> float:
    """Return the seconds of generation that replicas lose because their messages cross nodes."""
    ranks = max(layout.rollout_tp, layout.rollout_ep)
    one_node = replace(hardware, ranks_per_node=max(hardware.ranks_per_node, ranks))
    arguments = config, layout, model, engine, lengths
    return _generation(*arguments, hardware) - _generation(*arguments, one_node)


def _generation(
    config: Config,
    layout: Layout,
    model: Model,
    engine: EngineMemory,
    lengths: Lengths,
    hardware: Hardware,
    points: int = 1,
) -> float:
    """Return the seconds to generate all samples of a step, of all points.

    Prefill is limited by arithmetic, decoding by the memory that it reads.
    """
    samples = points * config.data.prompts_per_step * config.rollout.samples_per_prompt / layout.replicas
    at_once = max(1.0, min(slots(config, engine, lengths), samples))
    prompts = samples / config.rollout.samples_per_prompt
    prefill = prompts * lengths.prompt * prefill_seconds(layout, model, hardware)
    step = decode_seconds(config, layout, model, engine, lengths, hardware, at_once)
    return prefill + math.ceil(samples / at_once) * lengths.response * step


def slots(config: Config, engine: EngineMemory, lengths: Lengths) -> float:
    """Return the number of samples that a replica generates at once, if there are enough."""
    return min(config.rollout.max_concurrent_samples, engine.cache_tokens / lengths.total)


def prefill_seconds(layout: Layout, model: Model, hardware: Hardware) -> float:
    """Return the seconds in which a replica computes a token of a context."""
    busiest = hardware.expert_imbalance if layout.rollout_ep > 1 and model.num_experts else 1.0
    speed = hardware.tflops * 1e12 * hardware.train_share * layout.rollout_tp
    return 2 * busiest * model.multiplied / speed


def decode_seconds(
    config: Config,
    layout: Layout,
    model: Model,
    engine: EngineMemory,
    lengths: Lengths,
    hardware: Hardware,
    at_once: float,
) -> float:
    """Return the seconds of a replica's decoding step with `at_once` samples of half their length.

    With data parallel attention the replicas that share experts have as many samples each; in a mixture each
    of their ranks receives the tokens of all, and sends as many outputs.
    """
    tp, itemsize = layout.rollout_tp, ITEMSIZE[config.model.dtype]
    sharing = layout.rollout_sharing if model.num_experts else 1
    dense, routed = _weights_read(model, at_once * sharing)
    placement = layout.rollout_placement(model)
    repeated = sum(part.elements for part in model.parts if placement.repeats(part.weight))
    weights = itemsize * ((dense - repeated + routed / sharing) / tp + repeated)
    cache = at_once * (lengths.prompt + lengths.response / 2) * engine.bytes_per_token
    step = (weights + cache) / (hardware.hbm_gb_s * 1e9 * hardware.hbm_share)
    num_mixtures = len({part.weight.layer for part in model.parts if part.weight.expert is not None})
    message = 2 * at_once * model.hf["hidden_size"] * itemsize
    exchanges = num_mixtures if sharing > 1 else 0
    step += (2 * model.num_layers - exchanges) * _all_reduce_seconds(tp, message, hardware)
    step += exchanges * _all_reduce_seconds(tp * sharing, message * sharing, hardware)
    return max(step, at_once * prefill_seconds(layout, model, hardware))


def _all_reduce_seconds(ranks: int, message: float, hardware: Hardware) -> float:
    """Return the seconds of an all-reduce, or of an all-gather and a reduce-scatter, over adjacent ranks.

    message: bytes that a rank receives.
    """
    if ranks == 1:
        return 0.0
    if ranks <= hardware.ranks_per_node:
        return NEAR_LATENCY + hardware.link_seconds(message, 0)
    return FAR_LATENCY + hardware.link_seconds(0, message)


def _weights_read(model: Model, batch: float) -> tuple[float, float]:
    """Return the numbers of parameters that one decoding step reads: (outside, in) routed experts.

    batch: tokens of the step. Only the experts that some token uses are read.
    """
    routed = sum(part.elements for part in model.parts if part.weight.expert is not None)
    if not routed:
        return model.multiplied, 0.0
    per_token = model.experts_per_token / model.num_experts
    return model.multiplied - routed * per_token, routed * (1 - (1 - per_token) ** batch)
