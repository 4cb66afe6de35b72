"""Rootless containers for tools, tasks and programs that a model writes, without a daemon.

    with RunningContainer(images.unpack("/images/python.sif"), limits=ProgramLimits(wall_s=20)) as container:
        container.run(["sh", "-c", "echo hello"]).stdout

`container_child.py` holds a container and has the mechanism. A runtime (for example, bubblewrap) only turns
an image's directory into a root directory in a user and a mount namespace. The rest is the same for each
runtime:

- no network but its own loopback, unless `network`
- none of the host's files, variables, processes and objects of System V IPC; /dev has only harmless devices
- writes go to memory, at most `disk_mib`, and end with the container
- `memory_mib` per process by setrlimit(2), and for all processes together by a count every 50 ms. The count
  includes the memory that the node holds for the processes: shared mappings (their whole size), huge pages,
  page tables, descriptors (1,024 per process), System V IPC, and socket buffers (unless `network`).
  memfd_create(2) and vmsplice(2) are missing. Not counted: memory behind a descriptor that only a socket's
  message holds
- `tasks` by setrlimit (except for root) and by the count; `wall_s` and `output_bytes` per command
- Exceeding a limit ends every process
- `cpus` processors by sched_setaffinity(2), which commands then cannot call; containers may share them
- no capabilities, no further namespaces, no system calls of `sandbox.DENIED_EVERYWHERE`, and only
  sockets of Unix, IP and netlink

A container protects against accidents and against the tricks of a policy that searches for reward, not
against bugs of the kernel. For example, a program that deletes / deletes nothing of the host. The load on
caches and memory bandwidth, and the share of a processor, are not limited. Between two counts a program can
take more memory than its limit. If a program fills a shared mapping and unmaps a part, only the rest counts.
"""

import base64
import contextlib
import functools
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from rl.sandbox import sandbox
from rl.sandbox.sandbox import ProgramLimits, ProgramOutcome

LIMITS = ProgramLimits(
    wall_s=20.0, memory_mib=1024, disk_mib=512, files=20_000, tasks=64, output_bytes=100_000
)
"""Default limits of a container; `cpu_s` has no meaning here."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_WAIT = ["/bin/sh", "-c", "echo ready; read line"]
_CHILD = Path(__file__).with_name("container_child.py")
_SCRATCH = ("/mnt", "/media", "/srv", "/run", "/home", "/var/tmp", "/opt")
"""Directories to mount a container's layers over. Only the container sees the mount."""


@dataclass(frozen=True)
class Runtime:
    """A program that makes a container from a directory, for example bwrap."""

    name: str
    program: str
    arguments: Callable[[bool], list[str]]
    """Whether it has the network -> arguments before the command; {root} is the container's directory."""


def _bubblewrap(network: bool) -> list[str]:
    names = ["--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf"] if network else []
    mounts = "--bind {root} / --dev-bind /dev /dev --proc /proc --bind /tmp /tmp".split()
    return ["--unshare-user", "--uid", "0", "--gid", "0", *mounts, "--ro-bind", "/sys", "/sys", *names, "--"]


RUNTIMES = (
    Runtime(
        "apptainer",
        "apptainer",
        lambda network: ["exec", "--userns", "--contain", "--cleanenv", "--no-home", "--writable", "{root}"],
    ),
    Runtime(
        "charliecloud",
        "ch-run",
        lambda network: ["--write", "--uid=0", "--gid=0", "--unset-env=*", "{root}", "--"],
    ),
    Runtime("bubblewrap", "bwrap", _bubblewrap),
)
"""Runtimes in the order of search: with no name given, the first installed runtime is used."""


def find_runtime(name: str = "") -> tuple[Runtime, str]:
    """Return a runtime and the path of its program: the named one, or the first one that is installed.

    Raises ValueError if the runtime is unknown or not installed.
    """
    known = [runtime.name for runtime in RUNTIMES]
    if name and name not in known:
        raise ValueError(f"container.runtime={name!r} must be one of {', '.join(known)}, or empty.")
    for runtime in RUNTIMES:
        if name in ("", runtime.name) and (path := shutil.which(runtime.program)):
            return runtime, path
    wanted = [runtime.program for runtime in RUNTIMES if name in ("", runtime.name)]
    raise ValueError(
        f"container.runtime={name!r}: found no {' or '.join(wanted)} in PATH on {platform.node()}; load its "
        "module, or install apptainer, charliecloud or bubblewrap (packages of most distributions)."
    )


@dataclass(frozen=True)
class ContainerImage:
    """A root directory, with the image's variables and working directory for commands."""

    root: str
    variables: Mapping[str, str] = field(default_factory=dict)
    directory: str = "/"


