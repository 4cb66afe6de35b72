"""Environment: a container per trajectory, with the tools bash, read and write.

    agents:
      container: {image: /images/python.sif}      # names this environment, unless another one is named
      kwargs: {setup: "cp -r /data /app", directory: /app, test: "python3 /data/check.py"}

`directory` is the working directory after `setup`; the default is the image's. `image`, `setup`, `directory`,
`test`, `reward_file` and `kept` in a row's `extra_info` replace the values of the configuration. The score is
1 if the command `test` exits with status 0. With `reward_file`, the test writes the score to this file of the
container: a number, or a JSON object with `reward` and other numbers, for example
{"reward": 0.5, "passed": 3}. If the file cannot be read, or a number is outside of `reward_range`, the score
is 0.

A policy does not write its own grade:

- After `setup`, all processes of `setup` are ended, and the files are sealed.
- Before the test every process of the container is ended. The test sees the sealed files: shell,
  interpreters, libraries, /tests, /tmp, and all others. For example, a /usr/bin/python3 that the policy
  replaced does not run. Only the working directory and the paths in `kept` are as the policy left them,
  except the paths in `protected` and the installations in PATH (/app/venv for /app/venv/bin). HOME and
  /dev/shm are empty directories. Variables that name code to load, such as PYTHONPATH, keep only directories
  of the system.
- If the working directory is / and `kept` lists nothing, the test sees each directory of the root to which
  the policy wrote, except the system's, /tests, /tmp, and the directories of files that the test's command
  names. Set a `directory`: otherwise, a policy may write beside a file that only the test's program names.
- The reward file is removed before the test, and every process ends before it is read.
- If the answer of a task lies elsewhere, for example in /etc/nginx, list its path in `kept`. The log names
  changed paths that a test did not see. Paths in `kept` and `protected` may be relative to the working
  directory.

Not promised:

- A program of the policy that a test runs or imports has the rights of the test.
- The policy may change everything in the working directory: also tests and their settings (conftest.py,
  pytest.ini) unless `protected` lists them, and files that an installation takes from there by a link or
  `pip install -e`.
- `python -m`, `python -c` and `python < FILE` import from the directory in which they start (`python -P` does
  not). make, uv and npm obey files of this directory, for example a Makefile, and git obeys the settings and
  hooks of the repository.
"""

import json
import logging
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rl.features.agents.integrations.rows import task_of
from rl.features.containers.container import PATH, RunningContainer, find_runtime, stock
from rl.features.containers.image_store import unpack
from rl.sandbox.sandbox import ProgramOutcome

log = logging.getLogger(__name__)

