"""Comparison of values that must be identical on all ranks, and failures that all ranks share.

Every rank runs the same control flow. A rank with a different batch or configuration would continue
without an error, and the result would be wrong. Therefore ranks compare configuration and code at the start,
the phase and its batch before each phase (`PhaseAgreement.check`), and their weights every few steps.
"""

import hashlib
import platform
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl.config.options import ConfigError, flatten
from rl.config.schema import Config
from rl.faults.fault_board import Disagreement, FailedElsewhere
from rl.faults.phase_tracker import PHASES, PhaseEntry
from rl.runtime.checksum import bit_sum
from rl.runtime.collectives import any_rank, gather_objects, hash63, is_same_on_all_ranks
from rl.runtime.names import listed


@contextmanager
def fail_together() -> Iterator[None]:
    """Raise on every rank at the end of the `with` block if the block raised on any rank. Collective over the
    world.

    Use it where each rank reads input itself, for example a file that one node may lack. A rank that
    continued alone would hang in the next collective. The body must not call a collective after a point where
    it may raise.

    ValueError and OSError count as invalid input: all ranks raise the same ConfigError. Any other exception
    is raised unchanged where it occurred, and all other ranks raise FailedElsewhere with its text.
    """
    problem: tuple[bool, str] | None = None
    defect: Exception | None = None
    try:
        yield
    except (ValueError, OSError) as error:
        problem = (True, str(error))
    except Exception as error:
        problem, defect = (False, f"{type(error).__name__}: {error}"), error
    if not any_rank(problem is not None):
        return
    problems = gather_objects(problem)
    if defect is not None:
        raise defect
    failed = {rank: found for rank, found in enumerate(problems) if found is not None}
    for rank, (is_input, text) in failed.items():
        if not is_input:
            raise FailedElsewhere(f"rank {rank} failed: {text}")
    if failed:
        where = "" if len(failed) == len(problems) else f" (on rank {', '.join(map(str, failed))})"
        raise ConfigError(failed[min(failed)][1] + where)


def agree_on_config(config: Config) -> None:
    """Raise ConfigError on every rank if the ranks' configurations differ. Collective over the world."""
    mine = {key: hashlib.sha256(repr(value).encode()).hexdigest() for key, value in flatten(config).items()}
    agree_on_table(mine, "were started differently")


def agree_on_table(mine: Mapping[str, str], reason: str) -> None:
    """Raise ConfigError on every rank if the tables of the ranks differ. Collective over the world.

    The message names the first key that differs and its ranks. It ends with `reason`, which describes what
    these ranks did, for example "run different programs".
    """
    if is_same_on_all_ranks(repr(sorted(mine.items()))):
        return
    tables = gather_objects(dict(mine))
    for key in sorted(set().union(*tables)):
        odd = [rank for rank, table in enumerate(tables) if table.get(key) != tables[0].get(key)]
        if odd:
            ranks = ", ".join(map(str, odd))
            raise ConfigError(f"{key} differs between ranks: rank {ranks} and rank 0 {reason}.")


# Before each phase --------------------------------------------------------------------------------------

FIELDS = ("phase", "step", "number of phases so far", "configuration", "code", "batch", "event log")
"""Fields that must match across ranks, in reporting order. The last field must match only within a
replica."""
MEASURES = 3
"""Number of values that are sent with the fields and may differ: bytes on the host and on the device."""


