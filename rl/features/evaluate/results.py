"""`evaluation.json`: the validation metrics of checkpoints, written after each pass over the prompts."""

import json
import re
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path

from rl.config.limits import WatchdogConfig
from rl.config.options import to_yaml
from rl.config.schema import Config, Logging, Run
from rl.data.prompts import Prompt
from rl.run.changes import contents
from rl.run_directory import metric_log, status
from rl.run_directory.rollout_files import TOKENS_FILE, VALIDATIONS
from rl.sandbox.private_directory import make_private

FILE_NAME = "evaluation.json"
MOVED = (
    metric_log.FILE_NAME,
    "config.yaml",
    "environment.json",
    "code",
    TOKENS_FILE,
    "validation",
    FILE_NAME,
)
"""Files that `set_aside` moves."""
SHOWN = re.compile(r"val-core/.*|val/.*|val-aux/.*/score/mean@\d+")
"""Metrics of the printed table."""


@dataclass
class CheckpointMetrics:
    """The metrics of one checkpoint, or of the model itself."""

    path: str
    step: int
    """Step of the checkpoint; 0 for the model."""
    crc32: int
    """Checksum of the checkpoint's manifest, which differs if a run has written the step again."""
    passes: dict[str, dict[str, float]] = field(default_factory=dict)
    """Pass (`rl.run.validation.passes`) -> metrics."""

    @property
    def metrics(self) -> dict[str, float]:
        return {name: value for found in self.passes.values() for name, value in found.items()}


class Results:
    """The file of one evaluation, after `set_aside`. For rank 0 only.

    Passes that an earlier start with the same settings measured are kept.
    """

    def __init__(self, config: Config, prompts: Sequence[Prompt]):
        self._path, self._settings = Path(config.run.dir, FILE_NAME), settings(config, prompts)
        before = json.loads(self._path.read_text())["checkpoints"] if self._path.is_file() else []
        self._found = [CheckpointMetrics(**each) for each in before]
        self.write()  # files that the first pass leaves if it is killed belong to these settings

    def of(self, checkpoint: CheckpointMetrics) -> CheckpointMetrics:
        """Return the result of a checkpoint, with the passes measured before. `write` stores what it gets."""
        result = next((each for each in self._found if each.step == checkpoint.step), None)
        if result is None:
            self._found.append(result := checkpoint)
        result.path = checkpoint.path  # the earlier start may have named it in another way
        return result

    def write(self) -> None:
        """Write the file. Readers see the old content or the new."""
        new = self._path.with_name(self._path.name + ".partial")
        table = {
            "settings": self._settings,
            "checkpoints": [asdict(each) for each in self._found if each.passes],
        }
        new.write_text(json.dumps(table, indent=2) + "\n")
        new.replace(self._path)


def set_aside(
    config: Config, prompts: Sequence[Prompt], checkpoints: Sequence[CheckpointMetrics]
) -> Path | None:
    """Move the results of another evaluation out of run.dir; return their new directory, None without any.

    It is another one if its settings differ, or if it measured another checkpoint of the same step. Samples
    of a pass that did not end are removed. A start that was killed while it moved files is continued. Before
    the log opens its files; for rank 0 only.
    """
    directory, path = Path(config.run.dir), Path(config.run.dir, FILE_NAME)
    moving = directory.with_name(f"{directory.name}.moving")
    if moving.exists():
        return _move(directory, moving)
    before = json.loads(path.read_text()) if path.is_file() else {"settings": None, "checkpoints": []}
    measured = {each["step"]: each["crc32"] for each in before["checkpoints"]}
    is_same = all(measured.get(each.step, each.crc32) == each.crc32 for each in checkpoints)
    if is_same and before["settings"] == settings(config, prompts):
        return None
    if not measured:
        for name in VALIDATIONS.values():
            shutil.rmtree(directory / name, ignore_errors=True)
        return None
    make_private(moving)
    return _move(directory, moving)


def _move(directory: Path, moving: Path) -> Path:
    """Move the files that are not in `moving` yet, and give it the first free number; return its new path."""
    for name in MOVED:
        if (directory / name).exists():
            (directory / name).rename(moving / name)
    last = max(each["step"] for each in json.loads((moving / FILE_NAME).read_text())["checkpoints"])
    ended = {"state": "finished", "step": last, "max_steps": last}
    (moving / status.FILE_NAME).write_text(json.dumps(ended) + "\n")  # else it would look like a lost run
    places = (directory.with_name(f"{directory.name}.{number}") for number in count(1))
    return moving.rename(next(each for each in places if not each.exists()))


def settings(config: Config, prompts: Sequence[Prompt]) -> int:
    """Return a CRC-32 of what may change the metrics: the config, the prompts and the user's files."""
    run = Run(name=config.run.name, seed=config.run.seed, mode=config.run.mode)
    logging, watchdog = Logging(rollouts=config.logging.rollouts), WatchdogConfig()
    checkpoint = replace(config.checkpoint, resume="auto")
    kept = replace(config, run=run, logging=logging, watchdog=watchdog, checkpoint=checkpoint)
    return zlib.crc32(f"{to_yaml(kept)}{sorted(contents(config, prompts).items())}".encode())


def table(results: Sequence[CheckpointMetrics]) -> str:
    """Return a table of the core metrics and the mean score, with a column per checkpoint."""
    names = dict.fromkeys(name for each in results for name in each.metrics if SHOWN.fullmatch(name))
    rows = [["step", *(str(each.step) for each in results)]]
    for name in names:
        found = (each.metrics.get(name) for each in results)
        rows.append([name, *("-" if value is None else f"{value:.4f}" for value in found)])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = (
        [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        for row in rows
    )
    return "\n".join("  ".join(line) for line in lines)
