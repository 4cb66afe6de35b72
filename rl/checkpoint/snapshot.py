"""A copy of a rank's shards in host memory, so that training continues during the write."""

from collections.abc import Sequence

import torch

from rl.checkpoint.shards import Shard, num_bytes
from rl.runtime.device import host_memory


class Snapshot:
    """Host memory of the size of this rank's file.

    It is kept between checkpoints, because allocating it, and page-locking it on CUDA, takes longer than
    filling it.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, shards: Sequence[Shard]) -> list[Shard]:
        """Copy the shards into this memory, which holds them until the next call. Waits for the copies."""
        size = num_bytes(shards)
        if self._memory.numel() < size:
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old memory before allocating the new
            self._memory = host_memory(size)
        copies, at = [], 0
        for shard in shards:
            tensor = shard.tensor
            part = self._memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            part.copy_(tensor, non_blocking=True)
            copies.append(Shard(shard.name, shard.box, part))
            at += tensor.nbytes
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copies
