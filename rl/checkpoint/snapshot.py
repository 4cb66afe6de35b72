"""A copy of what a rank writes, in host memory, so that training may go on while it is written."""

from collections.abc import Sequence

import torch

from rl.checkpoint.shards import Shard, num_bytes


class Snapshot:
    """Host memory of the size of this rank's file, kept from one checkpoint to the next: getting it, and on CUDA page-locking
    it, takes longer than filling it."""

    def __init__(self):
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, shards: Sequence[Shard]) -> list[Shard]:
        """The same shards in this memory; it holds them until the next call. Waits for the copies."""
        size = num_bytes(shards)
        if self._memory.numel() < size:
            self._make(size)
        copies, at = [], 0
        for shard in shards:
            part = (
                self._memory[at : at + shard.tensor.nbytes].view(shard.tensor.dtype).view(shard.tensor.shape)
            )
            part.copy_(shard.tensor, non_blocking=True)
            copies.append(Shard(shard.name, shard.box, part))
            at += shard.tensor.nbytes
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copies

    def _make(self, size: int) -> None:
        on_cuda = torch.cuda.is_available()
        if on_cuda and self._memory.numel():
            _checked(torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr()), "cudaHostUnregister")
        self._memory = torch.empty(0, dtype=torch.uint8)  # the old memory is free before the new is taken
        self._memory = torch.empty(size, dtype=torch.uint8)
        if on_cuda:
            # Not pin_memory=True: torch's allocator takes the next power of two, up to twice as much.
            _checked(
                torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), size, 0),
                f"cudaHostRegister of {size} bytes",
            )


def _checked(code, call: str) -> None:
    if int(code) != 0:
        raise RuntimeError(f"{call} returned {code}")
