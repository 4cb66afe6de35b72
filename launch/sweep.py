"""`lockstep sweep SWEEP.yaml`: submit many runs as one job array, or in one job.

    name: lr-and-group                             runs/<name> (or dir: DIR) has a directory for each run
    config: my.yaml
    at_a_time: 2                                   tasks that run at once; 0: no limit
    grid:                                          every combination; also zip, random and seeds
      training.optimizer.lr: [5.0e-7, 1.0e-6]
      rollout.samples_per_prompt: [4, 8]
    overrides: {run.max_steps: 50}                 keys of all runs
    job: {nodes: 1, gpus_per_node: 8, time: "04:00:00"}

Each run has a directory of its own. The command writes SWEEP_DIR/launch (the batch file, the overrides of
each point, the list of submissions). It then submits one array, of which at most `at_a_time` tasks run at
once. If you call the command again, it submits only the points that are new in the file. With `--only failed`
it submits the points that did not finish and are not in the queue; these continue from their checkpoints.
docs/launch.md describes the file.
"""

import json
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from launch.arguments import as_typed, warn
from launch.batch_file import Resources
from launch.points import SweepRun, make_points
from launch.runs import DIRECTORY, SWEEP, UNFINISHED, note_job, noted_jobs, read_runs, read_sweep
from launch.schedulers import SCHEDULERS
from launch.slurm import undisturbed
from launch.submit import print_estimate
from rl.config.checks import check, check_directory_name
from rl.config.command_line import make_parser
from rl.config.options import ConfigError, as_override, flatten, load, show
from rl.config.paths import expand_paths, literal
from rl.config.schema import SUFFIXES, Config, load_config
from rl.config.sweep_checks import load_points
from rl.run_directory.named_metrics import check_named_metrics
from rl.sandbox.private_directory import make_private


@dataclass
class SweepFile:
    """The fields of a sweep file."""

    name: str = ""
    """Name of the sweep, of its directory (`runs/<name>`), and of the job. Required."""
    dir: str = ""
    """Directory of the sweep. Empty: `runs/<name>`."""
    config: Any = ""
    """YAML file of the run that the sweep varies, or a list of files, of which later ones win. Required."""
    mode: Literal["array", "adapters"] = "array"
    """array: each point is a task of a job array. adapters: all points run in one job, as adapters of one
    base model (`sweep.adapters`)."""
    at_a_time: int = 0
    """Maximum number of points that run at once (the % of sbatch --array). 0: no limit."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Dotted keys and values that apply to all points."""
    grid: dict[str, Any] = field(default_factory=dict)
    """Keys with lists of values: every combination."""
    zip: dict[str, Any] = field(default_factory=dict)
    """Keys with equally long lists of values: the first values form a point, then the second values, and so
    on."""
    random: dict[str, Any] = field(default_factory=dict)
    """Random draws: `points` is their number, `seed` the seed, `keys` maps each key to its distribution
    (uniform, log_uniform, integer or choice)."""
    seeds: Any = None
    """Values of run.seed: a list, or a number N for 1 to N."""
    skip: list[str] = field(default_factory=list)
    """Conditions over keys. A point is excluded if any of them holds for it."""
    only: list[str] = field(default_factory=list)
    """Conditions over keys. A point is excluded if any of them does not hold for it."""
    job: Resources = field(default_factory=Resources)
    """Resources of each point's job, or of the one job with mode=adapters."""


