"""The choice between CUDA with NCCL and CPU with gloo."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    """The accelerator of this rank."""

    torch: torch.device
    backend: str
    """Backend string of torch.distributed.init_process_group."""

    @property
    def is_cuda(self) -> bool:
        return self.torch.type == "cuda"

    def synchronize(self) -> None:
        """Wait for the device's queue; does nothing on CPU."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch)

    def release_cached_memory(self) -> None:
        """Return cached memory to the driver, so that the other engine of this process can allocate it."""
        if self.is_cuda:
            torch.cuda.empty_cache()


def choose_device(local_rank: int) -> Device:
    """Return this rank's CUDA device and make it current, or return the CPU if there is no GPU.

    The index is `local_rank % device_count`, because under `srun --gpus-per-task=1` a rank sees one device.
    """
    if not torch.cuda.is_available():
        return Device(torch.device("cpu"), "gloo")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return Device(device, "cpu:gloo,cuda:nccl")
