"""Transfer of the memory of tensors to the host and back; tensors and their views stay valid objects."""

from collections.abc import Iterable

import torch
from torch import Tensor

from rl.runtime.device import aligned, host_memory


class HostMemory:
    """Storages moved to the host.

    The device memory of a moved storage is free, so tensors that use the storage must not be accessed.

    The host memory (page-locked on CUDA) is kept for the next move, because allocating it takes longer than
    the transfer.
    """

    def __init__(self) -> None:
        self._moved: dict[int, tuple[torch.UntypedStorage, int, Tensor | None]] = {}
        """Address of the storage object -> (storage, bytes, contents or None if they were discarded)."""
        self._memory, self._used = torch.empty(0, dtype=torch.uint8), 0

    @property
    def occupied(self) -> bool:
        """Whether storages are on the host."""
        return bool(self._moved)

    def send(self, tensors: Iterable[Tensor], *, contents: bool) -> None:
        """Free the device storages of the tensors. If not `contents`, their values are lost."""
        storages = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._moved and storage.nbytes():
                storages[storage._cdata] = storage
        sizes = [storage.nbytes() for storage in storages.values()]
        hosts = self._places(sizes) if contents else [None] * len(sizes)
        for storage, host in zip(storages.values(), hosts):
            if host is not None:
                host.copy_(_bytes_of(storage), non_blocking=True)
        _synchronize(storages.values())
        for (key, storage), size, host in zip(storages.items(), sizes, hosts):
            self._moved[key] = (storage, size, host)
            storage.resize_(0)

    def fetch(self) -> None:
        """Move all storages back to the device."""
        for storage, size, host in self._moved.values():
            storage.resize_(size)
            if host is not None:
                _bytes_of(storage).copy_(host, non_blocking=True)
        _synchronize(storage for storage, _, _ in self._moved.values())
        self._moved, self._used = {}, 0

    def _places(self, sizes: list[int]) -> list[Tensor]:
        """Return a part of the host memory for each size, in bytes; allocate a larger block if necessary."""
        total = sum(map(aligned, sizes))
        if self._used + total > len(self._memory):
            self._memory, self._used = (
                torch.empty(0, dtype=torch.uint8),
                0,
            )  # frees the block unless it is in use
            self._memory = host_memory(total)
        places = []
        for size in sizes:
            places.append(self._memory[self._used : self._used + size])
            self._used += aligned(size)
        return places


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize(storages: Iterable[torch.UntypedStorage]) -> None:
    if any(storage.is_cuda for storage in storages):
        torch.cuda.synchronize()
