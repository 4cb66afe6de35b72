"""Trackers, which show the metrics of a run: TensorBoard, wandb, MLflow, trackio and Prometheus.

One thread per tracker reads metrics.jsonl as it grows and sends each record, so that no step waits for a
tracker. A slow tracker falls behind. This is logged, and no record is lost. If a tracker raises an error,
this is logged once, and the tracker is excluded until the next start of the run. The next start sends the
records that it missed.

`<run.dir>/trackers/<name>.json` has the tracker's own id of the run and the last step sent. After a resume
from a checkpoint some steps are repeated. TensorBoard and Prometheus then show the new values. The others
cannot remove a step; they keep the values that they have, and continue with the first step that they lack.
"""

import importlib
import json
import logging
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from rl.config.options import flatten
from rl.config.schema import Config, changed_keys
from rl.run_directory.metric_log import STEP
from rl.run_directory.rollout_files import read, stored_steps

log = logging.getLogger(__name__)

DIRECTORY = "trackers"
BEHIND = 8
"""Number of steps by which a tracker is behind when this is logged first. It is logged again at each
doubling."""
MAX_PARAMS = 100
"""Maximum number of parameters in one call of MLflow."""
SAMPLES_EVERY = 10
"""Number of steps between two tables of samples."""
SHOWN_SAMPLES = 16
"""Maximum number of samples in a table."""
SAMPLE_COLUMNS = "step", "score", "prompt", "response", "ground_truth"
"""Columns of a table of samples."""
SampleRows = list[list[Any]]
"""Rows of a table of samples, with a value for each of SAMPLE_COLUMNS."""


class Tracker(Protocol):
    """A program that shows metrics. `open`, `write` and `close` are called in a thread of their own."""

    name: str
    package: str
    """Module that is imported in the main thread, before the thread starts."""
    cuts: bool
    """Whether a step may be sent again after a resume, in place of its earlier values."""

    def open(self, directory: Path, state: dict[str, Any]) -> None:
        """Begin. state: `step`, the last step sent (-1: none), and what an earlier start has stored."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Send the finite metrics of a step."""

    def show(self, step: int, rows: SampleRows) -> None:
        """Send a table of samples, before the metrics of the step in which it appears."""

    def close(self) -> None:
        """Send the rest."""


class TrackerThread:
    """Sends metrics.jsonl to one tracker (`rl.run_directory.metric_log.MetricLog`).

    fence: called in the thread before each record; an exception from it ends the tracker.
    """

    def __init__(self, tracker: Tracker, fence: Callable[[], None] = lambda: None):
        self._tracker, self._fence = tracker, fence
        self._wake, self._closing = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name=f"tracker {tracker.name}", daemon=True)
        self._noted, self._limit = -1, BEHIND

    def start(self, path: Path, resume_step: int | None) -> None:
        """Begin to send the file, from which the records after `resume_step` were removed."""
        self._path, tracker = path, self._tracker
        self._state_path = path.parent / DIRECTORY / f"{tracker.name}.json"
        self._state: dict[str, Any] = {"step": -1}
        try:
            if resume_step is not None and self._state_path.is_file():
                self._state |= json.loads(self._state_path.read_text())
                if tracker.cuts:
                    self._state["step"] = min(self._state["step"], resume_step)
            # The package is imported here, because imports in two threads can wait for each other.
            importlib.import_module(tracker.package)
        except Exception as error:
            self._warn(error)
            return
        self._thread.start()

    def note(self, step: int) -> None:
        """Take note that the file has the record of a step."""
        self._noted = step
        if self._thread.is_alive() and self._behind >= self._limit:
            self._limit *= 2
            log.warning("%s is %d steps behind metrics.jsonl", self._tracker.name, self._behind)
        self._wake.set()

    @property
    def _behind(self) -> int:
        return self._noted - self._state["step"]

    def finish(self) -> None:
        """Take note that the file is complete. Does not wait."""
        self._closing = True
        self._wake.set()

    def wait(self, seconds: float) -> None:
        """Wait until the rest is sent, at most that long."""
        if self._thread.is_alive():
            self._thread.join(seconds)
            if self._thread.is_alive():
                log.warning(
                    "%s has not ended in time and lacks the last %d steps; metrics.jsonl has them",
                    self._tracker.name,
                    self._behind,
                )

    def _run(self) -> None:
        tracker, state = self._tracker, self._state
        try:
            self._state_path.parent.mkdir(exist_ok=True)
            tracker.open(self._path.parent, state)
            self._save_state()
            for record in self._records():
                step = record.pop(STEP)
                if step > state["step"]:
                    self._fence()
                    if step - state.get("samples", -SAMPLES_EVERY) >= SAMPLES_EVERY:
                        self._show_samples(step)
                    tracker.write(step, {name: value for name, value in record.items() if value is not None})
                    state["step"] = step
                    self._save_state()
            tracker.close()
        except Exception as error:
            self._warn(error)

    def _show_samples(self, step: int) -> None:
        """Send samples of the newest step that is stored (`logging.rollouts`), unless they were sent."""
        files = {number: path for number, path in stored_steps(self._path.parent).items() if number <= step}
        newest = max(files, default=-1)
        if newest > self._state.get("samples", -1):
            rows = read(files[newest], list(SAMPLE_COLUMNS)).slice(0, SHOWN_SAMPLES).to_pylist()
            self._tracker.show(step, [list(row.values()) for row in rows])
            self._state["samples"] = newest

    def _records(self) -> Iterator[dict[str, Any]]:
        """Yield the records of the file, and wait for further ones until `close`."""
        with open(self._path, encoding="utf-8") as file:
            while True:
                ends = self._closing
                start = file.tell()
                line = file.readline()
                if line.endswith("\n"):
                    yield json.loads(line)
                    continue
                file.seek(start)  # the line is being written
                if ends:
                    return
                self._wake.wait()
                self._wake.clear()

    def _save_state(self) -> None:
        partial = self._state_path.with_suffix(".partial")
        partial.write_text(json.dumps(self._state) + "\n")
        partial.replace(self._state_path)

    def _warn(self, error: Exception) -> None:
        log.warning(
            "%s failed after step %d and is excluded until the next start of the run: %s: %s",
            self._tracker.name,
            self._state["step"],
            type(error).__name__,
            error,
        )


