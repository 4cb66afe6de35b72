"""Diagnosis of which rank is at fault when ranks wait for each other: pure functions of their heartbeats."""

from collections import Counter
from dataclasses import dataclass

from rl.faults.heartbeat import Heartbeat


@dataclass(frozen=True)
class Diagnosis:
    at_fault: tuple[int, ...]
    """Ranks for which the others wait; empty if the heartbeats do not show which."""
    reason: str
    """The property that distinguishes the ranks at fault, for example "behind the others"."""


def lost_ranks(heartbeats: list[Heartbeat | None], silent_s: float) -> list[int]:
    """Return ranks that have ended, or have not changed their heartbeat for more than `silent_s`."""
    return [
        rank
        for rank, beat in enumerate(heartbeats)
        if beat is not None and (beat.process.is_gone() or beat.silent_s > silent_s)
    ]


def reports_loss_of_store(rank: int, heartbeats: list[Heartbeat | None]) -> bool:
    """Return whether this rank reports that rank 0's process with the store cannot be reached.

    The first live rank reports it. From another host it cannot be known whether a rank on the host of rank 0
    lives. Therefore the first rank on another host reports it, too.
    """
    known = [beat for beat in heartbeats if beat is not None]
    alive = [beat for beat in known if not beat.process.is_gone()]
    elsewhere = [beat for beat in alive if beat.process.host != known[0].process.host]
    return rank in {beat.rank for beat in (*alive[:1], *elsewhere[:1])}


def diagnose(heartbeats: list[Heartbeat | None], silent_s: float) -> Diagnosis:
    """Return the ranks for which the others wait.

    The first of these that exist are at fault: lost ranks; ranks that are behind the other ranks of their
    role in the program; ranks that do not wait although others do.
    """
    if lost := lost_ranks(heartbeats, silent_s):
        return Diagnosis(tuple(lost), "ended, or held by native code")
    present = [beat for beat in heartbeats if beat is not None]
    furthest: dict[str, int] = {}
    for beat in present:
        furthest[beat.role] = max(beat.number, furthest.get(beat.role, 0))
    if behind := tuple(beat.rank for beat in present if beat.number < furthest[beat.role]):
        return Diagnosis(behind, "behind the others")
    busy = tuple(beat.rank for beat in present if not beat.waits)
    if 0 < len(busy) < len(present):
        return Diagnosis(busy, "not waiting for others, while they wait")
    return Diagnosis((), "all are at the same place")


def summarize(heartbeats: list[Heartbeat | None], diagnosis: Diagnosis, silent_s: float) -> str:
    """Return one line: the ranks at fault and their phases, then the phases of the ranks that wait; at most
    four of each."""
    shown = [
        _describe(beat, silent_s) for rank in diagnosis.at_fault[:4] if (beat := heartbeats[rank]) is not None
    ]
    more = len(diagnosis.at_fault) - len(shown)
    text = "; ".join(shown) + (f"; and {more} more ranks" if more > 0 else "")
    others = [beat for beat in heartbeats if beat is not None and beat.rank not in diagnosis.at_fault]
    places = Counter((beat.label, beat.at) for beat in others)
    waiting = ", ".join(
        f"{_ranks(others, place)} in {place[0]} at {place[1]}" for place, _ in places.most_common(4)
    )
    if not diagnosis.at_fault:
        return f"{diagnosis.reason}: {waiting}"
    return f"{text} ({diagnosis.reason})" + (f"; waiting: {waiting}" if waiting else "")


def _describe(beat: Heartbeat, silent_s: float) -> str:
    """Return 'rank 1 (node2) in score of step 3 for 612 s at reward.py:12 score', or its last heartbeat."""
    if beat.silent_s > silent_s or beat.process.is_gone():
        return last_heartbeat(beat)
    at = f" at {beat.at}" if beat.at else ""
    return f"rank {beat.rank} ({beat.process.host}) in {beat.label} for {beat.phase_s + beat.age_s:.0f} s{at}"


def last_heartbeat(beat: Heartbeat) -> str:
    """Return 'rank 1 (node2), last heartbeat 90 s ago in score of step 3'."""
    return f"rank {beat.rank} ({beat.process.host}), last heartbeat {beat.age_s:.0f} s ago in {beat.label}"


def _ranks(heartbeats: list[Heartbeat], place: tuple[str, str]) -> str:
    """Return 'ranks 0, 1, 3': the first eight ranks with this label and frame."""
    ranks = [beat.rank for beat in heartbeats if (beat.label, beat.at) == place]
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{more}"
