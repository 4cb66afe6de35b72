"""The initialisation and the end of torch.distributed in this process."""

import datetime
import logging
import os
import platform
import random
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from rl.runtime.collectives import broadcast_object
from rl.runtime.compile_caches import use_private_caches
from rl.runtime.device import Device, choose_device, idle_gpus
from rl.runtime.job_store import JobStore, StoreProcess, connect_to, own_store
from rl.runtime.numa import bind_to_gpu
from rl.runtime.own_group import own_group
from rl.runtime.ranks import Ranks
from rl.runtime.rendezvous import LOOPBACK, address_to_bind, join_ranks, listen_anywhere

TIMEOUT = datetime.timedelta(minutes=30)
"""Default time limit of a collective."""

EXIT_TIMEOUT = datetime.timedelta(seconds=20)
"""Maximum wait of a rank that is about to exit for the other ranks to reach the same exit."""

SPLIT_GROUPS = "VLLM_DISTRIBUTED_USE_SPLIT_GROUP"
"""Environment variable that makes vLLM split its groups from the world's communicator."""

_gloo_group: dist.ProcessGroup | None = None
"""The world on gloo. The default group's backend may be a composite, which has no monitored barrier."""

_job: "Job | None" = None


@dataclass(frozen=True)
class Job:
    """All ranks of the job. With roles the world, torch.distributed's default group, is only a part of it."""

    rank: int
    world_size: int
    store: JobStore
    """Messages of this project, which only processes with the job's key can request or change."""
    torch_store: dist.Store
    """torch's own store, with the addresses of its groups."""
    group: dist.ProcessGroup
    """The group of all ranks of the job, on gloo."""


@contextmanager
def session(ranks: Ranks, timeout: datetime.timedelta = TIMEOUT) -> Iterator[Device]:
    """Initialise torch.distributed before the engines, which use its default group; destroy it at the end.

    timeout: time limit of collectives until `rl.runtime.group_warm_up.limit_collectives` sets another. Raises
    ValueError if VLLM_DISTRIBUTED_USE_SPLIT_GROUP is set.
    """
    if os.environ.get(SPLIT_GROUPS, "0") not in ("", "0"):
        raise ValueError(
            f"{SPLIT_GROUPS}={os.environ[SPLIT_GROUPS]} is not supported: with a default group bound to a "
            "device, every rank would take part in creating thousands of groups; unset it."
        )
    device = choose_device(ranks.local_rank)
    if device.is_cuda and ranks.launcher == "torchrun":  # other launchers have options that bind
        bind_to_gpu(device.torch)
    if ranks.local_rank == 0 and (idle := idle_gpus(ranks.local_world_size)):
        print(f"warning: {platform.node()}: {idle}", file=sys.stderr, flush=True)
    if not device.is_cuda:
        # vLLM's sampler would compile a function with Inductor, which takes 10 s and needs a C++ compiler.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if ranks.rank == 0:
        ours = logging.getLogger("rl")
        ours.setLevel(logging.INFO)
        ours.addHandler(logging.StreamHandler())
        ours.propagate = False
    else:
        logging.getLogger().setLevel(logging.ERROR)  # their warnings would repeat rank 0's
        logging.getLogger("rl.rewards").setLevel(logging.WARNING)  # each rank scores its own samples
        warnings.simplefilter("ignore")
    # These warnings are meant for the libraries' developers.
    for module in (r"torch\.distributed\..*", r"vllm\..*"):
        warnings.filterwarnings("ignore", module=module)
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # a CPU host has no Triton
    for seed in (random.seed, np.random.seed, torch.manual_seed):  # their states are part of a checkpoint
        seed(0)
    joined = join_ranks(ranks)  # may use a file in XDG_CACHE_HOME, which the next line may replace
    use_private_caches()
    _initialise(joined, device.backend, timeout)
    global _gloo_group, _job
    _gloo_group = dist.new_group(backend="gloo", timeout=timeout)
    torch_store = dist.distributed_c10d._get_default_store()
    with _store_of_job(joined, _gloo_group) as store:
        _job = Job(ranks.rank, ranks.world_size, store, torch_store, _gloo_group)
        try:
            yield device
        finally:
            _gloo_group = _job = None
            dist.destroy_process_group()


def control_group() -> dist.ProcessGroup:
    """Return the world on gloo, for agreement between ranks; engines do not use it. Only within `session`."""
    assert _gloo_group is not None, "there is no session"
    return _gloo_group


