"""The directories of checkpoints on disk: find complete ones, commit a new one, apply retention.

    <run.dir>/checkpoints/
        latest                      name of the newest checkpoint, for users; the program does not read it
        step_000100/
            checkpoint.json         manifest: format, step, models, versions, size and checksum of all files
            state.json              position in the data, KL coefficient
            config.yaml
            rank_00000.safetensors  file of rank 0
        step_000200.partial/        being written, or left by a killed run; the next save removes it
        step_000050.removed/        being removed, or left by a killed run; the next save removes it
        step_000150.damaged/        a run found it damaged and continued from an older one; never removed

A directory called step_<number> is complete: the manifest is the last file written into `.partial`, all files
are on the disk before the single rename, and a directory is renamed before its files are removed. Nothing
here is collective.
"""

import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rl.checkpoint.shards import DamagedError, Written, reading
from rl.config.options import ConfigError

log = logging.getLogger(__name__)

FORMAT = 1
"""Version of the format of all files of a checkpoint. A newer version is refused."""
MANIFEST, STATE, CONFIG, LATEST = "checkpoint.json", "state.json", "config.yaml", "latest"


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    step: int
    path: Path
    metric: float | None = None
    """Value of `checkpoint.best_metric` at that step."""

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of that step."""
        return json.loads((self.path / STATE).read_text())["metrics"]


def complete(directory: Path) -> list[Saved]:
    """Return the complete checkpoints, oldest first."""
    names = ((re.fullmatch(r"step_(\d+)", path.name), path) for path in directory.glob("step_*"))
    found = (Saved(int(match[1]), path) for match, path in names if match)
    return sorted(found, key=lambda saved: saved.step)


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def partial_name(step: int) -> str:
    """Return the name of a checkpoint that is being written.

    In an elastic run, the name contains the number of this start. A rank of an earlier start that was paused
    and continues later therefore finds no directory to write into.
    """
    generation = os.environ.get("LOCKSTEP_GENERATION")
    return f"step_{step:06d}.{generation}.partial" if generation else f"step_{step:06d}.partial"


def read_manifest(path: Path) -> dict:
    """Return the manifest of a checkpoint.

    Raises DamagedError if it is missing or damaged, ConfigError for a newer format.
    """
    file = path / MANIFEST
    with reading(file):
        manifest = json.loads(file.read_bytes())
        if not isinstance(manifest, dict) or manifest.pop("crc32", None) != _crc32_of(manifest):
            raise DamagedError(f"{file} is damaged: its checksum differs")
    if manifest["format"] > FORMAT:
        raise ConfigError(
            f"{path} has format {manifest['format']}, but this version of Lockstep reads up to {FORMAT}: "
            f"continue with the version that wrote it, of git revision {manifest['git_revision']}."
        )
    return manifest


def expected_files(manifest: Mapping) -> dict[str, Written]:
    return {name: Written(**entry) for name, entry in manifest["files"].items()}


def write_text(path: Path, text: str) -> Written:
    """Write a small file and wait until it is on the disk."""
    content = text.encode()
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return Written(len(content), zlib.crc32(content))


def commit(partial: Path, final: Path, manifest: dict) -> None:
    """Write the manifest, rename the directory to `final`, and make it the latest checkpoint.

    All other files must be on the disk already.
    """
    text = json.dumps(manifest | {"crc32": _crc32_of(manifest)}, indent=1)
    write_text(partial / MANIFEST, text + "\n")
    sync_directory(partial)
    if final.exists():
        retire(final)
    partial.rename(final)
    latest = final.with_name(LATEST + ".partial")
    try:
        write_text(latest, final.name + "\n")
        latest.replace(final.with_name(LATEST))
    except OSError as error:  # the checkpoint is complete without it
        log.warning("%s does not name %s: %s", final.with_name(LATEST), final.name, error)
    sync_directory(final.parent)


def _crc32_of(manifest: Mapping) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def retire(path: Path) -> Path:
    """Rename a checkpoint so that it is no longer found, and return the new path.

    The caller removes the files.
    """
    removed = path.with_name(path.name + ".removed")
    shutil.rmtree(removed, ignore_errors=True)
    return path.rename(removed)


def clear_leftovers(directory: Path) -> None:
    """Remove the unfinished directories of killed runs."""
    for pattern in ("step_*.partial", "step_*.removed"):
        for path in directory.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint, so that a new one can be written under its name."""
    damaged = path.with_name(path.name + ".damaged")
    if damaged.is_dir():
        shutil.rmtree(damaged, ignore_errors=True)
    else:
        damaged.unlink(missing_ok=True)
    path.rename(damaged)


def with_metrics(found: Sequence[Saved], name: str) -> list[Saved]:
    """Return the checkpoints with the metric `name` filled; None for a damaged checkpoint."""

    def metric(saved: Saved) -> float | None:
        try:
            return read_manifest(saved.path)["metrics"].get(name)
        except DamagedError:
            return None

    return [replace(saved, metric=metric(saved)) for saved in found]


def kept(found: Sequence[Saved], *, last: int, every: int, best: int, highest: bool) -> Collection[int]:
    """Return the steps that retention keeps, given the checkpoints from oldest to newest.

    The newest is always kept.

    last: number of newest checkpoints kept; 0 keeps all. every: keep steps that are multiples of it; 0 for
    none. best: number of checkpoints kept for their metric. The best metric is the highest if `highest`, else
    the lowest; of two equal metrics, the newer checkpoint is kept. For example, a run has checkpoints of the
    steps 50, 100, 150, 200 and 250. With last=2 and every=100, it keeps 100, 200 and 250.
    """
    if last == 0:
        return {saved.step for saved in found}
    sign = 1 if highest else -1
    ranked = sorted((sign * saved.metric, saved.step) for saved in found if saved.metric is not None)
    steps = {saved.step for saved in found[-last:]} | {step for _, step in (ranked[-best:] if best else ())}
    return steps | {saved.step for saved in found if every and saved.step % every == 0}


def sync_directory(path: Path) -> None:
    """Wait until the entries of a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
