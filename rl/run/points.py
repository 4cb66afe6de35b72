"""A sweep in one job: the runs of several points, which share one base model and one engine.

Each point is an ordinary run (`rl.run.loop`) with a directory, checkpoints and metrics of its own. The loop
of a point runs in a thread, but only one thread runs at a time: the points take turns in a fixed order, the
same on every rank, so collectives stay in order. A point that needs samples hands in its prompts and gives up
its turn; when all points wait, the engine generates for all of them in one call
(`rl.phases.joint_generation`).
"""

import copy
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from rl import algorithms
from rl.checkpoint.store import CheckpointStore, Saved
from rl.config.options import ConfigError
from rl.config.schema import Config, needs_engine, needs_reward
from rl.data.batch import Batch
from rl.engines.engines import Engines, build_policy, build_rollout, finish_imports, offload_of
from rl.engines.inputs import Inputs
from rl.faults.agreement import PhaseAgreement, fail_together
from rl.faults.lock import RunLock, check_lock, is_of_another, make_run_directory
from rl.faults.watchdog import Watchdog
from rl.phases.joint_generation import Ask, JointGeneration, PointGeneration
from rl.phases.phases import Phases
from rl.phases.scorer import Scorer, start_pool
from rl.phases.step import Step
from rl.run.checkpoints import find_checkpoint
from rl.run.early_stop import EarlyStop, PointStop
from rl.run.loop import end_ids, is_complete, note_end, take_steps
from rl.run_directory.metric_log import read_records
from rl.run_directory.progress import Progress
from rl.run_directory.record import code_hashes
from rl.run_directory.status import FILE_NAME as STATUS
from rl.run_directory.status import Status
from rl.runtime import start_up
from rl.runtime.collectives import broadcast_object
from rl.runtime.device import Device
from rl.runtime.group_warm_up import limit_collectives, warm_up
from rl.runtime.session import control_group
from rl.stopping.requests import StepAborted, StopRequests
from rl.training.engine import TrainingEngine
from rl.training.grid import build_grid

ENDED_EARLY = "sweep.stop="
"""Begins the reason in the status of a point that ended early."""


class PointFailed(RuntimeError):
    """The run of a point raised an error."""


class Turns:
    """Runs functions in threads, one at a time and in order; each may wait for an answer.

    Args:
        functions: by number. Each is called with a function `wait(ask)`, which returns the answer.
        answer: called in the main thread with the asks of all functions that have not ended, by number;
            returns their answers.
        prepare: called in each thread before its function.
        follow: called with the thread whose turn it is.
    """

    def __init__(
        self,
        functions: dict[int, Callable[[Callable[[Any], Any]], Any]],
        answer: Callable[[dict[int, Any]], dict[int, Any]],
        *,
        prepare: Callable[[], None],
        follow: Callable[[threading.Thread], None],
    ):
        self._answer, self._follow = answer, follow
        self._main = threading.Semaphore(0)
        self._turn = {number: threading.Semaphore(0) for number in functions}
        self._asks: dict[int, Any] = {}
        self._answers: dict[int, Any] = {}
        self._results: dict[int, Any] = {}
        self._errors: dict[int, BaseException] = {}
        self._threads = {
            number: threading.Thread(target=self._run, args=(number, function, prepare), daemon=True)
            for number, function in functions.items()
        }

    def run(self) -> dict[int, Any]:
        """Return the results of all functions by number. Raises the first error of a function."""
        for thread in self._threads.values():
            thread.start()
        live = list(self._threads)
        while live:
            for number in live:
                self._follow(self._threads[number])
                self._turn[number].release()
                self._main.acquire()
                if number in self._errors:
                    raise self._errors[number]
            self._follow(threading.main_thread())
            live = [number for number in live if number in self._asks]
            if live:
                self._answers, self._asks = self._answer(self._asks), {}
        return self._results

    def _run(self, number: int, function: Callable, prepare: Callable[[], None]) -> None:
        self._turn[number].acquire()
        try:
            prepare()
            self._results[number] = function(partial(self._wait, number))
        except BaseException as error:
            self._errors[number] = error
        self._main.release()

    def _wait(self, number: int, ask: Any) -> Any:
        """Give up the turn until the ask is answered; return the answer."""
        self._asks[number] = ask
        self._main.release()
        self._turn[number].acquire()
        return self._answers[number]


