"""Tasks in the format of Harbor (harborframework.com) or Terminal-Bench: a directory per task.

    lockstep data tasks harbor --options '{"tasks": "TASKS"}' --out DIR

    agents:
      environment: rl.features.containers.harbor:Task
      container: {image: /images/debian.sif}       # for tasks without an image in `images`
      kwargs: {images: {"python:3.12": /images/py.sif}}

A node without Docker builds no image. `images` names an image on disk for a task's directory, for task.toml's
docker_image, or for FROM of the Dockerfile, as above for `FROM python:3.12`. In the last case the
Dockerfile's WORKDIR, ENV, COPY, ADD and RUN are carried out when a trajectory begins. Images that were built
before need only WORKDIR and ENV.

A test is run as the format requires: tests/ lies at /tests, and test.sh writes /logs/verifier/reward.txt or
reward.json, while Terminal-Bench's run-tests.sh ends with a status. The test sees the policy's changes only
in WORKDIR and in the paths of `extra_info.kept` or the keyword argument `kept`
(rl.features.containers.environment).

A task's limits of memory, storage and processors hold, up to the limits of `agents.container`. For example,
of 4 GiB stated by a task only 1 GiB holds if agents.container.memory_mib is 1024. A test and a RUN have the
task's time. The agent's time is not applied, because the engine also serves other trajectories meanwhile; nor
are GPUs. When the rows are written, `unmet` says how many tasks state them.
"""

import json
import math
import os
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rl.features.agents.integrations.rows import task_of
from rl.features.containers.environment import ContainerEnvironment

REWARDS = ["/logs/verifier/reward.txt", "/logs/verifier/reward.json"]
_IGNORED = tuple("CMD ENTRYPOINT EXPOSE LABEL USER SHELL HEALTHCHECK VOLUME STOPSIGNAL MAINTAINER".split())


@dataclass(frozen=True)
class TaskDirectory:
    """A task, read from its files."""

    path: Path
    instruction: str
    built: tuple[str, ...]
    """Names of an image with the task's files: the name of the task's directory, and docker_image."""
    base: str
    """Name of the image in FROM; empty without a Dockerfile."""
    steps: tuple[tuple[str, str], ...]
    """Instructions of the Dockerfile after FROM with their arguments."""
    context: Path
    """Directory of the Dockerfile."""
    test: str
    reward_files: tuple[str, ...]
    variables: Mapping[str, str]
    """Environment variables of the test."""
    memory_mib: int
    """Memory that the task states, in MiB; 0 if it states none, as for the limits below."""
    disk_mib: int
    """Storage that the task states, in MiB."""
    cpus: int
    """Number of processors that the task states."""
    build_s: float
    """Time of an instruction RUN, in seconds."""
    test_s: float
    """Time of the test, in seconds."""
    not_applied: tuple[str, ...]
    """Keys of further limits and needs that a container cannot meet."""


def is_task(path: Path) -> bool:
    """Return whether a directory is a task of one of the two formats."""
    return (path / "instruction.md").is_file() or (path / "task.yaml").is_file()


def inside(top: Path, path: Path) -> Path:
    """Return a path of a task without links. Raises ValueError if it leads out of the task's directory."""
    found = path.resolve()
    if not found.is_relative_to(top.resolve()):
        raise ValueError(f"{path} leads out of the task's directory {top}; copy its target there.")
    return found


