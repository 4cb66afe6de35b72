"""All process groups of a run: made ready before memory fills, and with one time limit."""

import datetime

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rl.config.limits import PhaseLimits
from rl.runtime.device import Device

MARGIN_S = 120.0
"""A collective times out so much later than the longest phase: the watchdog is first, and says more than a time-out does."""


def groups_here() -> list[dist.ProcessGroup]:
    """The groups that this rank is a member of, in the order in which they were made, which is the same on every rank."""
    return list(distributed_c10d._world.pg_map)


def warm_up(device: Device) -> int:
    """One small collective in every group of more than one rank; returns how many. Collective over the world.

    NCCL makes a group's connections and buffers in its first collective, which fails or hangs late if by then the memory is
    full. Engines warm up the groups that they make themselves.
    """
    warmed = 0
    for group in groups_here():
        if group.size() == 1:
            continue
        for kind in group._device_types:
            if kind.type in ("cpu", device.torch.type):
                one = torch.ones(1, device=device.torch if kind.type == device.torch.type else kind)
                dist.all_reduce(one, group=group)
                assert int(one) == group.size(), (
                    f"a sum over a group of {group.size()} ranks gave {float(one)}"
                )
                warmed += 1
    return warmed


def limit_collectives(limits: PhaseLimits) -> None:
    """Let collectives wait for as long as the longest phase of a step may take. Until then they have the limit of the start-up.

    The phases' own limits are the watchdog's: a group has one time limit, and a rank may wait in the same group within a short
    phase and a long one. Not collective.
    """
    longest = max(seconds for name, seconds in vars(limits).items() if name != "start_up")
    for group in groups_here():
        distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=longest + MARGIN_S), group)
