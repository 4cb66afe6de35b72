"""Values that every rank must hold alike, and failures that every rank must share.

A step is replicated control flow: a rank that holds another batch or configuration computes on without an error, and the run
is worth nothing. So ranks compare what they are about to do before each phase (`Agreement.check`), their configuration and
code at the start, and their weights every few steps.
"""

import hashlib
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl.config.options import ConfigError, flatten
from rl.faults.fault_board import Disagreement, FailedElsewhere
from rl.faults.phase_tracker import PHASES, Place


@contextmanager
def fail_together() -> Iterator[None]:
    """If the body raises on any rank, every rank raises after it. Collective over the world.

    For input that each rank reads itself (files that one node may lack): a rank that went on alone would hang in the next
    collective. The body must not be collective where it may raise. ValueError and OSError are about input and become a
    ConfigError, the same on every rank; any other exception goes on where it came from, and is named on the other ranks.
    """
    problem: tuple[bool, str] | None = None
    defect: Exception | None = None
    try:
        yield
    except (ValueError, OSError) as error:
        problem = (True, str(error))
    except Exception as error:
        problem, defect = (False, f"{type(error).__name__}: {error}"), error
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, problem)
    if defect is not None:
        raise defect
    failed = {rank: said for rank, said in enumerate(everyone) if said is not None}
    defects = {rank: text for rank, (is_input, text) in failed.items() if not is_input}
    if defects:
        rank = min(defects)
        raise FailedElsewhere(f"rank {rank} failed: {defects[rank]}")
    if failed:
        where = "" if len(failed) == len(everyone) else f" (on rank {', '.join(map(str, failed))})"
        raise ConfigError(failed[min(failed)][1] + where)


def agree_on_config(config) -> None:
    """ConfigError on every rank if ranks were started with different configurations. Collective over the world."""
    mine = {key: hashlib.sha256(repr(value).encode()).hexdigest() for key, value in flatten(config).items()}
    agree_on_table(mine, "were started differently")


def agree_on_table(mine: Mapping[str, str], reason: str) -> None:
    """ConfigError on every rank, naming the first key and the ranks, if ranks hold different tables. Collective over the world.

    reason: what such ranks did: 'rank 1 and rank 0 <reason>'.
    """
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(mine))
    for key in sorted(set().union(*everyone)):
        odd = [rank for rank, theirs in enumerate(everyone) if theirs.get(key) != everyone[0].get(key)]
        if odd:
            raise ConfigError(
                f"{key} differs between ranks: rank {', '.join(map(str, odd))} and rank 0 {reason}."
            )


# Before each phase ----------------------------------------------------------------------------------------------------

FIELDS = ("phase", "step", "number of phases so far", "configuration", "code", "batch ids")
"""What must be alike, in the order in which a difference is said."""


