"""Environment: a container per trajectory, with the tools bash, read and write (rl.sandbox.container).

    agents:
      container: {image: /images/python.sif}      # names this environment, unless another one is named
      kwargs: {setup: "cp -r /data /app", test: "python3 /data/check.py"}

A row's `extra_info` may have `image`, `setup`, `test` and `reward_file`, which replace those of the
configuration. The score is 1 if the command `test` exits with status 0; with `reward_file` it is what that
file of the container holds after the test: a number, or a JSON object with `reward` and other numbers. If
the file cannot be read, or a number is outside of `reward_range`, the score is 0.

A policy does not write its own grade:

- After `setup`, all its processes are ended, and the files are sealed.
- Before the test every process of the container is ended. The test sees these files as they were sealed:
  the system (/usr, /bin, /sbin, /lib, /etc, /run, /dev without /dev/shm), /tests, the installations in PATH,
  the directory of each script that `test` starts (only the script if the working directory lies there), and
  pytest's settings in the directories above. All other files are as the policy left them. HOME is an empty
  directory, and variables that name code to load, such as PYTHONPATH, keep only directories of the system.
- The reward file is removed before the test, and every process ends before it is read.
- If the answer of a task belongs to the system, such as a package or a file of /etc, list its path in `kept`.
  The log names changed paths that a test did not see.

Not promised:

- A program of the policy that a test runs or imports has the rights of the test.
- `python -m` and `python -c` import from the working directory first (`python -P` does not); make, uv and npm
  obey files that they find there, and git the settings and hooks of the repository.
- What a test starts by another form (`D=/data; python3 $D/check.py`, `cat /data/check.py | python3`), through
  a link in its path, or by a program in PATH that is a link to another installation (uv's Python) is the
  policy's. Files below /tests and /usr are protected in any case. /dev/shm is as the policy left it.
- A script in the working directory is protected; files beside it are not, nor are the paths in `kept`.
"""

import json
import logging
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rl.agents.integrations.rows import task_of
from rl.sandbox.container import PATH, Container, find_runtime, stock
from rl.sandbox.images import unpack
from rl.sandbox.sandbox import Outcome

log = logging.getLogger(__name__)

