"""Generation for all points of a sweep in one call of the engine, with the interface of `Generation`."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rl.config.schema import Config
from rl.data.batch import Batch, fingerprint
from rl.engines.engines import Engines
from rl.phases.generation import AllReplicas
from rl.phases.sampler import SampleCall, Sampler
from rl.phases.step_record import StepRecord
from rl.refit.refit import check_refit, check_weights, refit, traffic_metrics
from rl.rollout.batches import batch_of
from rl.rollout.exchange import exchange
from rl.rollout.samples import Sample
from rl.rollout.sampling import Sampling
from rl.runtime.collectives import any_rank
from rl.stopping.requests import StepAborted, StopRequests
from rl.training.engine import TrainingEngine


@dataclass(frozen=True, kw_only=True)
class PointCall(SampleCall):
    """The call of a point."""

    step: StepRecord
    seeds: list[int]
    abortable: bool


class PointGeneration(Sampler):
    """Generation of one point: hands in the point's prompts, and waits until the engine has generated for all
    points.

    Args:
        wait: gives the request to `JointGeneration.serve`; returns the batch, or None after a stop request.
    """

    def __init__(
        self,
        config: Config,
        step: StepRecord,
        policy: TrainingEngine,
        wait: Callable[[PointCall], Batch | None],
    ):
        super().__init__(config, step, policy)
        self._wait = wait

    def sample(self, call: SampleCall) -> Batch:
        abortable = call.timing != "testing" and not self._step.is_committed
        batch = self._wait(
            PointCall(
                prompts=call.prompts,
                sampling=call.sampling,
                purpose=call.purpose,
                timing=call.timing,
                order=call.order,
                step=self._step,
                seeds=self._seeds(call),
                abortable=abortable,
            )
        )
        if batch is None:
            raise StepAborted
        return batch


class JointGeneration:
    """Serves the requests of all waiting points. Methods are collective over the world.

    Args:
        engines: the points' engines. A point's adapter has the same index in the generation engine: for
            example, the adapter of engines[2] is adapter 2.
        step: the step object of the sweep; all points wait in its phases.
        stop: requests that may abort a generation for training; None if no request may.
        offload: tensors that leave the device's memory while the engine generates (`offload_of`).
    """

    def __init__(
        self,
        config: Config,
        engines: Sequence[Engines],
        step: StepRecord,
        stop: StopRequests | None,
        *,
        offload: str,
    ):
        assert engines[0].rollout is not None
        self._config, self._engine, self._engines = config, engines[0].rollout, engines
        self._step, self._stop, self._offload = step, stop, offload
        self._checked: set[int] = set()
        """Points whose first refit has been checked."""

    def serve(self, calls: dict[int, PointCall]) -> dict[int, Batch | None]:
        """Return the batch of each point by its index; None for all if a stop request ended a call.

        Points with the same sampling parameters share a call of the engine. A sample has the same seed as in
        a run of its point alone.
        """
        self._wake(calls)
        by_sampling: defaultdict[Sampling, dict[int, PointCall]] = defaultdict(dict)
        for point, call in calls.items():
            by_sampling[call.sampling][point] = call
        found: dict[int, Batch | None] = {}
        for some in by_sampling.values():
            found |= self._generate(some)
        self._engine.sleep()
        for engines in self._engines:
            engines.reload()
        return found

    def _wake(self, calls: dict[int, PointCall]) -> None:
        """Wake the engine, and give it the present adapters of the points."""
        engine, refits = self._engine, self._config.refit
        assert engine.slots is not None
        slept = not engine.awake
        self._offload_models(weights=False)
        if slept:
            engine.wake_weights()
        policies = {point: self._engines[point].policy for point in calls}
        old = [point for point in calls if engine.slots.versions[point] != policies[point].version]
        for point in old:
            with calls[point].step.phase("refit", timing="update_weights"):
                traffic = refit(policies[point], engine, buffer_mib=refits.buffer_mib, adapter=point)
                calls[point].step.metrics |= traffic_metrics(traffic, engine.device)
        for point, call in calls.items():  # after all refits, which may have written to each other's slots
            policy, options = policies[point], dict(buffer_mib=refits.buffer_mib, adapter=point)
            is_due = bool(refits.check_every) and call.step.number % refits.check_every == 0
            if point in old and (is_due or point not in self._checked):
                check_refit(policy, engine, **options)
                self._checked.add(point)
            check_weights(policy, engine, **options, with_base=point == min(calls))
        self._offload_models(weights=True)
        if slept:
            engine.wake_cache()

    def _offload_models(self, *, weights: bool) -> None:
        """Offload gradients and optimizer states of all points, and with `weights` the weights, too."""
        if self._offload != "none":
            for engines in self._engines:
                engines.offload(weights=weights and self._offload == "all")

    def _generate(self, calls: dict[int, PointCall]) -> dict[int, Batch | None]:
        """Generate for points with the same sampling parameters."""
        engine, step = self._engine, self._step
        sampling = next(iter(calls.values())).sampling
        adapters = [point for point, call in calls.items() for _ in call.prompts]
        contexts = [ids for call in calls.values() for ids in call.ids]
        seeds = [seed for call in calls.values() for seed in call.seeds]
        order: list[int] = []
        for call in calls.values():
            order += [len(order) + place for place in call.order or range(len(call.prompts))]
        abortable = self._stop is not None and all(call.abortable for call in calls.values())
        total = len(contexts) * sampling.samples_per_prompt
        before = step.metrics.get("timing_s/gen", 0.0)
        phase = step.phase("generate", timing="gen", batch={"ids": fingerprint(contexts)})
        with phase, step.bar("gen", total) as bar:
            own = engine.generate(
                contexts,
                sampling,
                seeds,
                progress=AllReplicas(bar, engine.num_replicas),
                interrupt=self._stop.is_requested if abortable and self._stop is not None else None,
                order=order,
                adapters=adapters,
            )
            if abortable and any_rank(own is None):
                return dict.fromkeys(calls)
            step.events = engine.events.digest
            samples = exchange(own or [], step.device)
        seconds = step.metrics["timing_s/gen"] - before
        found: dict[int, Batch | None] = {}
        first, n = 0, sampling.samples_per_prompt
        for point, call in calls.items():
            mine = _within(samples, first, len(call.prompts))
            found[point] = batch_of(mine, call.ids, prompts=call.prompts, samples_per_prompt=n)
            first += len(call.prompts)
            # All points wait for the whole call, so the time of each point is the time of the call.
            key = f"timing_s/{call.timing}"
            call.step.metrics[key] = call.step.metrics.get(key, 0.0) + seconds
            if abortable:
                call.step.abortable_s += seconds
        return found


def _within(samples: list[Sample], first: int, number: int) -> list[Sample]:
    """Return the samples of prompts first .. first + number - 1, numbered from 0."""
    return [
        replace(sample, prompt=sample.prompt - first)
        for sample in samples
        if first <= sample.prompt < first + number
    ]
