"""Start a run from Python, and read what a run has written."""

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

Paths = str | PathLike[str] | Sequence[str | PathLike[str]]
"""A path, or several."""
PLACE = re.compile(r"(LOCKSTEP_)?(LOCAL_)?(RANK|WORLD_SIZE)$|MASTER_|OMPI_|PMIX?_|MPI_LOCAL|SLURM_STEP_")
"""Variables of a caller that is a rank itself. mpi4py sets some on import, too."""


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
    """The resolved configuration of its newest start, by section."""
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


def train(config: Paths, overrides: Mapping[str, Any] | None = None, *, ranks: int = 1) -> RunResult:
    """Train as `lockstep train --config CONFIG key=value ...` does, and return the results.

    The run has `ranks` processes of its own on this node, so a program may call `train` several times. The
    caller's output has the output of rank 0; `<run.dir>/launch` has the output of the other ranks. A run that
    was stopped returns too, with the state "stopped".

    config: YAML file, or several, of which later ones win.
    overrides: dotted key -> value, for example {"training.optimizer.lr": 1e-5}.

    Raises ValueError for invalid input, with the run's own sentence, and RunError if the run fails. Ctrl-C
    ends the run and raises KeyboardInterrupt; the same call continues from the last checkpoint.
    """
    from lockstep import HOME
    from rl.config.schema import load_config
    from rl.run_directory.status import read_object
    from rl.sandbox.private_directory import make_private
    from rl.stopping.requests import STOPPED_EXIT

    given = [f"{key}={as_text(value)}" for key, value in (overrides or {}).items()]
    files = [config] if isinstance(config, str | PathLike) else config
    directory = Path(load_config(files, given).run.dir)
    launcher, logs = [], directory / "launch"
    if ranks > 1:
        make_private(directory)
        logs.mkdir(exist_ok=True)
        launcher = ["-m", "launch.node", "1", str(ranks), str(logs)]
    named = [f"--config={os.fspath(file)}" for file in files]
    code, said = _run([sys.executable, *launcher, str(HOME / "train_rl.py"), *named, *given])
    if code == 2:
        raise ValueError(said)
    if code not in (0, STOPPED_EXIT):
        reason = read_object(directory / "status.json").get("reason") or said
        raise RunError(f"the run in {directory} ended with exit code {code}: {reason}")
    return read_run(directory)


def as_text(value: Any) -> str:
    """Return a value as the text of an override: a string or a path as it is, anything else as JSON."""
    return os.fspath(value) if isinstance(value, str | PathLike) else json.dumps(value)


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Run a command whose errors also appear here; return its exit code and its last line of an error."""
    from lockstep import HOME

    env = {name: value for name, value in os.environ.items() if not PLACE.match(name)}
    env |= {"NODE_RANK": "0", "LOCKSTEP_STEP": uuid.uuid4().hex}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HOME), env.get("PYTHONPATH"))))
    # In a session of its own, the run gets one SIGINT from here, and none from the terminal.
    process = subprocess.Popen(
        command, env=env, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    )
    assert process.stderr is not None
    said, interrupted = "its output says why", False
    while True:
        try:
            for line in process.stderr:
                print(line, end="", file=sys.stderr, flush=True)
                if line.startswith("error"):
                    said = line.partition(": ")[2].strip()
            code = process.wait()
            break
        except KeyboardInterrupt:
            interrupted = True
            process.send_signal(signal.SIGINT)
    if interrupted:
        raise KeyboardInterrupt
    return code, said


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
