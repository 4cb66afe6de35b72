"""Host memory locks exactly the pages that it needs and is unlocked with its last tensor."""

from types import SimpleNamespace

import pytest
import torch

from rl.runtime.device import ALIGNMENT, PAGE, aligned, host_memory


def test_memory_is_not_locked_without_a_gpu():
    memory = host_memory(1000)
    assert memory.dtype is torch.uint8 and memory.shape == (1000,) and not memory.is_pinned()


@pytest.mark.parametrize("size", [1, PAGE, 3 * PAGE + 5])
def test_whole_pages_are_locked_and_unlocked(monkeypatch, size):
    locked = {}
    calls = SimpleNamespace(
        cudaHostRegister=lambda address, length, flags: locked.update({address: length}) or 0,
        cudaHostUnregister=lambda address: locked.pop(address) and 0,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
    memory = host_memory(size)
    assert locked == {memory.data_ptr(): -(-size // PAGE) * PAGE}
    assert memory.data_ptr() % PAGE == 0 and len(memory) == size
    part = memory[:1].fill_(7)
    del memory
    assert locked  # a view still needs it
    assert part.tolist() == [7]
    del part
    assert not locked


def test_memory_that_cannot_be_locked_raises(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *args: 2))
    with pytest.raises(RuntimeError, match="cudaHostRegister of 4096 bytes returned 2"):
        host_memory(10)


def test_parts_of_a_block_suit_every_dtype():
    assert [aligned(size) for size in (0, 1, ALIGNMENT, ALIGNMENT + 1)] == [
        0,
        ALIGNMENT,
        ALIGNMENT,
        2 * ALIGNMENT,
    ]
