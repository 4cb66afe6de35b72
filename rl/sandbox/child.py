"""Script that `sandbox.run_program` starts: confines one untrusted program, watches it, and cleans up.

`sandbox.run_program` starts `python -I -S child.py PARENT_PIPE` and writes one line of JSON to it. This
process is the watcher. It forks, and the fork confines itself and becomes the program (execve). The watcher
collects the output, ends the program at its limits, kills all descendants, removes the program's directory
and prints one line of JSON. If PARENT_PIPE is closed, the calling process is gone. Then the watcher ends the
program and cleans up, too.

The script imports only the standard library, because `-I` finds no package and a start must take
milliseconds.

The program is confined by these layers (`sandbox` declares what is allowed). None of them needs root.

seccomp     a filter of system calls
landlock    rules for paths; needs Linux 6.2, because before it a readable file could be truncated
namespaces  if one of the two is missing: user, mount, network, IPC and PID namespaces with a read-only root
            and a file system of limited size for the program's directory

See seccomp(2), landlock(7), user_namespaces(7), mount_setattr(2).
"""

import contextlib
import json
import os
import platform
import resource
import select
import signal
import stat
import sys
import time
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # -I leaves it out

import kernel
import leftovers

COUNT_EVERY_S = 0.05
"""Seconds between counts of threads and files."""


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
    kernel.set_limits(wanted)
    # At the soft limit the kernel sends SIGXCPU, which the program may ignore. A second later, at the hard
    # limit, it sends SIGKILL.
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))


def become_program(
    job: dict[str, Any], box: str, root: str, fds: tuple[int, int, int], failed: int, watcher: int
) -> None:
    """Confine this process, which is the watcher's fork, and execve the program.

    It never returns, and raises on failure.
    """
    os.setsid()
    namespaces = "namespaces" in job["layers"]
    kernel.prctl(kernel.PR_SET_PDEATHSIG, "parent-death signal", int(signal.SIGKILL))
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
        kernel.apply_namespaces(job["readable"], job["devices"], box, root, job["limits"])
    os.chdir(box)
    with open("program.py", "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(job["source"])
    limit_resources(job["limits"])
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, "no_new_privs", 1)
    if "landlock" in job["layers"]:
        kernel.apply_landlock(job["readable"], job["devices"], box)
    if "seccomp" in job["layers"]:
        calls = job["denied_calls"], job["missing_calls"]
        kernel.apply_seccomp(kernel.seccomp_filter(platform.machine(), os.getpid(), *calls))
    environment = {**job["environment"], "HOME": box, "TMPDIR": box}
    os.execve(
        job["arguments"][0], [*job["arguments"], f"{box}/program.py", *map(str, job["pipes"])], environment
    )


# ---- the watcher ----


def count_tasks() -> int:
    """Return the number of descendant processes and their threads."""
    total = 0
    for pid in leftovers.descendants(os.getpid()):
        try:
            total += len(os.listdir(f"/proc/{pid}/task"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def exceeds(box: str, *, max_files: int, max_bytes: int) -> bool:
    """Return whether the program holds more than `max_files` files or `max_bytes` bytes.

    It examines at most `max_files` entries of `box`. A directory that cannot be read counts as an excess,
    because its contents cannot be counted.
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
    """Return the bytes of unlinked files that descendants hold open; a number above `max_bytes` if
    unknown."""
    sizes: dict[int, int] = {}
    mapped: set[int] = set()
    ended = (FileNotFoundError, ProcessLookupError, PermissionError)
    for pid in leftovers.descendants(os.getpid()):
        maps: list[str] = []
        with contextlib.suppress(*ended):
            for thread in os.listdir(f"/proc/{pid}/task"):  # a thread may have descriptors of its own
                with contextlib.suppress(*ended):  # go on with the others
                    found = f"/proc/{pid}/task/{thread}"
                    sizes |= _unlinked_in(f"{found}/fd")
                    if not maps:  # the first thread maps nothing after its end
                        with open(f"{found}/maps", encoding="utf-8", errors="replace") as file:
                            maps = file.readlines()
        for line in maps:
            if line.endswith(" (deleted)\n") and f" {box}/" in line:
                mapped.add(int(line.split(None, 5)[4]))
    # A mapping keeps a whole unlinked file alive. If no descriptor is open, the size of the file is unknown.
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
        kernel.enter_user_namespace()
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
            if not leftovers.collect(fd, output[fd], limits["output_bytes"]):
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
            # 1 MiB is added, so that one file of the largest size is allowed beside the file of the program
            # itself.
            elif exceeds(box, max_files=limits["files"], max_bytes=limits["disk_mib"] + 1 << 20):
                end = "disk"
    for fd in open_pipes:
        leftovers.collect(fd, output[fd], limits["output_bytes"])
    if end == "exit" and any(len(data) > limits["output_bytes"] for data in output.values()):
        end = "output"
    texts = (bytes(output[fd][: limits["output_bytes"]]).decode("utf-8", "replace") for fd in (out, err))
    result = dict(zip(("stdout", "stderr"), texts, strict=True))
    return {"end": end, "code": code, **result, "seconds": time.monotonic() - begin}


def main() -> None:
    parent = int(sys.argv[1])
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    # Slurm may send these signals to every process of a job step. The program inherits that they are ignored.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, "subreaper", 1)
    job = json.loads(sys.stdin.buffer.readline())
    try:
        result = watch(job, start(job), parent)
    except OSError as error:
        result = {"setup_error": str(error)}
    finally:
        leftovers.kill_descendants()
        with contextlib.suppress(OSError):  # the calling process reports a directory that is left
            leftovers.remove_directory(job["directory"])
    if result is not None:
        sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main()
