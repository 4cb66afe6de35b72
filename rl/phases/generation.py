"""The generation phase: prompts in, a batch of sampled responses out."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl.config.schema import Config
from rl.data.batch import Batch, fingerprint
from rl.data.prompts import Prompt
from rl.engines.engines import Engines
from rl.engines.memory import MemorySharing
from rl.phases.batch_checks import describe_failures, warn_of_failures
from rl.phases.batch_metrics import agent_metrics
from rl.phases.sampler import Sampler
from rl.phases.step import Step
from rl.rollout.batches import batch_of
from rl.rollout.exchange import exchange
from rl.rollout.queue import greedy_idle, idle_shares
from rl.rollout.samples import Sample
from rl.rollout.sampling import Sampling
from rl.runtime import tracing
from rl.runtime.collectives import any_rank, gather_objects, sum_over_world
from rl.stopping.requests import StepAborted, StopRequests

if TYPE_CHECKING:  # a run without environments does not import them
    from rl.agents.rollouts import AgentRollouts


class AllTrajectoriesFailed(Exception):
    """No group of a call has enough trajectories whose environments did not fail."""


@dataclass(frozen=True)
class AllReplicas:
    """A progress bar over the samples of all replicas, which one replica's samples advance for all."""

    bar: Any
    num_replicas: int

    def update(self, n: int) -> None:
        self.bar.update(n * self.num_replicas)