def main(argv: list[str]) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("file", metavar="SWEEP.yaml", help="the sweep")
    parser.add_argument("--only", choices=["failed"], help="submit again the points that did not finish")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the batch file and the points, and write nothing"
    )
    arguments = parser.parse_args(argv)
    sweep = read_file(arguments.file)
    directory = Path(sweep.dir or f"runs/{sweep.name}").absolute()
    config = load_config(sweep.config, _overrides(sweep))
    suffix = SUFFIXES.get(config.run.mode, "")  # which the program adds to run.dir
    named = make_points(vars(sweep), flatten(config))
    found = [replace(point, name=point.name + suffix) for point in named]
    in_one_job = sweep.mode == "adapters"
    first = check_adapters(sweep, directory, found) if in_one_job else check_points(sweep, directory, found)
    points = write_points(sweep, directory, found, is_dry=arguments.dry_run)
    if arguments.only and sweep.job.scheduler != "slurm":
        warn(f"the queue of {sweep.job.scheduler} is not read: a point that waits there is submitted twice.")
    tasks = failed_tasks(directory, points) if arguments.only else new_tasks(directory, points)
    names = {point.name for point in found}
    tasks = [task for task in tasks if points[task].name in names]
    if not tasks:
        which = (
            "unfinished" if arguments.only else "new; --only failed submits again those that did not finish"
        )
        print(f"nothing to submit: none of the {len(found)} points is {which}")
        return 0
    file, text = _batch_file(sweep, directory, tasks, found, command=as_typed("sweep", argv))
    print(f"# {file}")
    if arguments.dry_run:
        print(text)
    else:
        file.write_text(text)
    for task in tasks:
        print(f"{task:>4}  {points[task].name}")
    print_estimate(first, sweep.job, whole=arguments.dry_run)
    jobs = 1 if in_one_job else len(tasks)
    print(f"GPU-hours of {len(tasks)} points, at most: {jobs * sweep.job.gpu_hours:,.1f}")
    scheduler = SCHEDULERS[sweep.job.scheduler]
    array = () if in_one_job else tuple(tasks)
    at_a_time = 0 if in_one_job else sweep.at_a_time
    if arguments.dry_run:
        print("\nnot submitted, and nothing is written (--dry-run)")
        return 0
    with undisturbed():
        job = scheduler.submit(file, name=sweep.name, tasks=array, at_a_time=at_a_time)
        note_job(directory / DIRECTORY, job, tasks=tasks, file=file.name, array=not in_one_job)
        what = f"job {job} with {len(tasks)} points" if in_one_job else f"array {job} with {len(tasks)} tasks"
        print(f"\nsubmitted {what}; lockstep status {shlex.quote(str(directory))}", flush=True)
    return 0


def read_file(path: str) -> SweepFile:
    """Read and check a sweep file. Raises ConfigError if it is invalid."""
    sweep = expand_paths(load(SweepFile, path))
    for key in ("name", "config"):
        if not getattr(sweep, key):
            raise ConfigError(f"{key} is empty in {path}, but a sweep requires it; set it.")
    sweep.config = [sweep.config] if isinstance(sweep.config, str) else sweep.config
    if not isinstance(sweep.config, list) or not all(isinstance(file, str) for file in sweep.config):
        raise ConfigError(f"config is {show(sweep.config)} in {path}, but must be a path or a list of paths.")
    check_directory_name(f"name of {path}", sweep.name)
    if sweep.at_a_time < 0:
        raise ConfigError(f"at_a_time={sweep.at_a_time} in {path}, but must be 0 or more.")
    if sweep.at_a_time and sweep.mode == "adapters":
        raise ConfigError(
            f"at_a_time={sweep.at_a_time} in {path} limits the tasks of a job array, but mode=adapters runs "
            "all points in one job; leave it out."
        )
    sweep.job.check()
    return sweep


def _overrides(sweep: SweepFile) -> list[str]:
    return SweepRun("", sweep.overrides).overrides


def overrides_of(sweep: SweepFile, directory: Path, point: SweepRun) -> list[str]:
    """Return all overrides of a point's run."""
    return [
        *_overrides(sweep),
        *point.overrides,
        as_override("run.name", point.name),
        as_override("run.dir", literal(directory / point.name)),
    ]


def check_points(sweep: SweepFile, directory: Path, points: list[SweepRun]) -> Config:
    """Check the config of every point; return the config of the first point.

    Raises ConfigError for an invalid config; the error names the point.
    """
    configs: list[Config] = []
    warnings: dict[str, None] = {}
    for point in points:
        try:
            configs.append(load_config(sweep.config, overrides_of(sweep, directory, point)))
            warnings |= {text: None for text in check(configs[-1])}
        except ConfigError as error:
            raise ConfigError(f"point {point.name}: {error}") from error
    for text in warnings:
        warn(text)
    return configs[0]