class Agreement:
    """The comparison before each phase: one all-gather of 8 integers of 64 bits per rank, 64 bytes times the world, on the CPU.

    It has a group of its own, in which nothing else takes place: ranks that come from different phases meet in the same
    collective, of the same size, and learn that they differ. A rank that does not come at all is the watchdog's case.

    Args:
        config: compared anew at each step; it is not meant to change.
        code: a hash of the program's files.
        group: gloo, of the whole world.
    """

    def __init__(self, config: Any, code: str, group: dist.ProcessGroup):
        self._config, self._group = config, group
        self._code = _number(code)
        self._config_hash = 0
        self._own = torch.zeros(len(FIELDS) + 2, dtype=torch.int64)
        self._rows = torch.zeros(dist.get_world_size(), len(self._own), dtype=torch.int64)
        self.begin_step()

    def begin_step(self) -> None:
        self._config_hash = _number(repr(self._config))

    def check(self, place: Place, batch: int, memory: tuple[int, int]) -> tuple[int, int]:
        """Compare with all ranks; returns the largest `memory` of any rank, each number for itself. Collective over the world.

        batch: a number made of the batch's token ids, 0 for a phase without one. memory: bytes in use on the host and
        at most on the device; these may differ.
        Raises Disagreement on every rank, with what differs and on which ranks.
        """
        phase = PHASES.index(place.phase)
        row = (phase, place.step, place.number, self._config_hash, self._code, batch, *memory)
        self._own.copy_(torch.tensor(row, dtype=torch.int64))
        dist.all_gather_into_tensor(self._rows.view(-1), self._own, group=self._group)
        rows = self._rows.numpy()
        differs = (rows[:, : len(FIELDS)] != rows[0, : len(FIELDS)]).any(axis=0)
        if differs.any():
            column = int(differs.argmax())
            raise Disagreement(self._words(FIELDS[column], rows[:, column].tolist(), place))
        host, device = rows[:, len(FIELDS) :].max(axis=0).tolist()
        return host, device

    def _words(self, field: str, values: list[int], place: Place) -> str:
        shown = [PHASES[value] for value in values] if field == "phase" else values
        if field in ("configuration", "code", "batch ids"):
            shown = [f"{value:x}" for value in values]
        return f"ranks disagree on the {field} before {place.words}: {name_odd_ranks(shown, self._hosts())}"

    def _hosts(self) -> list[str]:
        hosts: list = [None] * dist.get_world_size()
        dist.all_gather_object(hosts, platform.node(), group=self._group)
        return hosts


def _number(text: str) -> int:
    """63 bits of a hash."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def name_odd_ranks(values: Sequence, hosts: Sequence[str]) -> str:
    """'rank 3 (node2) has x, the others y'; with one rank against one it cannot be said which is wrong."""
    usual, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        usual = values[0]
    odd = [f"rank {rank} ({hosts[rank]}) has {value}" for rank, value in enumerate(values) if value != usual]
    more = f" and {len(odd) - 8} more" if len(odd) > 8 else ""
    rest = [rank for rank, value in enumerate(values) if value == usual]
    whose = f"rank {rest[0]} ({hosts[rest[0]]})" if len(rest) == 1 else f"the other {len(rest)} ranks"
    return f"{', '.join(odd[:8])}{more}; {whose}: {usual}"


# Weights --------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Sum of the elements' bits as integers, int64 []: any single flipped bit changes it."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(-1).view(integers[tensor.element_size()]).sum(dtype=torch.int64)


def check_replicas(
    model: str, replicas: Iterable[tuple[dist.ProcessGroup, Mapping[str, Tensor]]], control: dist.ProcessGroup
) -> None:
    """Compare weights that data parallel ranks hold alike: one all-gather of 8 bytes per weight within each group.

    model: its name, for the message. replicas: a group and the weights that its ranks hold alike, by name and in one order.
    Raises Disagreement on every rank, with weights and ranks. Collective over the groups and over the world (`control`).
    """
    found: dict[str, list[int]] = {}
    for group, weights in replicas:
        if not weights:
            continue
        mine = torch.stack([checksum(weight) for weight in weights.values()])
        sums = mine.new_empty(group.size(), len(mine))
        dist.all_gather_into_tensor(sums.view(-1), mine, group=group)
        members = dist.get_process_group_ranks(group)
        for name, column in zip(weights, sums.cpu().T.tolist()):
            if len(set(column)) > 1:
                usual, count = Counter(column).most_common(1)[0]
                usual = usual if 2 * count > len(column) else column[0]
                found[name] = [rank for rank, value in zip(members, column) if value != usual]
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found, group=control)
    if not any(everyone):
        return
    ranks = sorted({rank for theirs in everyone for odd in theirs.values() for rank in odd})
    names = sorted({name for theirs in everyone for name in theirs})
    more = f" and {len(names) - 4} more weights" if len(names) > 4 else ""
    raise Disagreement(
        f"{', '.join(names[:4])}{more} of the {model} on rank {', '.join(map(str, ranks))} differ from the other data parallel "
        "replicas (the first, where there are two)"
    )