class PhaseAgreement:
    """The comparison before each phase: one all-gather of eleven 64-bit integers per rank, on the CPU.

    The group is used for nothing else. Ranks that are about to enter different phases therefore call the same
    collective with the same size, and find that they differ. The watchdog handles a rank that does not arrive
    at all.

    Args:
        config: hashed again at each step; it must not change.
        code: hashes of the program's files, as one text.
        group: the world on gloo.
        replica_size: number of adjacent ranks that form a replica of the engine.
    """

    def __init__(self, config: Any, code: str, group: dist.ProcessGroup, *, replica_size: int = 1):
        self._config, self._group = config, group
        ranks = torch.arange(dist.get_world_size())
        self._leaders = (ranks - ranks % replica_size).numpy()
        self._code = hash63(code)
        self._config_hash = 0
        self._waited_us = 0
        self.late_s = np.zeros(dist.get_world_size())
        """Seconds by which each rank arrived after the first rank, summed over the comparisons of this step.
        A rank measures how long it waits in a comparison and sends this with the next comparison. So no
        common clock is needed."""
        self._own = torch.zeros(len(FIELDS) + MEASURES + 1, dtype=torch.int64)
        self._rows = torch.zeros(dist.get_world_size(), len(self._own), dtype=torch.int64)
        self.begin_step()

    def begin_step(self) -> None:
        """Hash the configuration for the comparisons of this step, and set `late_s` to 0."""
        self.late_s[:] = 0.0
        self._config_hash = hash63(repr(self._config))

    def check(
        self, entry: PhaseEntry, batch: Mapping[str, int], events: int, memory: Sequence[int]
    ) -> list[int]:
        """Compare phase and batch of all ranks; return the maxima of `memory`. Collective over the world.

        batch: hashes of the batch's parts by name (`Batch.hashes`), none for a phase without a batch.
        events: digest of the replica's last event log (`rl.rollout.events`).
        memory: bytes in use on the host, peak bytes allocated and reserved on the device; these may differ.
        Raises Disagreement on every rank; it names the field and the ranks.
        """
        phase = PHASES.index(entry.phase)
        content = hash63(repr(sorted(batch.items())))
        row = (phase, entry.step, entry.number, self._config_hash, self._code, content, events)
        self._own.copy_(torch.tensor((*row, *memory, self._waited_us), dtype=torch.int64))
        began = time.perf_counter()
        dist.all_gather_into_tensor(self._rows.view(-1), self._own, group=self._group)
        self._waited_us = int(1e6 * (time.perf_counter() - began))
        rows = self._rows.numpy()
        self.late_s += (rows[:, -1].max() - rows[:, -1]) / 1e6  # the rank that arrived first waited longest
        expected = np.repeat(rows[:1, : len(FIELDS)], len(rows), axis=0)
        expected[:, -1] = rows[self._leaders, len(FIELDS) - 1]
        differs = (rows[:, : len(FIELDS)] != expected).any(axis=0)
        if differs.any():
            column = int(differs.argmax())
            if FIELDS[column] == "event log":  # each replica has its own
                ranks = ", ".join(map(str, np.flatnonzero(rows[:, column] != expected[:, column])))
                raise Disagreement(
                    f"ranks disagree on the event log before {entry.label}: rank {ranks} generated other "
                    "tokens than the first rank of its replica"
                )
            field, values = FIELDS[column], rows[:, column].tolist()
            if field == "batch":
                tables = gather_objects(dict(batch), self._group)
                parts = sorted(set().union(*tables), key=lambda part: (part != "ids", part))
                part = next(part for part in parts if len({table.get(part) for table in tables}) > 1)
                field, values = f"batch {part}", [table.get(part, 0) for table in tables]
            odd = self._name_odd_ranks(field, values)
            raise Disagreement(f"ranks disagree on the {field} before {entry.label}: {odd}")
        return rows[:, len(FIELDS) : -1].max(axis=0).tolist()

    def _name_odd_ranks(self, field: str, values: list[int]) -> str:
        shown: list = [PHASES[value] for value in values] if field == "phase" else values
        if field not in FIELDS[:3]:
            shown = [f"{value:x}" for value in values]
        return name_odd_ranks(shown, gather_objects(platform.node(), self._group))


def _usual(values: Sequence[Hashable]) -> Any:
    """Return the value that more than half of the ranks hold; if there is none, the value of the first
    rank."""
    value, count = Counter(values).most_common(1)[0]
    return value if 2 * count > len(values) else values[0]


def name_odd_ranks(values: Sequence, hosts: Sequence[str]) -> str:
    """Return 'rank 3 (node2) has x; the other 7 ranks: y'. With two ranks, either may be wrong."""
    usual = _usual(values)
    odd = [f"rank {rank} ({hosts[rank]}) has {value}" for rank, value in enumerate(values) if value != usual]
    more = f" and {len(odd) - 8} more" if len(odd) > 8 else ""
    rest = [rank for rank, value in enumerate(values) if value == usual]
    others = f"rank {rest[0]} ({hosts[rest[0]]})" if len(rest) == 1 else f"the other {len(rest)} ranks"
    return f"{', '.join(odd[:8])}{more}; {others}: {usual}"


# Weights ------------------------------------------------------------------------------------------------


def check_replicas(
    model: str, replicas: Iterable[tuple[dist.ProcessGroup, Mapping[str, Tensor]]], control: dist.ProcessGroup
) -> None:
    """Raise Disagreement on every rank if replicas of weights differ: an all-gather of 8 bytes per weight.

    model: its name. replicas: groups, each with the weights that its ranks replicate, in the same order.
    Collective over the groups and over `control`, the world.
    """
    found: dict[str, list[int]] = {}
    for group, weights in replicas:
        if not weights:
            continue
        mine = torch.stack([bit_sum(weight) for weight in weights.values()])
        sums = mine.new_empty(group.size(), len(mine))
        dist.all_gather_into_tensor(sums.view(-1), mine, group=group)
        members = dist.get_process_group_ranks(group)
        for name, column in zip(weights, sums.cpu().T.tolist()):
            usual = _usual(column)
            if odd := [rank for rank, value in zip(members, column) if value != usual]:
                found[name] = odd
    if not any_rank(bool(found), control):
        return
    findings = gather_objects(found, control)
    ranks = sorted({rank for theirs in findings for odd in theirs.values() for rank in odd})
    names, where = listed(sorted(set().union(*findings))), ", ".join(map(str, ranks))
    raise Disagreement(
        f"{names} of the {model} on rank {where} differ from the other replicas, or the first of two"
    )


def check_master_weights(model: str, stale: list[str], control: dist.ProcessGroup) -> None:
    """Raise Disagreement on every rank if a rank has weights that are not its rounded master weights.

    stale: their names on this rank. Collective over `control`.
    """
    if any_rank(bool(stale), control):
        found = {rank: names for rank, names in enumerate(gather_objects(stale, control)) if names}
        raise Disagreement(
            f"{listed(next(iter(found.values())))} of the {model} on rank {', '.join(map(str, found))} are "
            "not the optimizer's master weights"
        )
