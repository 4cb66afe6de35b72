"""Checks of `lockstep doctor` for differences between sites: C library, driver, network, environment, places.

As in tools/node_checks.py, each check returns findings, none needs a GPU, and a faulty node raises nothing.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import resource
import site
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from tools.node_checks import Finding, bad, check_disks, ok, warn

MODULES = "torch vllm megatron transformers numpy".split()
"""Modules that must come from the program's own environment."""
PROCESSES_PER_RANK = 512
"""Processes and threads of a rank, with its scoring workers, that a limit must allow."""
SOCKET_PATH, SOCKET_NAME = 107, 40
"""Longest path of a Unix socket, and what Python's multiprocessing adds to TMPDIR, in bytes."""
CONTAINER = "use the image of lockstep.def or Dockerfile (CONTAINER in slurm/site.sh)"
DRIVERS = {12: 525, 13: 580}
"""First driver branch of each CUDA version, from NVIDIA's table of minor version compatibility."""


def check_site(written: Iterable[Path], *, ranks_on_node: int, max_skew_s: float) -> list[Finding]:
    """Run all checks of this module. written: directories of the run."""
    env = os.environ
    found = [check_glibc(needed_glibc()), check_driver(torch_cuda(), driver_cuda())]
    found += [check_processes(ranks_on_node), *check_interfaces(env), *check_libraries(env), *check_modules()]
    found += check_places(env)
    return found + [finding for path in written for finding in check_file_clock(path, max_skew_s=max_skew_s)]


# ---- C library and driver ----


def check_glibc(needed: tuple[tuple[int, int], str]) -> Finding:
    """Compare this node's glibc with the version that the installed wheels need, and the wheel's name."""
    version, package = needed
    name, _, found = (os.confstr("CS_GNU_LIBC_VERSION") or "another C library").partition(" ")
    parts = tuple(map(int, re.findall(r"\d+", found)[:2]))
    text = f"{name} {found}; {package or 'no package'} needs {'.'.join(map(str, version))}"
    if parts >= version:
        return ok("glibc", text)
    return bad("glibc", text, CONTAINER)


def needed_glibc() -> tuple[tuple[int, int], str]:
    """Return the newest glibc in the platform tags of the installed wheels (PEP 600), and the package that
    needs it."""
    needed = [((2, 17), "")]
    for package in importlib.metadata.distributions():
        tags = re.findall(r"^Tag: .*manylinux_(\d+)_(\d+)_", package.read_text("WHEEL") or "", re.MULTILINE)
        if tags:  # several tags: the oldest one suffices
            needed.append((min((int(major), int(minor)) for major, minor in tags), package.name))
    return max(needed)


def check_driver(torch_version: str, driver_version: int | None) -> Finding:
    """Compare the driver's CUDA version, e.g. 13000, with torch's, e.g. 13.0; '' is a CPU build."""
    if not torch_version:
        return ok("driver", "torch needs no GPU driver")
    if driver_version is None:
        if Path("/proc/driver/nvidia/version").exists():
            remedy = "start the container with its GPU option (apptainer --nv, the NVIDIA hook of enroot)"
            return bad("driver", "the node has NVIDIA's driver, but libcuda.so.1 cannot be loaded", remedy)
        return warn(
            "driver", "no libcuda.so.1 on this node, and torch is built for CUDA", "none on CPU nodes"
        )
    major = int(torch_version.partition(".")[0])
    text = f"for CUDA {driver_version // 1000}.{driver_version % 1000 // 10}; torch needs {torch_version}"
    if driver_version // 1000 >= major:
        return ok("driver", text)
    branch = f"R{DRIVERS[major]} or newer" if major in DRIVERS else "a newer one"
    package = f"cuda-compat-{torch_version.replace('.', '-')}"
    remedy = f"ask your site for driver {branch}, or put NVIDIA's {package} first on LD_LIBRARY_PATH"
    return bad("driver", text, remedy)


def torch_cuda() -> str:
    """Return the CUDA version of the installed torch without importing it; '' for a CPU build or none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    text = Path(spec.origin).with_name("version.py").read_text()
    found = re.search(r"^cuda\b.*= '([\d.]+)'", text, re.MULTILINE)
    return found[1] if found else ""


def driver_cuda() -> int | None:
    """Return the newest CUDA version of the driver library that this process loads; None without one."""
    try:
        library, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError:
        return None
    return version.value if library.cuDriverGetVersion(ctypes.byref(version)) == 0 else None


# ---- limits and network ----


def check_processes(ranks_on_node: int) -> Finding:
    """Check the limits on processes and threads: `ulimit -u` and the cgroup's."""
    limits = {"ulimit -u": resource.getrlimit(resource.RLIMIT_NPROC)[0]}
    for line in _lines("/proc/self/cgroup"):
        if (pids := _lines(f"/sys/fs/cgroup{line.rpartition(':')[2]}/pids.max")) and pids[0].isdigit():
            limits["pids.max of the cgroup"] = int(pids[0])
    finite = {name: value for name, value in limits.items() if value != resource.RLIM_INFINITY}
    needed = PROCESSES_PER_RANK * ranks_on_node
    for name, value in finite.items():
        if value < needed:
            remedy = f"raise it to {needed:,} (limits.conf, UsePAM, TasksMax of the scheduler's daemon)"
            return warn("processes", f"{name} is {value:,} for {ranks_on_node} ranks", remedy)
    return ok("processes", ", ".join(f"{name} {value:,}" for name, value in finite.items()) or "unlimited")