HOME = "/tests-home"
"""Home directory of tests, empty when a test starts."""
_SYSTEM = re.compile(r"/(usr|s?bin|lib(32|64|x32)?|etc)(/|$)")
_LOADED = (
    *("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "BASH_ENV", "ENV"),
    *("PERL5LIB", "RUBYLIB", "NODE_PATH"),
)
"""Variables with paths of code to load. In tests they keep only entries in directories of the system."""
_told: set[str] = set()
"""Logged paths, at most 100: the policy changed them, but tests did not see the changes."""
_MOST_WORDS = 100
"""Maximum number of words of a test's command that are looked up as files."""
_DIRECTORIES_OF_FILES = """
for d in / "$@"; do
    for p; do test -f "$d/$p" && (cd -P -- "$(dirname -- "$d/$p")" && pwd -P); done
done 2>/dev/null; exit 0"""
_SHELL = ["/bin/sh", "-c", 'test -x /bin/bash && exec /bin/bash -c "$1"; exec /bin/sh -c "$1"', "sh"]


class ContainerEnvironment:
    """A container with a shell. Subclasses may replace `reset` and `score`.

    Methods for subclasses have a leading underscore, because every public method is a tool of the policy.
    """

    def __init__(
        self,
        *,
        container: Mapping[str, Any],
        setup: str = "",
        directory: str = "",
        test: str = "",
        reward_file: str = "",
        reward_range: Sequence[float] = (0.0, 1.0),
        kept: Sequence[str] = (),
        protected: Sequence[str] = (),
    ) -> None:
        self._settings, self._range, self._protected = container, reward_range, protected
        self._container: RunningContainer | None = None
        self._defaults = {"image": container["image"], "setup": setup, "directory": directory, "test": test}
        self._defaults |= {"reward_file": reward_file, "kept": kept}
        self.directory = ""
        self.variables: dict[str, str] = {}

    @classmethod
    def prepare(cls, *, container: Mapping[str, Any], **kwargs: Any) -> None:
        """Unpack the image and start a container. Raises ValueError if this machine cannot run it."""
        find_runtime(container["runtime"])
        if container["image"]:
            try:
                containers = stock(tuple(container.items()))
                containers.give_back(containers.take(unpack(container["image"])))
            except OSError as error:
                raise ValueError(str(error)) from error

    def reset(self, row: dict[str, Any]) -> Any:
        task = task_of(row)
        self._begin(task, task.get("image") or self._defaults["image"])
        if self._task["setup"]:
            self._check(self._command(self._task["setup"]), "setup")
        if directory := self._task["directory"]:
            self._check(self._command(f"mkdir -p -- {shlex.quote(directory)}"), "directory")
            self.directory = directory
        if self._task["setup"]:
            assert self._container is not None
            self._container.seal()
        self._find_places()
        return row.get("messages") or row["prompt"]

    def _begin(self, task: Mapping[str, Any], image: str, **limits: int) -> None:
        """Start a trajectory's container. Raises ValueError for a bad image.

        Args:
            task: values of the row, for example {"test": "pytest"}.
            image: path of the container's image.
            limits: limits that replace limits of `agents.container`.
        """
        self._task = {key: task.get(key) or value for key, value in self._defaults.items()}
        self.directory = ""
        if not image:
            raise ValueError("the row has no extra_info.image; set it, or agents.container.image.")
        self._stock = stock(tuple({**self._settings, **limits}.items()))
        self._container = self._stock.take(unpack(image))

    def _find_places(self) -> None:
        """Find which of the policy's files tests see. Call it before the policy's first command.

        If the working directory is / and `kept` lists nothing, the words of the test name its files, alone or
        after another word: /data/check.py in `D=/data; python3 $D/check.py`.
        """
        assert self._container is not None
        self._kept, self._sealed = self._absolute(self._task["kept"]), self._absolute(self._protected)
        (directory,) = self._absolute(["."])
        if directory != "/" or not self._kept:
            self._kept.append(directory)
        if self._kept == ["/"] and (test := self._task["test"]):
            words = re.split(r"[\s;&|<>()'\"`={},:]+", re.sub(r"\$\w+|\$\{\w+\}", "", test))
            named = list(dict.fromkeys(filter(None, words)))[:_MOST_WORDS]
            found = self._container.run(["/bin/sh", "-c", _DIRECTORIES_OF_FILES, "sh", *named]).stdout
            self._sealed += sorted(set(found.splitlines()) - {"/"})
            if "/" not in _told:
                _told.add("/")
                log.warning(
                    "the working directory is /, so tests see every directory that the policy wrote to, but "
                    "for the system's and %s; set agents.kwargs.directory or extra_info.directory, and tests "
                    "see only this one.",
                    ", ".join(self._sealed) or "no other",
                )

    def _absolute(self, paths: Sequence[str]) -> list[str]:
        """Return absolute paths. Relative paths begin at the working directory."""
        assert self._container is not None
        at = os.path.join("/", self.directory or self._container.image.directory)
        return [os.path.normpath(os.path.join(at, path)) for path in paths]

    def _command(self, command: str, *, wall_s: float | None = None) -> ProgramOutcome:
        """Run a command with bash, or with sh if bash is missing; `stdout` includes standard error.

        wall_s: time limit in seconds; None for the container's.
        """
        assert self._container is not None
        shell, variables = [*_SHELL, command], self.variables
        return self._container.run(
            shell, directory=self.directory, variables=variables, wall_s=wall_s, merge=True
        )

    def _put(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file of the container. Raises ValueError if that is impossible."""
        assert self._container is not None
        script = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1" && chmod "$2" "$1"'
        arguments = ["/bin/sh", "-c", script, "sh", path, f"{mode:o}"]
        outcome = self._container.run(arguments, stdin=data, directory=self.directory, merge=True)
        if not outcome.ok:
            raise ValueError(describe(outcome))

    @staticmethod
    def _check(outcome: ProgramOutcome, what: str) -> None:
        """Raise RuntimeError if a command of the task, not of the policy, has failed."""
        if not outcome.ok:
            raise RuntimeError(f"{what} of the task failed: {describe(outcome)[-2000:]}")

    # ---- tools ----

    def bash(self, command: str) -> str:
        """Run a shell command in the container and return what it prints.

        Args:
            command: the command; each one starts in the same directory, with the files that the others left
        """
        return describe(self._command(command))

    def read(self, path: str) -> str:
        """Return the content of a file.

        Args:
            path: path of the file
        """
        assert self._container is not None
        arguments = ["cat", "--", path]
        outcome = self._container.run(arguments, directory=self.directory, merge=True)
        if not outcome.ok:
            raise ValueError(describe(outcome))
        return outcome.stdout

    def write(self, path: str, content: str) -> str:
        """Write a text file, with its directory if there is none.

        Args:
            path: path of the file
            content: the whole new content
        """
        self._put(path, content.encode("utf-8", "replace"))
        return f"{len(content)} characters were written to {path}"

    # ---- end ----

    def score(self) -> dict[str, float]:
        if not self._task["test"]:
            raise ValueError("the row has no extra_info.test; set it, or agents.kwargs.test.")
        return self._judge(self._task["test"], [self._task["reward_file"]])

    def _judge(
        self,
        test: str,
        reward_files: Sequence[str],
        *,
        wall_s: float | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> dict[str, float]:
        """Run a test; return the score by the first existing file of `reward_files`, if any are given, else
        by its exit status.

        The policy may have caused a failure of the test, so a failure gives the score 0. A failed trajectory
        would be left out of training.

        Args:
            wall_s: time limit of the test in seconds; None for the container's.
            variables: environment variables of the test.
        """
        files = [path for path in reward_files if path]
        values = {"acc": 0.0, "test_s": 0.0, "test_timeout": 0.0}
        try:
            self._restore(variables or {})
            self._put_tests()
            assert self._container is not None
            self._check(self._command(f"mkdir -p {HOME}; rm -rf -- {shlex.join(files)}"), "test")
            outcome = self._command(test, wall_s=wall_s)
            self._container.end_processes()
            values |= {"test_s": outcome.seconds, "test_timeout": float(outcome.end == "time")}
            values["acc"] = float(outcome.ok)
            if files:
                values |= self._read_reward(files)
        except (OSError, RuntimeError, ValueError) as error:
            log.warning("a container's test could not be run and counts as failed: %s", error)
            return {"score": 0.0, **values, "acc": 0.0}
        return {"score": values["acc"], **values}

    def _put_tests(self) -> None:
        """Write the files of the test. Raises ValueError or RuntimeError if that is impossible."""

    def _restore(self, variables: Mapping[str, str]) -> None:
        """End the policy's processes, and show the test the sealed files except `kept`."""
        assert self._container is not None
        own = {"PATH": PATH, **self._container.image.variables, **self.variables}
        for name in own.keys() & _LOADED:
            own[name] = ":".join(entry for entry in own[name].split(":") if _SYSTEM.match(entry))
        programs = [os.path.normpath(entry) for entry in own["PATH"].split(":") if entry.startswith("/")]
        unseen, programs = self._container.restore(kept=self._kept, protected=self._sealed, programs=programs)
        self.variables = {**own, "PATH": ":".join(programs) or PATH, "HOME": HOME, **variables}
        for path in sorted(set(unseen) - _told)[: 100 - len(_told)]:
            _told.add(path)
            log.warning(
                "the policy wrote to %r, which tests see as it was before; if it belongs to the answer, "
                "list it in agents.kwargs.kept (a test then trusts what the policy wrote there).",
                path,
            )

    def _read_reward(self, files: Sequence[str]) -> dict[str, float]:
        assert self._container is not None
        script = (
            'for f; do if test -e "$f"; then test -f "$f" && ! test -L "$f" && exec cat -- "$f"; fi; done'
        )
        outcome = self._container.run(["/bin/sh", "-c", script, "sh", *files])
        values, (low, high) = read_reward(outcome.stdout if outcome.ok else ""), self._range
        if not low <= values["score"] <= high:
            raise ValueError(
                f"the reward {values['score']} is outside agents.kwargs.reward_range={[low, high]}; "
                "change the test or the range."
            )
        return values | {"acc": float(values["score"] == 1.0)}

    def close(self) -> None:
        if self._container is not None:
            self._stock.give_back(self._container)


def describe(outcome: ProgramOutcome) -> str:
    """Return the output of a command and, unless its status is 0, how the command ended."""
    limit = f"it exceeded the limit of {outcome.end}; every process of the container was ended"
    return outcome.report(outcome.stdout.rstrip(), limit)


def read_reward(text: str) -> dict[str, float]:
    """Return `score` and other finite numbers of a reward file; score 0 if the file has no number."""
    try:
        found = json.loads(text)
        found = found if isinstance(found, dict) else {"reward": found}
        numbers = {str(k): float(v) for k, v in found.items() if isinstance(v, int | float)}
    except (ValueError, OverflowError, RecursionError):
        return {"score": 0.0}
    if not all(map(math.isfinite, numbers.values())) or ("reward" in found and "reward" not in numbers):
        return {"score": 0.0}
    score = numbers.pop("reward", None)
    return {
        **numbers,
        "score": sum(numbers.values()) / len(numbers) if score is None and numbers else score or 0.0,
    }
