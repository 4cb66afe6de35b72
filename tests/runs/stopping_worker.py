"""One rank of test_stopping.py: every kind of stop with every combination of `checkpoint.*`, in one process.

    stopping_worker.py OUT STRIDE --config FILE [key=value ...]

A stop is, for example, SIGTERM or the file `stop`. The engines are built once. Each start uses the run's own
code from `find_checkpoint` to the exit code, and begins with the models as they were loaded. Tries every
STRIDE-th combination. Prints a line for each combination that breaks its promise, and the number of tried
combinations.
"""

import dataclasses
import errno
import itertools
import json
import os
import signal
import sys
from pathlib import Path

os.environ["SLURM_JOB_ID"] = "1"  # so that SIGTERM is a request
from rl.stopping import signals  # noqa: E402

signals.expect_signals()
from rl.runtime.ranks import discover  # noqa: E402
from train_rl import prepare_environment  # noqa: E402

RANKS = discover()
prepare_environment(RANKS)

import rl.algorithms  # noqa: E402
from rl.checkpoint import directory as on_disk  # noqa: E402
from rl.checkpoint.store import CheckpointStore  # noqa: E402
from rl.config.checks import check  # noqa: E402
from rl.config.options import ConfigError  # noqa: E402
from rl.config.schema import Checkpoint, load_config  # noqa: E402
from rl.engines.inputs import Inputs  # noqa: E402
from rl.faults.watchdog import Watchdog  # noqa: E402
from rl.run.checkpoints import find_checkpoint  # noqa: E402
from rl.run.loop import is_complete, note_end, take_steps  # noqa: E402
from rl.run.set_up import SetUp  # noqa: E402
from rl.run_directory.progress import Progress  # noqa: E402
from rl.run_directory.status import Status  # noqa: E402
from rl.runtime.session import job, session  # noqa: E402
from rl.stopping.requests import STOPPED_EXIT, StepAborted, StopRequests  # noqa: E402

LAST = 4
STOPS = "run.max_time, job's end, SIGUSR2, SIGTERM, file, save and SIGUSR2, in the collection, full disk"
RETENTION = itertools.cycle(
    [dict(keep_last=1), dict(keep_last=0), dict(keep_every=3), dict(keep_best=1, best_metric="sft/loss")]
)


class Lines(Progress):
    """Keeps the lines that a run prints."""

    def __init__(self, **options):
        super().__init__(False, **options)
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


class Steps(Status):
    """Calls `after` with each step that is written."""

    def __init__(self, run_dir, after):
        super().__init__(run_dir, max_steps=LAST, leads=True, start="a")
        self.began, self.after = None, after

    def write(self, **changes):
        super().write(**changes)
        if "step" in changes:
            if self.began is None:
                self.began = changes["step"]
            self.after(changes["step"])


