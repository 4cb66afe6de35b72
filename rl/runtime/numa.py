"""Binding of a rank to the processors next to its GPU, where the launcher binds none.

Page-locked memory is allocated on the NUMA node of the thread that first touches it. On a host with two
sockets, half of the ranks would otherwise move weights and optimizer states through the other socket.
"""

import os
from pathlib import Path
from typing import Any

import torch

SYSTEM = Path("/sys")


def bind_to_gpu(device: torch.device) -> None:
    """Restrict this thread, and threads and processes that it starts, to the processors of the GPU's node.

    Nothing changes if the system does not name the node, or if this process may use none of its processors.
    """
    gpu: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack the address
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    if cpus := processors_near(address) & os.sched_getaffinity(0):
        os.sched_setaffinity(0, cpus)


def processors_near(address: str) -> set[int]:
    """Return the processors of the NUMA node of a PCI device; empty if the system does not name them.

    address: for example 0000:1b:00.0.
    """
    try:
        node = int((SYSTEM / "bus/pci/devices" / address / "numa_node").read_text())
        ranges = (SYSTEM / f"devices/system/node/node{node}/cpulist").read_text().strip().split(",")
    except (OSError, ValueError):  # -1 is a host with one node: it has no directory
        return set()
    bounds = [list(map(int, part.split("-"))) for part in ranges]
    return {cpu for bound in bounds for cpu in range(bound[0], bound[-1] + 1)}
