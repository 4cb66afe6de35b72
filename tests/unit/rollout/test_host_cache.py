"""Host memory of offloaded KV caches: its size, and blocks that displace others before they are copied."""

from types import SimpleNamespace

import pytest
import torch

from rl.features.kv_offload import kv_offload
from rl.features.kv_offload.kv_offload import Copies, HostCache, KvOffload

BLOCK = 2**20
"""Bytes of a block, of both layers."""


@pytest.fixture
def cache(monkeypatch):
    cache = HostCache.__new__(HostCache)
    cache._layers = [torch.zeros(4, BLOCK // 2, dtype=torch.uint8) for _ in range(2)]
    cache._vllm_config = SimpleNamespace(cache_config=SimpleNamespace(block_size=16))
    cache._slots, cache._first, cache._copies = kv_offload.OrderedDict(), {}, Copies()
    monkeypatch.setattr(kv_offload, "get_kv_transfer_group", lambda: cache)
    return cache


def build(cache: HostCache, gib: float) -> None:
    device = SimpleNamespace(is_cuda=False)
    KvOffload(gib).built(SimpleNamespace(scheduler=SimpleNamespace(connector=cache), device=device))


def test_memory_that_holds_no_block_is_refused(cache):
    with pytest.raises(ValueError, match="kv_offload_gib=0.0001 must hold a block .* 0.00098 GiB; raise it"):
        build(cache, 0.0001)


def test_memory_that_cannot_be_allocated_is_refused(cache):
    with pytest.raises(ValueError, match=r"rollout.kv_offload_gib=1e\+08 cannot be allocated .*; lower it"):
        build(cache, 1e8)


def test_a_slot_is_written_once_per_step(cache):
    """Copies of one batch have no order on a GPU, so that an older block could be written last."""
    build(cache, 2.5 * BLOCK / 2**30)
    for number in range(2):
        request = SimpleNamespace(
            request_id=str(number),
            num_computed_tokens=32,
            num_tokens=33,
            block_hashes=[f"{number}-{i}" for i in range(2)],
        )
        cache.request_finished(request, [2 * number, 2 * number + 1])
    copies = cache.build_connector_meta(None)
    assert sorted(copies.stores) == [0, 1] and sorted(copies.stores.values()) == [2, 3]
    assert list(cache._slots) == ["1-1", "1-0"]