def check_interfaces(env: Mapping[str, str]) -> list[Finding]:
    """Check that the interfaces and adapters that NCCL's and gloo's variables name are on this node."""
    interfaces = [name for _, name in socket.if_nameindex()]
    adapters = [path.name for path in Path("/sys/class/infiniband").glob("*")]
    chosen = {"NCCL_SOCKET_IFNAME": interfaces, "GLOO_SOCKET_IFNAME": interfaces, "NCCL_IB_HCA": adapters}
    out = []
    for name, present in chosen.items():
        if not env.get(name) or env[name].startswith("^"):  # ^: all but these
            continue
        exact = env[name].startswith("=") or name == "GLOO_SOCKET_IFNAME"
        for word in env[name].removeprefix("=").split(","):
            wanted = word.partition(":")[0]  # mlx5_0:1 is its port 1
            if not any(each == wanted if exact else each.startswith(wanted) for each in present):
                text = f"{name}={env[name]}, but this node has {', '.join(present) or 'none'}"
                out.append(bad("interfaces", text, "correct it in slurm/site.sh; `ip -br addr` lists them"))
                break
    if adapters:
        try:
            ctypes.CDLL("libibverbs.so.1")
        except OSError:
            text = f"{', '.join(adapters)} cannot be used: libibverbs.so.1 cannot be loaded"
            out.append(bad("rdma", text, "install libibverbs1 and ibverbs-providers, also in the container"))
    return out or [ok("interfaces", f"{', '.join(interfaces)}; RDMA: {', '.join(adapters) or 'none'}")]


# ---- environment ----


def check_libraries(env: Mapping[str, str]) -> list[Finding]:
    """Check that no module's LD_LIBRARY_PATH or LD_PRELOAD replaces the libraries in torch's wheels."""
    found = []
    own = {path.name for path in _packages().glob("nvidia/*/lib/*.so.*")}
    for place in filter(None, env.get("LD_LIBRARY_PATH", "").split(":")):
        names = own.intersection(os.listdir(place)) if os.access(place, os.R_OK | os.X_OK) else ()
        if names:
            text = f"LD_LIBRARY_PATH has {place}, whose {', '.join(sorted(names)[:3])} replaces torch's own"
            found.append(warn("modules", text, "`module unload` it, or unset LD_LIBRARY_PATH in site.sh"))
    if env.get("LD_PRELOAD"):
        found.append(warn("modules", f"LD_PRELOAD={env['LD_PRELOAD']}", "unset it in slurm/site.sh"))
    return found or [ok("modules", "LD_LIBRARY_PATH and LD_PRELOAD replace no library of torch")]


def check_modules() -> list[Finding]:
    """Check that the program's modules come from its own environment, not PYTHONPATH or ~/.local."""
    foreign = {}
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        for place in list(spec.submodule_search_locations or ())[:1] if spec else ():
            if not str(place).startswith((sys.prefix, sys.base_prefix)):
                foreign[name] = str(Path(place).parent)
    if not foreign:
        return [ok("python", f"{sys.executable}")]
    some = ", ".join(f"{name} from {place}" for name, place in foreign.items())
    cause = "set PYTHONNOUSERSITE=1" if site.getusersitepackages() in foreign.values() else "unset PYTHONPATH"
    return [warn("python", f"{some}, not from {sys.prefix}", f"{cause} in slurm/site.sh")]


def _packages() -> Path:
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parents[1] if spec and spec.origin else Path(sys.prefix)


# ---- places ----


def check_places(env: Mapping[str, str]) -> list[Finding]:
    """Check home (quota, read-only) and TMPDIR (space, noexec, length), where libraries keep their files."""
    home, temporary = Path.home(), Path(tempfile.gettempdir())
    caches = Path(env.get("LOCKSTEP_CACHE") or temporary)
    remedy = "free space there, or set HOME, XDG_CACHE_HOME and HF_HOME in slurm/site.sh"
    out = [
        finding if finding.level == "ok" else warn("home", finding.text, remedy)
        for finding in check_disks([home], min_free_gib=1.0)
    ]
    out += check_disks([temporary], min_free_gib=1.0)
    if caches.is_dir() and os.statvfs(caches).f_flag & os.ST_NOEXEC:
        text = f"{caches} is mounted noexec, so compiled kernels cannot be loaded from it"
        out.append(bad("noexec", text, "set LOCKSTEP_CACHE and TMPDIR to another disk of the node"))
    if len(os.fsencode(temporary)) + SOCKET_NAME > SOCKET_PATH:
        text = f"TMPDIR={temporary} is too long for the sockets of worker processes"
        out.append(bad("tmpdir", text, f"at most {SOCKET_PATH - SOCKET_NAME} characters: export TMPDIR=/tmp"))
    return out


def check_file_clock(path: Path, *, max_skew_s: float) -> list[Finding]:
    """Compare this node's clock with the one by which the file system of the run dates files."""
    place = next((p for p in (path.absolute(), *path.absolute().parents) if p.is_dir()), Path("/"))
    try:
        with tempfile.NamedTemporaryFile(dir=place) as file:
            asked = time.time()
            file.write(b"1")
            file.flush()
            os.fsync(file.fileno())
            dated, answered = os.fstat(file.fileno()).st_mtime, time.time()
    except OSError:  # reported by check_disks
        return []
    ahead = dated - answered if dated > answered else min(0.0, dated - asked)
    text = f"{path}: the file system's clock is {ahead:+.3f} s from this node's"
    if abs(ahead) <= max_skew_s:
        return [ok("file clock", text)]
    return [bad("file clock", text, "ask your site to run chrony or ntpd on node and file server")]


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
