"""Move the memory of tensors to the host and back. The tensors and all views of them stay valid objects."""

from collections.abc import Iterable

import torch
from torch import Tensor


class HostMemory:
    """Storages moved to the host. Their device memory is free, so tensors in them must not be accessed.

    The host buffers (pinned on CUDA) are kept for the next move, because allocating them takes longer than
    the transfer.
    """

    def __init__(self) -> None:
        self._moved: dict[int, tuple[torch.UntypedStorage, int, Tensor | None]] = {}
        """Address of the storage object -> (storage, bytes, contents or None if they were discarded)."""
        self._buffers: dict[int, Tensor] = {}

    @property
    def occupied(self) -> bool:
        """Whether storages are on the host."""
        return bool(self._moved)

    def send(self, tensors: Iterable[Tensor], *, contents: bool) -> None:
        """Free the device storages of the tensors. If not `contents`, their values are lost."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in self._moved or not size:
                continue
            host = self._copy(key, storage) if contents else None
            self._moved[key] = (storage, size, host)
            storage.resize_(0)

    def fetch(self) -> None:
        """Move all storages back to the device."""
        for storage, size, host in self._moved.values():
            storage.resize_(size)
            if host is not None:
                storage.copy_(host.untyped_storage(), non_blocking=True)
        self._buffers = {key: host for key, (_, _, host) in self._moved.items() if host is not None}
        if any(storage.is_cuda for storage, _, _ in self._moved.values()):
            torch.cuda.synchronize()
        self._moved = {}

    def _copy(self, key: int, storage: torch.UntypedStorage) -> Tensor:
        """Copy the storage to host memory, into the buffer of the last move if it fits."""
        host = self._buffers.get(key)
        if host is None or len(host) != storage.nbytes():
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.is_cuda)
        host.untyped_storage().copy_(storage)
        return host
