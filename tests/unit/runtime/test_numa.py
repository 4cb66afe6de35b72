"""The processors next to a GPU."""

import os
from types import SimpleNamespace

import torch

from rl.runtime import numa

GPU = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)


def test_a_rank_is_bound_to_the_node_of_its_gpu(tmp_path, monkeypatch):
    place = tmp_path / "bus/pci/devices/0000:1b:00.0"
    node = tmp_path / "devices/system/node/node1"
    for directory in (place, node):
        directory.mkdir(parents=True)
    (place / "numa_node").write_text("1\n")
    (node / "cpulist").write_text("4-6,12\n")
    bound = []
    monkeypatch.setattr(numa, "SYSTEM", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: GPU)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: bound.append(cpus))
    for allowed in ({0, 1, 5, 6, 12}, {0, 1}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, allowed=allowed: allowed)
        numa.bind_to_gpu(torch.device("cuda", 0))
    assert bound == [{5, 6, 12}]
    assert numa.processors_near("0000:1b:00.0") == {4, 5, 6, 12}
    (place / "numa_node").write_text("-1\n")
    assert numa.processors_near("0000:1b:00.0") == set() == numa.processors_near("0000:ff:00.0")
