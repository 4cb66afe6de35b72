"""`Sampler` produces the samples of a run's steps. The loop and the phases know this class and no subclass.

    refit:  refit                                 before each step and each validation
    draw:   num_to_draw -> prompts -> batch       of each step, several times with dynamic sampling
    learn:  check -> update -> learned
    save:   before_save -> state_dict

`rl.run.samplers` chooses the form. In the default form, generation alternates with training
(`rl.phases.generation`). Other forms carry samples over to later steps, generate on separate ranks, generate
together with other points of a sweep, or read stored rollouts.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl.checks.batches import check_staleness
from rl.config.declarations import shipped
from rl.config.needs import needs_sampling_masks
from rl.config.options import ConfigError
from rl.config.schema import Config
from rl.data.batch import Batch, fingerprint
from rl.data.held import SAMPLING_MASKS, ColumnBytes
from rl.data.prompts import Prompt
from rl.phases.step_record import StepRecord
from rl.rollout import held_parts
from rl.rollout.queue import PastLengths
from rl.rollout.samples import Sample
from rl.rollout.sampling import Sampling, seed_of, train_sampling
from rl.runtime.collectives import sum_over_world
from rl.stopping.requests import StopRequests
from rl.training.engine import TrainingEngine

if TYPE_CHECKING:
    from rl.phases.phases import Phases


@dataclass(frozen=True)
class SampleCall:
    """A request to sample responses to prompts with the present weights."""

    prompts: Sequence[Prompt]
    sampling: Sampling
    """Sampling parameters, and the number of responses per prompt."""
    purpose: str
    """Distinguishes the seeds of this call from the seeds of other calls in the run."""
    timing: str = "gen"
    """Name of the call's duration in the metrics, timing_s/<timing>; "testing" marks a validation.

    A stop request ends every call that is not a validation, unless a model was already updated in this step.
    """
    order: Sequence[int] | None = None
    """The prompts in the order in which they start; None: as given."""

    @property
    def ids(self) -> list[np.ndarray]:
        """The prompts' tokens, int32 [P_i]."""
        return [prompt.token_ids for prompt in self.prompts]

    @property
    def num_samples(self) -> int:
        return len(self.prompts) * self.sampling.samples_per_prompt


