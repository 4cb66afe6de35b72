"""The generation engine: vLLM inside this process, one replica per `rollout.tp` adjacent ranks.

With vLLM's `external_launcher`, every rank of a replica runs the same engine schedule on the same requests;
replicas are independent of each other. Two requirements follow. First, each request has its own seed. With
the engine's generators, ranks would sample different tokens and hang later. Second, the ranks of a replica
add and abort requests at the same engine steps, in the same order. `rl.rollout.events` describes how.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from rl.config.adapter import Adapter
from rl.config.rollout import Rollout
from rl.data.held import SAMPLING_MASKS
from rl.models import read_hf_config
from rl.rollout import cpu_support
from rl.rollout.events import INTERVAL, Abort, Add, Done, Event, EventLog, Source, Waiting, Weights
from rl.rollout.queue import OrderedQueue, Queue, SharedQueue, StaticQueue
from rl.rollout.samples import Completion, Request, Sample, context_digest
from rl.rollout.sampling import Sampling
from rl.rollout.single_turns import SingleTurns
from rl.rollout.vllm_model import build_llm
from rl.runtime import tracing
from rl.runtime.device import Device

if TYPE_CHECKING:  # a run without adapters in the engine does not import them
    from rl.rollout.adapters import AdapterSlots


class RolloutEngine:
    """vLLM on this rank. The constructor is collective over the world; other methods are over the replica.

    Args:
        path: Hugging Face checkpoint directory.
        rollout: layout, capacity and memory; how responses are sampled is an argument of `generate`.
        dtype: dtype of the weights.
        max_tokens: maximum tokens of prompt and response together.
        seed: seed of the engine's own generators; each sample has its own seed.
        name: distinguishes the engines of one job.
        frozen: whether the weights are read from `path` and never change. On CUDA they then stay in GPU
            memory, because vLLM's sleep mode supports one engine per process. Weights of an engine that is
            not frozen are undefined until the first refit.
        returns_masks: whether completions have the masks of their tokens (`rl.rollout.sampling_masks`).
        routes: return the experts that were chosen for each token, as the held column "routes".
        bitwise: compute log-probs that are bitwise those of a trainer in the same mode.
        adapters: the low-rank adapters that it keeps beside the weights (`adapter.in_engine=adapter`), of the
            same layers; a request names one by its index.
    """

    def __init__(
        self,
        path: str,
        rollout: Rollout,
        *,
        dtype: str,
        max_tokens: int,
        seed: int,
        device: Device,
        name: str = "rollout",
        frozen: bool = False,
        returns_masks: bool = False,
        routes: bool = False,
        bitwise: bool = False,
        adapters: Sequence[Adapter] = (),
    ):
        self.config, self.device, self.name, self.frozen = rollout, device, name, frozen
        world, rank = dist.get_world_size(), dist.get_rank()
        self.tp = rollout.tp
        self.num_replicas = world // self.tp
        self.replica, self.rank_in_replica = divmod(rank, self.tp)
        self.leads = self.rank_in_replica == 0
        """Whether this rank decides what its replica generates (`rl.rollout.events`)."""
        cpu_support.install()
        options: dict = {}
        if adapters:
            from rl.rollout import adapters as in_vllm

            in_vllm.keep_experts_kernels()
            if not device.is_cuda:
                cpu_support.multiply_adapters_by_group()
            layers = in_vllm.adapted_layers(read_hf_config(path), adapters[0])
            options = in_vllm.options(layers, [adapter.rank for adapter in adapters])
        self.llm = build_llm(
            path,
            rollout,
            dtype=dtype,
            max_tokens=max_tokens,
            seed=seed,
            device=device,
            frozen=frozen,
            bitwise=bitwise,
            returns_masks=returns_masks,
            routes=routes,
            **options,
        )
        if not device.is_cuda:
            dist.barrier()
            cpu_support.unlink_shared_memory()
        # Garbage collection of the LLM would destroy the trainer's default process group (not in vLLM 0.25).
        if finalizer := getattr(self.llm.llm_engine.engine_core, "_finalizer", None):
            finalizer.detach()
        _abort_in_order(self.llm.llm_engine.engine_core)
        self.model = self.llm.apply_model(lambda model: model)[0]
        self._runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self._scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.adapters: AdapterSlots | None = None
        """Low-rank adapters beside the weights; None if there are none, or the weights contain them."""
        if adapters:
            ranks = [adapter.rank for adapter in adapters]
            self.adapters = in_vllm.AdapterSlots(self._runner, layers, ranks)
        self._vocab_size = self.llm.llm_engine.model_config.get_vocab_size()
        self._returns_masks = returns_masks
        self._cpu_cache = None
        self.keeps_cache = rollout.carry_over and rollout.carry_over_cache == "keep" and not frozen
        """Whether the KV cache stays when the weights change. Samples then share a cached prefix only if they
        began with the same version of the weights."""
        if not device.is_cuda:
            self._cpu_cache = cpu_support.KvCache(self._runner.kv_caches)
            self._runner.sampler = cpu_support.make_sampler(self._runner)
        if bitwise:
            from rl.rollout.bitwise_numerics import make_bitwise

            sampler = None if device.is_cuda else self._runner.sampler
            make_bitwise(self.model, read_hf_config(path), sampler)
        self.replica_group = _own_replica_group(world, self.tp, rank)
        self.held_columns: tuple[str, ...] = SAMPLING_MASKS * returns_masks + ("routes",) * routes
        """Held columns (`rl.data.held`) of the engine's completions."""
        self._routes: Any = None
        if routes and self.leads:
            from rl.rollout.routes import routes_of_engine

            self._routes = routes_of_engine(read_hf_config(path), self.llm, self.model, self._scheduler)
        self._queues_made = 0
        self._running: dict[str, _Live] = {}
        self.events = EventLog(self.replica_group)
        """The log of the last `run`."""
        self.awake = True
        """Whether the engine holds its memory and may generate."""
        self.weights_version = -1
        """Version of the policy whose weights the engine holds (`TrainingEngine.version`); -1: none yet."""

    @property
    def is_busy(self) -> bool:
        """Whether requests run."""
        return bool(self._running)

    def close(self) -> None:
        """Destroy vLLM's groups and shared memory.

        Collective over the replica; the engine is unusable afterwards.
        """
        from vllm.distributed.parallel_state import destroy_model_parallel

        destroy_model_parallel()

    # Memory and weights -----------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Release the engine's memory for the trainer.

        On CUDA the weights are released too, because each refit writes all of them. With adapters beside them
        a refit does not, so vLLM copies the weights to the host.
        """
        self.awake = False
        if not self.keeps_cache:
            self.llm.reset_prefix_cache()
        if self._cpu_cache is not None:
            if not self.keeps_cache:
                self._cpu_cache.release()
            cpu_support.release_packed_weights(self.model)
        elif not self.frozen:
            self.llm.sleep(level=2 if self.adapters is None else 1)

    def wake_weights(self) -> None:
        """Make the parameters writable again, before a refit."""
        self.device.release_cached_memory()
        if self.device.is_cuda and not self.frozen:
            self.llm.wake_up(tags=["weights"])

    def wake_cache(self) -> None:
        """Allocate the KV cache again, after a refit and before `generate`."""
        self.device.release_cached_memory()  # the buffers of the refit
        if self._cpu_cache is not None:
            self._cpu_cache.restore()
        elif not self.frozen:
            self.llm.wake_up(tags=["kv_cache"])
        self.awake = True

    def weights(self) -> dict[str, torch.Tensor]:
        """Return this rank's weights by vLLM's name, without W_UV and W_UK_T of multi-head latent attention.

        vLLM derives those two from kv_b_proj.weight, and `derive_weights` does so again.
        """
        return {
            name.replace(".base_layer.", "."): parameter  # a layer within one with an adapter
            for name, parameter in self.model.named_parameters()
            if name.rpartition(".")[2] not in ("W_UV", "W_UK_T")
        }

    @torch.no_grad()
    def derive_weights(self) -> None:
        """Recompute, in the same memory, the tensors that vLLM derives from weights after loading.

        Call it after every write to weights.
        """
        from vllm.model_executor.layers.attention.mla_attention import MLAAttention

        for module in self.model.modules():
            if isinstance(module, MLAAttention):
                module.process_weights_after_loading(module.kv_b_proj.weight.dtype)
        if not self.device.is_cuda:
            cpu_support.release_packed_weights(self.model)

    @torch.no_grad()
    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write whole Hugging Face tensors into this rank's shards through vLLM's own reloading.

        The reloading packs or quantises them as at the start. All tensors of a module must be among them.
        """
        self._runner.reload_weights(weights_iterator=weights)
        self.weights_changed()

    def weights_changed(self) -> None:
        """Recompute the tensors derived from the weights, and clear the prefix cache of the old weights.

        A cache that is kept for unfinished samples is separated by the version at which a sample began.
        """
        self.derive_weights()
        self.device.synchronize()
        if self.keeps_cache:
            return
        is_reset = self.llm.reset_prefix_cache(reset_running_requests=True)
        assert is_reset, "the engine kept cache blocks of old weights"

    # Generation -------------------------------------------------------------------------------------------

    def queue(self, num_items: int) -> Queue:
        """Return the work of one call, shared by all replicas; only leaders draw from it.

        Every rank calls it the same number of times.
        """
        self._queues_made += 1
        if self.config.deterministic:
            return StaticQueue(num_items, replica=self.replica, num_replicas=self.num_replicas)
        return SharedQueue(num_items, name=self.call_name)

    @property
    def call_name(self) -> str:
        """Name of the last `queue` in the job's store; equal on all ranks."""
        return f"{self.name}-queue-{self._queues_made}"

    def capacity(self, num_prompts: int, samples_per_prompt: int) -> int:
        """Return the most samples of a call that this replica may hold at a time.

        It is at most the replica's share. Otherwise the first to start would draw all prompts.
        """
        share = -(-num_prompts // self.num_replicas) * samples_per_prompt
        return max(samples_per_prompt, min(self.config.max_concurrent_samples, share))

    def generate(
        self,
        prompts: list[np.ndarray],
        sampling: Sampling,
        seeds: list[int],
        progress=None,
        interrupt: Callable[[], bool] | None = None,
        order: list[int] | None = None,
        adapters: list[int] | None = None,
    ) -> list[Sample] | None:
        """Return the samples of the prompts that this replica drew; None if the call was interrupted.

        The leader returns the samples; other ranks return [].

        Args:
            prompts: token ids of each prompt, int32 [P_i].
            seeds: one per prompt, see `SingleTurns`.
            progress: see `SingleTurns`.
            interrupt: see `run`.
            order: the prompts in the order in which they start; None: as given.
            adapters: see `SingleTurns`.
        """
        queue = self.queue(len(prompts))
        if order is not None:
            queue = OrderedQueue(queue, order)
        capacity = self.capacity(len(prompts), sampling.samples_per_prompt)
        options: dict = dict(queue=queue, capacity=capacity, progress=progress, adapters=adapters)
        turns = SingleTurns(prompts, sampling, seeds, **options)
        if not self.run(turns if self.leads else None, sampling, interrupt=interrupt):
            return None
        return turns.samples

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
        """Generate what the source of the replica's leader asks for. Collective over the replica.

        Before an engine step, the ranks exchange a record if nothing runs, if the source waits, if a request
        has finished since the last record, and at the latest after INTERVAL steps.

        Args:
            source: decides what is generated; None on other ranks than the leader.
            sampling: sampling parameters; each request has its own seed and `max_tokens`.
            interrupt: called before each record, on every rank. If it returns true on the leader, the run
                ends.
            take_weights: writes the weights of a version into the engine, after an event `Weights`.
            on_wait: called with the text of each event `Waiting`, and with "" when the wait is over.
            keep_records: whether `events` keeps its records, of which it has the hash in any case.

        Returns whether the run was completed, and not interrupted. `events` is then its log.
        """
        engine, running = self.llm.llm_engine, self._running
        self.events = EventLog(self.replica_group, keep_records=keep_records)
        if not self.device.is_cuda:
            self._runner.sampler.masks = {} if self._returns_masks else None
        step = last_record = 0
        has_finished = waits = False
        while True:
            if not running or waits or has_finished or step - last_record >= INTERVAL:
                last_record, has_finished = step, False
                is_interrupted = interrupt is not None and interrupt()
                events: list[Event] = []
                if source is not None:
                    events = (
                        [Done(aborted=True)] if is_interrupted else source.next_events(len(running), step)
                    )
                events = self.events.share(events, step)
                text = "".join(event.text for event in events if isinstance(event, Waiting))
                if text or waits:
                    on_wait(text)
                waits = bool(text)
                for event in events:
                    match event:
                        case Add(request):
                            self._add(request, sampling)
                        case Abort(name):
                            self._deliver(source, name, self._abort(name))
                        case Weights(version):
                            assert take_weights is not None, "this run takes no weights"
                            take_weights(version)
                            self._note_version(version)
                        case Done(aborted):
                            engine.abort_request(list(running))
                            running.clear()
                            return not aborted
            if running and not waits:
                with tracing.span("engine step", requests=len(running)):
                    outputs = engine.step()
                for output in outputs:
                    if output.finished:
                        has_finished = True
                        live = running.pop(output.request_id)
                        self._deliver(source, output.request_id, self._completion(output, live))
                step += 1

    def _add(self, request: Request, sampling: Sampling) -> None:
        """Give a request to vLLM."""
        prompt: dict = {"prompt_token_ids": request.token_ids.tolist()}
        if self.keeps_cache:
            first = request.first_version
            prompt["cache_salt"] = f"v{self.weights_version if first is None else first}"
        engine = self.llm.llm_engine
        options, version = {}, self.weights_version
        if self.adapters is not None:
            options["lora_request"] = self.adapters.request(request.adapter)
            version = self.adapters.versions[request.adapter]
        internal = engine.add_request(request.name, prompt, self._params(sampling, request), **options)
        self._running[request.name] = _Live(internal, [(0, version)])

    def _abort(self, name: str) -> Completion:
        """Abort a request and return its tokens so far."""
        live, engine = self._running.pop(name), self.llm.llm_engine
        token_ids = np.array(self._scheduler.requests[live.internal_id].output_token_ids, np.int32)
        # The CPU's scheduler reports tokens only at the end of a request, vLLM's after each step.
        logprobs = None if self.device.is_cuda else self._scheduler.logprobs.get(live.internal_id)
        if logprobs is None:
            logprobs = engine.output_processor.request_states[
                live.internal_id
            ].logprobs_processor.logprobs.logprobs
        logprobs = np.array(logprobs, np.float32)
        engine.abort_request([name])
        return Completion(token_ids, logprobs, "abort", live.versions(len(token_ids)))

    def _masks(self, internal_id: str, output) -> dict[str, np.ndarray]:
        """Return the held columns of the sets from which the tokens of a finished request were sampled."""
        from rl.rollout.sampling_masks import columns_of

        if self.device.is_cuda:
            sets = output.sampling_mask.token_ids
        else:  # none if the request was greedy; one too many if tokens were sampled after a stop string
            sets = list(self._runner.sampler.masks.pop(internal_id, {}).values())[: len(output.token_ids)]
            sets = sets or [()] * len(output.token_ids)
        assert len(sets) == len(output.token_ids), "the engine did not return a sampling mask for every token"
        return columns_of(sets, self._vocab_size)

    def _completion(self, finished, live: "_Live") -> Completion:
        """Return the tokens of a finished request, with the held columns."""
        output = finished.outputs[0]
        held = {} if self._routes is None else {"routes": self._routes.take(live.internal_id, output)}
        if self._returns_masks:
            held |= self._masks(live.internal_id, output)
        return Completion(
            token_ids=np.asarray(output.token_ids, np.int32),
            logprobs=np.asarray(output.logprobs.logprobs, np.float32),
            end="length" if output.finish_reason == "length" else "stop",
            weight_versions=live.versions(len(output.token_ids)),
            held=held,
            context_digest=context_digest(finished.prompt_token_ids),
        )

    def _deliver(self, source: Source | None, name: str, completion: Completion) -> None:
        self.events.note(name, completion.token_ids)
        if source is not None:
            source.receive(name, completion)

    def _note_version(self, version: int) -> None:
        """Note that all further tokens are sampled by `version` of the policy."""
        self.weights_version = version
        for live in self._running.values():
            request = self._scheduler.requests[live.internal_id]
            live.spans.append((request.num_output_tokens, version))

    def _params(self, sampling: Sampling, request: Request):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        # vLLM compiles the grammar within add_request if the executor is external_launcher, so that all ranks
        # admit the request at the same step (vLLM #29996).
        grammar = request.grammar and StructuredOutputsParams(structural_tag=request.grammar)
        temperature, top_k = sampling.temperature, sampling.top_k
        if self.device.is_cuda and self._returns_masks:
            # An engine that returns sampling masks refuses requests without top_k, and greedy ones.
            temperature, top_k = (temperature, top_k or self._vocab_size) if temperature else (1.0, 1)
        return SamplingParams(
            temperature=temperature,
            top_p=sampling.top_p,
            top_k=top_k,
            min_p=sampling.min_p,
            max_tokens=request.max_tokens,
            structured_outputs=grammar,
            stop=list(sampling.stop),
            stop_token_ids=list(sampling.stop_token_ids),
            seed=request.seed if self.device.is_cuda else None,
            extra_args={"seed": request.seed},  # for HashedSampler
            logprobs=0,  # the sampled token's only
            flat_logprobs=True,
            # Stop strings are matched in text; otherwise the trainer decodes in batches.
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # each request has its own parameters
        )


@dataclass
class _Live:
    """A request that runs."""

    internal_id: str
    """vLLM's id: the name and a random suffix."""
    spans: list[tuple[int, int]]
    """(number of the first token, version of the policy that sampled the tokens from there on)."""

    def versions(self, num_tokens: int) -> np.ndarray:
        """Return the version of each of the request's tokens, int32 [num_tokens]."""
        versions = np.zeros(num_tokens, np.int32)
        for first, version in self.spans:
            versions[first:] = version
        return versions


def _abort_in_order(client) -> None:
    """Make vLLM free aborted requests in the given order, identical on all ranks of a replica.

    Within one call vLLM frees requests in the iteration order of a set of strings, and both the ids and the
    hashes of strings are random per process. The order determines which cached prefix is evicted first. If
    ranks evict different prefixes, they later compute different numbers of tokens and their collectives no
    longer match. An interrupt aborts requests, and vLLM aborts every response that ends at a stop string.
    """
    abort = client.abort_requests

    def abort_requests(request_ids: list[str]) -> None:
        for request_id in request_ids:
            abort([request_id])

    client.abort_requests = abort_requests


def _own_replica_group(world: int, tp: int, rank: int) -> dist.ProcessGroup:
    """Return a gloo group of this replica's ranks. Collective over the world; all ranks create all groups."""
    groups = [dist.new_group(list(range(first, first + tp)), backend="gloo") for first in range(0, world, tp)]
    return groups[rank // tp]