def job() -> Job:
    """Return the job that this rank belongs to. Only within `session`."""
    assert _job is not None, "there is no session"
    return _job


def enter_role(name: str, members: range, device: Device, timeout: datetime.timedelta = TIMEOUT) -> None:
    """Make the ranks of a role the world, numbered from 0. Collective over the job.

    Megatron, vLLM and every collective over the world then work within the role. `job().group` still spans
    all ranks. The roles divide the ranks of the job among themselves.
    """
    global _gloo_group, _job
    assert _job is not None and _job.rank in members
    rank, store = _job.rank - members.start, _job.torch_store
    dist.monitored_barrier(_job.group, timeout)  # nobody uses the groups that are destroyed now
    dist.destroy_process_group()
    dist.init_process_group(
        device.backend,
        store=dist.PrefixStore(name, store),
        rank=rank,
        world_size=len(members),
        timeout=timeout,
    )
    _gloo_group = dist.new_group(backend="gloo", timeout=timeout)
    size = dict(rank=_job.rank, size=_job.world_size)
    group = own_group(store, "job", timeout=timeout, device=None, **size)
    _job = replace(_job, group=group)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(len(members)))  # vLLM reads them


def leave_together(ranks: Ranks) -> bool:
    """Wait until every rank is about to exit; return whether all arrived within EXIT_TIMEOUT.

    A launcher kills the other ranks when the first rank exits with an error. Without this wait, rank 0 might
    be killed before it has reported the error. Collective over the job.
    """
    try:
        if not dist.is_initialized():
            is_new = ranks.launcher != "torchrun"  # its agent's store needs no key
            joined = join_ranks(ranks, timeout=EXIT_TIMEOUT.total_seconds()) if is_new else ranks
            _initialise(joined, "gloo", EXIT_TIMEOUT)
        dist.monitored_barrier(group=None if _job is None else _job.group, timeout=EXIT_TIMEOUT)
    except (RuntimeError, TimeoutError, ValueError):  # RendezvousError is a RuntimeError
        return False
    return True


@contextmanager
def _store_of_job(ranks: Ranks, group: dist.ProcessGroup) -> Iterator[JobStore]:
    """Yield this rank's connection to the job's store; rank 0 starts and ends the store's process.
    Collective."""
    if ranks.key is None:
        yield own_store()
        return
    process, address = None, ("", 0)
    if ranks.rank == 0:
        listener = listen_anywhere(ranks.world_size, address_to_bind(ranks))
        host = LOOPBACK if ranks.on_one_host else ranks.master_addr
        address = host, listener.getsockname()[1]
        process = StoreProcess(listener, ranks.key.secret)
    # A forged address only prevents the start, because the store must prove that it knows the key.
    address = broadcast_object(address, group=group)
    try:
        yield connect_to(*address, ranks.key.secret)
    finally:
        if process is not None:
            process.close()


def _initialise(ranks: Ranks, backend: str, timeout: datetime.timedelta) -> None:
    """Connect to torch's store and initialise the default group.

    torchrun's agent holds the store. Under other launchers rank 0 holds it, on the socket of the rendezvous.
    Collective over the world.

    Without a device_id torch initialises NCCL in a group's first collective, and new_group returns at once on
    a rank outside the group. With a device_id, every new_group would split the world's communicator on all
    ranks (`_new_process_group_helper` of torch 2.13). For example, DeepSeek-V3 on 512 ranks has 4,166 groups
    on NCCL, and a rank uses about 15 of them.
    """
    start = partial(
        dist.init_process_group, backend, rank=ranks.rank, world_size=ranks.world_size, timeout=timeout
    )
    if ranks.launcher == "torchrun":
        start(init_method="env://")
    else:
        store = dist.TCPStore(
            ranks.master_addr if ranks.listener is None else _own_address(ranks.listener),
            ranks.master_port,
            ranks.world_size,
            is_master=ranks.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=None if ranks.listener is None else ranks.listener.detach(),
        )
        start(store=store)
    if ranks.rank == 0 and ranks.key is not None:
        ranks.key.forget()


def _own_address(listener: socket.socket) -> str:
    """Return an address that reaches this process's own socket; a host may not resolve its own name."""
    address = listener.getsockname()[0]
    return LOOPBACK if address in ("0.0.0.0", "::") else address
