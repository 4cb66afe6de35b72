"""The generation phase: prompts in, a batch of sampled responses out."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from rl.config.schema import Config
from rl.data.batch import Batch
from rl.engines.engines import Engines
from rl.engines.memory import MemorySharing
from rl.phases.dialogues import Dialogues
from rl.phases.sampler import SampleCall, Sampler
from rl.phases.step_record import StepRecord
from rl.rollout.engine import RolloutEngine
from rl.rollout.exchange import exchange
from rl.rollout.queue import greedy_idle, idle_shares
from rl.rollout.queue_schedule import QueueSchedule
from rl.rollout.samples import Sample
from rl.runtime import tracing
from rl.runtime.collectives import any_rank, sum_over_world
from rl.stopping.requests import StepAborted, StopRequests


@dataclass(frozen=True)
class AllReplicas:
    """A progress bar for the samples of all replicas, estimated from the progress of one replica."""

    bar: Any
    num_replicas: int

    def update(self, n: int = 1) -> None:
        self.bar.update(n * self.num_replicas)


class Generation(Sampler):
    """Generates responses with the policy's current weights, alternating with training on the same ranks.

    Args:
        stop: requests that may abort a generation; None: it cannot be aborted.
        dialogues: form of the samples; None: responses of one turn.
    """

    def __init__(
        self,
        config: Config,
        step: StepRecord,
        engines: Engines,
        memory: MemorySharing,
        stop: StopRequests | None,
        dialogues: Dialogues | None = None,
    ):
        super().__init__(config, step, engines.policy)
        self._dialogues = dialogues or Dialogues()
        self._engines, self._memory, self._stop = engines, memory, stop

    def refit(self) -> None:
        refit_phase = partial(self._step.phase, "refit", timing="update_weights")
        self._step.metrics |= self._memory.to_generation(self._step.number, refit_phase)

    def sample(self, call: SampleCall) -> Batch:
        def schedule() -> QueueSchedule:
            queue = self._engine.queue(len(call.prompts), is_fixed=self._dialogues.is_fixed)
            ordered = queue if call.order is None else (call.order[item] for item in queue)
            return QueueSchedule(call.prompts, call.sampling, self._seeds(call), queue=ordered)

        return self._dialogues.batch(self._run(call, call.ids, schedule, total=call.num_samples), call)

    @property
    def _engine(self) -> RolloutEngine:
        assert self._engines.rollout is not None, "this run has no generation engine"
        return self._engines.rollout

    def _run(
        self, call: SampleCall, ids: list[np.ndarray], schedule_of: Callable[[], QueueSchedule], *, total: int
    ) -> list[Sample]:
        """Generate as a phase with the engine awake; return the samples of all ranks.

        Collective over the world.

        Args:
            ids: contexts of the samples, int32 [P_i].
            schedule_of: returns this rank's schedule of the call's prompts; called in the phase.
            total: expected number of samples, for the progress bar.

        Raises StepAborted on every rank after a stop request.
        """
        engine, step, timing = self._engine, self._step, call.timing
        if not engine.awake:  # since the refit, a model that scores has used the engine's memory
            self.refit()
        with self._call("generate", ids, total, timing, self._stop) as (bar, interrupt):
            for part in engine.parts:
                part.check(engine, ids[0], total)
            began = time.perf_counter()  # all ranks have arrived
            with tracing.span("engine", replica=engine.replica):
                schedule, all_replicas = schedule_of(), AllReplicas(bar, engine.num_replicas)
                is_whole = self._dialogues.run(
                    engine, schedule, call, progress=all_replicas, interrupt=interrupt
                )
            busy = time.perf_counter() - began
            with tracing.span("exchange samples"):  # waits for the slowest replica
                if interrupt is not None and any_rank(not is_whole):
                    raise StepAborted
                step.events = engine.events.digest
                reward = self._config.reward
                is_read = bool(reward.model.path or reward.judge.path)
                samples = exchange(schedule.samples, step.device, conversations=is_read)
            step.metrics |= self._idle_metrics(timing, busy, samples, len(ids))
            for part in engine.parts:
                step.metrics |= part.metrics(engine)
        return samples

    def _idle_metrics(
        self, timing: str, busy: float, samples: list[Sample], num_groups: int
    ) -> dict[str, float]:
        """Return how long replicas waited for the slowest one, as shares of the generation time.

        For example, a replica that generates 45 s while the slowest generates 60 s has a share of 0.25.
        `mean` and `max` are over the replicas. `greedy` is the mean share if the groups had been assigned
        longest first. Collective over the world. busy: seconds in which this replica generated.
        """
        engine = self._engine
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
