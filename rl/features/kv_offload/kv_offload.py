"""KV cache of ended turns in host memory (`rollout.kv_offload_gib`).

When a request has ended, the full blocks of its KV cache are copied to host memory. The next turn of its
dialogue begins with the same tokens. It copies back the blocks that other requests have displaced from the
engine's cache:

    request ends -> its blocks -> host memory -> blocks of the next turn -> only the new tokens are computed

vLLM's own connectors report a copy when it has ended, at times that differ between ranks. Here each rank of a
replica has its own scheduler, and all must schedule the same. This connector therefore decides by requests
and their tokens alone, and its copies run in the order of the forward passes, before the pass of their step.
For example, with blocks of 16 tokens a turn that ends after 100 tokens leaves 6 blocks in host memory.
"""

import ctypes
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.v1.kv_cache_interface import group_kernel_blocks

from rl.config.adapter import Adapter
from rl.config.schema import Config
from rl.rollout.parts import EnginePart
from rl.runtime.collectives import sum_over_world
from rl.runtime.device import host_memory

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from rl.rollout.engine import RolloutEngine


class KvOffload(EnginePart):
    """Gives an engine host memory for the KV cache of ended turns.

    gib: GiB of host memory of each rank. Raises ValueError if no block fits, or they cannot be allocated.
    """

    def __init__(self, gib: float):
        self._gib = gib

    def options(self, engine: "RolloutEngine") -> dict:
        from vllm.config import KVTransferConfig

        return {
            "kv_transfer_config": KVTransferConfig(
                kv_connector=HostCache.__name__, kv_connector_module_path=__name__, kv_role="kv_both"
            )
        }

    def built(self, engine: "RolloutEngine") -> None:
        self._cache = engine.scheduler.connector
        worker, setting = get_kv_transfer_group(), f"rollout.kv_offload_gib={self._gib:g}"
        assert isinstance(worker, HostCache)
        try:
            self._cache.num_slots = worker.allocate(int(self._gib * 2**30), pinned=engine.device.is_cuda)
        except RuntimeError as error:
            raise ValueError(f"{setting} cannot be allocated on each rank: {error}; lower it.") from error
        if not self._cache.num_slots:
            least = worker.block_bytes / 2**30
            raise ValueError(
                f"{setting} must hold a block of the KV cache, of {least:.2g} GiB; raise it, or use 0."
            )
        self._cache.reset_cache()

    def begin(self, engine: "RolloutEngine") -> None:
        self._cache.num_loaded = 0

    def weights_changed(self, engine: "RolloutEngine") -> None:
        self._cache.reset_cache()

    def sleep(self, engine: "RolloutEngine") -> None:
        self._cache.reset_cache()  # blocks that are not copied yet are gone

    def metrics(self, engine: "RolloutEngine") -> dict[str, float]:
        loaded = torch.tensor(float(self._cache.num_loaded * engine.leads), dtype=torch.float64)
        return {"perf/kv_loaded_tokens": float(sum_over_world(loaded, engine.device.torch))}


@dataclass
class Copies(KVConnectorMetadata):
    """The copies before the forward pass of a step, between blocks of the engine's cache and host memory."""

    stores: dict[int, int] = field(default_factory=dict)
    """Slot in host memory -> block: the last one if several blocks got the slot before the step."""
    loads: list[tuple[int, int]] = field(default_factory=list)
    """(Block, slot), after the stores."""


