"""Reads and writes the files through which the nodes of an elastic run agree.

There is one lease per node and one record per generation. All files are in `<run.dir>/elastic` on the shared
disk, so they survive the death of any node:

    node2-1764.json           the lease of a node's agent, replaced every second while the agent lives
    generation-000003.json    members and layout of the third start of the run, or the end of the run

To create a generation, an agent writes a complete file and then links it to the generation's name. Only one
process can create a name, also on NFS. So if two agents both believe that they lead, they still cannot start
two different generations with the same number. Each reader uses its own clock to measure for how long a lease
has not changed, because the clocks of nodes differ.
"""

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rl.sandbox.private_directory import make_private

DIRECTORY = "elastic"
FORGET_S = 3600.0
"""Seconds after which the lease of a dead agent is removed."""


@dataclass
class Lease:
    """State of an agent and of its node, written by the agent itself."""

    key: str
    """Unique name of the agent: node, pid and start time."""
    node: str
    """Name of the node."""
    address: str
    """Host name by which the ranks on other nodes reach this node."""
    ranks: int
    """Number of ranks that the node can run."""
    job: str
    """Slurm job id, empty outside of Slurm."""
    config: str
    """Hash of the config and of `ranks`. An agent with another hash belongs to another run and cannot become
    a member."""
    started: int
    """Start time of the agent, in nanoseconds of its node's clock. Of two agents on one node, the later one
    counts."""
    beat: int = 0
    """Number of renewals of this lease."""
    ready: bool = False
    """Whether the agent can start ranks."""
    leaving: bool = False
    """Whether Slurm asked the node to leave, by SIGUSR2 or SIGTERM."""
    generation: int = 0
    """Number of the newest generation that the agent knows."""
    code: int | None = None
    """Exit code of this node's ranks in this generation. None while they run, or if the node is not a
    member."""


@dataclass
class ElasticGeneration:
    """One start of the run. The last generation instead records the end of the run."""

    number: int
    members: list[Lease] = field(default_factory=list)
    """The member nodes, in the order of their ranks. Empty if this generation is the end of the run."""
    overrides: list[str] = field(default_factory=list)
    """The layout, as config overrides."""
    target: int = 0
    """Largest number of nodes that the run has had; the leader submits a job to get them back."""
    code: int | None = None
    """Exit code of the run if this generation is its end, else None."""
    reason: str = ""
    step: int = 0
    """Step of the newest checkpoint when the generation began."""
    attempts: int = 1
    """Number of generations since that checkpoint that failed without the loss of a node."""

    @property
    def nodes(self) -> list[str]:
        return [member.node for member in self.members]


class Board:
    """The directory of leases and generations, as one agent sees it. lost_s: seconds after which a lease that
    does not change counts as dead."""

    def __init__(self, run_dir: str, lost_s: float):
        self.directory, self._lost_s = Path(run_dir, DIRECTORY), lost_s
        for directory in (self.directory.parent, self.directory):
            make_private(directory)
        self._seen: dict[str, tuple[int, float, bool]] = {}
        """Key of a lease -> (its last beat, when this beat was first seen, whether an earlier beat was
        seen)."""

    def renew(self, lease: Lease) -> None:
        lease.beat += 1
        self._replace(f"{lease.key}.json", asdict(lease))

    def alive(self) -> list[Lease]:
        """Return the leases that were renewed within lost_s, one per node, ordered by node.

        A lease counts as alive only after this agent has seen it change. A lease that never changes may have
        been left behind by an earlier start.
        """
        now, found = time.monotonic(), dict[str, Lease]()
        for path in self.directory.glob("*.json"):
            if path.name.startswith("generation-") or (lease := _lease(_read(path))) is None:
                continue
            known = self._seen.get(lease.key)
            if known is None or known[0] != lease.beat:
                self._seen[lease.key] = known = lease.beat, now, known is not None
            if not known[2] or now - known[1] > self._lost_s:
                if now - known[1] > FORGET_S:
                    path.unlink(missing_ok=True)
                continue
            if lease.node not in found or found[lease.node].started < lease.started:
                found[lease.node] = lease
        return sorted(found.values(), key=lambda lease: lease.node)

    def excuse(self, seconds: float) -> None:
        """Add seconds in which this agent itself did not run (for example, was stopped) to the times of all
        leases, so that the leases do not look older than they are."""
        self._seen = {key: (beat, at + seconds, moved) for key, (beat, at, moved) in self._seen.items()}

    def silent_s(self, key: str) -> float:
        """Return the seconds since the last change of a lease."""
        return time.monotonic() - self._seen[key][1] if key in self._seen else 0.0

    def newest(self, known: ElasticGeneration | None) -> ElasticGeneration | None:
        """Return the newest generation: `known` or a later one.

        A damaged record is returned as a generation without members. Raises OSError if a file cannot be read.
        """
        number = 0 if known is None else known.number
        # Only the first call lists the directory. Later calls open the next name directly, which is safer,
        # because a listing on a network disk may be out of date.
        if known is None:
            numbers = [int(path.stem[-6:]) for path in self.directory.glob(f"generation-{'[0-9]' * 6}.json")]
            number = max(numbers, default=1) - 1
        while (content := _read(self._path(number + 1))) is not None:
            number += 1
            try:
                known = ElasticGeneration(**content | {"members": [Lease(**it) for it in content["members"]]})
            except (KeyError, TypeError):
                known = ElasticGeneration(number, reason="its record is damaged")
        return known

    def propose(self, generation: ElasticGeneration, by: str) -> None:
        """Create the generation, unless another agent has already created this number.

        by: key of this agent's lease.
        """
        name = f"{by}.proposal"
        # Without sync, a node that dies now may leave an empty file.
        self._replace(name, asdict(generation), sync=True)
        with contextlib.suppress(FileExistsError):
            os.link(self.directory / name, self._path(generation.number))
        (self.directory / name).unlink()

    def note(self, name: str, line: dict) -> None:
        """Append a line to a file of the directory."""
        with (self.directory / name).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _path(self, number: int) -> Path:
        return self.directory / f"generation-{number:06d}.json"

    def _replace(self, name: str, content: dict, sync: bool = False) -> None:
        partial = self.directory / f"{name}.partial"
        with partial.open("w") as file:
            file.write(json.dumps(content) + "\n")
            file.flush()
            if sync:
                os.fsync(file.fileno())
        partial.replace(self.directory / name)


def exit_code(codes: Sequence[int]) -> int:
    """Return the exit code of a node, given the exit codes of its ranks.

    The result is 2 if a rank ended with 2 (invalid input), else the first code of a fault, else 75 if a rank
    ended with 75 (stopped), else 0. A rank killed by signal S counts as code 128 + S.
    """
    faults = [code if code > 0 else 128 - code for code in codes if code not in (0, 75)]
    return 2 if 2 in faults else next(iter(faults), 75 if 75 in codes else 0)


def _lease(content: dict | None) -> Lease | None:
    try:
        return Lease(**content or {})
    except TypeError:  # the file was removed meanwhile, or is damaged
        return None


def _read(path: Path) -> dict | None:
    """Return the content of a file; None if the file does not exist, {} if it is damaged."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
