"""The choice between CUDA with NCCL and CPU with gloo."""

import os
import weakref
from dataclasses import dataclass

import numpy as np
import torch

from rl.runtime.peaks import peak_tflops

PAGE = 4096
ALIGNMENT = 512
"""Alignment of tensors in a block of host memory, in bytes. Suits every dtype; aligned copies are fastest."""


@dataclass(frozen=True)
class Device:
    """The accelerator of this rank."""

    torch: torch.device
    backend: str
    """Backend string of torch.distributed.init_process_group."""

    @property
    def is_cuda(self) -> bool:
        return self.torch.type == "cuda"

    @property
    def peak_tflops(self) -> float | None:
        """Peak of dense bfloat16 matrix products in TFLOP/s; None on CPU and for an unknown device."""
        return peak_tflops(torch.cuda.get_device_name(self.torch)) if self.is_cuda else None

    def synchronize(self) -> None:
        """Wait for the device's queue; does nothing on CPU."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch)

    def release_cached_memory(self) -> None:
        """Return cached memory to the driver, so that the other engine of this process can allocate it."""
        if self.is_cuda:
            torch.cuda.empty_cache()


def host_memory(size: int) -> torch.Tensor:
    """Return uninitialised host memory, uint8 [size], page-locked if there is a GPU.

    The memory is unlocked when the last tensor in it is freed. pin_memory=True is not used: torch's allocator
    rounds up to a power of two (up to twice the size) and keeps freed memory. Raises RuntimeError if CUDA
    cannot lock the memory.
    """
    if not torch.cuda.is_available() or not size:
        return torch.empty(size, dtype=torch.uint8)
    memory = np.empty(size + 2 * PAGE, np.uint8)
    start = -memory.ctypes.data % PAGE  # whole pages, so that no other block shares them
    address, length = memory.ctypes.data + start, -(-size // PAGE) * PAGE
    cudart = torch.cuda.cudart()
    code = int(cudart.cudaHostRegister(address, length, 0))
    if code != 0:
        raise RuntimeError(
            f"cudaHostRegister of {length} bytes returned {code}: the memory cannot be page-locked; check "
            "the free host memory and `ulimit -l`."
        )
    weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False
    return torch.from_numpy(memory[start : start + size])


def aligned(size: int) -> int:
    """Return `size`, in bytes, rounded up to a multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def idle_gpus(num_ranks: int) -> str:
    """Return a warning if this host has more GPUs for this job than ranks; else ''."""
    visible = torch.cuda.device_count()
    allotted = os.environ.get("SLURM_GPUS_ON_NODE", "")
    count = min(visible, int(allotted)) if allotted.isdecimal() else visible
    if count <= num_ranks:
        return ""
    return (
        f"{count - num_ranks} of {count} GPUs of this host are idle, because it has ranks={num_ranks}; start "
        f"a rank for each (torchrun --nproc-per-node {count}, srun --ntasks-per-node={count}), or set "
        "CUDA_VISIBLE_DEVICES to the GPUs to use."
    )


def choose_device(local_rank: int) -> Device:
    """Return this rank's CUDA device and make it current, or return the CPU if there is no GPU.

    The index is `local_rank % device_count`, because under `srun --gpus-per-task=1` a rank sees one device:
    for example, local rank 3 then uses device 0.
    """
    if not torch.cuda.is_available():
        return Device(torch.device("cpu"), "gloo")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return Device(device, "cpu:gloo,cuda:nccl")