@dataclass
class Point:
    """A point of the sweep on this rank, before its models are built."""

    number: int
    config: Config
    inputs: Inputs
    algorithm: ModuleType
    status: Status
    lock: RunLock | None
    store: CheckpointStore
    found: tuple[Saved | None, Saved | None]
    """Result of `find_checkpoint`."""


def run_points(
    config: Config, points: Sequence[Config], inputs: Inputs, device: Device, watchdog: Watchdog
) -> int:
    """Run all points of the sweep until the end or a stop. Collective over the world.

    Returns the exit code of the process: 0, or STOPPED_EXIT if a point is to be continued.

    points: result of `load_points`.
    """
    start_up.mark("Megatron")
    leads = dist.get_rank() == 0
    progress = Progress(leads, name=config.run.name, max_steps=config.run.max_steps)
    early = EarlyStop(config.sweep, [point.run.name for point in points])
    live = [
        opened
        for number, point in enumerate(points)
        if (opened := _open(number, point, inputs, early)) is not None
    ]
    progress.line(f"{config.run.name}: sweep of {len(points)} points, of which {len(live)} go on")
    if not live:
        watchdog.status.write(state="finished")
        return 0
    try:
        return _run(config, live, len(points), device, watchdog, progress, early)
    finally:
        for point in live:
            if point.lock is not None:
                point.lock.release()


def _open(number: int, config: Config, inputs: Inputs, early: EarlyStop) -> Point | None:
    """Open the directory of a point; return None if it has ended. Collective over the world."""
    leads, lock, before = dist.get_rank() == 0, None, ({}, [])
    with fail_together():
        algorithm = algorithms.load(config.algorithm)
        if leads:
            lock = make_run_directory(config)
            before = _read_before(config)
    token = broadcast_object("" if lock is None else lock.token)
    state, records = broadcast_object(before)
    store = CheckpointStore(config, fence=lambda: check_lock(lock))
    found = find_checkpoint(config, store)
    ended_early = state.get("reason", "").startswith(ENDED_EARLY)
    step = found[0].step if found[0] is not None else 0
    is_over = ended_early or is_complete(config, found[0])
    kept = [record for record in records if ended_early or record["training/global_step"] <= step]
    early.remember(number, kept, is_over=is_over)
    if is_over:
        if lock is not None:
            lock.release()
        return None
    status = Status(
        config.run.dir,
        max_steps=config.run.max_steps,
        leads=leads,
        start=token,
        is_taken_over=lambda: is_of_another(config.run.dir, token),
    )
    own = copy.copy(inputs)
    own.config = config
    return Point(number, config, own, algorithm, status, lock, store, found)


def _read_before(config: Config) -> tuple[dict, list[dict]]:
    """Return the status and the metrics of the point's earlier starts."""
    status, metrics = Path(config.run.dir, STATUS), Path(config.run.dir, "metrics.jsonl")
    state = json.loads(status.read_text()) if status.is_file() else {}
    return state, read_records(metrics) if metrics.is_file() else []


