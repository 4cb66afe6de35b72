"""A sweep in one job: the runs of several points with one base model and one engine.

Each point is an ordinary run (`rl.run.loop`) with a directory, checkpoints and metrics of its own. The loop
of a point runs in a thread, but only one thread runs at a time. The points take turns in a fixed order,
identical on every rank, so collectives stay in order. A point that needs samples hands in its prompts and
yields. Once all points wait, the engine generates for all points in one call. For example, three points with
64 prompts each become one call with 192 prompts (`rl.features.sweep.joint_generation`).
"""

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from rl import algorithms
from rl.checkpoint.store import CheckpointStore, Saved
from rl.config import wing
from rl.config.adapter_checks import adapters_of
from rl.config.needs import needs_engine, needs_reward
from rl.config.options import ConfigError
from rl.config.schema import Config
from rl.data.batch import Batch
from rl.data.curriculum import load_order
from rl.engines.engines import Engines, build_engines, build_policy, finish_imports, offload_of
from rl.engines.inputs import Inputs
from rl.engines.memory import MemorySharing
from rl.faults.agreement import fail_together
from rl.faults.lock import LockLost, check_lock, is_of_another, make_run_directory
from rl.faults.watchdog import Watchdog
from rl.features.sweep.alternating import AlternatingThreads
from rl.features.sweep.joint_generation import JointGeneration, PointCall, PointGeneration
from rl.features.sweep.point_stop import ENDED_EARLY, PointStop, Survivors
from rl.models import architecture
from rl.models.peft import check_peft
from rl.phases.scorer import start_pool
from rl.run.checkpoints import find_checkpoint
from rl.run.loop import is_complete, note_end, take_steps
from rl.run.set_up import make_grid, make_phases, make_step
from rl.run_directory.metric_log import read_records
from rl.run_directory.progress import Counter, Progress
from rl.run_directory.status import FILE_NAME as STATUS
from rl.run_directory.status import Status, read_object
from rl.runtime import start_up
from rl.runtime.collectives import broadcast_object
from rl.runtime.device import Device
from rl.runtime.group_warm_up import limit_collectives
from rl.stopping.requests import StopRequests


class PointFailed(RuntimeError):
    """The run of a point raised an error."""


@dataclass
class SweepPoint:
    """A point of the sweep on this rank, before its models are built."""

    number: int
    """Index in `sweep.adapters`."""
    config: Config
    inputs: Inputs
    algorithm: ModuleType
    status: Status
    fence: Callable[[], None]
    """Raises LockLost if another run took over the directory of the sweep or of the point."""
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
    due = config.validation.every if config.sweep.metric.startswith("val") else 0
    survivors = (wing.door(config, "rule") or Survivors)(config.sweep, len(points), due=due)
    total = SweepStatus(watchdog.status)
    opened = [_open(number, point, inputs, survivors, total, watchdog) for number, point in enumerate(points)]
    live = [point for point in opened if point is not None]
    survivors.judge()
    if leads:
        _record_points(config, points)
    ended = f", of which {len(points) - len(live)} have ended" if len(live) < len(points) else ""
    progress.line(f"{config.run.name}: sweep of {len(points)} points{ended}")
    if not live:
        total.write(state="finished")
        return 0
    return _run(config, live, device, watchdog, progress, survivors)


def _record_points(config: Config, points: Sequence[Config]) -> None:
    """Add the points to launch/sweep.json, for `lockstep status` and `report`."""
    path = Path(config.run.dir, "launch", "sweep.json")
    facts: dict[str, Any] = {"name": config.run.name, "points": []}
    if path.is_file():
        facts = json.loads(path.read_text())
    known = {point["name"] for point in facts["points"]}
    new = [
        {"name": point.run.name, "values": values}
        for point, values in zip(points, config.sweep.adapters, strict=True)
        if point.run.name not in known
    ]
    if new:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(facts | {"points": facts["points"] + new}, indent=1) + "\n")


