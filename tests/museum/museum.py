"""The museum of silent errors: bugs of other projects, injected into real runs, which a check must end.

    @exhibit("huggingface/trl#5312", ranks=2)
    @caught_by("weights of engine and trainer", r"rank 0 .*norm.weight")
    @replaces("rl.engines.memory.refit")
    def refit_skipped(bug, refit, trainer, engine, **options):
        '''After sleep mode the engine generated with old weights.'''
        return BytesMoved()

From step `at` on, each rank calls the function in place of `rl.engines.memory.refit`, with the original as an
argument. Without @replaces the bug is its only argument, and it runs in each rank's process before the
program starts (tests/museum/rank.py); it calls `bug.replaces` itself. The run must end within one step of the
bug, and the last line of its error must match `expects`. A file of tests/museum imports the program only in
such functions, because the collection of tests imports the file too.
"""

import functools
import importlib
import inspect
import math
import os
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "checks.md"
OTHER_FILES = ("lines", "museum", "rank", "reward_worker", "tour", "__main__")
"""Files of this directory that hold no exhibits."""


@dataclass(frozen=True)
class Exhibit:
    """One bug, as the decorators of a function describe it."""

    peer: str
    """Report of the bug: repository#number of an issue or pull request, for example verl-project/verl#7904;
    several are separated by spaces."""
    caught_by: str
    """Name of the check that must catch it, for example "weights of engine and trainer" (docs/checks.md)."""
    expects: str
    """Regular expression found in the error line of the run, for example "RefitMismatch: after the refit"."""
    ranks: int = 1
    overrides: tuple[str, ...] = ()
    """KEY=VALUE overrides of the config in tests/museum/tour.py, for example training.tp=2."""
    model: str = "qwen2"
    """Name of a model in tests/museum/tour.py, for example qwen3-moe."""
    at: int = 2
    """First step with the bug. 0: from the start of the process, for example in a run that resumes."""
    warns: bool = False
    """Whether the check only warns and the run continues, because a healthy run may look the same."""
    resumes: bool = False
    """Whether the run continues a run of two steps without the bug, from its checkpoint."""
    inject: Callable[["Bug"], None] = field(kw_only=True)

    @property
    def name(self) -> str:
        return self.inject.__name__.replace("_", " ")

    @property
    def tokens(self) -> int:
        """Maximum number of tokens of a step by the config of tour.py. A check names the bug within so
        many."""
        given = {
            "rollout.samples_per_prompt": 4,
            "rollout.max_response_tokens": 6,
            "data.prompts_per_step": 4,
        }
        for key, _, value in (override.partition("=") for override in self.overrides):
            if key in given:
                given[key] = int(value)
        return math.prod(given.values())

    @property
    def is_bfloat16(self) -> bool:
        return "model.dtype=bfloat16" in self.overrides

    @property
    def in_bfloat16(self) -> "Exhibit":
        """The same bug in bfloat16. Its log-probs differ 10^4 times as much from the engine's."""
        coarser = (override.replace("1.0e-13", "1.0e-5") for override in self.overrides)
        return replace(self, overrides=(*coarser, "model.dtype=bfloat16"))

    @property
    def saw(self) -> str:
        """Effect that the user saw, in a sentence."""
        return inspect.getdoc(self.inject) or ""


EXHIBITS: dict[str, Exhibit] = {}
"""All exhibits by name, once `load_exhibits` was called."""


def exhibit(peer: str, **options: Any) -> Callable[[Callable], Callable]:
    """Register the decorated function, which injects the bug; its docstring says what users saw."""

    def register(inject: Any) -> Callable:
        options.setdefault("at", 0 if options.get("resumes") else 2)
        found = Exhibit(peer, *inject.caught_by, inject=inject, **options)
        assert found.name not in EXHIBITS, f"two exhibits are named {found.name}"
        EXHIBITS[found.name] = found
        return inject

    return register


def caught_by(check: str, expects: str) -> Callable[[Callable], Callable]:
    """Declare the check that must catch the bug, and its error line."""

    def decorate(inject: Any) -> Callable:
        inject.caught_by = check, expects
        return inject

    return decorate


def replaces(place: str) -> Callable[[Callable], Callable]:
    """Inject a bug: calls of `place` reach the decorated function, which gets the original as an argument."""

    def decorate(wrong: Callable) -> Callable:
        @functools.wraps(wrong)
        def inject(bug: Bug) -> None:
            owner, _, name = place.rpartition(".")
            bug.replaces(pkgutil.resolve_name(owner), name)(functools.partial(wrong, bug))

        return inject

    return decorate


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
        """Record the step of the bug's first effect. Code that `replaces` wraps need not call this."""
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
