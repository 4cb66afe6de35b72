"""The museum of silent errors: bugs of other projects, injected into real runs, which a check must end.

    @exhibit(
        name="refit skipped",
        peer="huggingface/trl#5312",
        saw="After sleep mode the engine generated with old weights.",
        caught_by="weights of engine and trainer",
        expects=r"rank 0 .*model.norm.weight",
        ranks=1,
        overrides=("rollout.tp=1",),
    )
    def refit_skipped(bug):
        from rl.engines import memory

        @bug.replaces(memory, "refit")
        def nothing(refit, trainer, engine, **options):
            return BytesMoved()

The function runs in each rank's process before the program starts (tests/museum/rank.py). What it replaces
behaves as before until step `at`. The run must then end within one step, by an error whose last line matches
`expects`. A file of tests/museum imports the program only within such functions, because the collection of
tests imports it too.
"""

import functools
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "checks.md"
OTHER_FILES = ("museum", "rank", "tour", "__main__")
"""Files of this directory that hold no exhibits."""


@dataclass(frozen=True)
class Exhibit:
    """One bug; the fields are the arguments of `exhibit`."""

    name: str
    peer: str
    """Report of the bug: repository#number of an issue or pull request; several are separated by spaces."""
    saw: str
    """Effect that the user saw, in a sentence."""
    caught_by: str
    """Name of the check that must catch it, as docs/checks.md lists it."""
    expects: str
    """Regular expression found in the error line of the run."""
    inject: Callable[["Bug"], None]
    ranks: int = 1
    overrides: tuple[str, ...] = ()
    """KEY=VALUE overrides of the config in tests/museum/tour.py."""
    model: str = "qwen2"
    """Name of a model in tests/museum/tour.py."""
    at: int = 2
    """Step from which on the bug acts. 0: from the start of the process on."""
    warns: bool = False
    """Whether the check only warns, because a healthy run may look alike; the run then goes on."""
    resumes: bool = False
    """Whether the run continues a run of two steps without the bug, from its checkpoint."""


EXHIBITS: dict[str, Exhibit] = {}
"""All exhibits by name, once `load_exhibits` was called."""


def exhibit(**fields: Any) -> Callable[[Callable[["Bug"], None]], Callable[["Bug"], None]]:
    """Register the decorated function as the injection of an exhibit with these fields."""

    def register(inject: Callable[["Bug"], None]) -> Callable[["Bug"], None]:
        found = Exhibit(inject=inject, **fields)
        assert found.name not in EXHIBITS, f"two exhibits are named {found.name}"
        EXHIBITS[found.name] = found
        return inject

    return register


def load_exhibits() -> dict[str, Exhibit]:
    """Import the files with exhibits, and return the exhibits by name."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem not in OTHER_FILES:
            importlib.import_module(f"tests.museum.{path.stem}")
    return EXHIBITS


class Bug:
    """The switch of an injected bug in one rank's process."""

    def __init__(self, at: int, directory: Path):
        self.at, self._directory = at, directory
        self.step = 0
        """The run's current step, which tests/museum/rank.py keeps; 0 in the start-up."""
        self.rank = int(os.environ["RANK"])
        self._has_acted = False

    @property
    def is_on(self) -> bool:
        return self.step >= self.at

    def acts(self) -> None:
        """Note the step in which the bug acts for the first time. Code that `replaces` wraps need not."""
        if not self._has_acted:
            self._has_acted = True
            with open(self._directory / "acted", "a") as file:
                print(self.step, self.rank, file=file)

    def replaces(self, owner: Any, name: str) -> Callable[[Callable], Callable]:
        """Return a decorator: once the bug is on, calls of owner.name call the decorated function instead.

        Its first argument is the original function, which it may call.
        """
        original = getattr(owner, name)

        def decorate(wrong: Callable) -> Callable:
            @functools.wraps(original)
            def either(*args: Any, **kwargs: Any) -> Any:
                if not self.is_on:
                    return original(*args, **kwargs)
                self.acts()
                return wrong(original, *args, **kwargs)

            setattr(owner, name, either)
            return wrong

        return decorate
