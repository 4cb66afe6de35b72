"""Checks of `lockstep doctor` between nodes: clocks, transport and bandwidth. Collective over the world."""

import os
import re
import socket
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from rl.runtime.collectives import gather_objects
from rl.runtime.device import Device
from tools.node_checks import Finding, bad, ok, warn

SAMPLES = 5
WARM_UP, REPEATS = 2, 5
SET_GLOO = "set GLOO_SOCKET_IFNAME in slurm/site.sh"


def first_ranks(hosts: Sequence[str]) -> list[int]:
    """Return the first rank of each node, given the host of each rank."""
    return [hosts.index(host) for host in dict.fromkeys(hosts)]


# ---- clocks ----


def check_clocks(hosts: Sequence[str], *, max_skew_s: float) -> dict[str, list[Finding]]:
    """Return findings by node: clocks that differ from the median clock.

    Rank 0 asks the first rank of each node for its time; the fastest of several answers is used; its error is
    at most half of its round trip.
    """
    offsets = [0.0 if peer == 0 else _offset(peer) for peer in first_ranks(hosts)]
    shared = torch.tensor(offsets, dtype=torch.float64)
    dist.broadcast(shared, src=0)
    median = statistics.median(shared.tolist())
    out = {}
    for host, offset in zip(dict.fromkeys(hosts), shared.tolist()):
        text = f"{offset - median:+.3f} s from the median of {len(shared)} nodes"
        is_off = abs(offset - median) > max_skew_s
        out[host] = [bad("clock", f"{text}, more than {max_skew_s:g} s") if is_off else ok("clock", text)]
    return out


def _offset(peer: int) -> float:
    """Return the seconds by which the peer's clock is ahead of rank 0's; 0 on other ranks."""
    rank, best = dist.get_rank(), (float("inf"), 0.0)
    if rank not in (0, peer):
        return 0.0
    for _ in range(SAMPLES):
        answer = torch.zeros(1, dtype=torch.float64)
        if rank == 0:
            asked, started = time.time(), time.perf_counter()
            dist.send(answer, peer)
            dist.recv(answer, peer)
            trip = time.perf_counter() - started
            best = min(best, (trip, float(answer) - (asked + trip / 2)))
        else:
            dist.recv(answer, 0)
            answer[0] = time.time()
            dist.send(answer, 0)
    return best[1]


# ---- bandwidth ----


def pair_rounds(number: int, most: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs of 0..number-1, which together hold every pair once (circle method).

    If there are more than `most` rounds, an evenly spaced selection is returned.
    """
    nodes = [*range(number), *([None] if number % 2 else [])]
    rounds = []
    for _ in range(len(nodes) - 1):
        half = len(nodes) // 2
        pairs = [pair for pair in zip(nodes[:half], reversed(nodes[half:])) if None not in pair]
        rounds.append([(min(pair), max(pair)) for pair in pairs])
        nodes = [nodes[0], nodes[-1], *nodes[1:-1]]
    return rounds if len(rounds) <= most else [rounds[len(rounds) * i // most] for i in range(most)]


def measure_pairs(
    hosts: Sequence[str], device: Device, *, mib: int, rounds: int
) -> dict[tuple[str, str], float]:
    """Return the GB/s of an all-reduce between the first ranks of two nodes, by hosts.

    The result is identical on all ranks. On a single node, its first two ranks are measured.
    """
    leaders = first_ranks(hosts)
    if len(leaders) == 1:
        leaders = list(range(min(2, len(hosts))))
    speeds: dict[tuple[str, str], float] = {}
    for pairs in pair_rounds(len(leaders), rounds):
        mine = None
        for a, b in pairs:
            if dist.get_rank() in (leaders[a], leaders[b]):
                mine = (a, b), _all_reduce_speed([leaders[a], leaders[b]], device, mib)
        for found in gather_objects(mine):
            if found is not None:
                (a, b), speed = found
                pair = hosts[leaders[a]], hosts[leaders[b]]
                speeds[pair] = min(speed, speeds.get(pair, float("inf")))
    return speeds


def _all_reduce_speed(ranks: list[int], device: Device, mib: int) -> float:
    """Return the GB/s of an all-reduce of two ranks; each sends its whole buffer."""
    group = dist.new_group(ranks, use_local_synchronization=True)
    buffer = torch.ones((mib << 20) // 4, device=device.torch)
    for _ in range(WARM_UP):
        dist.all_reduce(buffer, group=group)
    device.synchronize()
    started = time.perf_counter()
    for _ in range(REPEATS):
        dist.all_reduce(buffer, group=group)
    device.synchronize()
    seconds = (time.perf_counter() - started) / REPEATS
    dist.destroy_process_group(group)
    return (mib << 20) / seconds / 1e9


def judge_pairs(
    speeds: dict[tuple[str, str], float], *, slow_share: float, min_gb_s: float
) -> dict[str, list[Finding]]:
    """Return findings by node: bad if most of its pairs are below slow_share * median or min_gb_s."""
    if not speeds:
        return {}
    median = statistics.median(speeds.values())
    limit = max(min_gb_s, slow_share * median)
    out = {}
    for host in dict.fromkeys(host for pair in speeds for host in pair):
        own = {pair: speed for pair, speed in speeds.items() if host in pair}
        slow = {pair: speed for pair, speed in own.items() if speed < limit}
        extremes = f"{min(own.values()):.2f} to {max(own.values()):.2f} GB/s"
        text = f"{extremes} in {len(own)} pairs, median of all {median:.2f}"
        if 2 * len(slow) > len(own):
            peers = ", ".join(f"{a if b == host else b} {speed:.2f}" for (a, b), speed in slow.items())
            out[host] = [bad("bandwidth", f"{text}; slow with {peers}")]
        else:
            out[host] = [warn("bandwidth", f"{text}; {len(slow)} slow") if slow else ok("bandwidth", text)]
    return out


# ---- transport ----


def check_transport(hosts: Sequence[str], device: Device, nccl_log: str) -> list[Finding]:
    """Return the transport of this node's messages. nccl_log: output of NCCL_DEBUG=INFO; "" on CPU."""
    if len(set(hosts)) == 1:
        return [ok("transport", "one node")]
    if device.is_cuda:
        return read_nccl_log(nccl_log, rdma=active_rdma())
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return [bad("transport", f"{name} does not resolve on itself, as gloo needs it to", SET_GLOO)]
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if address.startswith("127.0.0.") and interface in (None, "lo"):
        return [bad("transport", f"{name} resolves to {address}, which no other node reaches", SET_GLOO)]
    return [ok("transport", f"gloo over TCP, {interface or address}")]


def active_rdma() -> list[str]:
    """Return the RDMA adapters of this node with an active port."""
    states = Path("/sys/class/infiniband").glob("*/ports/*/state")
    return sorted({path.parents[2].name for path in states if "ACTIVE" in path.read_text()})


def read_nccl_log(text: str, *, rdma: list[str]) -> list[Finding]:
    """Return the network that NCCL logged: `NET/IB`, `NET/Socket`, or a plugin's name."""
    used = re.findall(r"via (NET/[\w-]+)", text) or re.findall(r"Using network (\S+)", text)
    if not used:
        return [warn("transport", "NCCL did not log which network it uses")]
    names = sorted(set(used))
    if any(name in ("NET/Socket", "Socket") for name in names) and rdma:
        text = f"NCCL uses TCP ({', '.join(names)}) although {', '.join(rdma)} is active"
        return [bad("transport", text, "set NCCL_IB_HCA; install libibverbs1 in the container")]
    return [ok("transport", f"NCCL over {', '.join(names)}")]
