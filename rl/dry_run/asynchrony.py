"""Simulates the seconds of a step in each form of asynchrony, to find the form that pays.

Lengths of responses are log-normal. All samples of a replica advance together by one token per decoding step.
Its duration depends on their number. Replicas share the load evenly. A synchronous step therefore ends with
its longest response, at the speed of an almost empty engine. Rates come from the dry run, or are scaled to
the measured seconds of a synchronous step.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rl.config.checks import check
from rl.config.options import ConfigError
from rl.dry_run.changes import with_values
from rl.dry_run.estimate import Estimate, changed
from rl.dry_run.generation import EngineRates, Work, engines_of, generation_seconds, work_of

OVERSAMPLES = (1.5, 2.0)
"""Values of rollout.oversample that are tried beside the config's."""
LEAST_GAIN = 1.1
"""Minimum gain over the synchronous form for recommending another form, because the rates are rough. For
example, 9.5 s in place of 10 s are not enough."""
CLOSE = 1.05
"""Factor on the seconds of the fastest form; a simpler form within it is preferred. For example, a form of
10.4 s is preferred to a less simple form of 10 s."""


@dataclass(frozen=True)
class StepForm:
    """A way to run a step."""

    overrides: dict[str, object]
    """Empty for the synchronous form."""
    seconds: float

    @property
    def name(self) -> str:
        return " ".join(f"{k}={str(v).lower()}" for k, v in self.overrides.items()) or "synchronous"


def forms(
    estimate: Estimate, *, sigma: float, generation_s: float = 0.0, rest_s: float = 0.0
) -> list[StepForm]:
    """Return the synchronous form, and the fastest of each other kind that fits, the simplest kind first.

    generation_s, rest_s: measured seconds of a synchronous step; 0 means the dry run's.
    """
    config, world = estimate.config, estimate.layout.num_ranks
    off = {"rollout.carry_over": False, "roles.train": "", "roles.rollout": ""}
    base = changed(estimate, with_values(config, off), world)
    work, rest = replace(_work(base), sigma=sigma), _rest(base)
    generation = generation_seconds(work, _engines(base))
    faster, faster_rest = (generation_s or generation) / generation, (rest_s or rest) / rest
    found = [StepForm({}, faster * generation + faster_rest * rest)]

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
            seconds = generation_seconds(work, _engines(after), started=oversample, staleness=stale)
            kind.append(StepForm(values, faster * seconds + faster_rest * rest))
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
            seconds = generation_seconds(work, _engines(after), started=started)
            kind.append(StepForm(values, max(faster * seconds, faster_rest * _rest(after))))
        found += sorted(kind, key=lambda form: form.seconds)[:1]
    return found


def best(found: list[StepForm]) -> StepForm:
    """Return the simplest form that is close to the fastest, the synchronous one unless another pays."""
    fastest = min(form.seconds for form in found)
    chosen = next(form for form in found if form.seconds <= CLOSE * fastest)
    return chosen if found[0].seconds >= LEAST_GAIN * chosen.seconds else found[0]


def _engines(estimate: Estimate) -> EngineRates:
    config, layout, models = estimate.config, estimate.layout, estimate.models
    assert estimate.memory.engine is not None
    return engines_of(config, layout, models, estimate.memory.engine, estimate.lengths, estimate.hardware)


def _work(estimate: Estimate) -> Work:
    return work_of(estimate.config, estimate.lengths, estimate.points)


def _rest(estimate: Estimate) -> float:
    """Return the seconds of a step without generation."""
    return sum(seconds for name, seconds in estimate.seconds.items() if name != "gen")


def _train_sizes(estimate: Estimate) -> Iterator[int]:
    """Yield numbers of training ranks: whole nodes, or on one node any. Not all of them are valid."""
    per_node, world = estimate.hardware.ranks_per_node, estimate.layout.num_ranks
    unit = per_node if world > per_node else 1
    yield from range(unit, world, max(unit, -(-world // 16) // unit * unit))
