"""The generation engine: vLLM inside this process, one replica per `rollout.tp` adjacent ranks.

With vLLM's `external_launcher`, every rank of a replica runs the same engine schedule on the same requests;
replicas are independent of each other. Two requirements follow. First, each request has its own seed. With
the engine's generators, ranks would sample different tokens and hang later. Second, the ranks of a replica
add and abort requests at the same engine steps, in the same order. `rl.rollout.events` describes how.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rl.config.rollout import Rollout
from rl.data.prompts import Prompt
from rl.models import SUPPORTED, read_hf_config, rope, sizes
from rl.models.layout import Piece, Weight
from rl.models.placement import RolloutPlacement
from rl.rollout import cpu_support, router
from rl.rollout.calls import Calls
from rl.rollout.events import INTERVAL, Abort, Add, Done, Event, EventLog, Source, Waiting, Weights
from rl.rollout.parts import EnginePart, WeightSlots
from rl.rollout.platforms import Cpu, Cuda, Platform
from rl.rollout.queue import shared_queue, static_queue
from rl.rollout.queue_schedule import QueueSchedule
from rl.rollout.samples import Completion, Sample
from rl.rollout.sampling import Sampling
from rl.rollout.single_turn import SingleTurn
from rl.rollout.source import SampleSource
from rl.rollout.vllm_model import DERIVED, ServedModel, build_llm, derive_weights, refusals
from rl.run_directory.progress import Counter
from rl.runtime.device import Device


class RolloutEngine:
    """vLLM on this rank. The constructor is collective over the world; other methods are over the replica.

    Args:
        model: the model that the engine serves.
        rollout: layout, capacity and memory. The sampling parameters are an argument of `generate`.
        seed: seed of the engine's own generators; each sample has its own seed.
        name: distinguishes the engines of one job.
        parts: additions by the features of the run; `rl.engines.rollout_engines` chooses them.
    """

    def __init__(
        self,
        model: ServedModel,
        rollout: Rollout,
        *,
        seed: int,
        device: Device,
        name: str = "rollout",
        parts: Sequence[EnginePart] = (),
    ):
        self.config, self.device, self.name, self.frozen = rollout, device, name, model.frozen
        world, rank = dist.get_world_size(), dist.get_rank()
        self.tp = rollout.tp
        self.num_replicas = world // self.tp
        self.replica, self.rank_in_replica = divmod(rank, self.tp)
        self.leads = self.rank_in_replica == 0
        """Whether this rank decides what its replica generates (`rl.rollout.events`)."""
        self.hf = rope.scaled(read_hf_config(model.path), model.rope_scaling)
        self._path, self._has_stepped = model.path, False
        num_layers, num_experts = self.hf["num_hidden_layers"], sizes.num_experts(self.hf)
        ep = rollout.ep if num_experts else 1
        self.placement = RolloutPlacement(world, self.tp, num_layers, ep=ep, num_experts=num_experts)
        self.slots = next((part for part in parts if isinstance(part, WeightSlots)), None)
        """Weights beside the model's; None if there are none, or the model's weights contain them."""
        self.keeps_cache = rollout.carry_over and rollout.carry_over_cache == "keep" and not self.frozen
        """Whether the KV cache stays when the weights change. Samples then share a cached prefix only if they
        began with the same version of the weights."""
        self.platform: Platform = Cuda() if device.is_cuda else Cpu()
        self.parts: list[EnginePart] = [self.platform, *parts]
        cpu_support.install()
        options: dict = {}
        for part in self.parts:
            options |= part.options(self)
        self.llm = build_llm(model, self.hf, rollout, seed=seed, device=device, options=options)
        self.model = self.llm.apply_model(lambda model: model)[0]
        if not model.frozen:  # nothing is compared with a model that only generates
            router.check(self.model)
        self.runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        client: Any = self.llm.llm_engine.engine_core  # the class that vLLM names declares no core
        self.scheduler = client.engine_core.scheduler
        for part in self.parts:
            part.built(self)
        self.replica_group = _own_replica_group(world, self.tp, rank)
        self._queues_made = 0
        self._calls = Calls(self)
        self.events = EventLog(self.replica_group)
        """The log of the last `run`."""
        self.awake = True
        """Whether the engine holds its memory and may generate."""
        self.weights_version = -1
        """Version of the policy's weights in the engine (`TrainingEngine.version`); -1: none yet."""

    @property
    def is_busy(self) -> bool:
        """Whether requests run."""
        return len(self._calls) > 0

    def close(self) -> None:
        """Destroy vLLM's groups and shared memory.

        Collective over the replica; the engine is unusable afterwards.
        """
        from vllm.distributed.parallel_state import destroy_model_parallel

        destroy_model_parallel()

    # Memory and weights -----------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Release the engine's memory for the trainer.

        On CUDA the weights are released too, because a refit writes all of them.
        """
        self.awake = False
        if not self.keeps_cache:
            self.llm.reset_prefix_cache()
        for part in self.parts:
            part.sleep(self)

    def wake_weights(self) -> None:
        """Make the parameters writable again, before a refit."""
        self._wake("weights")

    def wake_cache(self) -> None:
        """Allocate the KV cache again, after a refit and before `generate`."""
        self._wake("kv_cache")
        self.awake = True

    def _wake(self, what: str) -> None:
        self.device.release_cached_memory()  # of the trainer, or the buffers of the refit
        for part in self.parts:
            part.wake(self, what)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return this rank's weights by vLLM's name, without weights that vLLM derives from others."""
        weights: dict[str, torch.Tensor] = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if name.rpartition(".")[2] not in DERIVED
        }
        for part in self.parts:
            weights = part.weights(weights)
        return weights

    def pieces(self, weight: Weight) -> list[Piece]:
        """Return the pieces of the parameter `weight.vllm` on this rank; [] if the rank holds none of it."""
        return self.placement.pieces_on(weight, dist.get_rank())

    @torch.no_grad()
    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write whole Hugging Face tensors into this rank's shards through vLLM's own reloading.

        vLLM packs or quantises the tensors as it does at the start. If one tensor of a module is among
        `weights`, all tensors of this module must be.
        """
        self.runner.reload_weights(weights_iterator=weights)
        self.weights_changed()

    def weights_changed(self) -> None:
        """Derive vLLM's own tensors from the weights again, in the same memory, and clear the prefix cache.

        Call it after every write to weights. A cache that is kept for unfinished samples is not cleared; its
        prefixes are separated by the version of the weights that a sample began with.
        """
        derive_weights(self.model)
        for part in self.parts:
            part.weights_changed(self)
        self.device.synchronize()
        if self.keeps_cache:
            return
        is_reset = self.llm.reset_prefix_cache(reset_running_requests=True)
        assert is_reset, "the engine kept cache blocks of old weights"

    # Generation -------------------------------------------------------------------------------------------

    def queue(self, num_items: int, *, is_fixed: bool = False) -> Iterator[int]:
        """Return the work of one call, shared by all replicas; only leaders draw from it.

        Every rank calls it the same number of times. is_fixed: whether each replica has a fixed share also
        without `rollout.deterministic`.
        """
        self._queues_made += 1
        if self.config.deterministic or is_fixed:
            return static_queue(num_items, replica=self.replica, num_replicas=self.num_replicas)
        return shared_queue(num_items, name=self.call_name)

    @property
    def call_name(self) -> str:
        """Name of the last `queue` in the job's store; equal on all ranks."""
        return f"{self.name}-queue-{self._queues_made}"

    def capacity(self, num_prompts: int, samples_per_prompt: int) -> int:
        """Return the maximum number of samples of a call that this replica may hold at a time.

        The number is at most the replica's share of the call: for example, 32 for 16 prompts of 8 samples on
        4 replicas. Without this limit the first replica to start would draw all prompts.
        """
        share = -(-num_prompts // self.num_replicas) * samples_per_prompt
        return max(samples_per_prompt, min(self.config.max_concurrent_samples, share))

    def generate(
        self,
        prompts: list[np.ndarray],
        sampling: Sampling,
        seeds: list[int],
        progress: Counter | None = None,
        interrupt: Callable[[], bool] | None = None,
        order: Sequence[int] | None = None,
        adapters: list[int] | None = None,
    ) -> list[Sample] | None:
        """Return the samples of the prompts that this replica drew; None if the call was interrupted.

        The leader returns the samples; other ranks return [].

        Args:
            prompts: token ids of each prompt, int32 [P_i].
            seeds: one per prompt, see `StartedSample.seed`.
            progress: see `SampleSource`.
            interrupt: see `run`.
            order: places of the prompts in starting order; None: as given.
            adapters: see `QueueSchedule`.
        """
        queue = self.queue(len(prompts))
        if order is not None:
            queue = (order[item] for item in queue)
        capacity = self.capacity(len(prompts), sampling.samples_per_prompt)
        whole = [Prompt.of_tokens(token_ids) for token_ids in prompts]
        schedule = QueueSchedule(whole, sampling, seeds, queue=queue, adapters=adapters)
        source = SampleSource(schedule, SingleTurn(sampling, capacity=capacity), progress=progress)
        if not self.run(source if self.leads else None, sampling, interrupt=interrupt):
            return None
        return schedule.samples

    def run(
        self,
        source: Source | None,
        sampling: Sampling,
        *,
        interrupt: Callable[[], bool] | None = None,
        take_weights: Callable[[int], None] | None = None,
        on_wait: Callable[[str], None] = lambda text: None,
        keep_records: bool = True,
    ) -> bool:
        """Generate for the source on the replica's leader. Collective over the replica.

        Before an engine step, the leader sends a record of events to the other ranks in any of these cases:
        nothing runs, the source waits, a request has finished since the last record, or INTERVAL steps have
        passed.

        Args:
            source: decides what is generated; None on other ranks than the leader.
            sampling: sampling parameters; each request has its own seed and `max_tokens`.
            interrupt: called before each record, on every rank. If it returns true on the leader, the run
                ends.
            take_weights: writes the weights of a version into the engine, after an event `Weights`.
            on_wait: called with the text of each event `Waiting`, and with "" when the wait is over.
            keep_records: whether `events` keeps its records; it keeps their hash in any case.

        Returns whether the run was completed without an interrupt. Afterwards `events` is the log of the run.
        """
        calls = self._calls
        self.events = EventLog(self.replica_group, keep_records=keep_records)
        for part in self.parts:
            part.begin(self)
        step = last_record = 0
        has_finished = waits = False
        while True:
            if not len(calls) or waits or has_finished or step - last_record >= INTERVAL:
                last_record, has_finished = step, False
                is_interrupted = interrupt is not None and interrupt()
                events: list[Event] = []
                if source is not None:
                    events = [Done(aborted=True)] if is_interrupted else source.next_events(len(calls), step)
                events = self.events.share(events, step)
                text = "".join(event.text for event in events if isinstance(event, Waiting))
                if text or waits:
                    on_wait(text)
                waits = bool(text)
                if any(not isinstance(event, Add) for event in events):
                    for name, completion in calls.drain():
                        has_finished = True
                        self._deliver(source, name, completion)
                for event in events:
                    match event:
                        case Add(request):
                            calls.add(request, sampling)
                        case Abort(name) if name in calls:  # else the step in flight finished it
                            self._deliver(source, name, calls.abort(name))
                        case Weights(version):
                            assert take_weights is not None, "this run takes no weights"
                            take_weights(version)
                            calls.note_version(version)
                        case Done(aborted):
                            calls.abort_all()
                            for part in self.parts:
                                part.end(self)
                            return not aborted
            steps = len(calls) > 0 and not waits
            follows = steps
            for part in self.parts:
                follows = part.step_together(self, follows)
            if not follows:
                continue
            step += 1
            if not steps:
                self.dummy_step()
                continue
            for name, completion in self._step():
                has_finished = True
                self._deliver(source, name, completion)

    def _step(self) -> list[tuple[str, Completion]]:
        """Take an engine step with requests. Raises ConfigError if vLLM fails in the first one of a class."""
        if self._has_stepped or not set(self.hf["architectures"]).isdisjoint(SUPPORTED):
            return self._calls.step()
        with refusals(self._path, self.hf):
            out = self._calls.step()
        self._has_stepped = True
        return out

    def dummy_step(self) -> None:
        """Take an engine step without requests, together with replicas that have some."""
        self.llm.llm_engine.engine_core.execute_dummy_batch()
        self.events.note_dummy_step()

    def _deliver(self, source: Source | None, name: str, completion: Completion) -> None:
        self.events.note(name, completion.token_ids)
        if source is not None:
            source.receive(name, completion)


def _own_replica_group(world: int, tp: int, rank: int) -> dist.ProcessGroup:
    """Return a gloo group of this replica's ranks. Collective over the world; all ranks create all groups."""
    groups = [dist.new_group(list(range(first, first + tp)), backend="gloo") for first in range(0, world, tp)]
    return groups[rank // tp]
