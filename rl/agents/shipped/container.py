"""Environment: a container per trajectory, with the tools bash, read and write (rl.sandbox.container).

    agents:
      container: {image: /images/python.sif}      # names this environment, unless another one is named
      kwargs: {setup: "cp -r /data /app", test: "python3 /data/check.py"}

A row's `extra_info` may have `image`, `setup`, `test` and `reward_file`, which replace those of the
configuration. The score is 1 if the command `test` exits with status 0; with `reward_file` it is what that
file of the container holds after the test: a number, or a JSON object with `reward` and other numbers.
"""

import json
from collections.abc import Mapping
from typing import Any

from rl.agents.integrations.rows import task_of
from rl.sandbox.container import Container, find_runtime, stock
from rl.sandbox.images import unpack
from rl.sandbox.sandbox import Outcome

_SHELL = ["/bin/sh", "-c", 'test -x /bin/bash && exec /bin/bash -c "$1"; exec /bin/sh -c "$1"', "sh"]


class ContainerEnvironment:
    """A container with a shell. Subclasses may replace `reset` and `score`.

    What they use has a leading underscore: every public method is a tool of the policy.
    """

    def __init__(
        self, *, container: Mapping[str, Any], setup: str = "", test: str = "", reward_file: str = ""
    ) -> None:
        self._settings = container
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
        return self._container.run(
            [*_SHELL, command], directory=self.directory, variables=self.variables, wall_s=wall_s, merge=True
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

    def _judge(self, test: str, reward_files: list[str], *, wall_s: float | None = None) -> dict[str, float]:
        """Run a test; return the score by its exit status, or by the first of the files that exists.

        wall_s: time limit of the test in seconds; None for the container's.
        """
        outcome = self._command(test, wall_s=wall_s)
        values = {
            "acc": float(outcome.ok),
            "test_s": outcome.seconds,
            "test_timeout": float(outcome.end == "time"),
        }
        named = [path for path in reward_files if path]
        if named:
            assert self._container is not None
            found = [self._container.run(["cat", "--", path]) for path in named]
            texts = [one.stdout for one in found if one.ok]
            values |= read_reward(texts[0] if texts else "0")
            values["acc"] = float(values["score"] == 1.0)
        return {"score": values["acc"], **values}

    def close(self) -> None:
        if self._container is not None:
            self._stock.give_back(self._container)


def describe(outcome: Outcome) -> str:
    """Return the output of a command, and how it ended if not with status 0."""
    limit = f"it exceeded the limit of {outcome.end}; every process of the container was ended"
    return outcome.report(outcome.stdout.rstrip(), limit)


def read_reward(text: str) -> dict[str, float]:
    """Return `score` and other numbers of a reward file, 0 if it holds no number."""
    try:
        found = json.loads(text)
    except ValueError:
        return {"score": 0.0}
    if not isinstance(found, dict):
        found = {"reward": found}
    numbers = {str(k): float(v) for k, v in found.items() if isinstance(v, int | float)}
    score = numbers.pop("reward", None)
    return {
        **numbers,
        "score": sum(numbers.values()) / len(numbers) if score is None and numbers else score or 0.0,
    }