def read_task(path: Path) -> TaskDirectory:
    """Return a task. Raises ValueError for a directory that is no task, or for unsupported requirements."""
    is_harbor = (path / "instruction.md").is_file()
    if not is_task(path):
        raise ValueError(f"{path} is no task: it has neither instruction.md nor task.yaml.")
    read = ("task.toml", "task.yaml", "instruction.md", "environment", "Dockerfile", "run-tests.sh", "tests")
    for file in (*(path / name for name in read), *(path / "tests").rglob("*")):
        inside(path, file)
    if is_harbor:
        described = tomllib.loads((path / "task.toml").read_text()) if (path / "task.toml").is_file() else {}
        instruction, context = (path / "instruction.md").read_text(), path / "environment"
        test, rewards = "bash /tests/test.sh", tuple(REWARDS)
    else:
        described = yaml.safe_load((path / "task.yaml").read_text())
        instruction, context = described["instruction"], path
        test, rewards = "bash /tests/run-tests.sh", ()
    needed = path / ("tests/test.sh" if is_harbor else "run-tests.sh")
    if not needed.is_file():
        raise ValueError(f"{path} has no {needed.relative_to(path)}, which scores the task.")
    file = inside(path, context / "Dockerfile")
    steps = read_dockerfile(file.read_text(), file) if file.is_file() else []
    base = next((arguments.split()[0] for kind, arguments in steps if kind == "FROM"), "")
    stated = described.get("environment", {})
    verifier = described.get("verifier", {})
    return TaskDirectory(
        path,
        instruction.strip(),
        built=tuple(filter(None, (path.name, stated.get("docker_image")))),
        base=base,
        steps=tuple(step for step in steps if step[0] != "FROM"),
        context=context,
        test=test,
        reward_files=rewards,
        variables={"TEST_DIR": "/tests", **verifier.get("env", {})},
        memory_mib=_mib(stated, "memory", path),
        disk_mib=_mib(stated, "storage", path),
        cpus=math.ceil(stated.get("cpus", 0)),
        build_s=float(stated.get("build_timeout_sec", 0)),
        test_s=float(verifier.get("timeout_sec", described.get("max_test_timeout_sec", 0))),
        not_applied=tuple(
            name
            for name, has in (
                ("agent.timeout_sec", "timeout_sec" in described.get("agent", {})),
                ("max_agent_timeout_sec", "max_agent_timeout_sec" in described),
                ("environment.gpus", stated.get("gpus", 0)),
            )
            if has
        ),
    )


