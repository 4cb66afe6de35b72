"""Simulates how long the replicas take to generate the samples of a step.

Lengths of responses are log-normal. All samples of a replica advance together by one token per decoding step.
Its duration depends on their number. Replicas share the load evenly. A synchronous step therefore ends with
its longest response, at the speed of an almost empty engine.

A decoding step reads weights (only routed experts that some token uses) or is limited by arithmetic. It then
reads caches, adds up the layers' outputs over the tensor parallel ranks twice per layer, and takes time on
the host. A prompt is limited by arithmetic.
"""

import functools
import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from rl.config.schema import Config
from rl.dry_run.grids import Layout
from rl.dry_run.hardware import Hardware
from rl.dry_run.memory import EngineMemory, parts_in_fp8
from rl.dry_run.parameters import ITEMSIZE, CountedWeight
from rl.dry_run.shape import ModelShape, drafter_of

NUM_STEPS, WARM_UP = 8, 2
"""Number of simulated steps, and how many first ones are not counted."""
MAX_SAMPLES = 512
"""Number of samples of a step that are simulated at most; larger runs are scaled down."""


@dataclass(frozen=True)
class Lengths:
    """Assumed tokens of a sequence: means, and the standard deviation of the logarithm of a response's."""

    prompt: float
    response: float
    sigma: float = 0.7

    @property
    def total(self) -> float:
        return self.prompt + self.response


@dataclass(frozen=True)
class Work:
    """The responses of a step."""

    groups: int
    samples: int
    """Samples of a group."""
    mean: float
    """Mean tokens of a response."""
    sigma: float
    """Standard deviation of the logarithm of the tokens."""
    longest: int
    """Maximum tokens of a response."""
    prompt: float = 0.0
    """Mean tokens of a prompt."""

    def lengths(self, number: int) -> np.ndarray:
        """Return tokens of responses, float64 [number], the same in every call; their mean is `mean`."""
        shape = np.exp(self.sigma * np.random.default_rng(0).standard_normal(number))
        scale = 1.0
        for _ in range(20):  # the limit shortens the mean
            scale *= self.mean / np.minimum(self.longest, scale * shape).mean()
        return np.minimum(self.longest, scale * shape)


@dataclass(frozen=True)
class EngineRates:
    """The rates of the replicas."""

    replicas: float
    slots: float
    """Number of samples that a replica generates at once."""
    decode_s: Callable[[int], float]
    """Number of samples of a replica -> seconds of a decoding step."""
    prefill_s: float = 0.0
    """Seconds that a replica takes for a token of a context."""


def generation_seconds(
    work: Work, engines: EngineRates, *, started: float = 1.0, staleness: int = 1
) -> float:
    """Return the mean seconds until the groups of another step are complete.

    Args:
        started: number of groups in progress when a step starts, per group of the step. Carry-over has
            `rollout.oversample`, generators that go on beside the trainers 1 + `roles.lag`.
        staleness: number of steps after its first within which a group must be complete.
    """
    scale = max(1.0, work.groups * work.samples / MAX_SAMPLES)
    groups, replicas = max(1, round(work.groups / scale)), engines.replicas / scale
    in_progress = math.ceil(started * groups)
    lengths = iter(work.lengths((NUM_STEPS + 2) * in_progress * work.samples).tolist())
    waiting: deque[tuple[float, int]] = deque()
    live: list[tuple[float, float, int]] = []  # (position of the end, position of the start, group)
    left: dict[int, int] = {}  # unfinished samples of each group in progress
    first_step: dict[int, int] = {}
    position = seconds = counted = 0.0
    number = complete = 0

    def begin(step: int) -> None:
        nonlocal number
        left[number], first_step[number] = work.samples, step
        waiting.extend((next(lengths), number) for _ in range(work.samples))
        number += 1

    for step in range(NUM_STEPS):
        before = seconds
        again = sum(position - start for _, start, _ in live)  # the prefixes under new weights
        seconds += (groups * work.prompt + again) * engines.prefill_s / replicas
        while len(left) + complete < in_progress:
            begin(step)
        while complete < groups or (left and min(map(first_step.__getitem__, left)) <= step - staleness):
            while waiting and len(live) < max(1, engines.slots * replicas):
                length, group = waiting.popleft()
                heapq.heappush(live, (position + length, position, group))
            end, _, group = live[0]
            seconds += (end - position) * engines.decode_s(math.ceil(len(live) / replicas))
            position = end
            heapq.heappop(live)
            left[group] -= 1
            if not left[group]:
                del left[group]
                complete += 1
        complete -= groups  # further groups wait for the next step
        if step >= WARM_UP:
            counted += seconds - before
    return counted / (NUM_STEPS - WARM_UP)


def work_of(config: Config, lengths: Lengths, points: int = 1) -> Work:
    """Return the responses of a step of all points."""
    groups = points * config.data.prompts_per_step
    samples, longest = config.rollout.samples_per_prompt, config.rollout.max_response_tokens
    return Work(groups, samples, lengths.response, lengths.sigma, longest, lengths.prompt)


def engines_of(
    config: Config,
    layout: Layout,
    models: Mapping[str, ModelShape],
    engine: EngineMemory,
    lengths: Lengths,
    hardware: Hardware,
) -> EngineRates:
    """Return the rates of the replicas."""
    decode = decoding(config, layout, models, lengths, hardware)
    at_once = slots(config, engine, lengths)
    prefill = prefill_seconds(layout, models["policy"], hardware) * hardware.turns
    return EngineRates(layout.replicas, at_once, decode, prefill)