class RunningContainer:
    """A container. It is not thread-safe, and ends with this process at the latest."""

    def __init__(
        self,
        image: ContainerImage,
        *,
        limits: ProgramLimits = LIMITS,
        network: bool = False,
        runtime: str = "",
        cpus: int = 0,
    ):
        """Start the container. Raises ValueError if this machine cannot run it, OSError if the start failed.

        cpus: maximum number of this process's processors that commands run on; 0 for all.
        """
        found, program = find_runtime(runtime)
        self.image, self.limits, self.uses = image, limits, 0
        machine, own = platform.machine(), sorted(os.sched_getaffinity(0))
        denied = sandbox.DENIED_EVERYWHERE + (f", {sandbox.SET_AFFINITY}" if cpus else "")
        job = {
            "image": image.root,
            "scratch": _scratch(image.root, program),
            "limits": asdict(limits),
            "network": network,
            "runtime": [program, *found.arguments(network), *_WAIT],
            "runtime_environment": {"PATH": PATH, "USER": "root", "HOME": "/"},
            "cpus": random.SystemRandom().sample(own, min(cpus or len(own), len(own))),
            "denied_calls": sandbox.call_numbers(denied, machine),
            "missing_calls": sandbox.call_numbers(f"{sandbox.MISSING}, {sandbox.MEMFD}", machine),
        }
        self._process = subprocess.Popen(
            [os.path.realpath(sys.executable), "-I", "-S", "-B", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PATH": PATH},
            cwd="/",
            start_new_session=True,
        )
        try:
            self._ask(job)
        except BaseException:
            self.close()
            raise

    def run(
        self,
        arguments: Sequence[str],
        *,
        stdin: str | bytes = "",
        directory: str = "",
        variables: Mapping[str, str] | None = None,
        wall_s: float | None = None,
        merge: bool = False,
    ) -> ProgramOutcome:
        """Run a command in the container.

        Args:
            arguments: the program, which is searched in PATH of the container, and its arguments.
            directory: working directory of the command; "" for the image's.
            variables: environment variables beside the image's.
            wall_s: time limit in seconds; None for the container's limit. At a limit every process ends.
            merge: write standard error to standard output, as a terminal shows them.

        Raises OSError if the container has ended.
        """
        data = stdin.encode("utf-8", "surrogatepass") if isinstance(stdin, str) else stdin
        own = {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8", **self.image.variables}
        answer = self._ask(
            {
                "arguments": list(arguments),
                "stdin": base64.b64encode(data).decode(),
                "directory": directory or self.image.directory,
                "environment": {**own, **(variables or {})},
                "limits": {} if wall_s is None else {"wall_s": wall_s},
                "merge": merge,
            }
        )
        if note := answer.pop("note"):
            answer["stderr" if not merge else "stdout"] += (
                f"\n[background processes exceeded the limit of {note}]"
            )
        return ProgramOutcome(**answer)

    def renew(self) -> None:
        """Replace the container by a fresh container of the same image, in fewer steps than a start."""
        self._ask({"renew": True})

    def seal(self) -> None:
        """Keep the present files for `restore`, and end every process."""
        self._ask({"seal": True})

    def restore(
        self, *, kept: Sequence[str], protected: Sequence[str], programs: Sequence[str]
    ) -> tuple[list[str], list[str]]:
        """End every process, and show later commands the sealed files, or the image's if nothing was sealed.

        Args:
            kept: paths that later commands see as earlier commands left them. For example, with ["/app"] a
                test sees the policy's /app. "/" means all directories of the root that earlier commands
                wrote to, except the system's, /tests and /tmp.
            protected: paths below the kept paths that stay sealed.
            programs: directories of PATH. Installations (`venv` for `venv/bin`) stay sealed, too.

        Returns the paths with changes that later commands do not see, and the `programs` that stay sealed. A
        program's directory cannot stay sealed if its installation is one of `kept`. Raises OSError if it
        failed.
        """
        asked = {"kept": list(kept), "protected": list(protected), "programs": list(programs)}
        answer = self._ask({"restore": asked})
        return answer["unseen"], answer["programs"]

    def end_processes(self) -> None:
        """End every process of the container."""
        self._ask({"end": True})

    def close(self) -> None:
        """End every process and mount of the container."""
        process = self._process
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()  # process 1 has a parent-death signal
            process.wait()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process.stdin and process.stdout and process.stderr
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (BrokenPipeError, ValueError) as error:
            raise OSError("the container has ended") from error
        if not line:
            errors = process.stderr.read().decode(errors="replace")
            raise OSError(f"the container's first process ended: {errors[-2000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise (ValueError if answer.get("is_refused") else OSError)(_describe(answer["error"]))
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _scratch(*used: str) -> str:
    """Return a directory to mount layers over, without any of the paths that a start uses."""
    paths = [Path(os.path.realpath(path)) for path in used]
    for place in _SCRATCH:
        if os.path.isdir(place) and not any(path.is_relative_to(os.path.realpath(place)) for path in paths):
            return place
    raise ValueError(f"none of the directories {', '.join(_SCRATCH)} can be mounted over; make /mnt.")


def _describe(error: str) -> str:
    return (
        f"a container cannot be started on {platform.node()}: {error.strip()}. This needs user namespaces "
        "for ordinary users and an overlay in them (Linux 5.11, RHEL 8.5). Ask for user.max_user_namespaces, "
        "max_mnt_namespaces, max_pid_namespaces and max_net_namespaces above 0, "
        "kernel.unprivileged_userns_clone=1 (Debian) and "
        "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu 24.04); inside Docker, for a profile that "
        "permits them and an unmasked /proc. container.network=true needs no network namespace."
    )


def describe(*, runtime: str, network: bool, cpus: int, **settings: Any) -> str:
    """Return a description of containers with these settings on this machine, and of the gaps in their
    limits."""
    found, program = find_runtime(runtime)
    gaps = [
        "memory and processes are counted every 50 ms, because no control group is used",
        "a shared mapping that is filled and unmapped in part counts only with the rest",
        "containers of a worker process share its processors",
    ]
    if os.geteuid() == 0:
        gaps.append("the run is root's, whose processes the kernel does not count")
    if network:
        gaps.append(
            "they have the node's network and its abstract sockets, and socket buffers are not counted"
        )
    return (
        f"containers by {found.name} ({program}), each with at most {settings['memory_mib']} MiB, "
        f"{settings['tasks']} processes, {f'{cpus} processors' if cpus else 'no limit of processors'} and "
        f"{settings['disk_mib']} MiB of files in memory; {'; '.join(gaps)}"
    )


class Stock:
    """Containers of a process, started ahead of their use and used again. Thread-safe."""

    def __init__(self, start: Callable[[ContainerImage], RunningContainer], *, ahead: int, reuse: int):
        """Store how to start a container.

        Args:
            ahead: number of containers of an image that wait for their use, once the first one was taken.
            reuse: number of uses of a container's first process; each use has a fresh container.
        """
        self._start, self._ahead, self._reuse = start, ahead, reuse
        self._idle: dict[str, list[RunningContainer]] = {}
        self._coming: dict[str, int] = {}
        self._lock = threading.Lock()

    def take(self, image: ContainerImage) -> RunningContainer:
        """Return a fresh container. Raises as `RunningContainer`."""
        with self._lock:
            idle = self._idle.setdefault(image.root, [])
            taken = idle.pop() if idle else None
            missing = self._ahead - len(idle) - self._coming.get(image.root, 0)
            self._coming[image.root] = self._coming.get(image.root, 0) + max(missing, 0)
        for _ in range(missing):
            self._in_thread(self._add, image)
        taken = taken or self._start(image)
        taken.uses += 1
        return taken

    def give_back(self, container: RunningContainer) -> None:
        """End a container, or renew it for its next use."""
        self._in_thread(self._renew, container)

    def _renew(self, container: RunningContainer) -> None:
        root = container.image.root
        try:
            with self._lock:
                is_needed = len(self._idle.get(root, [])) < max(self._ahead, 1)
            if not is_needed or container.uses >= self._reuse:
                return container.close()
            container.renew()
        except OSError:
            return container.close()
        with self._lock:
            self._idle.setdefault(root, []).append(container)

    def _add(self, image: ContainerImage) -> None:
        container = None
        try:
            with contextlib.suppress(OSError, ValueError):  # the next `take` reports it
                container = self._start(image)
        finally:
            with self._lock:
                self._coming[image.root] -= 1
                if container is not None:
                    self._idle[image.root].append(container)

    @staticmethod
    def _in_thread(function: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=function, args=arguments, daemon=True).start()


@functools.cache
def stock(settings: tuple[tuple[str, Any], ...]) -> Stock:
    """Return this process's containers with these items of a `rl.config.container.Container`."""
    given = dict(settings)
    names = ("wall_s", "memory_mib", "disk_mib", "files", "tasks", "output_bytes")
    limits = ProgramLimits(**{name: given[name] for name in names})

    def start(image: ContainerImage) -> RunningContainer:
        others = {name: given[name] for name in ("network", "runtime", "cpus")}
        return RunningContainer(image, limits=limits, **others)

    return Stock(start, ahead=given["ahead"], reuse=given["reuse"])


def run_program_in(
    image: ContainerImage,
    settings: Mapping[str, Any],
    source: str,
    *,
    stdin: str = "",
    limits: ProgramLimits,
    interpreter: str | None = None,
) -> ProgramOutcome:
    """Run a Python program in a fresh container, as `sandbox.run_program` does without one.

    Of `limits`, only `wall_s` applies; `settings` have the other limits. Raises as `RunningContainer`.
    """
    containers = stock(tuple(settings.items()))
    container = containers.take(image)
    try:
        script = "cat > /tmp/program.py"
        container.run(["/bin/sh", "-c", script], stdin=source)
        command = [interpreter or "python3", "-I", "-B", "-X", "utf8", "/tmp/program.py"]
        return container.run(command, stdin=stdin, directory="/tmp", wall_s=limits.wall_s)
    finally:
        containers.give_back(container)
