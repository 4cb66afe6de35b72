"""Script started by `sandbox.run_program`: confine one untrusted program, watch it, and clean up.

`sandbox.run_program` starts `python -I -S child.py PARENT_PIPE` and writes one line of JSON to it. This
process, the watcher, forks; the fork confines itself and becomes the program (execve). The watcher collects
the output, ends the program at its limits, kills all descendants, removes the program's directory and prints
one line of JSON. It also ends and cleans up when PARENT_PIPE is closed, because the calling process is then
gone.

It imports only the standard library, because `-I` finds no package and a start must take milliseconds.

The program is confined by these layers, none of which needs root (`sandbox` declares what is allowed):

seccomp     a filter of system calls
landlock    rules for paths; needs Linux 6.2, before which a readable file could be truncated
namespaces  if one of the two is missing: user, mount, network, IPC and PID namespaces with a read-only root
            and a file system of limited size for the program's directory

See seccomp(2), landlock(7), user_namespaces(7), mount_setattr(2).
"""

import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import select
import signal
import stat
import struct
import sys
import time
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
}
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT, _MOUNT_SETATTR = 444, 445, 446, 442

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_CLONE_THREAD = 0x00010000
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_CLONE_NEW = 0x7E020000  # any of the above, or CLONE_NEWCGROUP

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 22, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 36, 38, 47

COUNT_EVERY_S = 0.05
"""Seconds between counts of threads and files."""


def check(result: int, what: str) -> int:
    """Return the result of a C library call. Raises OSError with errno's reason if it is negative."""
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
    """Return a rule: `if_listed` for a call whose argument `index` is in `listed`, else `otherwise`."""
    tests = [op for value in listed for op in (_op(_EQUAL, value, 0, 1), _op(_RETURN, if_listed))]
    return [_load_arg(index), *tests, _op(_RETURN, otherwise)]


def _clone_rule(*bits: tuple[int, int], otherwise: int) -> list[bytes]:
    """Return the rule for clone: the verdict of the first mask with a bit of the flags, else another."""
    tests = [op for mask, verdict in bits for op in (_op(_BITS, mask, 0, 1), _op(_RETURN, verdict))]
    return [_load_arg(0), *tests, _op(_RETURN, otherwise)]


def container_filter(machine: str, denied_calls: list[int], missing_calls: list[int]) -> bytes:
    """Return the BPF program for commands in a container: no namespaces, no signal to process 1."""
    bodies = {
        "clone": _clone_rule((_CLONE_NEW, _DENY), otherwise=_ALLOW),
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
        "kill": _rule(0, [pid, 0]),  # 0 is its own group, of which it is the only member
        "tgkill": _rule(0, [pid]),
        # Without the death signal it would outlive a killed watcher, which cannot count the open files of a
        # process that is not dumpable.
        "prctl": _rule(0, [_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE], if_listed=_DENY, otherwise=_ALLOW),
        "prlimit64": _rule(0, [pid, 0]),
        "socketpair": _rule(0, [1]),  # AF_UNIX
        # F_SETOWN, F_SETSIG and F_SETOWN_EX make the kernel send a chosen signal to any process of the user;
        # a lease (F_SETLEASE) makes others wait in open(); F_NOTIFY is an older inotify.
        "fcntl": _rule(1, [8, 10, 15, 1024, 1026], if_listed=_DENY, otherwise=_ALLOW),
        # FIOSETOWN and SIOCSPGRP act as F_SETOWN; TIOCSTI and TIOCLINUX insert terminal input.
        "ioctl": _rule(1, [0x8901, 0x8902, 0x5412, 0x541C], if_listed=_DENY, otherwise=_ALLOW),
        # It exceeds the largest size of a file. With this error posix_fallocate(3) writes to the blocks.
        "fallocate": [_op(_RETURN, _FAIL | errno.EOPNOTSUPP)],
    }
    return _assemble(machine, bodies, denied_calls, missing_calls)


