"""The life of torch.distributed in this process."""

import datetime
import logging
import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from rl.runtime.device import Device, choose_device
from rl.runtime.ranks import Ranks
from rl.runtime.rendezvous import meet

TIMEOUT = datetime.timedelta(minutes=30)
"""Of every collective; a phase in which a rank waits longer for another has failed."""


_gloo_group: dist.ProcessGroup | None = None
"""The world on gloo, beside the default group, whose backend may be a composite that has no monitored barrier."""

LEAVING = datetime.timedelta(seconds=20)
"""How long a rank that cannot go on waits for the others to come to the same end."""


@contextmanager
def session(ranks: Ranks, timeout: datetime.timedelta = TIMEOUT) -> Iterator[Device]:
    """Join the world, before either engine is built (both then use this default group); leave it at the end. `timeout`: of
    collectives until `rl.runtime.groups.limit_collectives` sets another."""
    device = choose_device(ranks.local_rank)
    if not device.is_cuda:
        # vLLM's sampler would compile a function with Inductor: 10 s, or a crash where there is no C++ compiler.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if ranks.rank == 0:
        ours = logging.getLogger("rl")
        ours.setLevel(logging.INFO)
        ours.addHandler(logging.StreamHandler())
        ours.propagate = False
    else:
        logging.getLogger().setLevel(logging.ERROR)  # what rank 0 warns of, all would,
        logging.getLogger("rl.rewards").setLevel(logging.WARNING)  # but each scores samples of its own
        warnings.simplefilter("ignore")
    # Notes of libraries to their own developers; ours come through logging and as errors.
    for module in (r"megatron\..*", r"torch\.distributed\..*", r"vllm\..*"):
        warnings.filterwarnings("ignore", module=module)
    logging.getLogger("torch._library.triton").setLevel(
        logging.ERROR
    )  # a CPU host has no Triton and needs none
    for seed in (random.seed, np.random.seed, torch.manual_seed):  # their states are part of a checkpoint
        seed(0)
    _join(ranks, device.backend, timeout)
    global _gloo_group
    _gloo_group = dist.new_group(backend="gloo", timeout=timeout)
    try:
        yield device
    finally:
        _gloo_group = None
        dist.destroy_process_group()


def control_group() -> dist.ProcessGroup:
    """The world on gloo, for what ranks agree on; engines do not use it. Within `session` only."""
    assert _gloo_group is not None, "there is no session"
    return _gloo_group


def leave_together(ranks: Ranks) -> bool:
    """Wait until every rank is about to leave, or for LEAVING; returns whether all came. A launcher kills the other ranks
    when the first one exits with an error, before the first rank may have said what is wrong."""
    try:
        if not dist.is_initialized():
            _join(ranks, "gloo", LEAVING)
        dist.monitored_barrier(group=_gloo_group, timeout=LEAVING)
    except (RuntimeError, TimeoutError):  # MeetingFailed is a RuntimeError
        return False
    return True


def _join(ranks: Ranks, backend: str, timeout: datetime.timedelta) -> None:
    """Torchrun's agent holds the store at the meeting point; under other launchers rank 0 does, on the socket it met the others
    with. Raises MeetingFailed."""
    options = dict(rank=ranks.rank, world_size=ranks.world_size, timeout=timeout)
    if ranks.launcher == "torchrun":
        dist.init_process_group(backend, init_method="env://", **options)
        return
    met = meet(
        ranks, timeout=LEAVING.total_seconds()
    )  # already, but for a rank that leaves before it came to that
    listener = None if met.listener is None else met.listener.detach()
    host = met.master_addr if met.rank > 0 else "127.0.0.1"  # a host's own name need not resolve on it
    store = dist.TCPStore(
        host,
        met.master_port,
        met.world_size,
        is_master=met.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    dist.init_process_group(backend, store=store, **options)