HOME = "/tests-home"
"""Home directory of tests, empty when a test starts."""
_SYSTEM = re.compile(r"/(usr|s?bin|lib(32|64|x32)?|etc)(/|$)")
_LOADED = ("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "BASH_ENV", "ENV")
_LOADED += ("PERL5LIB", "RUBYLIB", "NODE_PATH")
"""Variables that name code that programs load; tests keep only entries in directories of the system."""
_PROGRAMS = re.compile(
    r"(?:.*/)?(python[\d.]*|(ba|da)?sh|node|perl|ruby|pytest|source|\.|exec|env|time(out)?|nice)"
)
"""Programs of a test's command that start the file that follows."""
_told: set[str] = set()
"""Paths that were already logged because tests did not see the policy's changes to them."""
_SHELL = ["/bin/sh", "-c", 'test -x /bin/bash && exec /bin/bash -c "$1"; exec /bin/sh -c "$1"', "sh"]


class ContainerEnvironment:
    """A container with a shell. Subclasses may replace `reset` and `score`.

    What they use has a leading underscore: every public method is a tool of the policy.
    """

    def __init__(
        self,
        *,
        container: Mapping[str, Any],
        setup: str = "",
        test: str = "",
        reward_file: str = "",
        reward_range: Sequence[float] = (0.0, 1.0),
        kept: Sequence[str] = (),
    ) -> None:
        self._settings, self._range, self._kept = container, reward_range, kept
        self._container: Container | None = None
        self._defaults = {
            "image": container["image"],
            "setup": setup,
            "test": test,
            "reward_file": reward_file,
        }
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
        self._task = {key: task.get(key) or value for key, value in self._defaults.items()}
        self._start(self._task["image"])
        if self._task["setup"]:
            self._check(self._command(self._task["setup"]), "setup")
            self._container.seal()
        return row.get("messages") or row["prompt"]

    def _start(self, image: str, **limits: int) -> None:
        """Start the trajectory's container. Raises ValueError for a bad image.

        limits: limits in place of those of `agents.container`.
        """
        if not image:
            raise ValueError("the row has no extra_info.image; set it, or agents.container.image.")
        self._stock = stock(tuple({**self._settings, **limits}.items()))
        self._container = self._stock.take(unpack(image))

    def _command(self, command: str, *, wall_s: float | None = None) -> Outcome:
        """Run a command with bash, or sh if there is none; standard error is in `stdout` too.

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
    def _check(outcome: Outcome, what: str) -> None:
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
        protected: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> dict[str, float]:
        """Run a test; return the score by its exit status, or by the first of the files that exists.

        The policy may have caused a failure here, so a failure is the score 0 and not a failed trajectory,
        which training would leave out.

        Args:
            wall_s: time limit of the test in seconds; None for the container's.
            protected: further paths that the test sees as before the policy's first action.
            variables: environment variables of the test.
        """
        files = [path for path in reward_files if path]
        values = {"acc": 0.0, "test_s": 0.0, "test_timeout": 0.0}
        try:
            self._restore(test, protected, variables or {})
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

    def _restore(self, test: str, protected: Sequence[str], variables: Mapping[str, str]) -> None:
        """End the policy's processes, and show the test the files that the policy cannot have changed."""
        assert self._container is not None
        image = self._container.image
        own = {"PATH": PATH, **image.variables, **self.variables}
        directory = os.path.normpath(os.path.join("/", self.directory or image.directory))
        loaded = {
            name: [e for e in own[name].split(":") if _SYSTEM.match(e)] for name in _LOADED if name in own
        }
        programs = [os.path.normpath(entry) for entry in own["PATH"].split(":") if entry.startswith("/")]
        files = {
            f: _place_of(f, directory)
            for f in _started(test, directory)
            if not f"{directory}/".startswith(f"{f}/")
        }
        places = {_place_of(f"{entry}/program", directory) for entry in programs if not _SYSTEM.match(entry)}
        own |= {name: ":".join(entries) for name, entries in loaded.items()}
        self.variables = own | {"PATH": ":".join(programs), "HOME": HOME, **variables}
        everything = sorted({*places, *protected, "/tests", HOME} - {"/"})
        for path in self._container.restore(protected=everything, files=files, kept=self._kept):
            if path not in _told:
                _told.add(path)
                log.warning(
                    "the policy wrote to %s, which tests see as it was before; if it belongs to the answer, "
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


def describe(outcome: Outcome) -> str:
    """Return the output of a command, and how it ended if not with status 0."""
    limit = f"it exceeded the limit of {outcome.end}; every process of the container was ended"
    return outcome.report(outcome.stdout.rstrip(), limit)


def read_reward(text: str) -> dict[str, float]:
    """Return `score` and other finite numbers of a reward file, 0 if it holds no number."""
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


def _started(test: str, directory: str) -> list[str]:
    """Return the files and directories that a test's command starts: the first word of each of its commands,
    or the first one after an interpreter that looks like a path. `cd` is followed, a variable is not."""
    lexer = shlex.shlex(test.replace("\n", " ; "), posix=True, punctuation_chars=True)
    try:
        words = list(lexer)
    except ValueError:  # quotes that do not end, which the shell will refuse
        return []
    found, before, is_next = [], ";", True
    for word in words:
        if set(word) <= set("();<>|&"):
            is_next = is_next if set(word) & set("<>&") and word != "&&" else True
        elif before == "cd":
            directory = os.path.normpath(os.path.join(directory, word))
        elif _PROGRAMS.fullmatch(word):
            found += [os.path.normpath(os.path.join(directory, word))] if "/" in word else []
            is_next = True
        elif is_next and " " in word:  # sh -c
            found += _started(word, directory)
        elif is_next and not re.match(r"-|\w+=", word) and ">" not in before:
            if is_path := "/" in word or "." in word:
                found.append(os.path.normpath(os.path.join(directory, word)))
            is_next = not is_path and not (set(before) <= set("();|&"))
        before = word
    return found


def _place_of(file: str, directory: str) -> str:
    """Return the path to protect for a file that tests run: the installation of a program, or the file's
    directory, or only the file if the working directory lies in this directory."""
    parent = os.path.dirname(file)
    wide = os.path.dirname(parent) if os.path.basename(parent) == "bin" else parent
    return next((p for p in (wide, parent) if p != "/" and not f"{directory}/".startswith(f"{p}/")), file)
