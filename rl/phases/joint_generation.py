"""Generation for all points of a sweep in one call of the engine, with the interface of `Generation`."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rl.config.schema import Config
from rl.data.batch import Batch, fingerprint
from rl.data.prompts import Prompt
from rl.phases.generation import AllReplicas
from rl.phases.sampler import Sampler
from rl.phases.step import Step
from rl.refit.refit import check_refit, check_weights, refit, traffic_metrics
from rl.rollout.batches import batch_of
from rl.rollout.engine import RolloutEngine
from rl.rollout.exchange import exchange
from rl.rollout.samples import Sample
from rl.rollout.sampling import Sampling
from rl.runtime.collectives import any_rank
from rl.stopping.requests import StepAborted, StopRequests
from rl.training.engine import TrainingEngine


@dataclass(frozen=True)
class Ask:
    """The request of a point; see `Generation.sample`."""

    step: Step
    prompts: list[Prompt]
    sampling: Sampling
    seeds: list[int]
    timing: str
    abortable: bool
    order: Sequence[int]
    """The prompts in the order in which they start."""


class PointGeneration(Sampler):
    """Generation of one point: hands in its prompts, and waits until the engine has generated for all.

    Args:
        wait: gives the request to `JointGeneration.serve` and returns its batch, None after a stop request.
    """

    def __init__(
        self, config: Config, step: Step, policy: TrainingEngine, wait: Callable[[Ask], Batch | None]
    ):
        super().__init__(config, step, policy)
        self._wait = wait

    def sample(
        self,
        prompts: list[Prompt],
        sampling: Sampling,
        *,
        purpose: str,
        timing: str = "gen",
        order: Sequence[int] | None = None,
    ) -> Batch:
        seeds, order = self._seeds(purpose, len(prompts)), order or range(len(prompts))
        abortable = timing != "testing" and not self._step.is_committed
        batch = self._wait(Ask(self._step, prompts, sampling, seeds, timing, abortable, order))
        if batch is None:
            raise StepAborted
        return batch


class JointGeneration:
    """Serves the requests of all points that wait. Methods are collective over the world.

    Args:
        policies: of all points. The index of a point's adapter in the engine is that of its policy here.
        step: the step object of the sweep, whose phases are those in which all points wait.
        stop: requests that may abort a generation for training; None if none may.
        offload: what leaves the device's memory while the engine generates (`offload_of`).
    """

    def __init__(
        self,
        config: Config,
        engine: RolloutEngine,
        policies: list[TrainingEngine],
        step: Step,
        stop: StopRequests | None,
        *,
        offload: str,
    ):
        self._config, self._engine, self._policies = config, engine, policies
        self._step, self._stop, self._offload = step, stop, offload
        self._checked: set[int] = set()
        """Points whose first refit has been checked."""

    def serve(self, asks: dict[int, Ask]) -> dict[int, Batch | None]:
        """Return the batch of each point by its index; None for all if a stop request ended a call.

        Points with the same sampling parameters share a call of the engine. A sample has the seed that it
        would have if its point ran alone.
        """
        self._wake(asks)
        alike: defaultdict[Sampling, dict[int, Ask]] = defaultdict(dict)
        for point, ask in asks.items():
            alike[ask.sampling][point] = ask
        found: dict[int, Batch | None] = {}
        for some in alike.values():
            found |= self._generate(some)
        if self._offload != "none":
            self._engine.sleep()
            for policy in self._policies:
                policy.reload()
        return found

    def _wake(self, asks: dict[int, Ask]) -> None:
        """Wake the engine, and give it the present adapters of the points."""
        engine, refits = self._engine, self._config.refit
        assert engine.adapters is not None
        slept = not engine.awake
        if self._offload != "none":
            for policy in self._policies:
                policy.offload(weights=False)
        if slept:
            engine.wake_weights()
        for point, ask in asks.items():
            policy = self._policies[point]
            options = dict(buffer_mib=refits.buffer_mib, adapter=point)
            if engine.adapters.versions[point] != policy.version:
                is_due = bool(refits.check_every) and ask.step.number % refits.check_every == 0
                with ask.step.phase("refit", timing="update_weights"):
                    traffic = refit(policy, engine, **options)
                    ask.step.metrics |= traffic_metrics(traffic, engine.device)
                    if is_due or point not in self._checked:
                        check_refit(policy, engine, **options)
                        self._checked.add(point)
            check_weights(policy, engine, **options, with_base=point == min(asks))
        if self._offload == "all":
            for policy in self._policies:
                policy.offload(weights=True)
        if slept:
            engine.wake_cache()

    def _generate(self, asks: dict[int, Ask]) -> dict[int, Batch | None]:
        """Generate for points with the same sampling parameters."""
        engine, step = self._engine, self._step
        sampling = next(iter(asks.values())).sampling
        ids = {point: [prompt.token_ids for prompt in ask.prompts] for point, ask in asks.items()}
        adapters = [point for point, ask in asks.items() for _ in ask.prompts]
        contexts = [tokens for some in ids.values() for tokens in some]
        seeds = [seed for ask in asks.values() for seed in ask.seeds]
        order: list[int] = []
        for ask in asks.values():
            order += [len(order) + place for place in ask.order]
        abortable = self._stop is not None and all(ask.abortable for ask in asks.values())
        total = len(contexts) * sampling.samples_per_prompt
        before = step.metrics.get("timing_s/gen", 0.0)
        with step.phase("generate", timing="gen", batch=fingerprint(contexts)), step.bar("gen", total) as bar:
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
                return dict.fromkeys(asks)
            step.events = engine.events.digest
        seconds = step.metrics["timing_s/gen"] - before
        found: dict[int, Batch | None] = {}
        first = 0
        for point, ask in asks.items():
            mine = _within(own or [], first, len(ask.prompts))
            batch = batch_of(
                exchange(mine, step.device),
                ids[point],
                prompts=ask.prompts,
                samples_per_prompt=sampling.samples_per_prompt,
            )
            # All points wait for the whole call, so each one's time is that of the call.
            key = f"timing_s/{ask.timing}"
            ask.step.metrics[key] = ask.step.metrics.get(key, 0.0) + seconds
            if abortable:
                ask.step.abortable_s += seconds
            found[point], first = batch, first + len(ask.prompts)
        return found


def _within(samples: list[Sample], first: int, number: int) -> list[Sample]:
    """Return the samples of prompts first .. first + number - 1, numbered from 0."""
    return [
        replace(sample, prompt=sample.prompt - first)
        for sample in samples
        if first <= sample.prompt < first + number
    ]
