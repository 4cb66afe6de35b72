"""The first fault of a run, shared by all ranks through the job's store.

The first rank to write its fault determines the cause that is reported. Later faults count as its
consequences. The store answers while collectives hang. Unlike a file on a network file system, it shows a
fault to all ranks at once.
"""

import json
import re
from dataclasses import asdict, dataclass

import torch.distributed as dist

from rl.runtime.job_store import JobStore, StoreError

CONNECTION = re.compile(
    r"connection (closed|reset|refused|was)|broken pipe|timed out|socket timeout|gloo|nccl"
    r"|remote process exited|failed to recv",
    re.I,
)
"""Pattern in the message of an error that may be caused by the end of another rank."""


@dataclass(frozen=True)
class Fault:
    kind: str
    """error: an exception; overrun: a phase over its limit; lost: a rank ended; memory: above the limit;
    refused: with roles, one role found the input invalid."""
    rank: int
    """The rank that found the fault."""
    message: str
    """One line that names rank, host, phase and step."""


class FailedElsewhere(RuntimeError):
    """Raised on a rank that ends because another rank failed; the other rank reports the cause."""


class Disagreement(RuntimeError):
    """Raised on every rank when ranks are about to do different things or hold different weights."""


def may_be_secondary(error: BaseException) -> bool:
    """Return whether another rank's end may be the cause: a closed connection, a collective's time-out."""
    if isinstance(error, (FailedElsewhere, StoreError, dist.DistError)):
        return True
    is_io = isinstance(error, (RuntimeError, ConnectionError, TimeoutError))
    return is_io and bool(CONNECTION.search(str(error)))


class FaultBoard:
    """The first fault of the run and the ranks' acknowledgements of it, in the store.

    No method is collective. Each raises StoreError if the process that holds the store has ended.

    Args:
        store: the job's store. The board opens its own connection, because another thread may be waiting on
            the given one.
    """

    def __init__(self, store: JobStore):
        self._store = store.clone("faults")

    def claim(self) -> bool:
        """Return whether this rank is the first to find an overrun, and so reads the heartbeats of all."""
        return self._store.add("finders", 1) == 1

    def post(self, fault: Fault) -> Fault:
        """Post a fault. Return the first fault of the run: this fault, unless another rank was earlier."""
        return _fault(self._store.compare_set("first", "", json.dumps(asdict(fault))))

    def first(self) -> Fault | None:
        """Return the first fault of the run, if there is one."""
        found = self._store.get("first")
        return None if found is None else _fault(found)

    def acknowledge(self) -> None:
        """Acknowledge the first fault: this rank has read it, and has written its stacks if required."""
        self._store.add("seen", 1)

    def num_acknowledged(self) -> int:
        """Return the number of ranks that acknowledged the first fault."""
        return self._store.add("seen", 0)

    def mark_reported(self) -> None:
        """Record that the first fault is in the log, so that ranks may end."""
        self._store.set("reported", "1")

    def is_reported(self) -> bool:
        return self._store.check(["reported"])


def _fault(text: bytes) -> Fault:
    return Fault(**json.loads(text))
