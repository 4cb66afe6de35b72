"""Simulates the seconds of a step in each form of asynchrony, to find the form that pays.

Lengths of responses are log-normal. All samples of a replica advance together by one token per decoding step,
whose duration depends on their number. Replicas share the load evenly. A synchronous step therefore ends with
its longest response, at the speed of an almost empty engine. Rates are those of the dry run, or are scaled to
the measured seconds of a synchronous step.
"""

import functools
import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from rl.config.checks import check
from rl.config.options import ConfigError
from rl.dry_run.changes import with_values
from rl.dry_run.estimate import Estimate, changed
from rl.dry_run.timing import decode_seconds, prefill_seconds, slots

NUM_STEPS, WARM_UP = 8, 2
"""Number of simulated steps, and of those that are not counted."""
MAX_SAMPLES = 512
"""Number of samples of a step that are simulated at most; larger runs are scaled down."""
OVERSAMPLES = (1.5, 2.0)
"""Values of rollout.oversample that are tried beside the config's."""
LEAST_GAIN = 1.1
"""Minimum gain over the synchronous form with which another is recommended; the rates are rough."""
CLOSE = 1.05
"""Factor on the seconds of the fastest form within which a simpler one is preferred."""


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
class Engines:
    """The rates of the replicas."""

    replicas: float
    slots: float
    """Number of samples that a replica generates at once."""
    decode_s: Callable[[int], float]
    """Number of samples of a replica -> seconds of a decoding step."""
    prefill_s: float = 0.0
    """Seconds in which a replica computes a token of a context."""


@dataclass(frozen=True)
class Form:
    """A way to run a step."""

    overrides: dict[str, object]
    """Empty for the synchronous form."""
    seconds: float

    @property
    def name(self) -> str:
        return " ".join(f"{k}={str(v).lower()}" for k, v in self.overrides.items()) or "synchronous"


def generation_seconds(work: Work, engines: Engines, *, started: float = 1.0, staleness: int = 1) -> float:
    """Return the mean seconds until the groups of another step are complete.

    Args:
        started: number of groups in progress when a step starts, per group of the step. Carry-over has
            `rollout.oversample`, generators that go on beside the trainers 1 + `roles.lag`.
        staleness: number of steps after its first in which a group must be complete.
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
        complete -= groups  # those beyond wait for the next step
        if step >= WARM_UP:
            counted += seconds - before
    return counted / (NUM_STEPS - WARM_UP)


def forms(estimate: Estimate, *, sigma: float, generation_s: float = 0.0, rest_s: float = 0.0) -> list[Form]:
    """Return the synchronous form, and the fastest of each other kind that fits, the simplest kind first.

    generation_s, rest_s: measured seconds of a synchronous step; 0 means the dry run's.
    """
    config, world = estimate.config, estimate.layout.num_ranks
    off = {"rollout.carry_over": False, "roles.train": "", "roles.rollout": ""}
    base = changed(estimate, with_values(config, off), world)
    work, rest = _work(base, sigma), _rest(base)
    generation = generation_seconds(work, engines_of(base))
    faster, faster_rest = (generation_s or generation) / generation, (rest_s or rest) / rest
    found = [Form({}, faster * generation + faster_rest * rest)]

    def fits(values: dict[str, object]) -> Estimate | None:
        if not base.config.rollout_correction.corrects:
            values |= {"rollout_correction.truncate_tokens": 2.0}
        try:
            other = with_values(base.config, values)
            check(other)
            after = changed(base, other, world)
        except ConfigError:
            return None
        return None if after.problems else after

    kind = []
    for oversample in {base.config.rollout.oversample, *OVERSAMPLES}:
        values: dict[str, object] = {"rollout.carry_over": True, "rollout.oversample": oversample}
        if (after := fits(values)) is not None:
            stale = after.config.rollout.max_staleness
            seconds = generation_seconds(work, engines_of(after), started=oversample, staleness=stale)
            kind.append(Form(values, faster * seconds + faster_rest * rest))
    found += sorted(kind, key=lambda form: form.seconds)[:1]
    for granularity in ("batch", "group"):
        kind = []
        for train in _train_sizes(base):
            roles = {"train": f"0-{train - 1}", "rollout": f"{train}-{world - 1}", "lag": 1}
            roles["granularity"] = granularity
            values = {f"roles.{key}": value for key, value in roles.items()}
            if (after := fits(values)) is None:
                continue
            started = 2.0 if granularity == "group" else 1.0
            seconds = generation_seconds(work, engines_of(after), started=started)
            kind.append(Form(values, max(faster * seconds, faster_rest * _rest(after))))
        found += sorted(kind, key=lambda form: form.seconds)[:1]
    return found


def best(found: list[Form]) -> Form:
    """Return the simplest form that is close to the fastest, the synchronous one unless another pays."""
    fastest = min(form.seconds for form in found)
    chosen = next(form for form in found if form.seconds <= CLOSE * fastest)
    return chosen if found[0].seconds >= LEAST_GAIN * chosen.seconds else found[0]


def engines_of(estimate: Estimate) -> Engines:
    """Return the rates of an estimate's replicas."""
    config, layout, model = estimate.config, estimate.layout, estimate.models["policy"]
    engine, hardware, lengths = estimate.memory.engine, estimate.hardware, estimate.lengths
    assert engine is not None

    @functools.cache
    def decode_s(samples: int) -> float:
        return decode_seconds(config, layout, model, engine, lengths, hardware, samples)

    at_once = slots(config, engine, lengths)
    return Engines(layout.replicas, at_once, decode_s, prefill_seconds(layout, model, hardware))


def _work(estimate: Estimate, sigma: float) -> Work:
    config, lengths = estimate.config, estimate.lengths
    longest = config.rollout.max_response_tokens
    groups, samples = config.data.prompts_per_step, config.rollout.samples_per_prompt
    return Work(groups, samples, lengths.response, sigma, longest, lengths.prompt)


def _rest(estimate: Estimate) -> float:
    """Return the seconds of a step without generation."""
    return sum(seconds for name, seconds in estimate.seconds.items() if name != "gen")


def _train_sizes(estimate: Estimate) -> Iterator[int]:
    """Yield numbers of training ranks: whole nodes, or on one node any. Not all of them are valid."""
    per_node, world = estimate.hardware.ranks_per_node, estimate.layout.num_ranks
    unit = per_node if world > per_node else 1
    yield from range(unit, world, max(unit, -(-world // 16) // unit * unit))
