"""System calls that confine a process: filters of calls, rules for paths, namespaces, mounts, limits.

The scripts child.py and container_child.py import this file without the package, so it imports only the
standard library. See seccomp(2), landlock(7), user_namespaces(7), mount_setattr(2).
"""

import ctypes
import errno
import os
import platform
import resource
import stat
import struct
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)

# Numbers of system calls on x86_64 and aarch64; from 424 on, all architectures share them.
_MACHINES = ("x86_64", "aarch64")
_CALLS = {
    "clone": (56, 220),
    "kill": (62, 129),
    "tgkill": (234, 131),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "pivot_root": (155, 41),
    "capset": (126, 91),
    "fallocate": (285, 47),
    "close_range": (436, 436),
}
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT, _MOUNT_SETATTR = 444, 445, 446, 442

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_CLONE_FILES, _CLONE_THREAD = 0x00000400, 0x00010000
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_CLONE_NEW = 0x7E020000  # any of the above, or CLONE_NEWCGROUP

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 36, 38, 47


def check(result: int, what: str) -> int:
    """Return the result of a call of the C library. If it is negative, raise OSError with the reason in
    errno."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def call_number(name: str, machine: str | None = None) -> int:
    """Return the number of a system call in _CALLS."""
    return _CALLS[name][_MACHINES.index(machine or platform.machine())]


def syscall(number: int, what: str, *args: Any) -> int:
    """Make a system call without a C library function. An int argument is passed as a C long."""
    return check(LIBC.syscall(number, *(ctypes.c_long(a) if isinstance(a, int) else a for a in args)), what)


def prctl(option: int, what: str, *args: Any) -> None:
    """Call prctl(2) with all five arguments, because some options check unused ones."""
    padded = [*args, 0, 0, 0, 0][:4]
    check(LIBC.prctl(option, *(ctypes.c_ulong(a) if isinstance(a, int) else a for a in padded)), what)


# ---- seccomp ----

_LOAD, _EQUAL, _AT_LEAST, _BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_DENY = _FAIL | errno.EPERM


def _op(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, k)


def _load_arg(index: int) -> bytes:
    """Return the instruction that loads the low 32 bits of an argument; both machines are little-endian."""
    return _op(_LOAD, 16 + 8 * index)


def _rule(index: int, listed: list[int], *, if_listed: int = _ALLOW, otherwise: int = _DENY) -> list[bytes]:
    """Return a rule with the verdict `if_listed` if argument `index` of a call is in `listed`, else
    `otherwise`."""
    tests = [op for value in listed for op in (_op(_EQUAL, value, 0, 1), _op(_RETURN, if_listed))]
    return [_load_arg(index), *tests, _op(_RETURN, otherwise)]


def _clone_rule(*bits: tuple[int, int], otherwise: int) -> list[bytes]:
    """Return the rule for clone.

    bits: (mask, verdict). The first mask that shares a bit with the flags decides. otherwise: verdict if none
        does.
    """
    tests = [op for mask, verdict in bits for op in (_op(_BITS, mask, 0, 1), _op(_RETURN, verdict))]
    return [_load_arg(0), *tests, _op(_RETURN, otherwise)]


def container_filter(machine: str, denied_calls: list[int], missing_calls: list[int]) -> bytes:
    """Return the BPF program for commands in a container: no namespaces, no signal to process 1."""
    bodies = {
        # CLOSE_RANGE_UNSHARE (2) would give a thread its own descriptors, which would be missing in the
        # count.
        "clone": _clone_rule(
            (_CLONE_NEW, _DENY), (_CLONE_FILES, _ALLOW), (_CLONE_THREAD, _DENY), otherwise=_ALLOW
        ),
        "close_range": _rule(2, [0, 4], otherwise=_FAIL | errno.ENOSYS),
        "kill": _rule(0, [1], if_listed=_DENY, otherwise=_ALLOW),  # the kernel would ignore it silently
        # AF_UNIX, AF_INET, AF_INET6 and AF_NETLINK. No namespace separates AF_VSOCK and AF_ALG.
        "socket": _rule(0, [1, 2, 10, 16], otherwise=_FAIL | errno.EAFNOSUPPORT),
    }
    return _assemble(machine, bodies, denied_calls, missing_calls)


def seccomp_filter(machine: str, pid: int, denied_calls: list[int], missing_calls: list[int]) -> bytes:
    """Return the BPF program for the process `pid` (in its own PID namespace), 8 bytes per instruction.

    `denied_calls` fail with EPERM, `missing_calls` with ENOSYS, and some others depend on their arguments.
    """
    bodies = {
        "clone": _clone_rule((_CLONE_NEW, _DENY), (_CLONE_THREAD, _ALLOW), otherwise=_DENY),
        "kill": _rule(0, [pid, 0]),  # 0 is its own group; it is the only member
        "tgkill": _rule(0, [pid]),
        # PR_SET_PDEATHSIG is denied because a program without the death signal would outlive a killed
        # watcher. PR_SET_DUMPABLE is denied because the watcher cannot count the open files of an undumpable
        # process.
        "prctl": _rule(0, [PR_SET_PDEATHSIG, PR_SET_DUMPABLE], if_listed=_DENY, otherwise=_ALLOW),
        "prlimit64": _rule(0, [pid, 0]),
        "socketpair": _rule(0, [1]),  # AF_UNIX
        # F_SETOWN, F_SETSIG and F_SETOWN_EX make the kernel send a chosen signal to any process of the user;
        # a lease (F_SETLEASE) makes others wait in open(); F_NOTIFY is an older inotify.
        "fcntl": _rule(1, [8, 10, 15, 1024, 1026], if_listed=_DENY, otherwise=_ALLOW),
        # FIOSETOWN and SIOCSPGRP act as F_SETOWN; TIOCSTI and TIOCLINUX insert terminal input.
        "ioctl": _rule(1, [0x8901, 0x8902, 0x5412, 0x541C], if_listed=_DENY, otherwise=_ALLOW),
        # fallocate could exceed the largest size of a file. With this error, posix_fallocate(3) writes blocks
        # instead.
        "fallocate": [_op(_RETURN, _FAIL | errno.EOPNOTSUPP)],
    }
    return _assemble(machine, bodies, denied_calls, missing_calls)


def _assemble(
    machine: str, bodies: dict[str, list[bytes]], denied_calls: list[int], missing_calls: list[int]
) -> bytes:
    """Return a BPF program.

    A system call in `bodies` gets the verdict of its body. `denied_calls` fail with EPERM, `missing_calls`
    with ENOSYS. All other calls are allowed.
    """
    program = [_op(_LOAD, 4), _op(_EQUAL, _AUDIT_ARCH[machine], 1, 0), _op(_RETURN, _KILL), _op(_LOAD, 0)]
    if machine == "x86_64":  # the x32 calls are a second set of numbers for the same calls
        program += [_op(_AT_LEAST, 0x40000000, 0, 1), _op(_RETURN, _KILL)]
    rules = {call_number(name, machine): body for name, body in bodies.items()}
    rules |= {number: [_op(_RETURN, _DENY)] for number in denied_calls}
    rules |= {number: [_op(_RETURN, _FAIL | errno.ENOSYS)] for number in missing_calls}
    for number, body in rules.items():
        program += [_op(_EQUAL, number, 0, len(body)), *body]
    return b"".join([*program, _op(_RETURN, _ALLOW)])


def apply_seccomp(code: bytes) -> None:
    """Filter the system calls of this process and its descendants by a BPF program."""
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    prctl(_PR_SET_SECCOMP, "seccomp", 2, ctypes.c_char_p(program))


# ---- Landlock ----

# Rights of linux/landlock.h by bit: execute 0, write 1, read 2, list 3, remove 4 and 5, make 6-12 (char 6,
# dir 7, regular 8, socket 9, FIFO 10, block 11, symlink 12), refer 13 (ABI 2), truncate 14 (ABI 3), device
# ioctl 15 (ABI 5).
_EXECUTE, _WRITE, _READ, _LIST, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_MAKE_DEVICES_AND_SOCKETS = 1 << 6 | 1 << 9 | 1 << 11


def landlock_abi() -> int:
    """Return the version of Landlock in the kernel, 0 if it has none. Below 3 it does not prevent
    truncation."""
    return max(0, LIBC.syscall(ctypes.c_long(_LANDLOCK_CREATE), None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


def apply_landlock(readable: list[str], devices: list[str], writable: str) -> None:
    abi = landlock_abi()
    if abi < 3:
        raise OSError(errno.ENOSYS, f"Landlock ABI {abi}, 3 is needed")
    every = (1 << (16 if abi >= 5 else 15)) - 1
    # Forbid TCP bind and connect (ABI 4), abstract Unix sockets, and signals to others (ABI 6): no rule
    # allows them.
    attributes = struct.pack("QQQ", every, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = syscall(_LANDLOCK_CREATE, "Landlock", ctypes.c_char_p(attributes), size, 0)

    def allow(path: str, rights: int) -> None:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not stat.S_ISDIR(os.fstat(fd).st_mode):  # the kernel rejects rights of directories on a file
            rights &= _EXECUTE | _WRITE | _READ | _TRUNCATE
        rule = struct.pack("=Qi", rights, fd)
        syscall(_LANDLOCK_ADD, f"Landlock rule for {path}", ruleset, 1, ctypes.c_char_p(rule), 0)
        os.close(fd)

    for path in readable:
        allow(path, _EXECUTE | _READ | _LIST)
    for path in devices:
        allow(path, _READ | _WRITE | _TRUNCATE)
    allow(writable, every & 0x7FFF & ~_EXECUTE & ~_MAKE_DEVICES_AND_SOCKETS)
    syscall(_LANDLOCK_RESTRICT, "Landlock", ruleset, 0)
    os.close(ruleset)


# ---- namespaces ----


def enter_user_namespace() -> None:
    """Enter new user and PID namespaces. The next fork is process 1 there, and its end kills all others
    there."""
    uid, gid = os.getuid(), os.getgid()
    check(LIBC.unshare(_CLONE_NEWUSER | _CLONE_NEWPID), "user namespace")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def apply_namespaces(
    readable: list[str], devices: list[str], writable: str, root: str, limits: dict[str, Any]
) -> None:
    """Remove the network, and build a new root directory.

    It has read-only binds of `readable` and `devices`, and `writable` as an empty directory.
    """
    check(LIBC.unshare(_CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS), "namespaces")
    private, recursive, bind, nosuid, nodev = 1 << 18, 1 << 14, 1 << 12, 2, 4
    mount(None, "/", None, private | recursive)
    mount("tmpfs", root, "tmpfs", nosuid | nodev)
    for path in [*readable, *devices]:
        target = root + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path):  # /lib -> usr/lib
            if not os.path.lexists(target):
                os.symlink(os.readlink(path), target)
            continue
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        elif not os.path.lexists(target):
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        mount(path, target, None, bind | recursive)
        set_read_only(target, 0x8000)  # AT_RECURSIVE
    os.makedirs(root + writable)
    size = f"mode=700,size={limits['disk_mib'] + 1}m,nr_inodes={limits['files'] + 2}"
    mount("tmpfs", root + writable, "tmpfs", nosuid | nodev, size)
    set_read_only(root, 0)
    os.chdir(root)
    # pivot_root(2), "pivot_root(".", ".")": the old root is then on top of the new one and is unmounted.
    here = ctypes.c_char_p(b".")
    syscall(call_number("pivot_root"), "pivot_root", here, here)
    check(LIBC.umount2(b".", 2), "umount")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [os.fsencode(text) if text is not None else None for text in (source, target, kind)]
    mounted = LIBC.mount(*encoded, ctypes.c_ulong(flags), ctypes.c_char_p(options.encode()))
    check(mounted, f"mount of {source} on {target}")


def set_read_only(target: str, flags: int) -> None:
    attributes = struct.pack("QQQQ", 1 | 2, 0, 0, 0)  # read-only, nosuid
    path, buffer = ctypes.c_char_p(os.fsencode(target)), ctypes.c_char_p(attributes)
    syscall(_MOUNT_SETATTR, f"read-only {target}", -100, path, flags, buffer, len(attributes))


# ---- rights and limits ----


def drop_capabilities() -> None:
    """Drop all capabilities. The bounding set is emptied, too, so that execve does not restore them to
    root."""
    capability = 0
    while LIBC.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) == 0:
        capability += 1
    prctl(_PR_CAP_AMBIENT, "ambient capabilities", 4)
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    syscall(call_number("capset"), "capset", ctypes.c_char_p(header), ctypes.c_char_p(none))


def set_limits(wanted: dict[int, int]) -> None:
    """Set soft and hard limit of each resource to the wanted value, or to this process's hard limit if it is
    lower."""
    for kind, value in wanted.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