def _open(
    number: int,
    config: Config,
    inputs: Inputs,
    survivors: Survivors,
    total: "SweepStatus",
    watchdog: Watchdog,
) -> SweepPoint | None:
    """Open the directory of a point; return None if the point has ended. Collective over the world.

    watchdog: gets the lock of the directory, on rank 0.
    """
    leads, lock = dist.get_rank() == 0, None
    earlier: tuple[dict, list[dict]] = {}, []
    with fail_together():
        algorithm = algorithms.load(config.algorithm)
        if leads:
            lock = make_run_directory(config)
            watchdog.locks_of_points.append(lock)
            earlier = _read_before(config)
        own = _inputs_of(config, inputs)
    token, before = broadcast_object(("", "") if lock is None else (lock.token, lock.before))
    state, records = broadcast_object(earlier)
    fence = partial(check_lock, watchdog.lock, lock)
    store = CheckpointStore(config, fence=fence)
    found = find_checkpoint(config, store)
    ended_early = state.get("reason", "").startswith(ENDED_EARLY)
    step = found[0].step if found[0] is not None else 0
    is_over = ended_early or is_complete(config, found[0])
    kept = [record for record in records if ended_early or record["training/global_step"] <= step]
    if step and found[0] is not None and all(record["training/global_step"] != step for record in kept):
        kept.append({"training/global_step": step, **found[0].metrics})  # killed before it was logged
    survivors.remember(number, kept, is_over=is_over)
    total.steps[number] = dict(max_steps=config.run.max_steps, step=step, checkpoint_step=step)
    if is_over:
        if lock is not None:
            lock.release()
        return None
    status = PointStatus(
        partial(total.follow, number),
        config.run.dir,
        max_steps=config.run.max_steps,
        leads=leads,
        start=token,
        is_taken_over=lambda: is_of_another(config.run.dir, token, before),
    )
    return SweepPoint(number, config, own, algorithm, status, fence, store, found)


def _inputs_of(config: Config, inputs: Inputs) -> Inputs:
    """Return the inputs of a point: the inputs of the sweep, with the point's config and curriculum.

    Raises ConfigError for an unusable adapter or curriculum.
    """
    own, data, adapter = copy.copy(inputs), config.data, config.adapter
    own.config = config
    try:
        own.order = load_order(data.curriculum) if data.curriculum else None
        own.prompt_order()  # raises ConfigError for a curriculum that returns no order
        if adapter.path:
            hf = inputs.models["policy"].hf
            pairs = adapters_of(config, architecture(hf).weights(hf))
            check_peft(adapter.path, pairs, kind=adapter.kind, rank=adapter.rank, scale=adapter.scale)
    except ValueError as error:
        raise ConfigError(f"point {config.run.name} of sweep.adapters: {error}") from error
    return own


class SweepStatus:
    """The status of a sweep, with the sums of its points' steps.

    A batch script reads in the sums whether a start of the job made progress. For example, two points at
    steps 3 and 4 give step 7.
    """

    def __init__(self, status: Status):
        self._status = status
        self.steps: dict[int, dict[str, int]] = {}
        """max_steps, step and checkpoint_step of each point."""

    def write(self, **changes: str) -> None:
        """Write the sums, and changes of other fields."""
        names = ("max_steps", "step", "checkpoint_step")
        sums = {name: sum(own[name] for own in self.steps.values()) for name in names}
        self._status.write(**changes, **sums)

    def follow(self, point: int, **steps: int) -> None:
        """Write the sums with new steps of a point."""
        self.steps[point] |= steps
        self.write()


class PointStatus(Status):
    """The status of a point. follow: called with the written steps."""

    def __init__(self, follow: Callable[..., None], run_dir: str, **options: Any):
        super().__init__(run_dir, is_copied=False, **options)
        self._follow = follow

    def write(self, **changes: str | int) -> None:
        super().write(**changes)
        if steps := {key: value for key, value in changes.items() if key in ("step", "checkpoint_step")}:
            self._follow(**steps)


def _read_before(config: Config) -> tuple[dict, list[dict]]:
    """Return the status and the metrics of the point's earlier starts."""
    status, metrics = Path(config.run.dir, STATUS), Path(config.run.dir, "metrics.jsonl")
    return read_object(status), read_records(metrics) if metrics.is_file() else []