def seconds_between_nodes(
    config: Config,
    layout: Layout,
    models: Mapping[str, ModelShape],
    engine: EngineMemory,
    lengths: Lengths,
    hardware: Hardware,
) -> float:
    """Return the seconds of generation that replicas lose because their messages cross nodes."""
    ranks = max(layout.rollout_tp, layout.rollout_ep)
    one_node = replace(hardware, ranks_per_node=max(hardware.ranks_per_node, ranks))
    work = work_of(config, lengths)
    both = [engines_of(config, layout, models, engine, lengths, some) for some in (hardware, one_node)]
    far, near = (generation_seconds(work, engines) for engines in both)
    return far - near


def slots(config: Config, engine: EngineMemory, lengths: Lengths) -> float:
    """Return the number of samples that a replica generates at once, if there are enough."""
    return min(config.rollout.max_concurrent_samples, engine.cache_tokens / lengths.total)


def prefill_seconds(layout: Layout, model: ModelShape, hardware: Hardware) -> float:
    """Return the seconds that a replica takes for a token of a context."""
    busiest = hardware.expert_imbalance if layout.rollout_ep > 1 and model.num_experts else 1.0
    speed = hardware.tflops * 1e12 * hardware.train_share * layout.rollout_tp
    return 2 * busiest * model.multiplied / speed


def decoding(
    config: Config, layout: Layout, models: Mapping[str, ModelShape], lengths: Lengths, hardware: Hardware
) -> Callable[[float], float]:
    """Return a function: number of samples, at half their length -> seconds of a replica per token of each.

    With draft tokens an engine step is one pass of the policy over them and the token before them, after one
    pass of what proposes them for each.
    """
    policy, drafter, drafts = models["policy"], drafter_of(config, models), config.rollout.draft.tokens
    verify = _forward_pass(config, layout, policy, lengths, hardware, parts_in_fp8(config, policy))
    propose = _forward_pass(config, layout, drafter, lengths, hardware, []) if drafter else None
    launch_ms = hardware.eager_layer_ms * policy.num_layers if config.rollout.enforce_eager else 0.0

    @functools.cache
    def seconds(at_once: float) -> float:
        host_s = (hardware.engine_step_ms + hardware.engine_sample_ms * at_once + launch_ms) / 1e3
        if propose is None:
            return (verify(at_once, 1) + host_s) * hardware.turns
        step = verify(at_once, 1 + drafts) + drafts * propose(at_once, 1) + host_s
        return step * hardware.turns / hardware.tokens_per_step(drafts)

    return seconds


def _forward_pass(
    config: Config,
    layout: Layout,
    model: ModelShape,
    lengths: Lengths,
    hardware: Hardware,
    in_fp8: list[CountedWeight],
) -> Callable[[float, int], float]:
    """Return a function: (number of samples, tokens of each) -> seconds of a pass of a replica.

    With data parallel attention the replicas that share experts have as many samples each; in a mixture each
    of their ranks receives the tokens of all, and sends as many outputs.

    in_fp8: the weights that are in FP8.
    """
    tp, itemsize, hidden = layout.rollout_tp, ITEMSIZE[config.model.dtype], model.hf["hidden_size"]
    sharing = layout.rollout_sharing if model.num_experts else 1
    placement = layout.rollout_placement(model)
    repeated = sum(part.elements for part in model.parts if placement.repeats(part.weight))
    num_mixtures = len({part.weight.layer for part in model.parts if part.weight.expert is not None})
    exchanges = num_mixtures if sharing > 1 else 0
    bandwidth = hardware.hbm_gb_s * 1e9
    cached = (lengths.prompt + lengths.response / 2) * itemsize * model.cache_elements(tp)
    state = model.state_bytes(tp, itemsize)  # one state is read and written
    per_sample_s = (cached / hardware.cache_share + state / hardware.hbm_share) / bandwidth
    prefill = prefill_seconds(layout, model, hardware)

    # With FP8 the bytes of an element fall to one in routed experts, and in a share of the other weights.
    shared_fp8 = sum(part.elements for part in in_fp8 if part.weight.expert is None)
    dense_share = 1 - shared_fp8 / _weights_read(model, 0)[0] * (1 - 1 / itemsize)

    def seconds(at_once: float, tokens: int) -> float:
        batch = at_once * tokens
        dense, routed = _weights_read(model, batch * sharing)
        routed *= 1 / itemsize if in_fp8 else 1.0
        weights = itemsize * (((dense - repeated) * dense_share + routed / sharing) / tp + repeated)
        reading = weights / (bandwidth * hardware.hbm_share)
        message = batch * hidden * itemsize
        messages = (2 * model.num_layers - exchanges) * hardware.all_reduce_seconds(message, tp)
        messages += exchanges * hardware.all_reduce_seconds(message * sharing, tp * sharing)
        return max(reading, batch * prefill) + at_once * per_sample_s + messages

    return seconds


def _weights_read(model: ModelShape, batch: float) -> tuple[float, float]:
    """Return the numbers of parameters that one decoding step reads: (outside, in) routed experts.

    batch: tokens of the step. Only the experts that some token uses are read.
    """
    if not model.routed:
        return model.multiplied, 0.0
    per_token = model.experts_per_token / model.num_experts
    return model.multiplied - model.routed * per_token, model.routed * (1 - (1 - per_token) ** batch)
