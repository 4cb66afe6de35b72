"""Every form of collective that a run uses, over all ranks and over groups of them, with known results."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tools.acceptance.worker import StageTask, world

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

GIB = 1 << 30
WIDTH = 1 << 16
"""Elements that a rank sends to another."""


def run(task: StageTask) -> None:
    """Run each form in each group; measure the memory of the group's connections and its rate."""
    import torch
    import torch.distributed as dist

    with world(task) as device:
        ranks = torch.arange(dist.get_world_size())
        groups = {
            "all ranks": (ranks,),
            "neighbours": ranks.split(2),
            "every other rank": (ranks[::2], ranks[1::2]),
        }
        for name, members in groups.items():
            group, _ = dist.new_subgroups_by_enumeration([part.tolist() for part in members])
            if len(members[0]) == 1:
                task.findings.skip(name, f"{len(ranks)} ranks have no such group of two")
                continue
            before = torch.cuda.mem_get_info()[0] if device.is_cuda else 0
            for form, found, expected in _forms(group, device.torch):
                wrong = torch.tensor(int(not torch.equal(found, expected)), device=device.torch)
                dist.all_reduce(wrong)
                task.findings.check(f"{name}: {form}", not wrong, f"{int(wrong)} ranks have a wrong result")
            if device.is_cuda:
                used = (before - torch.cuda.mem_get_info()[0]) / GIB
                text = f"{before / GIB:.2f} GiB were free before"
                task.findings.note(f"{name}: memory of NCCL", used, unit="GiB", text=text)
            large = torch.zeros(task.size(1 << 27, WIDTH), dtype=torch.bfloat16, device=device.torch)
            for _ in range(2):
                device.synchronize()
                start = time.perf_counter()
                dist.all_reduce(large, group=group)
                device.synchronize()
            rate = large.nbytes / (time.perf_counter() - start) / 1e9
            task.findings.note(f"{name}: all-reduce", rate, unit="GB/s", text=f"{large.nbytes} bytes")


def _forms(
    group: "dist.ProcessGroup", device: "torch.device"
) -> "Iterator[tuple[str, torch.Tensor, torch.Tensor]]":
    """Yield each form, what it gave, and what it should give: whole numbers, whose sums are exact."""
    import torch
    import torch.distributed as dist

    rank, size = group.rank(), group.size()
    each = torch.arange(size, dtype=torch.float32, device=device).repeat_interleave(WIDTH).view(size, WIDTH)
    total = each.sum(0)
    found = each[rank].clone()
    dist.all_reduce(found, group=group)
    yield "all-reduce", found, total
    found = torch.empty_like(each).flatten()
    dist.all_gather_into_tensor(found, each[rank].clone(), group=group)
    yield "all-gather", found, each.flatten()
    found = torch.empty_like(total)
    dist.reduce_scatter_tensor(found, (each + rank).flatten(), group=group)
    yield "reduce-scatter", found, total + size * rank
    found = each[rank].clone()
    dist.broadcast(found, group_src=size - 1, group=group)
    yield "broadcast", found, each[-1]
    # Rank j gets j + 1 rows of each rank's number.
    rows = each[rank].expand(size * (size + 1) // 2, WIDTH).contiguous()
    found = torch.empty(size * (rank + 1), WIDTH, device=device)
    dist.all_to_all_single(found, rows, [rank + 1] * size, [*range(1, size + 1)], group=group)
    yield "all-to-all", found, each.repeat_interleave(rank + 1, 0)
    found = torch.empty_like(total)
    there, back = (rank + 1) % size, (rank - 1) % size
    ring = [
        dist.P2POp(dist.isend, each[rank].clone(), group=group, group_peer=there),
        dist.P2POp(dist.irecv, found, group=group, group_peer=back),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    yield "send and receive", found, each[back]
