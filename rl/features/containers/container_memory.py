"""Count the memory that the node holds for a container; imported by container_child.py without the package.

Process 1 of the container calls these functions, and shares its /proc, IPC and network namespaces with the
other processes. A shared mapping that was filled and unmapped in part counts only with the remaining part.
For example, if a program fills 1 GiB and unmaps the last 0.9 GiB, 0.1 GiB count.
"""

import contextlib
import os
import socket
import struct

DESCRIPTORS, DESCRIPTOR_BYTES = 1024, 4096
"""Maximum number of descriptors of a process, and the bytes counted for each descriptor: a pipe keeps two
pages."""
COUNTS = 100
"""Maximum number of counts for one result. A count is repeated if threads end meanwhile."""
RECORD_BYTES = 256
"""Bytes counted for the kernel's record of a mapping, a file's lock or a watch (epoll, inotify)."""


def _sum_of(path: str, names: tuple[bytes, ...]) -> int:
    """Return the sum, in bytes, of lines `name: number kB` of a file in /proc; 0 if the process has ended."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith(names))
    return 0


def held_bytes(found: list[int], limit: int, network: bool) -> int:
    """Return the memory that the node holds for processes, in bytes. The memory exceeds `limit` exactly if
    the result does.

    If the result would exceed `limit` otherwise, pages that forks share count once.
    """
    for _ in range(COUNTS):
        threads = list(map(_thread_of, found))
        total = _held_bytes([thread for thread in threads if thread], limit, network)
        if all(thread == pid or (thread and _has_memory(thread)) for pid, thread in zip(found, threads)):
            return total
    return limit + 1  # threads that replace each other hide the memory


def _thread_of(pid: int) -> int | None:
    """Return a thread with the process's memory in /proc; None if threads end meanwhile.

    The first thread, which has the process's number, shows nothing after its end.
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        found = next((int(thread) for thread in threads if _has_memory(int(thread))), None)
        return found or (pid if threads == os.listdir(f"/proc/{pid}/task") else None)
    except OSError:  # the process has ended
        return pid


def _has_memory(thread: int) -> bool:
    return _sum_of(f"/proc/{thread}/status", (b"VmSize:",)) > 0


def _held_bytes(found: list[int], limit: int, network: bool) -> int:
    own = (b"RssAnon:", b"VmSwap:", b"VmPTE:", b"HugetlbPages:")
    kept = system_v_bytes() + (0 if network else socket_bytes())
    kept += sum(map(descriptor_bytes, found))
    if sum(_sum_of(f"/proc/{pid}/status", (b"VmSize:",)) for pid in found) + kept > limit:
        kept += mapping_bytes(found)  # records of smaller mappings are below a sixteenth of the limit
    total = kept + sum(_sum_of(f"/proc/{pid}/status", own) for pid in found)
    if total > limit:
        total = kept + sum(_sum_of(f"/proc/{pid}/status", own[2:]) for pid in found)
        total += sum(_sum_of(f"/proc/{pid}/smaps_rollup", (b"Pss_Anon:", b"SwapPss:")) for pid in found)
    return total


def descriptor_bytes(pid: int) -> int:
    """Return the bytes counted for a process's descriptors, with locks and watches; 0 if the process has
    ended."""
    total, kinds = 0, (b"lock:", b"tfd:", b"inotify ", b"fanotify ")
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fdinfo"):
            total += DESCRIPTOR_BYTES
            with contextlib.suppress(OSError), open(f"/proc/{pid}/fdinfo/{fd}", "rb") as file:
                total += RECORD_BYTES * sum(line.startswith(kinds) for line in file)
    return total


def mapping_bytes(found: list[int]) -> int:
    """Return the bytes of records of mappings, and the size of shared mappings without a file. Such a mapping
    keeps pages that no process maps any more."""
    sizes: dict[bytes, int] = {}
    records = 0
    for pid in found:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
            for line in file:
                records += RECORD_BYTES
                # A program may give a shared mapping a name: [anon_shmem:NAME].
                if line.endswith((b"/dev/zero (deleted)\n", b"/dev/zero\n")) or b" [anon_shmem:" in line:
                    span, rights, offset, _, inode, _ = line.split(None, 5)
                    begin, end = (int(place, 16) for place in span.split(b"-"))
                    if rights.endswith(b"s"):
                        sizes[inode] = max(sizes.get(inode, 0), int(offset, 16) + end - begin)
    return records + sum(sizes.values())


def system_v_bytes() -> int:
    """Return the memory of objects of System V IPC in this namespace, in bytes. Such objects outlive their
    process."""
    total = 0
    for name, columns, each in (
        ("shm", ("rss", "swap"), 1),
        ("msg", ("cbytes",), 1),
        ("sem", ("nsems",), 64),
    ):
        with open(f"/proc/sysvipc/{name}") as file:
            head = file.readline().split()
            for line in file:
                values = line.split()
                total += sum(int(values[head.index(column)]) for column in columns) * each
                total += int(values[head.index("qnum")]) * 64 if name == "msg" else 0
    return total


def socket_bytes() -> int:
    """Return the bytes in all socket buffers of this network namespace, even of sockets without a process.
    See sock_diag(7).

    A kind of socket that the kernel does not report (without CONFIG_UNIX_DIAG, CONFIG_INET_DIAG) counts as 0.
    """
    unix = struct.pack("BBxxIII8x", socket.AF_UNIX, 0, 0xFFFFFFFF, 0, 1 << 5)
    netlink = struct.pack("BBxxII8x", socket.AF_NETLINK, 0xFF, 0, 1)
    ips = [(family, kind) for family in (socket.AF_INET, socket.AF_INET6) for kind in (6, 17)]
    asked = [(16, 5, unix), (28, 0, netlink)]
    asked += [(72, 7, struct.pack("BBBxI48x", *ip, 1 << 6, 0xFFFFFFFF)) for ip in ips]
    return sum(_diagnosed_bytes(*request) for request in asked)


def _diagnosed_bytes(fixed: int, wanted: int, request: bytes) -> int:
    """Return the sum over sockets of their attribute `wanted`, which follows `fixed` bytes."""
    total = 0
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as diagnosis:
        diagnosis.send(struct.pack("IHHII", 16 + len(request), 20, 0x301, 0, 0) + request)
        while True:
            data, at = diagnosis.recv(1 << 17), 0
            while at < len(data):
                length, kind = struct.unpack_from("IH", data, at)
                if kind in (2, 3):  # an error, for example for a kind that the kernel does not have; the end
                    return total
                place, end = at + 16 + fixed, at + length
                while place + 4 <= end:
                    size, name = struct.unpack_from("HH", data, place)
                    if name == wanted and size >= 36:  # received, sent or queued, reserved, backlog
                        received, _, sent, _, reserved, queued, _, backlog = struct.unpack_from(
                            "8I", data, place + 4
                        )
                        total += received + max(sent, queued) + reserved + backlog
                    place += max(size + 3 & ~3, 4)
                at += length + 3 & ~3
