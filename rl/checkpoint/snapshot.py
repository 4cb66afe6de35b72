"""Copies of a rank's shards in host memory, all at once or in batches.

With a copy of all shards, training continues during the write.
"""

from collections.abc import Iterator, Sequence

import torch

from rl.checkpoint.shards import Shard, num_bytes
from rl.runtime.device import host_memory

BATCH_BYTES = 1 << 30
"""Bytes of the shards that `Snapshot.in_turn` copies at once. A larger shard is copied alone."""


class Snapshot:
    """Host memory of the size of this rank's file, or of a batch of its shards.

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

    def in_turn(self, shards: Sequence[Shard]) -> Iterator[Shard]:
        """Yield a copy of each shard of a GPU, which is valid until the next one is requested.

        A batch is copied by one transfer after another and waited for once. Shards of a CPU are not copied.
        """
        if not torch.cuda.is_available():
            yield from shards
            return
        batch: list[Shard] = []
        size = 0
        for shard in shards:
            if batch and size + shard.tensor.nbytes > BATCH_BYTES:
                yield from self.take(batch)
                batch, size = [], 0
            batch.append(shard)
            size += shard.tensor.nbytes
        yield from self.take(batch)