def _assemble(
    machine: str, bodies: dict[str, list[bytes]], denied_calls: list[int], missing_calls: list[int]
) -> bytes:
    """Return a BPF program: a body per system call of _CALLS, EPERM, ENOSYS, and any other is allowed."""
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
    """Return the kernel's version of Landlock, 0 for none; below 3 it does not prevent truncation."""
    return max(0, LIBC.syscall(ctypes.c_long(_LANDLOCK_CREATE), None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


def apply_landlock(readable: list[str], devices: list[str], writable: str) -> None:
    abi = landlock_abi()
    if abi < 3:
        raise OSError(errno.ENOSYS, f"Landlock ABI {abi}, 3 is needed")
    every = (1 << (16 if abi >= 5 else 15)) - 1
    # No rule allows TCP bind and connect (ABI 4), abstract Unix sockets or signals to others (ABI 6).
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
    """Enter new user and PID namespaces; the next fork is process 1, and its end kills the others there."""
    uid, gid = os.getuid(), os.getgid()
    check(LIBC.unshare(_CLONE_NEWUSER | _CLONE_NEWPID), "user namespace")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def apply_namespaces(
    readable: list[str], devices: list[str], writable: str, root: str, limits: dict[str, Any]
) -> None:
    """Remove the network; build a root of read-only binds of `readable` and `devices`, `writable` empty."""
    check(LIBC.unshare(_CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS), "namespaces")
    private, recursive, bind, nosuid, nodev = 1 << 18, 1 << 14, 1 << 12, 2, 4
    _mount(None, "/", None, private | recursive)
    _mount("tmpfs", root, "tmpfs", nosuid | nodev)
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
        _mount(path, target, None, bind | recursive)
        _set_read_only(target, 0x8000)  # AT_RECURSIVE
    os.makedirs(root + writable)
    size = f"mode=700,size={limits['disk_mib'] + 1}m,nr_inodes={limits['files'] + 2}"
    _mount("tmpfs", root + writable, "tmpfs", nosuid | nodev, size)
    _set_read_only(root, 0)
    os.chdir(root)
    # pivot_root(2), "pivot_root(".", ".")": the old root is then on top of the new one and is unmounted.
    here = ctypes.c_char_p(b".")
    syscall(call_number("pivot_root"), "pivot_root", here, here)
    check(LIBC.umount2(b".", 2), "umount")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [os.fsencode(text) if text is not None else None for text in (source, target, kind)]
    mounted = LIBC.mount(*encoded, ctypes.c_ulong(flags), ctypes.c_char_p(options.encode()))
    check(mounted, f"mount of {source} on {target}")


def _set_read_only(target: str, flags: int) -> None:
    attributes = struct.pack("QQQQ", 1 | 2, 0, 0, 0)  # read-only, nosuid
    path, buffer = ctypes.c_char_p(os.fsencode(target)), ctypes.c_char_p(attributes)
    syscall(_MOUNT_SETATTR, f"read-only {target}", -100, path, flags, buffer, len(attributes))


# ---- the program ----


def drop_capabilities() -> None:
    """Drop all capabilities; emptying the bounding set keeps execve from restoring them to root."""
    capability = 0
    while LIBC.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) == 0:
        capability += 1
    prctl(_PR_CAP_AMBIENT, "ambient capabilities", 4)
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    syscall(call_number("capset"), "capset", ctypes.c_char_p(header), ctypes.c_char_p(none))


def set_limits(wanted: dict[int, int]) -> None:
    """Set both limits of each resource, at most to the hard limit of this process."""
    for kind, value in wanted.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def limit_resources(limits: dict[str, Any]) -> None:
    """Set the soft and hard limits of setrlimit(2), so that the program cannot raise them."""
    mib = 1 << 20
    wanted = {
        resource.RLIMIT_AS: limits["memory_mib"] * mib,
        resource.RLIMIT_FSIZE: limits["disk_mib"] * mib,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_STACK: 8 * mib,  # default for each thread, within RLIMIT_AS
    }
    set_limits(wanted)
    # The soft limit sends SIGXCPU, which the program may ignore; the hard one, a second later, sends SIGKILL.
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))