class TensorBoard:
    name, package, cuts = "tensorboard", "torch.utils.tensorboard", True

    def __init__(self, config: Config):
        self._config = config

    def open(self, directory: Path, state: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        # TensorBoard hides the points of that step and later ones in event files of earlier starts.
        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=state["step"] + 1)
        values = {name: str(value) for name, value in changed_keys(self._config).items()}
        assert self._writer.file_writer is not None
        for summary in hparams(values, {"critic/score/mean": 0}):  # SummaryWriter.add_hparams adds a run
            self._writer.file_writer.add_summary(summary)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name != "time":
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def show(self, step: int, rows: SampleRows) -> None:
        facts = [dict(zip(SAMPLE_COLUMNS, row)) for row in rows]
        texts = ["\n".join(f"    {name}: {value!r}" for name, value in row.items()) for row in facts]
        self._writer.add_text("samples", "\n\n---\n\n".join(texts), step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    name, package, cuts = "wandb", "wandb", False

    def __init__(self, config: Config):
        self._config = config

    def open(self, directory: Path, state: dict[str, Any]) -> None:
        import wandb

        state.setdefault("run", uuid.uuid4().hex[:8])
        self._run = wandb.init(
            project=self._config.logging.project,
            name=self._config.run.name,
            id=state["run"],
            resume="allow",
            reinit="create_new",  # a process may have several runs at the same time (sweeps)
            mode=self._config.logging.wandb,
            dir=str(directory),
            config=flatten(self._config),
            settings=wandb.Settings(console="off", silent=True),
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step, commit=True)

    def show(self, step: int, rows: SampleRows) -> None:
        import wandb

        self._run.log({"samples": wandb.Table(list(SAMPLE_COLUMNS), rows)}, step=step, commit=False)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    name, package, cuts = "mlflow", "mlflow.tracking", False

    def __init__(self, config: Config):
        self._config = config

    def open(self, directory: Path, state: dict[str, Any]) -> None:
        uri = self._config.logging.mlflow
        if uri.startswith("file:"):  # which MLflow otherwise refuses in favour of a database
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = client = MlflowClient(tracking_uri=uri)
        if "run" in state:
            found = client.get_run(state["run"])
            state["step"] = max(state["step"], int(found.data.metrics.get(STEP, -1)))
            client.update_run(state["run"], status="RUNNING")
        else:
            project = self._config.logging.project
            experiment = client.get_experiment_by_name(project)
            number = client.create_experiment(project) if experiment is None else experiment.experiment_id
            state["run"] = client.create_run(number, run_name=self._config.run.name).info.run_id
            params = [Param(name, str(value)[:500]) for name, value in flatten(self._config).items()]
            for start in range(0, len(params), MAX_PARAMS):
                client.log_batch(state["run"], params=params[start : start + MAX_PARAMS])
        self._id = state["run"]

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        values, time_ms = dict(values), int(1e3 * values["time"])
        del values["time"]
        metrics = [Metric(STEP, step, time_ms, step)]  # first, because `open` reads the last step from it
        metrics += [Metric(mlflow_name(name), value, time_ms, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def show(self, step: int, rows: SampleRows) -> None:
        table = {name: list(column) for name, column in zip(SAMPLE_COLUMNS, zip(*rows))}
        self._client.log_table(self._id, table, "samples.json")  # appends the rows

    def close(self) -> None:
        self._client.set_terminated(self._id)


def mlflow_name(name: str) -> str:
    """Return a metric's name without the characters that MLflow rejects: mean@4 becomes mean_at_4."""
    return re.sub(r"[^/\w.\- :]", "_", name.replace("@", "_at_"))


class Trackio:
    name, package, cuts = "trackio", "trackio", False

    def __init__(self, config: Config):
        self._config = config

    def open(self, directory: Path, state: dict[str, Any]) -> None:
        import trackio

        # trackio finds a run by its name.
        state.setdefault("run", f"{self._config.run.name}-{uuid.uuid4().hex[:6]}")
        self._run = trackio.init(
            project=self._config.logging.project,
            name=state["run"],
            resume="allow",
            config=flatten(self._config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({name: value for name, value in values.items() if name != "time"}, step=step)

    def show(self, step: int, rows: SampleRows) -> None:
        import trackio

        self._run.log({"samples": trackio.Table(list(SAMPLE_COLUMNS), rows)}, step=step)

    def close(self) -> None:
        self._run.finish()


def followers(config: Config, fence: Callable[[], None] = lambda: None) -> list[TrackerThread]:
    """Return the trackers of a run, not yet started. fence: as in `TrackerThread`."""
    chosen = config.logging
    found: list[Tracker] = []
    if chosen.tensorboard:
        found.append(TensorBoard(config))
    if chosen.wandb != "none":
        found.append(Wandb(config))
    if chosen.mlflow:
        found.append(Mlflow(config))
    if chosen.trackio:
        found.append(Trackio(config))
    if chosen.prometheus or chosen.prometheus_port:
        from rl.run_directory.prometheus import Prometheus

        found.append(Prometheus(config))
    return [TrackerThread(tracker, fence) for tracker in found]