def _run(
    config: Config,
    points: list[SweepPoint],
    device: Device,
    watchdog: Watchdog,
    progress: Progress,
    survivors: Survivors,
) -> int:
    """Build the shared models, engine and reward pool, and run the points. Returns the exit code. Collective
    over the world."""
    generates = needs_engine(config)
    finish_imports(config, generate=generates)
    pool = None
    with fail_together():
        if needs_reward(config):
            pool = start_pool(config, points[0].inputs)
    start_up.mark("rewards")
    of_points = _build_engines(points, device)
    stop = StopRequests(config.run.dir, max_time=config.run.max_time)
    to_save: set[int] = set()
    joint = None
    if generates:
        step = make_step(config, device, watchdog, progress, fence=lambda: None)
        redo = stop if config.run.on_stop_in_generation == "redo" else None
        joint = JointGeneration(config, of_points, step, redo, offload=offload_of(config, device))
    limit_collectives(config.watchdog.limits)

    def take_turns(index: int, wait: Callable[[PointCall], Batch | None]) -> tuple[int, str]:
        """Run one point to its end; return the exit code, and why it stopped before its end."""
        point = points[index]
        own, inputs = point.config, point.inputs
        step = make_step(own, device, watchdog, PointProgress(progress, own.run.name), point.fence)
        engines = of_points[index]
        memory = MemorySharing(own, device, engines)
        sampler = PointGeneration(own, step, engines.policy, wait)
        phases = make_phases(own, inputs, step, engines, memory, sampler, pool)
        files = StopRequests(own.run.dir, max_time="")
        requests = PointStop(files, stop, survivors, to_save, point.number, step, own.run.max_steps)
        try:
            asked, _ = take_steps(
                own, point.algorithm, inputs, phases, point.status, requests, point.store, point.found
            )
            point.fence()
        except LockLost:
            raise
        except Exception as error:
            kind = ConfigError if isinstance(error, ConfigError) else PointFailed
            text = str(error) if kind is ConfigError else f"{type(error).__name__}: {error}"
            point.status.fail(text)
            raise kind(f"point {own.run.name}: {text}") from error
        if asked is not None and asked.is_final:
            point.status.write(state="finished", reason=asked.reason)
            return 0, ""
        return note_end(point.status, asked), "" if asked is None else asked.reason

    turns = AlternatingThreads(
        [partial(take_turns, index) for index in range(len(points))],
        answer=joint.serve if joint is not None else lambda calls: {},
        prepare=partial(torch.cuda.set_device, device.torch) if device.is_cuda else lambda: None,
        follow=watchdog.tracker.follow,
    )
    ends = turns.run()
    if pool is not None:
        pool.shutdown()
    of_points[0].close()
    stopped = [reason for _, reason in ends if reason]
    if stopped:
        watchdog.status.write(state="stopped", reason=stopped[0])
    else:
        watchdog.status.write(state="finished")
    return max(code for code, _ in ends)


def _build_engines(points: list[SweepPoint], device: Device) -> list[Engines]:
    """Build the models of each point. Collective over the world.

    The points share all models of the first point except the policies, and the policies share its base
    weights. One engine generates with the adapters of all points.
    """
    grid, first = make_grid(points[0].config, points[0].inputs, device), points[0]
    adapters = [point.config.adapter for point in points]
    engines = build_engines(first.config, first.inputs, grid, device, generate=True, adapters=adapters)
    found = [engines]
    for point in points[1:]:
        hf = point.inputs.models["policy"].hf
        policy = build_policy(point.config, hf, grid, device, base_of=engines.policy)
        found.append(replace(engines, training=engines.training | {"policy": policy}))
    return found


class PointProgress(Progress):
    """The progress of one point: its lines begin with the point's name."""

    def __init__(self, progress: Progress, name: str):
        self._progress, self._name = progress, name

    @contextmanager
    def phase(self, description: str, total: int | None, unit: str) -> Iterator[Counter]:
        with self._progress.phase(f"{self._name}: {description}", total, unit) as counter:
            yield counter

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Do nothing, because the live view shows the sweep."""

    def line(self, text: str) -> None:
        self._progress.line(f"{self._name}: {text}")