class HostCache(KVConnectorBase_V1):
    """Both ends of vLLM's interface: its scheduler has one object, and its worker another one."""

    def __init__(
        self, vllm_config: "VllmConfig", role: "KVConnectorRole", kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.num_slots = 0
        """Number of blocks that fit into the host memory."""
        self.num_loaded = 0
        """Number of tokens with keys and values that were copied back."""
        self._slots: OrderedDict = OrderedDict()
        """Hash of all tokens up to the end of a block -> slot, the least recently used first."""
        self._free: list[int] = []
        self._copies = Copies()
        self._first: dict[str, int] = {}
        """Number of blocks of a waiting request that the engine's cache holds."""

    # The scheduler's object -------------------------------------------------------------------------------

    @property
    def _block_size(self) -> int:
        return self._vllm_config.cache_config.block_size

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        """Return the number of tokens to copy back, and False: the step waits for the copies."""
        first = num_computed_tokens // self._block_size
        stop = (request.num_tokens - 1) // self._block_size  # the last token is computed in any case
        held = [block_hash in self._slots for block_hash in request.block_hashes[first:stop]]
        self._first[request.request_id] = first
        return (held + [False]).index(False) * self._block_size, False

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        first = self._first.pop(request.request_id, 0)
        own = blocks.get_block_ids()[0]
        for place in range(first, first + num_external_tokens // self._block_size):
            block_hash = request.block_hashes[place]
            self._slots.move_to_end(block_hash)
            self._copies.loads.append((own[place], self._slots[block_hash]))
        self.num_loaded += num_external_tokens

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Decide which blocks of an ended request are kept; vLLM frees them before they are copied.

        The copy precedes the next write to the blocks. Of these blocks the last one will be given up first.
        """
        self._first.pop(request.request_id, None)  # of a request that was aborted while it waited
        num_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        num_blocks = min(num_tokens // self._block_size, len(request.block_hashes), self.num_slots)
        for block, block_hash in reversed(list(zip(block_ids[:num_blocks], request.block_hashes))):
            if block_hash not in self._slots:
                slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
                self._slots[block_hash] = slot
                self._copies.stores[slot] = block
            self._slots.move_to_end(block_hash)
        return False, None

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> Copies:
        copies, self._copies = self._copies, Copies()
        return copies

    def reset_cache(self) -> bool:
        """Forget everything, because the weights have changed."""
        self._slots.clear()
        self._first.clear()
        self._free, self._copies = list(range(self.num_slots)), Copies()
        return True

    # The worker's object ----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        num_blocks = self._kv_cache_config.num_blocks
        self._layers = [group_kernel_blocks(cache, num_blocks) for cache in kv_caches.values()]
        for cache in self._layers:
            assert cache[0].numel() == cache.stride(0), f"a block of {tuple(cache.shape)} has gaps"

    def allocate(self, size: int, *, pinned: bool) -> int:
        """Allocate at most `size` bytes of host memory; return the number of blocks that fit."""
        self._sizes = np.array([cache[0].nbytes for cache in self._layers])
        self.block_bytes = int(self._sizes.sum())
        num_slots = size // self.block_bytes
        memory = host_memory if pinned else lambda size: torch.empty(size, dtype=torch.uint8)
        self._host = memory(num_slots * self.block_bytes)
        return num_slots

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Copy to the host; vLLM calls it before each forward pass, also without preemptions."""
        assert isinstance(kv_connector_metadata, Copies)
        self._copy([(block, slot) for slot, block in kv_connector_metadata.stores.items()], to_host=True)

    def start_load_kv(self, forward_context: "ForwardContext", **options: Any) -> None:
        copies = self._get_connector_metadata()
        assert isinstance(copies, Copies)
        self._copy(copies.loads, to_host=False)

    def _copy(self, pairs: list[tuple[int, int]], *, to_host: bool) -> None:
        """Copy all layers of some blocks. On CUDA the copies are queued on the current stream."""
        if not pairs:
            return
        blocks, slots = np.array(pairs, np.int64).T
        starts = np.array([cache.data_ptr() for cache in self._layers])
        engines = starts + blocks[:, None] * self._sizes
        ends = self._sizes.cumsum()
        hosts = self._host.data_ptr() + slots[:, None] * ends[-1] + (ends - self._sizes)
        sizes = np.broadcast_to(self._sizes, engines.shape)
        pointers = (engines, hosts) if to_host else (hosts, engines)
        sources, targets, sizes = (np.ascontiguousarray(each).ravel() for each in (*pointers, sizes))
        if self._layers[0].is_cuda:
            from vllm import _custom_ops

            _custom_ops.swap_blocks_batch(
                torch.from_numpy(sources), torch.from_numpy(targets), torch.from_numpy(sizes)
            )
        else:
            for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist()):
                ctypes.memmove(target, source, size)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """The copies precede the forward pass on its stream."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: "AttentionMetadata", **options: Any
    ) -> None:
        """Blocks are copied when their request has ended."""

    def wait_for_save(self) -> None:
        """The copies precede the next writes to their blocks on the stream."""


def parts(config: Config, adapters: Sequence[Adapter]) -> list[EnginePart]:
    """Return the parts of an engine."""
    return [KvOffload(config.rollout.kv_offload_gib)]