class Generation(Sampler):
    """Generates responses with the current weights of the policy, in turn with the training.

    Args:
        stop: requests that may abort a generation; None if none may.
        agents: generates trajectories with environments; None: responses of one turn.
    """

    def __init__(
        self,
        config: Config,
        step: Step,
        engines: Engines,
        memory: MemorySharing,
        stop: StopRequests | None,
        agents: "AgentRollouts | None" = None,
    ):
        super().__init__(config, step, engines.policy)
        self._engines = engines
        self._memory, self._stop, self._agents = memory, stop, agents
        self._counts: defaultdict[tuple[int, str], Counter[str]] = defaultdict(Counter)
        """Counts of environments in this step, by its number and the timing of the calls."""

    def sample(
        self,
        prompts: list[Prompt],
        sampling: Sampling,
        *,
        purpose: str,
        timing: str = "gen",
        order: Sequence[int] | None = None,
    ) -> Batch:
        """Sample responses to the prompts, as `Sampler.sample`.

        With environments a group may have fewer responses, or be missing (`batch.prompts`). In validation
        a failed trajectory is a sample of which `failed` is 1. Raises AllTrajectoriesFailed on every rank if
        environments failed for every group.
        """
        engine = self._engines.rollout
        assert engine is not None, "this run has no generation engine"
        seeds = self._seeds(purpose, len(prompts))
        ids, n = [prompt.token_ids for prompt in prompts], sampling.samples_per_prompt
        options: dict[str, Any] = dict(total=len(ids) * n, timing=timing)
        if self._agents is None:
            generate = partial(engine.generate, ids, sampling, seeds, order=order)
            samples = self.run(ids, generate, **options)
            return batch_of(samples, ids, prompts=prompts, samples_per_prompt=n)
        counts: Counter[str] = Counter()

        def generate_trajectories(progress, interrupt) -> list[Sample] | None:
            assert self._agents is not None
            on_wait = self._step.watchdog.tracker.wait
            waits: dict[str, Any] = dict(progress=progress, interrupt=interrupt, on_wait=on_wait, order=order)
            # Validation is not repeated, so its log is not stored.
            is_validation = timing == "testing"
            waits["log_name"] = "" if is_validation else f"step_{self._step.number}/{purpose}"
            waits["keeps_failed"] = is_validation
            own, found = self._agents.generate(engine, prompts, sampling, seeds, **waits)
            counts.update(found)
            return own

        batch = batch_of(self.run(ids, generate_trajectories, **options), ids, prompts=prompts, turns=True)
        return self._complete_groups(batch, sampling, counts, timing)

    def run(
        self, ids: list[np.ndarray], generate: Callable[..., list[Sample] | None], *, total: int, timing: str
    ) -> list[Sample]:
        """Call `generate` as a phase with the engine awake; return the samples of all ranks.

        Collective over the world.

        Args:
            ids: contexts of the samples, int32 [P_i].
            generate: called with the keyword arguments `progress` and `interrupt` on every rank; returns this
                rank's samples, or None after an interrupt.
            total: expected number of samples, for the progress bar.
            timing: see `Sampler.sample`.

        Raises StepAborted on every rank after a stop request.
        """
        self._wake_engine()
        engine, step = self._engines.rollout, self._step
        assert engine is not None, "this run has no generation engine"
        abortable = timing != "testing" and self._stop is not None and not step.is_committed
        started = time.perf_counter()
        with step.phase("generate", timing=timing, batch=fingerprint(ids)), step.bar(timing, total) as bar:
            began = time.perf_counter()  # all ranks have arrived
            interrupt = self._stop.is_requested if abortable and self._stop is not None else None
            with tracing.span("engine", replica=engine.replica):
                own = generate(progress=AllReplicas(bar, engine.num_replicas), interrupt=interrupt)
            busy = time.perf_counter() - began
            with tracing.span("exchange samples"):  # waits for the slowest replica
                if abortable and any_rank(own is None):
                    raise StepAborted
                step.events = engine.events.digest
                reward = self._config.reward
                is_read = bool(reward.model.path or reward.judge.path)
                samples = exchange(own or [], step.device, conversations=is_read)
            step.metrics |= self._idle_metrics(timing, busy, samples, len(ids))
        if abortable:
            step.abortable_s += time.perf_counter() - started
        return samples

    def _complete_groups(self, batch: Batch, sampling: Sampling, counts: Counter[str], timing: str) -> Batch:
        """Return the groups that can be learned from, and log what the environments did.

        A group loses the trajectories whose environments failed, and is dropped if a single one is left of
        several. Collective over the world. counts: this rank's, by name.
        """
        total: Counter[str] = sum(map(Counter, gather_objects(dict(counts))), Counter())
        ended = total["trajectories"] + total["dropped"]
        expected = len(batch.prompts) * sampling.samples_per_prompt
        assert ended == expected, f"{ended} of {expected} trajectories have ended"
        sizes = torch.bincount(batch.merge_rows().groups, minlength=len(batch.prompts))
        kept = (sizes >= min(2, sampling.samples_per_prompt)).nonzero().squeeze(1).tolist()
        total["dropped_groups"] = len(batch.prompts) - len(kept)
        key = self._step.number, timing
        self._counts = defaultdict(Counter, {k: v for k, v in self._counts.items() if k[0] == key[0]})
        self._counts[key].update(total)  # a step may have several calls
        found = agent_metrics(self._counts[key], capacity=self._config.rollout.max_concurrent_samples)
        prefix = "" if timing == "gen" else "val-aux/"
        self._step.metrics |= {f"{prefix}{name}": value for name, value in found.items()}
        if warning := warn_of_failures(total, counts_as_wrong=timing == "testing"):
            self._step.progress.line(warning)
        if not kept:
            raise AllTrajectoriesFailed(
                f"environments failed in every group of {len(batch.prompts)} prompts: "
                f"{describe_failures(total)}; the log has the reason of each failure."
            )
        return batch if len(kept) == len(batch.prompts) else batch.keep_groups(kept)

    def _wake_engine(self) -> None:
        step = self._step
        step.metrics |= self._memory.to_generation(
            step.number, lambda: step.phase("refit", timing="update_weights")
        )

    def _idle_metrics(
        self, timing: str, busy: float, samples: list[Sample], num_groups: int
    ) -> dict[str, float]:
        """Return the mean and maximum share of the generation time in which a replica waited for the slowest.

        `greedy` is the mean share that longest-first assignment of groups would have had. Collective over the
        world. busy: seconds in which this replica generated.
        """
        engine = self._engines.rollout
        assert engine is not None
        seconds = torch.zeros(engine.num_replicas, dtype=torch.float64)
        if engine.rank_in_replica == 0:
            seconds[engine.replica] = busy
        seconds = sum_over_world(seconds, self._step.device.torch)
        mean, most = idle_shares(seconds.tolist())
        late = (seconds - seconds.min()).numpy()
        self._step.agreement.late_s += late.repeat(len(self._step.agreement.late_s) // len(late))
        loads = [0] * num_groups
        for sample in samples:
            loads[sample.prompt] += len(sample.token_ids)
        greedy = greedy_idle(loads, engine.num_replicas)
        name = f"perf/idle_share_{timing}"
        return {f"{name}/mean": mean, f"{name}/max": most, f"{name}/greedy": greedy}
