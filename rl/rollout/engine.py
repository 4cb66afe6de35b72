"""The generation engine: vLLM inside this process, one replica per `rollout.tp` adjacent ranks.

With vLLM's `external_launcher`, every rank of a replica runs the same engine schedule on the same requests;
replicas are independent of each other. Two requirements follow. First, each request has its own seed. With
the engine's generators, ranks would sample different tokens and hang later. Second, the ranks of a replica
add and abort requests at the same engine steps, in the same order.
"""

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist

from rl.config.schema import Rollout
from rl.rollout import cpu_support
from rl.rollout.queue import Queue, SharedQueue, StaticQueue
from rl.rollout.sampling import Sampling, seed_of
from rl.rollout.turns import Completion, Request, Response, Sample, SingleTurn
from rl.rollout.vllm_model import build_llm
from rl.runtime.collectives import any_rank
from rl.runtime.device import Device

INTERRUPT_TURNS = 16
"""Number of engine steps between two checks of `interrupt`; a step takes at least about 10 ms."""


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
    ):
        self.config, self.device, self.name, self.frozen = rollout, device, name, frozen
        world, rank = dist.get_world_size(), dist.get_rank()
        self.tp = rollout.tp
        self.num_replicas = world // self.tp
        self.replica, self.rank_in_replica = divmod(rank, self.tp)
        cpu_support.install()
        self.llm = build_llm(
            path, rollout, dtype=dtype, max_tokens=max_tokens, seed=seed, device=device, frozen=frozen
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
        self._cpu_cache = None
        if not device.is_cuda:
            self._cpu_cache = cpu_support.KvCache(self._runner.kv_caches)
            self._runner.sampler = cpu_support.make_sampler(self._runner)
        self._replica_group = _own_replica_group(world, self.tp, rank)
        self._queues_made = 0
        self.awake = True
        """Whether the engine holds its memory and may generate."""
        self.weights_version = -1
        """Version of the policy whose weights the engine holds (`TrainingEngine.version`); -1: none yet."""

    def close(self) -> None:
        """Destroy vLLM's groups and shared memory.

        Collective over the replica; the engine is unusable afterwards.
        """
        from vllm.distributed.parallel_state import destroy_model_parallel

        destroy_model_parallel()

    # Memory and weights -----------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Release the engine's memory for the trainer.

        On CUDA the weights are released too, because each refit writes all of them.
        """
        self.awake = False
        self.llm.reset_prefix_cache()
        if self._cpu_cache is not None:
            self._cpu_cache.release()
            cpu_support.release_packed_weights(self.model)
        elif not self.frozen:
            self.llm.sleep(level=2)

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
            name: parameter
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

    def weights_changed(self, *, keep_cache: bool = False) -> None:
        """Recompute the tensors derived from the weights, and clear the prefix cache of the old weights.

        keep_cache: keep it, and with it the cache of running requests.
        """
        self.derive_weights()
        self.device.synchronize()
        if keep_cache:
            return
        is_reset = self.llm.reset_prefix_cache(reset_running_requests=True)
        assert is_reset, "the engine kept cache blocks of old weights"

    # Generation -------------------------------------------------------------------------------------------

    def queue(self, num_items: int) -> Queue:
        """Return the work of one `generate` call, shared by all replicas.

        Every rank calls it the same number of times.
        """
        self._queues_made += 1
        if self.config.deterministic:
            return StaticQueue(num_items, replica=self.replica, num_replicas=self.num_replicas)
        return SharedQueue(
            num_items, name=f"{self.name}-queue-{self._queues_made}", replica_group=self._replica_group
        )

    def generate(
        self,
        prompts: list[np.ndarray],
        sampling: Sampling,
        seeds: list[int],
        progress=None,
        interrupt: Callable[[], bool] | None = None,
    ) -> list[Sample] | None:
        """Return the samples of the prompts that this replica drew; None if the call was interrupted.

        Args:
            prompts: token ids of each prompt, int32 [P_i].
            seeds: one per prompt. Sample j of prompt i is sampled with `seed_of(seeds[i], j)`, so it does not
                depend on the replica that draws the prompt.
            interrupt: called every INTERRUPT_TURNS engine steps. If it returns true on any rank of the
                replica, the call ends.
        """
        engine, queue = self.llm.llm_engine, self.queue(len(prompts))
        n = sampling.samples_per_prompt
        # A replica holds at most its share; otherwise the first to start would draw all prompts.
        share = -(-len(prompts) // self.num_replicas) * n
        capacity = max(n, min(self.config.max_concurrent_samples, share))
        running: dict[str, Response] = {}
        finished: list[Sample] = []
        more = True
        for turn in itertools.count():
            if not more and not running:
                return finished
            if interrupt is not None and turn % INTERRUPT_TURNS == 0 and self._any_in_replica(interrupt()):
                engine.abort_request(sorted(running))
                return None
            while more and len(running) + n <= capacity:
                item = queue.draw()
                if item is None:
                    more = False
                    break
                for number in range(n):
                    seed = seed_of(seeds[item], number)
                    request = Request(prompts[item].tolist(), seed, sampling.max_tokens)
                    self._submit(SingleTurn(item, number, request), sampling, running)
            num_before = len(finished)
            for output in engine.step() if running else []:
                if output.finished:
                    response = running.pop(output.request_id)
                    response.receive(_completion(output.outputs[0], self.weights_version))
                    if not self._submit(response, sampling, running):
                        finished.append(response.sample())
            if progress is not None:
                progress.update((len(finished) - num_before) * self.num_replicas)

    def _submit(self, response: Response, sampling: Sampling, running: dict[str, Response]) -> bool:
        """Give the response's next request to vLLM; return False if the response is complete instead."""
        request = response.next_request()
        if request is None:
            return False
        request_id = f"{response.prompt}.{response.number}"
        prompt = {"prompt_token_ids": request.token_ids}
        self.llm.llm_engine.add_request(request_id, prompt, self._params(sampling, request))
        running[request_id] = response
        return True

    def _params(self, sampling: Sampling, request: Request):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=request.max_tokens,
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

    def _any_in_replica(self, here: bool) -> bool:
        """Return whether `here` is true on any rank of this replica. Collective over the replica."""
        return here if self.tp == 1 else any_rank(here, self._replica_group)


def _completion(output, weights_version: int) -> Completion:
    return Completion(
        token_ids=np.asarray(output.token_ids, np.int32),
        logprobs=np.asarray(output.logprobs.logprobs, np.float32),
        truncated=output.finish_reason == "length",
        weights_version=weights_version,
    )


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
