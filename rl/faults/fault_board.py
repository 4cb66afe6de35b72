"""The first fault of a run. Ranks race for it in the store of the process group; what comes after it is its consequence.

The store answers while collectives hang, and unlike files on a network file system it shows a fault to all ranks at once.
"""

import json
import re
from dataclasses import asdict, dataclass

import torch.distributed as dist

CONNECTION = re.compile(
    r"connection (closed|reset|refused|was)|broken pipe|timed out|socket timeout|gloo|nccl|remote process exited|failed to recv",
    re.I,
)
"""In the message of an error that may be the echo of another rank's end."""


@dataclass(frozen=True)
class Fault:
    kind: str
    """error: an exception; overrun: a phase took longer than its limit; lost: a rank has gone; memory: over the host's limit."""
    rank: int
    """Who found it."""
    said: str
    """One line that names rank, host, phase and step."""


class FailedElsewhere(RuntimeError):
    """This rank leaves because another one failed, which says why."""


class Disagreement(RuntimeError):
    """Ranks are not doing the same. Raised on every rank alike."""


def is_echo(error: BaseException) -> bool:
    """Whether the error may come of another rank's end: a closed connection or a collective that timed out."""
    if isinstance(error, (FailedElsewhere, dist.DistError)):
        return True
    return isinstance(error, (RuntimeError, ConnectionError, TimeoutError)) and bool(
        CONNECTION.search(str(error))
    )


class FaultBoard:
    """What ranks tell each other about the end of the run. Nothing here is collective; a method raises dist.DistError when the
    process that holds the store has gone.

    Args:
        store: that of the default process group. A connection of its own is made: another thread may wait on the given one.
    """

    def __init__(self, store: dist.Store):
        self._store = dist.PrefixStore("lockstep-faults", store.clone())

    def claim(self, fault: Fault) -> Fault:
        """The first fault: this one, unless another rank was earlier."""
        return _fault(self._store.compare_set("first", "", json.dumps(asdict(fault))))

    def first(self) -> Fault | None:
        return _fault(self._store.get("first")) if self._store.check(["first"]) else None

    def acknowledge(self) -> None:
        """This rank has seen the first fault and done what it had to do."""
        self._store.add("seen", 1)

    def acknowledged(self) -> int:
        """Ranks that have."""
        return self._store.add("seen", 0)

    def close_case(self) -> None:
        """The first fault has been said: ranks may end."""
        self._store.set("said", "1")

    def is_closed(self) -> bool:
        return self._store.check(["said"])


def _fault(text: bytes) -> Fault:
    return Fault(**json.loads(text))
