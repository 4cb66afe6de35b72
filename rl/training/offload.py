"""Memory of tensors that moves to the host and back, while the tensors and every view of them stay what they are."""

from collections.abc import Iterable

import torch
from torch import Tensor


class HostStay:
    """Storages that are away: their device memory is free, and touching a tensor in them is undefined.

    The host's copies are kept between stays, pinned on CUDA, since allocating them takes longer than the transfer.
    """

    def __init__(self) -> None:
        self._away: dict[int, tuple[torch.UntypedStorage, int, Tensor | None]] = {}
        """Storage's address as an object -> storage, bytes, its contents (None: they are not wanted back)."""
        self._buffers: dict[int, Tensor] = {}

    @property
    def anything_away(self) -> bool:
        return bool(self._away)

    def send(self, tensors: Iterable[Tensor], *, contents: bool) -> None:
        """Free the storages of the tensors that are here; `contents`: they come back with them, else undefined."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in self._away or not size:
                continue
            host = self._copy(key, storage) if contents else None
            self._away[key] = (storage, size, host)
            storage.resize_(0)

    def fetch(self) -> None:
        """Bring all of them back."""
        for storage, size, host in self._away.values():
            storage.resize_(size)
            if host is not None:
                storage.copy_(host.untyped_storage(), non_blocking=True)
        self._buffers = {key: host for key, (_, _, host) in self._away.items() if host is not None}
        if any(storage.is_cuda for storage, _, _ in self._away.values()):
            torch.cuda.synchronize()
        self._away = {}

    def _copy(self, key: int, storage: torch.UntypedStorage) -> Tensor:
        """A copy of the storage in host memory, in the buffer of the last stay if there is one."""
        host = self._buffers.get(key)
        if host is None or len(host) != storage.nbytes():
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.is_cuda)
        host.untyped_storage().copy_(storage)
        return host
