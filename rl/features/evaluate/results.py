"""`evaluation.json`: the validation metrics of checkpoints, written after each pass over the prompts."""

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rl.config.limits import WatchdogConfig
from rl.config.options import to_yaml
from rl.config.schema import Config, Logging, Run
from rl.data.prompts import Prompt
from rl.run.changes import contents

FILE_NAME = "evaluation.json"
SHOWN = "val-core/", "val/"
"""Beginnings of the metrics in the printed table."""


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
    """The file of one evaluation. For rank 0 only.

    Passes that an earlier start with the same settings measured are kept.
    """

    def __init__(self, config: Config, prompts: Sequence[Prompt]):
        self._path = Path(config.run.dir, FILE_NAME)
        self._settings, self.found = settings(config, prompts), list[CheckpointMetrics]()
        if self._path.is_file():
            before = json.loads(self._path.read_text())
            if before["settings"] == self._settings:
                self.found = [CheckpointMetrics(**each) for each in before["checkpoints"]]

    def of(self, path: str, step: int, crc32: int) -> CheckpointMetrics:
        """Return the passes that are measured of a checkpoint, in a result that `write` stores."""
        result = next((each for each in self.found if (each.path, each.crc32) == (path, crc32)), None)
        if result is None:
            self.found = [each for each in self.found if each.path != path]
            self.found.append(result := CheckpointMetrics(path, step, crc32))
        return result

    def write(self) -> None:
        """Write the file. Readers see the old content or the new."""
        new = self._path.with_name(self._path.name + ".partial")
        table = {"settings": self._settings, "checkpoints": [asdict(each) for each in self.found]}
        new.write_text(json.dumps(table, indent=2) + "\n")
        new.replace(self._path)


def settings(config: Config, prompts: Sequence[Prompt]) -> int:
    """Return a CRC-32 of what may change the metrics: the config, the prompts and the user's files."""
    run = Run(name=config.run.name, seed=config.run.seed, mode=config.run.mode)
    logging, watchdog = Logging(rollouts=config.logging.rollouts), WatchdogConfig()
    checkpoint = replace(config.checkpoint, resume="auto")
    kept = replace(config, run=run, logging=logging, watchdog=watchdog, checkpoint=checkpoint)
    return zlib.crc32(f"{to_yaml(kept)}{sorted(contents(config, prompts).items())}".encode())


def table(results: Sequence[CheckpointMetrics]) -> str:
    """Return a table of the core metrics, with a column per checkpoint."""
    names = dict.fromkeys(name for each in results for name in each.metrics if name.startswith(SHOWN))
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
