"""First collective and time limit of every process group of a run.

`rl.runtime.collectives` lists the collectives of each group.
"""

import datetime
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rl.config.limits import PhaseLimits
from rl.runtime.device import Device
from rl.runtime.session import control_group

MARGIN_S = 120.0
"""Margin of the collectives' time limit above the longest phase, in seconds. The watchdog thus acts first."""


def groups_here() -> list[dist.ProcessGroup]:
    """Return the groups that this rank is a member of, in the order of creation, which all ranks share."""
    return list(distributed_c10d._world.pg_map)


def warm_up(device: Device, groups: Iterable[dist.ProcessGroup] = ()) -> int:
    """Run a small collective in the world, the control group and `groups`; return the number of collectives.

    NCCL allocates a group's connections and buffers, about 1 GiB, in the group's first collective. If the
    memory is full by then, this collective fails or hangs. Therefore `groups` are those on which a step
    communicates; other groups take no memory. Engines warm up the groups that they make themselves.
    Collective over the world.
    """
    warmed = 0
    for group in (dist.group.WORLD, control_group(), *groups):
        if group is None or group.size() == 1:
            continue
        for kind in group._device_types:
            if kind.type in ("cpu", device.torch.type):
                one = torch.ones(1, device=device.torch if kind.type == device.torch.type else kind)
                dist.all_reduce(one, group=group)
                assert int(one) == group.size(), f"{group.size()} ones sum to {float(one)}"
                warmed += 1
    return warmed


def limit_collectives(limits: PhaseLimits) -> None:
    """Derive the time limit of collectives from the longest phase of a step. Not collective.

    Until this call, the limit of the start-up applies. A group has only one time limit, although a rank may
    wait in the group during a short phase or a long phase. The watchdog applies the limits of single phases.
    """
    longest = max(seconds for name, seconds in vars(limits).items() if name != "start_up")
    for group in groups_here():
        distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=longest + MARGIN_S), group)