def _mib(stated: Mapping[str, Any], name: str, path: Path) -> int:
    """Return a size in MiB; 0 if it is not stated. For example, `memory = "2G"` gives 2048.

    Raises ValueError for another form.
    """
    if f"{name}_mb" in stated:
        return int(stated[f"{name}_mb"])
    match = re.fullmatch(r"(\d+)\s*([MG])i?B?", text := str(stated.get(name, "0M")), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{path}/task.toml: environment.{name}={text!r} must be a size such as 512M or 2G.")
    return int(match[1]) * (1024 if match[2].upper() == "G" else 1)


def unmet(tasks: Sequence[TaskDirectory]) -> list[str]:
    """Return sentences on limits of these tasks that are not applied, and on settings that the tasks need."""
    out = []
    for name in dict.fromkeys(name for task in tasks for name in task.not_applied):
        number = sum(name in task.not_applied for task in tasks)
        out.append(f"{name} of {number} tasks is not applied.")
    for name, key in (("memory_mib", "memory_mib"), ("disk_mib", "disk_mib"), ("test_s", "timeout_s")):
        if most := max((getattr(task, name) for task in tasks), default=0):
            place = "agents" if key == "timeout_s" else "agents.container"
            bound = "above" if key == "timeout_s" else "at least"
            out.append(f"The largest {name} of a task is {most:g}: {place}.{key} must be {bound} that.")
    return out


def read_dockerfile(text: str, file: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile with one stage. Raises ValueError for any other Dockerfile."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    steps = []
    for line in re.sub(r"\\[ \t]*\n", " ", "\n".join(lines)).splitlines():
        kind, _, arguments = line.strip().partition(" ")
        if not kind or kind.upper() in _IGNORED:
            continue
        kind, arguments = kind.upper(), arguments.strip()
        if kind not in ("FROM", "WORKDIR", "ENV", "ARG", "COPY", "ADD", "RUN") or "<<" in arguments:
            raise ValueError(f"{file}: {line.strip():.80} is not supported; build the image before the run.")
        if kind in ("COPY", "ADD") and ("--from" in arguments or "://" in arguments):
            raise ValueError(f"{file}: {line.strip():.80} needs a build; build the image before the run.")
        steps.append((kind, arguments))
    if sum(kind == "FROM" for kind, _ in steps) != 1:
        raise ValueError(f"{file} must have one FROM; build the image before the run.")
    return steps


class Task(ContainerEnvironment):
    """A task's container; `extra_info.task` of a row is the task's directory."""

    def __init__(
        self,
        *,
        container: Mapping[str, Any],
        images: Mapping[str, str] | None = None,
        reward_range: Sequence[float] = (0.0, 1.0),
        kept: Sequence[str] = (),
        protected: Sequence[str] = (),
    ) -> None:
        super().__init__(container=container, reward_range=reward_range, kept=kept, protected=protected)
        self._images = images or {}
        self._files = self._bytes = 0

    def reset(self, row: dict[str, Any]) -> Any:
        given = task_of(row)
        task = self._read = read_task(Path(given["task"]))
        name = next((name for name in (*task.built, task.base) if name in self._images), "")
        stated = {key: getattr(task, key) for key in ("memory_mib", "disk_mib", "cpus")}
        limits = {key: min(value, self._settings[key] or value) for key, value in stated.items() if value}
        self._is_short = any(limits[key] < stated[key] for key in limits)
        self._begin(given, self._images.get(name) or self._settings["image"], **limits)
        is_built = name in task.built
        for kind, arguments in task.steps:
            self._carry_out(kind, arguments, is_built)
        assert self._container is not None
        self._container.seal()
        self._find_places()
        return [{"role": "user", "content": task.instruction}]

    def _carry_out(self, kind: str, arguments: str, is_built: bool) -> None:
        """Carry out an instruction of the Dockerfile. In a built image, carry out only WORKDIR and ENV."""
        if kind == "WORKDIR":
            at = Path(self.directory or "/", shlex.split(arguments)[0])
            self.directory = "/"
            self._check(self._command(f"mkdir -p -- {shlex.quote(str(at))}"), f"WORKDIR {at}")
            self.directory = str(at)
        elif kind in ("ENV", "ARG"):
            words = shlex.split(arguments)
            pairs = [word.split("=", 1) for word in words if "=" in word] or [[words[0], " ".join(words[1:])]]
            self.variables = {**self.variables, **{key: value for key, value in pairs}}
        elif kind == "RUN" and not is_built:
            command = shlex.join(json.loads(arguments)) if arguments.startswith("[") else arguments
            command = re.sub(r"^(--\S+\s+)+", "", command)
            outcome = self._command(command, wall_s=self._read.build_s or None)
            self._check(outcome, f"RUN {arguments:.80}")
        elif kind in ("COPY", "ADD") and not is_built:
            words = json.loads(arguments) if arguments.startswith("[") else shlex.split(arguments)
            *sources, target = [word for word in words if not word.startswith("--")]
            for source in sources:
                at, pattern = self._read.context, os.path.normpath(f"/{source}").lstrip("/")
                for found in sorted(at.glob(pattern)) if pattern else [at]:
                    is_directory = target.endswith("/") or target == "." or len(sources) > 1
                    self._copy(found, target, is_directory=is_directory)

    def _copy(self, source: Path, target: str, *, is_directory: bool) -> None:
        """Copy a file, or the content of a directory, of the task's directory into the container."""
        if source.is_dir():
            files = {f"{target.rstrip('/')}/{f.relative_to(source)}": f for f in sorted(source.rglob("*"))}
        else:
            files = {f"{target.rstrip('/')}/{source.name}" if is_directory else target: source}
        self._files += len(files)
        for name, file in files.items():
            found = inside(self._read.path, file)
            if not found.is_file():
                continue
            self._bytes += found.stat().st_size
            if self._bytes > self._settings["disk_mib"] << 20 or self._files > self._settings["files"]:
                raise ValueError(f"{self._read.path} exceeds agents.container.disk_mib or files; raise them.")
            self._put(name, found.read_bytes(), mode=found.stat().st_mode & 0o777)

    def score(self) -> dict[str, float]:
        task = self._read
        values = self._judge(
            task.test, task.reward_files, wall_s=task.test_s or None, variables=task.variables
        )
        return {**values, "limits_below_task": float(self._is_short)}

    def _put_tests(self) -> None:
        task, self.directory, directory = self._read, "/", self.directory
        self._check(self._command("rm -rf /tests && mkdir -p /tests /logs/verifier"), "test")
        if (task.path / "tests").is_dir():
            self._copy(task.path / "tests", "/tests", is_directory=True)
        if not task.reward_files:
            self._copy(task.path / "run-tests.sh", "/tests", is_directory=True)
        self.directory = directory
