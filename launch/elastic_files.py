"""The files by which the nodes of an elastic run agree: a lease per node, and a record per generation.

All are in `<run.dir>/elastic`, so that no node's death takes them away:

    node2-1764.json           the lease of a node's agent, replaced every second while the agent lives
    generation-000003.json    members and layout of the third start of the run, or the end of the run

A generation is created by linking a complete file to its name, which one process can do, also on NFS. Two
agents that both think they lead can therefore not start two different generations of one number. Readers
measure by their own clock for how long a lease has not changed, because the clocks of nodes differ.
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
    """State of an agent and of its node, as the agent states it."""

    key: str
    """Name of the agent, which no other agent had."""
    node: str
    """Name of the node."""
    address: str
    """Name by which the ranks of other nodes reach it."""
    ranks: int
    """Number of ranks that the node can run."""
    job: str
    """Slurm job id, empty outside of Slurm."""
    config: str
    """Hash of the config. Agents of another config are not taken: they belong to another run."""
    started: int
    """Start of the agent in nanoseconds of its node's clock: of two agents on one node, the later counts."""
    beat: int = 0
    ready: bool = False
    """Whether it can start ranks."""
    leaving: bool = False
    """Whether the node was asked to leave: by SIGUSR2 or SIGTERM from Slurm."""
    generation: int = 0
    """Number of the newest generation that the agent knows."""
    code: int | None = None
    """Exit code of the ranks that it ran in this generation; None if they run, or if it is no member."""


@dataclass
class ElasticGeneration:
    """One start of the run, or its end."""

    number: int
    members: list[Lease] = field(default_factory=list)
    """The nodes in the order of their ranks; none at the end of the run."""
    overrides: list[str] = field(default_factory=list)
    """The layout, as overrides."""
    target: int = 0
    """Number of nodes that the run had at its widest."""
    code: int | None = None
    """Exit code of the run, at its end."""
    reason: str = ""
    step: int = 0
    """Step of the newest checkpoint when the generation began."""
    attempts: int = 1
    """Number of generations since that checkpoint that failed without the loss of a node."""

    @property
    def nodes(self) -> list[str]:
        return [member.node for member in self.members]


class Board:
    """The directory as one agent sees it."""

    def __init__(self, run_dir: str, lost_s: float):
        self.directory, self._lost_s = Path(run_dir, DIRECTORY), lost_s
        for directory in (self.directory.parent, self.directory):
            make_private(directory)
        self._seen: dict[str, tuple[int, float, bool]] = {}
        """Key of a lease -> its last beat, when it was first seen, and whether it followed another one."""

    def renew(self, lease: Lease) -> None:
        lease.beat += 1
        self._replace(f"{lease.key}.json", asdict(lease))

    def alive(self) -> list[Lease]:
        """Return the leases that were renewed within lost_s, one per node, ordered by node.

        A lease is known to live from its second content on: it may have been left by an earlier start.
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
        """Do not count seconds during which this agent itself did not run, for example while it was
        stopped."""
        self._seen = {key: (beat, at + seconds, moved) for key, (beat, at, moved) in self._seen.items()}

    def silent_s(self, key: str) -> float:
        """Return the seconds since the last change of a lease."""
        return time.monotonic() - self._seen[key][1] if key in self._seen else 0.0

    def newest(self, known: ElasticGeneration | None) -> ElasticGeneration | None:
        """Return the newest generation, `known` or a later one. A damaged one counts as one without members.

        Raises OSError if a file cannot be read.
        """
        number = 0 if known is None else known.number
        if known is None:  # the names of later ones are known, which is safer than a list on a network disk
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
        """Create the generation unless another agent was first. by: key of the lease of this agent."""
        name = f"{by}.proposal"
        self._replace(name, asdict(generation), sync=True)  # else a node that dies now may leave it empty
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
    """Return the exit code of a node from its ranks' exit codes: 2, a fault's, 75 or 0, the first of them."""
    faults = [code if code > 0 else 128 - code for code in codes if code not in (0, 75)]
    return 2 if 2 in faults else next(iter(faults), 75 if 75 in codes else 0)


def _lease(content: dict | None) -> Lease | None:
    try:
        return Lease(**content or {})
    except TypeError:  # removed meanwhile, or damaged
        return None


def _read(path: Path) -> dict | None:
    """Return the content of a file, None if there is none, {} if it is damaged."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