def _run(
    config: Config,
    points: list[Point],
    num_points: int,
    device: Device,
    watchdog: Watchdog,
    progress: Progress,
    early: EarlyStop,
) -> int:
    """Build what the points share, and run them. Returns the exit code. Collective over the world."""
    generates = needs_engine(config)
    finish_imports(config, generate=generates)
    inputs, pool = points[0].inputs, None
    with fail_together():
        if needs_reward(config):
            pool = start_pool(config, inputs)
    start_up.mark("rewards")
    layout = config.training
    grid = build_grid(tp=layout.tp, pp=layout.pp, ep=layout.ep, etp=layout.expert_tp, seed=config.run.seed)
    warm_up(device)
    start_up.mark("groups")
    policies: dict[int, TrainingEngine] = {}
    for point in points:
        base = next(iter(policies.values()), None)
        policies[point.number] = build_policy(
            point.config, inputs.models["policy"].hf, grid, device, base_of=base
        )
    away = offload_of(config, device)
    start_up.mark("trainer")
    steps = {
        point.number: _step(point.config, device, watchdog, PointProgress(progress, point))
        for point in points
    }
    stop = StopRequests(config.run.dir, max_time=config.run.max_time)
    joint, rollout = None, None
    if generates:
        if away != "none":
            for policy in policies.values():
                policy.offload(weights=away == "all")
        rollout = build_rollout(config, device, num_adapters=num_points)
        if away != "none":
            rollout.sleep()
            for policy in policies.values():
                policy.reload()
        redo = stop if config.run.on_stop_in_generation == "redo" else None
        step = _step(config, device, watchdog, progress)
        joint = JointGeneration(config, rollout, policies, step, redo, offload=away)
    start_up.mark("engine")
    limit_collectives(config.watchdog.limits)

    def run_one(point: Point, wait: Callable[[Ask], Batch | None]) -> int:
        name, step = point.config.run.name, steps[point.number]
        engines = Engines(policies[point.number])
        scorer = None if pool is None else Scorer(point.config, point.inputs, device, engines, pool)
        own_stop = StopRequests(point.config.run.dir, max_time="")
        requests = PointStop(own_stop, stop, early, point.number, step, point.config.run.max_steps)
        phases = Phases(
            point.config,
            step=step,
            engines=engines,
            prompts=inputs.prompts,
            sampler=point.inputs.sampler(),
            scorer=scorer,
            end_ids=end_ids(config, inputs),
            generation=PointGeneration(point.config, step, partial(_wait_for, wait)),
        )
        try:
            asked = take_steps(
                point.config,
                point.algorithm,
                point.inputs,
                phases,
                point.status,
                requests,
                point.store,
                point.found,
            )
        except ConfigError as error:
            point.status.fail(str(error))
            raise ConfigError(f"point {name}: {error}") from error
        except Exception as error:
            point.status.fail(f"{type(error).__name__}: {error}")
            raise PointFailed(f"point {name}: {type(error).__name__}: {error}") from error
        if asked is not None and asked.reason.startswith(ENDED_EARLY):
            point.status.write(state="finished", reason=asked.reason)
            return 0
        return note_end(point.status, asked)

    functions = {point.number: partial(run_one, point) for point in points}
    turns = Turns(
        functions,
        answer=joint.serve if joint is not None else lambda asks: {},
        prepare=partial(torch.cuda.set_device, device.torch) if device.is_cuda else lambda: None,
        follow=watchdog.tracker.follow,
    )
    codes = turns.run()
    if pool is not None:
        pool.close()
    if rollout is not None:
        rollout.close()
    code = max(codes.values())
    watchdog.status.write(state="stopped" if code else "finished")
    return code


def _wait_for(wait: Callable[[Ask], Batch | None], ask: Ask) -> Batch:
    batch = wait(ask)
    if batch is None:
        raise StepAborted
    return batch


def _step(config: Config, device: Device, watchdog: Watchdog, progress) -> Step:
    agreement = PhaseAgreement(
        config, json.dumps(code_hashes(config)), control_group(), replica_size=config.rollout.tp
    )
    return Step(device=device, progress=progress, watchdog=watchdog, agreement=agreement)


class PointProgress(Progress):
    """The progress of one point: its lines begin with the point's name."""

    def __init__(self, progress: Progress, point: Point):
        self._progress, self._name = progress, point.config.run.name

    def phase(self, description: str, total: int | None, unit: str):
        return self._progress.phase(f"{self._name}: {description}", total, unit)

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Do nothing: the live view is that of the sweep."""

    def line(self, text: str) -> None:
        self._progress.line(f"{self._name}: {text}")