class Runs:
    """Starts runs with the same engines."""

    def __init__(self, config, device):
        self.config, self.algorithm = config, rl.algorithms.load(config.algorithm)
        Path(config.run.dir).mkdir(parents=True, exist_ok=True)
        status = Status(config.run.dir, max_steps=LAST, leads=True)
        own = dict(run_dir=config.run.dir, device=device, store=job().store, lock=None, status=status)
        self.watchdog = Watchdog(config.watchdog, config.memory, **own)
        self.inputs = Inputs(config, 1)
        set_up = SetUp(config, self.inputs, device, self.watchdog, is_finished=False)
        progress = Lines(name="", max_steps=LAST)
        self.phases = set_up.phases(progress, StopRequests(config.run.dir, max_time=""))
        self.models, self.drawn = self.phases.engines.learning, self.phases.draw.state_dict()
        origin = CheckpointStore(config)
        origin.save(1, self.models, {})
        self.origin = origin, origin.newest()

    def start(self, run_dir: Path, checkpoint: Checkpoint, stop: str = "", at: int = 0):
        """Return exit code, first step, and the lines of one start with `stop` after step `at`."""
        run = dataclasses.replace(self.config.run, dir=str(run_dir), max_steps=LAST)
        config = dataclasses.replace(self.config, run=run, checkpoint=checkpoint)
        check(config)
        run_dir.mkdir(exist_ok=True)
        store, first = self.origin
        store.load_weights(first, self.models)
        for model in self.models.values():
            model.start_from_present_weights()
        self.phases.draw.load_state_dict(self.drawn)
        progress = self.phases.step.progress = Lines(name="", max_steps=LAST)
        requests, commit, collect = (
            StopRequests(str(run_dir), max_time="1-0"),
            on_disk.commit,
            self.algorithm.collect,
        )

        def ask(step: int) -> None:
            nonlocal at
            if step < at or not stop:
                return
            at = LAST + 1  # once
            if stop == "run.max_time":
                requests._deadline = 0.0
            elif stop == "job's end":
                requests._job_end, requests._step_seconds = 0.0, [1.0]
            elif stop == "file":
                (run_dir / "stop").touch()
            elif stop == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
            elif stop == "in the collection":
                self.algorithm.collect = abort
            else:
                os.kill(os.getpid(), signal.SIGUSR2)
            if stop.startswith("save"):
                (run_dir / "save").touch()
            if stop == "full disk":
                on_disk.commit = fail

        def abort(phases):
            os.kill(os.getpid(), signal.SIGUSR2)
            raise StepAborted

        def fail(*_):
            raise OSError(errno.ENOSPC, "full")

        status = Steps(str(run_dir), ask)
        try:
            store = CheckpointStore(config)
            found = find_checkpoint(config, store)
            if is_complete(config, found[0]):
                return 0, found[0].step, progress.lines
            inputs = self.inputs, self.phases, status, requests, store, found
            asked, code = take_steps(config, self.algorithm, *inputs)
            return note_end(status, asked, code), status.began, progress.lines
        except ConfigError as error:
            return 2, status.began, [*progress.lines, str(error)]
        finally:
            on_disk.commit, self.algorithm.collect, signals._terminate = commit, collect, False
            signal.sigtimedwait({signal.SIGUSR2}, 0)


def broken_promise(runs: Runs, run_dir: Path, checkpoint: Checkpoint, stop: str, at: int) -> str:
    """Return how a stop or the next start broke the promise of exit code and text; '' if neither did."""
    code, began, lines = runs.start(run_dir, checkpoint, stop, at)
    step = at if began is None else max(at, began)
    promise = [line for line in lines if "the same command continues" in line]
    fails = stop == "full disk" and not Path(run_dir, "checkpoints", f"step_{step:06d}").exists() and step > 0
    if fails:
        return "" if code == 2 and not promise else f"exit code {code} after a failed save: {lines}"
    if code != (0 if stop == "file" else STOPPED_EXIT) or not promise:
        return f"exit code {code}: {lines}"
    if stop == "file":
        if f"after you remove {run_dir}/stop" not in promise[0]:
            return promise[0]
        (run_dir / "stop").unlink()
    # A stop at once, as of a job that is pre-empted again, must not lose anything either.
    for again in ("SIGUSR2", ""):
        code, began, lines = runs.start(run_dir, checkpoint, again, step)
        if began != step or code != (STOPPED_EXIT if again else 0):
            return f"stopped after step {step}, the next start began after {began} with code {code}: {lines}"
    steps = [json.loads(line)["training/global_step"] for line in open(run_dir / "metrics.jsonl")]
    return "" if steps == list(range(steps[0], LAST + 1)) else f"metrics of steps {steps}"


def main() -> None:
    out, stride = Path(sys.argv[1]), int(sys.argv[2])
    config = load_config(sys.argv[4], sys.argv[5:])
    with session(RANKS) as device:
        runs = Runs(config, device)
        other = out / "other"
        runs.start(other, Checkpoint(every=1, keep_last=0), "SIGUSR2", 1)
        sources = ("auto", "never", str(other), str(other / "checkpoints" / "step_000001"))
        number = 0
        for resume, weights_only, every, background, stop in itertools.product(
            sources, (False, True), (0, 1, 3), (False, True), STOPS.split(", ")
        ):
            if weights_only and resume in ("auto", "never"):
                continue
            number += 1
            if number % stride:
                continue
            at = (0, 2)[number % 5 > 0]  # before its first step, or after the second
            options = dict(resume=resume, weights_only=weights_only, every=every, background=background)
            options |= next(RETENTION)
            problem = broken_promise(runs, out / f"run{number}", Checkpoint(**options), stop, at)
            if problem:
                print(stop, "after step", at, options, problem)
        print(number // stride)
        runs.watchdog.close()


main()