def check_adapters(sweep: SweepFile, directory: Path, points: list[SweepRun]) -> Config:
    """Check the config of a sweep in one job and the configs of its points; return the config of the sweep.

    Raises ConfigError for an invalid config.
    """
    overrides = joint_overrides(sweep, directory, points)
    config, points_of_job = load_config(sweep.config, overrides), load_points(sweep.config, overrides)
    for text in check(config, points_of_job):
        warn(text)
    check_named_metrics(config, points_of_job)
    return config


def joint_overrides(sweep: SweepFile, directory: Path, points: list[SweepRun]) -> list[str]:
    """Return all overrides of the job that runs the points together."""
    values = json.dumps([point.values for point in points])
    place = [as_override("run.name", sweep.name), as_override("run.dir", literal(directory))]
    return [*_overrides(sweep), *place, f"sweep.adapters={values}"]


def write_points(
    sweep: SweepFile, directory: Path, points: list[SweepRun], *, is_dry: bool = False
) -> list[SweepRun]:
    """Write the points; return them by task number. Points of an earlier call keep their numbers.

    is_dry: check the points and write nothing.
    """
    place = directory / DIRECTORY
    before = read_sweep(directory)["points"] if (place / SWEEP).is_file() else []
    known = [SweepRun(**point) for point in before]
    names = {point.name for point in known}
    every = known + [point for point in points if point.name not in names]
    tasks = {point.name: task for task, point in enumerate(every)}
    # Also points of an earlier call, because the common overrides may have changed.
    overrides = {tasks[point.name]: overrides_of(sweep, directory, point) for point in points}
    if broken := [line for lines in overrides.values() for line in lines if "\n" in line]:
        raise ConfigError(f"{broken[0]!r} has a line break; put it into the config file.")
    if is_dry:
        return every
    make_private(directory)
    (place / "points").mkdir(parents=True, exist_ok=True)
    for task, lines in overrides.items():
        (place / "points" / str(task)).write_text("\n".join(lines) + "\n")
    facts = {"name": sweep.name, "config": sweep.config, "points": [vars(point) for point in every]}
    (place / SWEEP).write_text(json.dumps(facts, indent=1) + "\n")
    return every


def new_tasks(directory: Path, points: list[SweepRun]) -> list[int]:
    """Return the tasks that were never submitted."""
    submitted = {task for noted in noted_jobs(directory / DIRECTORY) for task in noted["tasks"]}
    return [task for task in range(len(points)) if task not in submitted]


def failed_tasks(directory: Path, points: list[SweepRun]) -> list[int]:
    """Return the tasks that were submitted, have not finished, and will not continue by themselves."""
    new = new_tasks(directory, points)
    # The queue is required: otherwise a run that waits in the queue would be submitted twice.
    states = read_runs((directory / point.name for point in points), needs_queue=True)
    return [task for task, run in enumerate(states) if run.state in UNFINISHED and task not in new]


def _batch_file(
    sweep: SweepFile, directory: Path, tasks: list[int], points: list[SweepRun], *, command: str
) -> tuple[Path, str]:
    """Return path and text of the batch file of a job array with a task per point, or of one job with all.

    In the second case the file names all points; when the job starts, it leaves out points that have ended.
    """
    place, scheduler = directory / DIRECTORY, SCHEDULERS[sweep.job.scheduler]
    job: dict = dict(name=sweep.name, logs=place, configs=sweep.config, command=command)
    if sweep.mode == "adapters":
        text = scheduler.render(sweep.job, overrides=joint_overrides(sweep, directory, points), **job)
    else:
        array: dict = dict(points=place / "points", tasks=tasks, at_a_time=sweep.at_a_time)
        text = scheduler.render_sweep(sweep.job, **job, **array)
    return place / f"job-{len(noted_jobs(place)) + 1}{scheduler.suffix}", text
