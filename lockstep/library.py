"""Start a run from Python, and read what a run has written."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any


class RunError(RuntimeError):
    """A run that ended with a fault. The message has the exit code and the last error that it printed."""


@dataclass(frozen=True)
class RunResult:
    """The files of a run's directory, read into memory."""

    directory: Path
    state: str
    """running, stopped (the same command continues it), finished or failed; "" before its first step."""
    reason: str
    """Why it was stopped or failed, in one sentence; else ""."""
    config: dict[str, Any]
    """The resolved configuration of its first start, by section."""
    records: list[dict[str, Any]]
    """The metrics of each step (docs/metrics.md), by name; None for a value that is not finite."""
    checkpoints: dict[int, Path]
    """Step -> directory of each complete checkpoint."""

    def values(self, metric: str) -> dict[int, float]:
        """Return step -> value of a metric, for the steps that have it."""
        return {
            record["training/global_step"]: record[metric]
            for record in self.records
            if record.get(metric) is not None
        }


def train(
    config: str | PathLike[str], overrides: Mapping[str, Any] | None = None, *, ranks: int = 1
) -> RunResult:
    """Train as `lockstep train --config CONFIG key=value ...` does, and return the results.

    The run is a process of its own, or `ranks` processes on this node under torchrun. Therefore a program may
    call `train` several times. Its output appears in the output of the caller. A run that was stopped returns
    too, with the state "stopped".

    overrides: dotted key -> value, for example {"training.optimizer.lr": 1e-5}.

    Raises ValueError for invalid input, with the run's own sentence, and RunError if the run fails.
    """
    from lockstep import HOME
    from rl.config.schema import load_config
    from rl.stopping.requests import STOPPED_EXIT

    given = [f"{key}={as_text(value)}" for key, value in (overrides or {}).items()]
    directory = load_config(str(config), given).run.dir
    torchrun = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    )
    command = [sys.executable, *torchrun, str(HOME / "train_rl.py"), "--config", str(config), *given]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        print(line, end="", file=sys.stderr, flush=True)
        if line.startswith("error"):
            said = line.partition(": ")[2].strip()
    code = process.wait()
    if code == 2:
        raise ValueError(said)
    if code not in (0, STOPPED_EXIT):
        raise RunError(f"the run in {directory} ended with exit code {code}: {said or 'its output says why'}")
    return read_run(directory)


def as_text(value: Any) -> str:
    """Return a value as the text of an override: a string as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def read_run(directory: str | PathLike[str]) -> RunResult:
    """Read the directory of a run, also while it runs. Raises FileNotFoundError if it holds no run."""
    from rl.checkpoint.directory import complete
    from rl.config.options import read_file
    from rl.run_directory.metric_log import read_records
    from rl.run_directory.status import read_object

    directory = Path(directory)
    if not (directory / "config.yaml").is_file():
        raise FileNotFoundError(f"{directory} holds no config.yaml; name the directory of a run (run.dir).")
    metrics, status = directory / "metrics.jsonl", read_object(directory / "status.json")
    return RunResult(
        directory=directory,
        state=status.get("state", ""),
        reason=status.get("reason", ""),
        config=read_file(directory / "config.yaml"),
        records=read_records(metrics) if metrics.is_file() else [],
        checkpoints={saved.step: saved.path for saved in complete(directory / "checkpoints")},
    )
