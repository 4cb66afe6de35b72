"""The generation engine: vLLM inside this process, one replica per `rollout.tp` neighbouring ranks, no server.

vLLM's `external_launcher` makes every rank of a replica run the same engine schedule on the same requests; replicas are
independent of each other. Requirements that follow, all met here: each request has its own seed (ranks would otherwise
sample from their own generators: silent garbage, then a hang), and ranks of a replica add requests at the same steps.
"""

import hashlib
import itertools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from rl.config.schema import Rollout
from rl.rollout import cpu_support
from rl.rollout.queue import Queue, SharedQueue, StaticQueue
from rl.runtime.device import Device

INTERRUPT_TURNS = 16
"""Engine steps between two looks at whether to go on; a step takes 10 ms and more."""


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn."""

    samples_per_prompt: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Sample:
    """One generated response."""

    prompt: int
    """Which of the prompts given to `generate`."""
    number: int
    """Which of the prompt's samples."""
    token_ids: np.ndarray
    """int32 [R], the end-of-sequence token included if there is one."""
    logprobs: np.ndarray
    """float32 [R], in the distribution that was sampled from (after temperature, top-p, ...)."""
    truncated: bool
    """Ended at max_tokens."""


class RolloutEngine:
    """vLLM on this rank. The constructor is collective over the world; other methods are over the replica.

    Args:
        path: Hugging Face checkpoint directory.
        rollout: layout, capacity and memory; how responses are sampled is an argument of `generate`.
        dtype: of the weights.
        max_tokens: longest prompt and response together.
        seed: of the engine's own generators; samples have seeds of their own.
        name: tells the engines of one job apart.
        frozen: the weights are read from `path` and stay; on CUDA in the GPU's memory, since vLLM's sleeping allocator serves
            one engine per process. Otherwise they are undefined until the first refit.
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
        with _trainer_state_kept(device):
            self.llm = _build_llm(path, rollout, dtype, max_tokens, seed, device, frozen)
        if not device.is_cuda:
            dist.barrier()
            cpu_support.unlink_shared_memory()
        # Garbage collection of the LLM would destroy the trainer's default process group.
        self.llm.llm_engine.engine_core._finalizer.detach()
        _abort_one_by_one(self.llm.llm_engine.engine_core)
        self.model = self.llm.apply_model(lambda model: model)[0]
        self._runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self._cpu_cache = None if device.is_cuda else cpu_support.KvCache(self._runner.kv_caches)
        self._replica_group = _own_replica_group(world, self.tp, rank)
        self._queues_made = 0
        self.awake = True
        """Whether it holds its memory and may generate."""

    def close(self) -> None:
        """Give vLLM's groups and shared memory back. Collective over the replica; the engine is of no use afterwards."""
        from vllm.distributed.parallel_state import destroy_model_parallel

        destroy_model_parallel()

    def sleep(self) -> None:
        """Give the engine's memory to the trainer. On CUDA the weights go too: each refit rewrites all of them."""
        self.awake = False
        self.llm.reset_prefix_cache()
        if self._cpu_cache is not None:
            self._cpu_cache.release()
        elif not self.frozen:
            self.llm.sleep(level=2)

    def wake_weights(self) -> None:
        """Make the parameters writable again, before a refit."""
        self.device.release_cached_memory()
        if self.device.is_cuda and not self.frozen:
            self.llm.wake_up(tags=["weights"])

    def wake_cache(self) -> None:
        """Take the KV cache's memory again, after a refit and before `generate`."""
        self.device.release_cached_memory()  # what the refit gathered
        if self._cpu_cache is not None:
            self._cpu_cache.restore()
        elif not self.frozen:
            self.llm.wake_up(tags=["kv_cache"])
        self.awake = True

    def weights(self) -> dict[str, torch.Tensor]:
        """This rank's weights by vLLM's name. W_UV and W_UK_T of multi-head latent attention are none: vLLM takes them from
        kv_b_proj.weight, and `derive_weights` does so again."""
        return {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if name.rpartition(".")[2] not in ("W_UV", "W_UK_T")
        }

    @torch.no_grad()
    def derive_weights(self) -> None:
        """Bring what vLLM computed from weights after loading up to date, in the same memory. After every write to weights."""
        from vllm.model_executor.layers.attention.mla_attention import MLAAttention

        for module in self.model.modules():
            if isinstance(module, MLAAttention):
                module.process_weights_after_loading(module.kv_b_proj.weight.dtype)

    @torch.no_grad()
    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write whole Hugging Face tensors into this rank's shards through vLLM's own reloading, which packs or quantises them as
        at the start, and forget what was computed with the old ones. All tensors of a module must be among them."""
        self._runner.reload_weights(weights_iterator=weights)
        self.weights_changed()

    def weights_changed(self) -> None:
        """Derive anew what depends on the weights, wait for the writes, and forget what was computed with the old ones."""
        self.derive_weights()
        self.device.synchronize()
        assert self.llm.reset_prefix_cache(reset_running_requests=True), (
            "the engine kept cache blocks of old weights"
        )

    def queue(self, num_items: int) -> Queue:
        """The work of one `generate` call, over all replicas. Made the same number of times on every rank."""
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
        """The samples of those prompts that this replica drew; None if `interrupt`, asked now and then, was true on a rank of it.

        prompts: int32 [P_i] token ids each; seeds: one per prompt; sample j of prompt i is drawn with `seed_of(seeds[i], j)`,
        so that what is sampled does not depend on which replica draws it.
        """
        engine, queue = self.llm.llm_engine, self.queue(len(prompts))
        n = sampling.samples_per_prompt
        # No replica holds more than its share, or the first to start would take all.
        share = -(-len(prompts) // self.num_replicas) * n
        capacity = max(n, min(self.config.max_concurrent_samples, share))
        running: set[str] = set()
        more, out = True, []
        for turn in itertools.count():
            if not more and not running:
                return out
            if interrupt is not None and turn % INTERRUPT_TURNS == 0 and self._any_in_replica(interrupt()):
                engine.abort_request(sorted(running))
                return None
            while more and len(running) + n <= capacity:
                item = queue.draw()
                if item is None:
                    more = False
                    break
                for number in range(n):
                    params = _params(sampling, seed_of(seeds[item], number))
                    request = f"{item}.{number}"
                    engine.add_request(request, {"prompt_token_ids": prompts[item].tolist()}, params)
                    running.add(request)
            finished = [output for output in engine.step() if output.finished] if running else []
            running -= {output.request_id for output in finished}
            out += [_sample(output) for output in finished]
            if progress is not None:
                progress.update(len(finished) * self.num_replicas)

    def _any_in_replica(self, here: bool) -> bool:
        """Whether it is true on a rank of this replica. Collective over the replica."""
        if self.tp == 1:
            return here
        anywhere = torch.tensor(int(here))
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=self._replica_group)
        return bool(anywhere)


def seed_of(*parts: object) -> int:
    """A seed of 63 bits that is a function of the parts: run seed, step, prompt, sample number."""
    digest = hashlib.blake2b(".".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _params(sampling: Sampling, seed: int):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        seed=seed,
        logprobs=0,  # the sampled token's only
        flat_logprobs=True,
        detokenize=bool(
            sampling.stop
        ),  # stop strings are looked for in text; otherwise the trainer decodes in batches
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _sample(output) -> Sample:
    prompt, number = map(int, output.request_id.split("."))
    completion = output.outputs[0]
    return Sample(
        prompt=prompt,
        number=number,
        token_ids=np.asarray(completion.token_ids, np.int32),
        logprobs=np.asarray(completion.logprobs.logprobs, np.float32),
        truncated=completion.finish_reason == "length",
    )


def _abort_one_by_one(client) -> None:
    """Make vLLM's scheduler free aborted requests in the order given, which all ranks of a replica share.

    Within one call vLLM frees requests in the order of a set of strings, and both the ids and the hashes of
    strings are random per process. The order decides which cached prefix is evicted first. If ranks evict
    different prefixes, they later compute different numbers of tokens and their collectives no longer match.
    Interrupts abort requests, and so does vLLM itself for every response that ends at a stop string.
    """
    abort = client.abort_requests

    def abort_requests(request_ids: list[str]) -> None:
        for request_id in request_ids:
            abort([request_id])

    client.abort_requests = abort_requests


def _build_llm(
    path: str, rollout: Rollout, dtype: str, max_tokens: int, seed: int, device: Device, frozen: bool
):
    from vllm import LLM, ModelRegistry

    from rl.models import SUPPORTED, read_hf_config

    hf = read_hf_config(path)
    for name in set(hf["architectures"]) & set(
        SUPPORTED
    ):  # skips a subprocess of about 10 s that inspects the model's class
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
    options: dict = {}
    if not frozen and hf.get(
        "quantization_config"
    ):  # the trainer's weights, which come by refits, are not quantised
        options = dict(hf_overrides={"quantization_config": None})
    if device.is_cuda:
        options |= dict(
            enable_sleep_mode=not frozen,
            enforce_eager=rollout.enforce_eager,
            # FlashInfer's kernels reorder the experts' weights in place, in the same shape: a refit would write them as they
            # lie in a checkpoint, and nothing would look wrong. Triton's compute with them as they are.
            moe_backend="auto" if frozen else "triton",
            gpu_memory_utilization=rollout.gpu_memory_utilization,
        )
    else:
        options |= dict(
            enforce_eager=True,
            kv_cache_memory_bytes=rollout.cpu_kv_cache_mib << 20,
            # vLLM's CPU rotary kernel is wrong for 3-dimensional queries (DeepSeek).
            compilation_config={"custom_ops": ["all", "-rotary_embedding"]},
        )
        if "kv_lora_rank" in hf:  # the other choice, on hosts with AMX, takes kv_b_proj.weight away
            options |= dict(attention_backend="CPU_MLA")
    return LLM(
        path,
        distributed_executor_backend="external_launcher",
        tensor_parallel_size=rollout.tp,
        dtype=dtype,
        load_format="auto" if frozen else "dummy",  # the first refit writes every weight
        max_model_len=max_tokens,
        max_num_seqs=rollout.max_concurrent_samples,
        logprobs_mode="processed_logprobs",  # the log-probs of the distribution that is sampled from
        seed=seed,
        disable_log_stats=True,
        # By default vLLM turns asynchronous scheduling on for CUDA and off for CPU. It schedules one step
        # ahead: finishes are seen one step late, and `generate` returns or aborts with a step in flight
        # when the trainer takes the memory. Ranks of external_launcher fell out of step with it on (vLLM
        # #28774). Without it CUDA runs the loop that the tests compare between ranks, step by step.
        async_scheduling=False,
        **options,
    )


@contextmanager
def _trainer_state_kept(device: Device):
    """vLLM's constructor seeds every generator, changes LOCAL_WORLD_SIZE and replaces torch.set_num_threads. It takes its
    GPU from LOCAL_RANK, which is another number where each rank sees one GPU (srun --gpus-per-task)."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    environment = {name: os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    set_num_threads = torch.set_num_threads
    if device.is_cuda:
        os.environ["LOCAL_RANK"] = str(device.torch.index)
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    torch.set_num_threads = set_num_threads
    os.environ.update(environment)


def _own_replica_group(world: int, tp: int, rank: int):
    """A gloo group of the replica's ranks. Every rank makes every group."""
    groups = [dist.new_group(list(range(first, first + tp)), backend="gloo") for first in range(0, world, tp)]
    return groups[rank // tp]
