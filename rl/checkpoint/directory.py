"""The directories of checkpoints on disk: which are whole, how one becomes current, which are kept.

    <run.dir>/checkpoints/
        latest                          name of the newest, for people and scripts; lost, it loses nothing
        step_000100/
            checkpoint.json             the manifest: format, step, models, versions, and size and checksum of every other file
            state.json                  place in the data, KL weight
            config.yaml
            rank_00000.safetensors      what rank 0 wrote
        step_000200.partial/            being written, or left by a run that was killed; removed by the next save
        step_000050.removed/            being removed; likewise
        step_000150.damaged/            found damaged by a run that went on from an older one; yours to look at and remove

A directory called step_<number> is complete: its manifest is the last file written into `.partial`, everything is on the disk
before the one rename, and a directory is renamed before its files are removed. Nothing here is collective.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rl.checkpoint.shards import DamagedError, Written
from rl.config.options import ConfigError

FORMAT = 1
"""Of everything below a checkpoint's directory. A newer one is refused."""
MANIFEST, STATE, CONFIG, LATEST = "checkpoint.json", "state.json", "config.yaml", "latest"


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    step: int
    path: Path
    metric: float | None = None
    """Of `checkpoint.best_metric` at that step."""


def complete(directory: Path) -> list[Saved]:
    """The complete checkpoints, oldest first."""
    names = ((re.fullmatch(r"step_(\d+)", path.name), path) for path in directory.glob("step_*"))
    return sorted(
        (Saved(int(match[1]), path) for match, path in names if match), key=lambda saved: saved.step
    )


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def read_manifest(path: Path) -> dict:
    """The manifest of a checkpoint. DamagedError if it is not there or not whole, ConfigError if this version is too old to
    read it."""
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_bytes())
        if not isinstance(manifest, dict) or manifest.pop("crc32", None) != _crc32_of(manifest):
            raise DamagedError(f"{file} is damaged: it does not have its own checksum")
    except FileNotFoundError:
        raise DamagedError(f"{file} is missing")
    except ValueError:
        raise DamagedError(f"{file} is damaged: it is not JSON")
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
    """Make a directory whose files are all on the disk the checkpoint `final`, in one rename, and the latest one."""
    text = json.dumps(manifest | {"crc32": _crc32_of(manifest)}, indent=1)
    write_text(partial / MANIFEST, text + "\n")
    sync_directory(partial)
    if final.exists():
        retire(final)
    partial.rename(final)
    latest = final.with_name(LATEST + ".partial")
    write_text(latest, final.name + "\n")
    latest.replace(final.with_name(LATEST))
    sync_directory(final.parent)


def _crc32_of(manifest: Mapping) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def retire(path: Path) -> Path:
    """Rename a checkpoint to what is none, for its files to be removed; returns the new path."""
    removed = path.with_name(path.name + ".removed")
    shutil.rmtree(removed, ignore_errors=True)
    return path.rename(removed)


def clear_leftovers(directory: Path) -> None:
    """Remove what killed runs left unfinished."""
    for pattern in ("step_*.partial", "step_*.removed"):
        for path in directory.glob(pattern):
            shutil.rmtree(path)


def set_aside(path: Path) -> None:
    """Out of the way of the checkpoint that will be written in its place."""
    damaged = path.with_name(path.name + ".damaged")
    shutil.rmtree(damaged, ignore_errors=True)
    path.rename(damaged)


def with_metrics(found: Sequence[Saved], name: str) -> list[Saved]:
    """The same with their metrics of that name; a checkpoint that cannot be read has none."""

    def metric(saved: Saved) -> float | None:
        try:
            return read_manifest(saved.path)["metrics"].get(name)
        except DamagedError:
            return None

    return [replace(saved, metric=metric(saved)) for saved in found]


def kept(found: Sequence[Saved], *, last: int, every: int, best: int, highest: bool) -> Collection[int]:
    """The steps that retention leaves, of checkpoints from the oldest to the newest.

    last: how many of the newest; 0: all. every: those of a step that it divides. best: how many of the highest, or lowest,
    metric; of equal ones the newer. The newest is always kept.
    """
    if last == 0:
        return {saved.step for saved in found}
    ranked = sorted(
        (s for s in found if s.metric is not None), key=lambda s: (s.metric if highest else -s.metric, s.step)
    )
    steps = {saved.step for saved in (*found[-last:], *(ranked[-best:] if best else ()))}
    return steps | {saved.step for saved in found if every and saved.step % every == 0}


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