class Sampler:
    """Produces samples. Methods are collective over the world, with the same arguments on every rank."""

    varies_limits = False
    """Whether a resumed run may hold samples that were generated with another limit of tokens."""

    def __init__(self, config: Config, step: StepRecord, policy: TrainingEngine):
        self._config, self._step, self._policy = config, step, policy
        self._past_lengths = PastLengths() if config.rollout.longest_first else None

    # Samples ----------------------------------------------------------------------------------------------

    def refit(self) -> None:
        """Give the present weights to the generating engines; do nothing if the engines already have them.

        The points of a sweep get their weights together, when all of them wait for samples
        (`JointGeneration`).
        """

    def sample(self, call: SampleCall) -> Batch:
        """Return the samples of a call, for example of a validation.

        Raises StepAborted on every rank after a stop request.
        """
        raise NotImplementedError

    def num_to_draw(self, num_groups: int) -> int:
        """Return how many prompts the next `batch` needs in order to return `num_groups` groups."""
        return num_groups

    def batch(self, prompts: list[Prompt], *, round: int = 0) -> Batch:
        """Return a training batch of rollout.samples_per_prompt responses per prompt.

        The prompts were just drawn. The batch may have groups of other prompts (`Batch.prompts`).

        round: number of the call within the step; calls with different numbers sample with different seeds.
        """
        sampling, order = train_sampling(self._config), self._order(prompts)
        return self._noted(self.sample(SampleCall(prompts, sampling, self._purpose(round), order=order)))

    def collect(self, phases: "Phases", collect: Callable[["Phases"], Batch]) -> Batch:
        """Return the batch of a step by the algorithm's `collect`."""
        return collect(phases)

    # Steps ------------------------------------------------------------------------------------------------

    def begin(self, cursor: Mapping[str, Any]) -> None:
        """Begin the run. cursor: of the draw before the first batch."""

    def check(self, batch: Batch) -> None:
        """Raise StaleTokens if tokens of the next batch to learn from are too old."""
        # A user's algorithm may keep samples of older weights.
        if self._config.algorithm in shipped():
            check_staleness(batch, self._policy.version, limit=0)

    def learned(self) -> None:
        """Note that the step has learned from the batch."""

    def end(self, code: int) -> None:
        """End the run. code: its exit code."""

    # Checkpoints ------------------------------------------------------------------------------------------

    def cursor(self) -> dict[str, Any]:
        """Return the sampler's own part of a batch's cursor, which `Phases.cursor` adds to the draw's part.

        Later calls do not modify the returned object.
        """
        return {} if self._past_lengths is None else {"past_lengths": dict(self._past_lengths.means)}

    def before_save(self) -> None:
        """Complete the state that a checkpoint must hold."""

    def state_dict(self, cursor: Mapping[str, Any]) -> dict[str, Any]:
        """Return plain data for a checkpoint; rank 0's is written. Collective over the world.

        cursor: of the last batch that was learned from.
        """
        return dict(cursor)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of `state_dict`. Raises ConfigError if it does not fit the config."""
        if num_carried := len(state.get("carry_over", {}).get("prompts", ())):
            raise ConfigError(
                f"rollout.carry_over=false, but the checkpoint holds {num_carried} prompts that were drawn "
                "and not consumed; set rollout.carry_over=true."
            )
        self._load_lengths(state)

    def _load_lengths(self, state: Mapping[str, Any]) -> None:
        if self._past_lengths is not None:
            means = state.get("past_lengths", {}).items()
            self._past_lengths.means = {int(index): mean for index, mean in means}

    def _loaded(self, samples: list[Sample]) -> list[Sample]:
        """Return the samples of a checkpoint. Rank 0 keeps the values of the samples' held columns.

        Raises ConfigError if the samples lack a held column that this run learns with.
        """
        config = self._config
        columns = {"routes"} if config.training.router_replay == "engine" else set()
        columns |= set(SAMPLING_MASKS) if needs_sampling_masks(config) else set()
        segments = (segment for sample in samples for segment in sample.segments if segment.is_sampled)
        missing = next((columns - own.held.keys() for own in segments if len(own.token_ids)), set())
        if missing:
            raise ConfigError(
                f"the checkpoint holds samples without {', '.join(sorted(missing))}; resume with the values "
                "of training.router_replay, rollout.top_p, top_k and min_p of the saved run."
            )
        return held_parts.only_on(samples, 0)

    # Parts of `sample` and `batch` -----------------------------------------------------------------------

    def _log_held(self, batch: Batch, moved: ColumnBytes) -> None:
        """Log the bytes that brought the held columns of a batch to the ranks that keep them.

        moved: the bytes of this rank. Collective over the world.
        """
        if batch.held:
            total = sum_over_world(torch.tensor([moved.received, moved.planned]), self._step.device.torch)
            names = "perf/held_collected_bytes_received", "perf/held_collected_bytes_planned"
            self._step.metrics |= zip(names, total.tolist())

    def _seeds(self, call: SampleCall) -> list[int]:
        """Return one seed per place in the call, so that a prompt drawn twice gets different samples."""
        return [seed_of(self._config.run.seed, call.purpose, place) for place in range(len(call.prompts))]

    @contextmanager
    def _call(
        self, phase: str, ids: Sequence[np.ndarray], total: int, timing: str, stop: StopRequests | None
    ) -> Iterator[tuple[Any, Callable[[], bool] | None]]:
        """Run the body as a phase that generates samples of the prompts, int32 [P_i].

        Yields a pair: a progress bar over `total` samples, and a function that returns whether to abort. The
        function is None if the call cannot be aborted. stop: see `Generation`.
        """
        step, started = self._step, time.perf_counter()
        can_abort = timing != "testing" and stop is not None and not step.is_committed
        with (
            step.phase(phase, timing=timing, batch={"ids": fingerprint(ids)}),
            step.bar(timing, total) as bar,
        ):
            yield bar, stop.is_requested if stop is not None and can_abort else None
        if can_abort:
            step.abortable_s += time.perf_counter() - started

    def _purpose(self, round: int) -> str:
        """Return a text that distinguishes the seeds of the training batch from the seeds of other calls."""
        return f"train.{self._step.number}.{round}" if round else f"train.{self._step.number}"

    def _order(self, prompts: Sequence[Prompt]) -> list[int] | None:
        """Return the places of the prompts in the order in which they start; None: as given."""
        if self._past_lengths is None:
            return None
        return self._past_lengths.longest_first([prompt.index for prompt in prompts])

    def _noted(self, batch: Batch) -> Batch:
        """Note the lengths of the batch for the order of later batches; return the batch."""
        if self._past_lengths is not None:
            indices = [prompt.index for prompt in batch.prompts]
            self._past_lengths.note(indices, batch.groups.tolist(), batch.lengths.tolist())
        return batch