def become_program(
    job: dict[str, Any], box: str, root: str, fds: tuple[int, int, int], failed: int, watcher: int
) -> None:
    """Confine this process, the watcher's fork, and execve the program. Never returns; raises on failure."""
    os.setsid()
    namespaces = "namespaces" in job["layers"]
    prctl(_PR_SET_PDEATHSIG, "parent-death signal", int(signal.SIGKILL))
    if not namespaces and os.getppid() != watcher:  # in a new PID namespace the parent's pid is 0
        os._exit(1)
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
    first = 3
    for fd in sorted([failed, *job["pipes"], resource.getrlimit(resource.RLIMIT_NOFILE)[0]]):
        os.closerange(first, fd)
        first = fd + 1
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):  # Python's settings would survive execve
        signal.signal(number, signal.SIG_DFL)
    os.umask(0o077)
    if namespaces:
        apply_namespaces(job["readable"], job["devices"], box, root, job["limits"])
    os.chdir(box)
    with open("program.py", "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(job["source"])
    limit_resources(job["limits"])
    drop_capabilities()
    prctl(_PR_SET_NO_NEW_PRIVS, "no_new_privs", 1)
    if "landlock" in job["layers"]:
        apply_landlock(job["readable"], job["devices"], box)
    if "seccomp" in job["layers"]:
        calls = job["denied_calls"], job["missing_calls"]
        apply_seccomp(seccomp_filter(platform.machine(), os.getpid(), *calls))
    environment = {**job["environment"], "HOME": box, "TMPDIR": box}
    os.execve(
        job["arguments"][0], [*job["arguments"], f"{box}/program.py", *map(str, job["pipes"])], environment
    )


# ---- the watcher ----


def descendants(root: int) -> list[int]:
    """Return all descendants of `root`, nearest first; orphans are children of the watcher, a subreaper."""
    found = [root]
    for pid in found:  # grows during the iteration
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children") as file:
                    found += map(int, file.read().split())
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
    return found[1:]


def count_tasks() -> int:
    """Return the number of descendant processes and their threads."""
    total = 0
    for pid in descendants(os.getpid()):
        try:
            total += len(os.listdir(f"/proc/{pid}/task"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def kill_descendants() -> None:
    """Kill all descendants and wait for them; all are stopped first, so that none can fork."""
    seen: set[int] = set()
    while new := set(descendants(os.getpid())) - seen:
        seen |= new
        _send(new, signal.SIGSTOP)
    while True:
        _send(descendants(os.getpid()), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _send(pids: Any, number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def exceeds(box: str, *, max_files: int, max_bytes: int) -> bool:
    """Return whether the program holds more files or bytes; examine at most `max_files` entries of `box`.

    A directory that cannot be read is an excess, because its contents cannot be counted.
    """
    files, size, waiting = 0, unlinked_bytes(box, max_bytes), [box]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    files += 1
                    with contextlib.suppress(FileNotFoundError):  # just removed
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if files > max_files or size > max_bytes:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except FileNotFoundError:  # just removed
            continue
        except OSError:  # it cannot be read, or its path is too long
            return True
    return size > max_bytes


def unlinked_bytes(box: str, max_bytes: int) -> int:
    """Return the bytes of unlinked files that descendants hold open; more than `max_bytes` if unknown."""
    sizes: dict[int, int] = {}
    mapped: set[int] = set()
    ended = (FileNotFoundError, ProcessLookupError, PermissionError)
    for pid in descendants(os.getpid()):
        maps: list[str] = []
        with contextlib.suppress(*ended):
            for thread in os.listdir(f"/proc/{pid}/task"):  # a thread may have descriptors of its own
                with contextlib.suppress(*ended):  # of the others the rest is still counted
                    found = f"/proc/{pid}/task/{thread}"
                    sizes |= _unlinked_in(f"{found}/fd")
                    if not maps:  # the first thread maps nothing after its end
                        with open(f"{found}/maps", encoding="utf-8", errors="replace") as file:
                            maps = file.readlines()
        for line in maps:
            if line.endswith(" (deleted)\n") and f" {box}/" in line:
                mapped.add(int(line.split(None, 5)[4]))
    # A mapping keeps the whole file, whose size is then not to be found.
    return max_bytes + 1 if mapped - set(sizes) else sum(sizes.values())


def _unlinked_in(fds: str) -> dict[int, int]:
    """Return inode -> bytes of the unlinked files in a directory of descriptors of /proc."""
    sizes = {}
    for fd in os.listdir(fds):
        with contextlib.suppress(FileNotFoundError):  # just closed
            found = os.stat(f"{fds}/{fd}")
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
                sizes[found.st_ino] = found.st_blocks * 512
    return sizes


def remove_directory(path: str) -> None:
    """Remove a directory and its contents.

    Subdirectories are moved up before they are emptied, because a program can nest them deeper than the
    longest path and than shutil.rmtree can recurse.
    """
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    moved = 0
    while names := os.listdir(top):
        for name in names:
            if not _unlock(name, top):
                os.unlink(name, dir_fd=top)
                continue
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
            for inner in os.listdir(fd):
                moved += 1
                _unlock(inner, fd)  # only its owner's right to write allows a directory to be moved
                os.rename(inner, f".moved-{os.getpid()}-{moved}", src_dir_fd=fd, dst_dir_fd=top)
            os.close(fd)
            os.rmdir(name, dir_fd=top)
    os.close(top)
    os.rmdir(path)


def _unlock(name: str, parent: int) -> bool:
    """Return whether an entry is a directory; give its owner all rights then."""
    is_directory = stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    if is_directory:
        os.chmod(name, 0o700, dir_fd=parent)
    return is_directory


def start(job: dict[str, Any]) -> tuple[int, str, int, int]:
    """Fork the program; return its pid, its directory, and the reading ends of its stdout and stderr."""
    top = job["directory"]
    box, root = f"{top}/box", f"{top}/root"
    os.mkdir(box)
    os.mkdir(root)
    with open(f"{top}/stdin", "wb") as file:
        file.write(job["stdin"].encode("utf-8", "surrogatepass"))
    stdin = os.open(f"{top}/stdin", os.O_RDONLY)
    (out, program_out), (err, program_err), (failure, failed) = os.pipe(), os.pipe(), os.pipe()
    if "namespaces" in job["layers"]:
        enter_user_namespace()
    watcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            become_program(job, box, root, (stdin, program_out, program_err), failed, watcher)
        except BaseException as error:
            os.write(failed, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(1)
    for fd in (stdin, program_out, program_err, failed, *job["pipes"]):
        os.close(fd)
    message = os.read(failure, 4096)  # b"": execve closed the other end
    if message:
        raise OSError(message.decode())
    return pid, box, out, err


def watch(job: dict[str, Any], started: tuple[int, str, int, int], parent: int) -> dict[str, Any] | None:
    """Collect the output until the program ends or exceeds a limit; None if the pipe `parent` is closed."""
    pid, box, out, err = started
    limits, begin = job["limits"], time.monotonic()
    output: dict[int, bytearray] = {out: bytearray(), err: bytearray()}
    poll = select.poll()
    for fd in (out, err, parent):
        os.set_blocking(fd, False)
        poll.register(fd, select.POLLIN)
    open_pipes, next_count, end, code = {out, err}, begin + COUNT_EVERY_S, "", 0
    while not end:
        for fd, _ in poll.poll(20 if open_pipes else 2):
            if fd == parent:
                return None
            if not _collect(fd, output[fd], limits["output_bytes"]):
                poll.unregister(fd)
                open_pipes.discard(fd)
        ended, status = os.waitpid(pid, os.WNOHANG)
        now = time.monotonic()
        if ended:
            code = os.waitstatus_to_exitcode(status)
            end = "exit" if code >= 0 else "time" if code == -signal.SIGXCPU else "signal"
        elif any(len(data) > limits["output_bytes"] for data in output.values()):
            end = "output"
        elif now - begin > limits["wall_s"]:
            end = "time"
        elif now >= next_count:
            next_count = now + COUNT_EVERY_S
            if count_tasks() > limits["tasks"]:
                end = "tasks"
            # 1 MiB more, so that one file of the largest size is allowed beside the program's own.
            elif exceeds(box, max_files=limits["files"], max_bytes=limits["disk_mib"] + 1 << 20):
                end = "disk"
    for fd in open_pipes:
        _collect(fd, output[fd], limits["output_bytes"])
    if end == "exit" and any(len(data) > limits["output_bytes"] for data in output.values()):
        end = "output"
    texts = (bytes(output[fd][: limits["output_bytes"]]).decode("utf-8", "replace") for fd in (out, err))
    result = dict(zip(("stdout", "stderr"), texts, strict=True))
    return {"end": end, "code": code, **result, "seconds": time.monotonic() - begin}


def _collect(fd: int, data: bytearray, limit: int) -> bool:
    """Read available bytes until `data` exceeds the limit; return False at the end of the pipe."""
    while len(data) <= limit:
        try:
            chunk = os.read(fd, 1 << 16)
        except BlockingIOError:
            return True
        if not chunk:
            return False
        data += chunk
    return True


def main() -> None:
    parent = int(sys.argv[1])
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    # Slurm may send these to every process of a step; the program inherits the setting.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    prctl(_PR_SET_CHILD_SUBREAPER, "subreaper", 1)
    job = json.loads(sys.stdin.buffer.readline())
    try:
        result = watch(job, start(job), parent)
    except OSError as error:
        result = {"setup_error": str(error)}
    finally:
        kill_descendants()
        with contextlib.suppress(OSError):  # the calling process reports a directory that is left
            remove_directory(job["directory"])
    if result is not None:
        sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main()
