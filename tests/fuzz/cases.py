"""Random input of one kind, tried in a process of its own, and the verdict on what the program made of it."""

import json
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

LIMIT_S = 90
"""Seconds after which a case counts as hung; a case takes at most a few on a quiet machine."""
LONGEST_SENTENCE = 1500
"""Characters of a refusal; a longer one is a dump of the input."""


class Silent(Exception):
    """The program accepted an input and lost or changed a part of it."""


class Unnamed(Exception):
    """A refusal names nothing of what is wrong with an input."""


@dataclass(frozen=True)
class Case:
    """One input."""

    what: str
    """Description of the input, for a person who repeats the case."""
    run: Callable[[], str]
    """Give the input to the program and return what it became; raises ValueError if it is refused."""
    valid: bool | None = None
    """True: a refusal is a fault. False: acceptance is a fault. None: both are right, silence is not."""


@dataclass(frozen=True)
class Verdict:
    number: int
    what: str
    outcome: str
    """`read`, `refused`, or one of FAULTS."""
    detail: str
    seconds: float


FAULTS = ("traceback", "silent", "hang", "died", "refused although valid", "not a sentence", "names nothing")
Kind = Callable[[random.Random, Path], Case]
"""Makes a case from random numbers, in an empty directory."""


def try_cases(kind: Kind, numbers: list[int], *, seed: int) -> Iterator[Verdict]:
    """Yield the verdict on each numbered case. A case is a function of the seed and its number."""
    for number in numbers:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
            yield _try(kind, number, seed, Path(directory))


def _try(kind: Kind, number: int, seed: int, directory: Path) -> Verdict:
    inputs, report = directory / "in", directory / "verdict.json"
    inputs.mkdir()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        with open(directory / "log", "w") as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        try:
            case = kind(random.Random(f"{seed} {number}"), inputs)
            os.write(1, f"{case.what}\n".encode(errors="backslashreplace"))  # for one that hangs or dies
            found = _verdict(case)
            report.write_text(json.dumps(found))
        except BaseException:  # of the maker of cases
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)
    ended = _wait(child, began + LIMIT_S)
    seconds = time.monotonic() - began
    if report.is_file() and report.stat().st_size:
        what, outcome, detail = json.loads(report.read_text())
    else:
        what, outcome = f"case {number}", "died" if ended else "hang"
        detail = (directory / "log").read_text(errors="replace")[-900:]
    return Verdict(number, what, outcome, detail, seconds)


def _wait(child: int, deadline: float) -> bool:
    """Wait for a child until the deadline, then kill its group. Return whether it ended by itself."""
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _verdict(case: Case) -> tuple[str, str, str]:
    try:
        became = case.run()
    except Silent as loss:
        return case.what, "silent", str(loss)
    except Unnamed as refusal:
        return case.what, "names nothing", str(refusal)
    except ValueError as refusal:
        text = str(refusal)
        if type(refusal).__name__ not in ("ValueError", "ConfigError"):
            return case.what, "traceback", traceback.format_exc()[-900:]
        if case.valid:
            return case.what, "refused although valid", text
        is_sentence = re.search(r"\s", text.strip()) and "\n" not in text.strip() and "Traceback" not in text
        outcome = "refused" if is_sentence and len(text) <= LONGEST_SENTENCE else "not a sentence"
        return case.what, outcome, text
    except BaseException:
        return case.what, "traceback", traceback.format_exc()[-900:]
    if case.valid is False:
        return case.what, "silent", f"accepted: {became}"
    return case.what, "read", became


def line(verdict: Verdict) -> str:
    """Return a verdict as a line of JSON."""
    return json.dumps(asdict(verdict))
