"""Which rank is at fault when ranks wait for each other: a pure function of their heartbeats."""

from collections import Counter
from dataclasses import dataclass

from rl.faults.heartbeat import Beat


@dataclass(frozen=True)
class Verdict:
    guilty: tuple[int, ...]
    """Empty: the heartbeats do not tell."""
    reason: str
    """What tells those ranks from the others."""


def lost_ranks(beats: list[Beat | None], now: float, silent_s: float) -> list[int]:
    """Ranks whose process has ended, or whose last heartbeat is more than `silent_s` seconds before `now` (Unix time)."""
    return [
        rank
        for rank, beat in enumerate(beats)
        if beat is not None and (beat.process.is_gone() or now - beat.time > silent_s)
    ]


def judge(beats: list[Beat | None], now: float, silent_s: float) -> Verdict:
    """The ranks for which the others wait. In this order: those that are lost, those that are behind in the program, those
    that do not wait while others do."""
    if lost := lost_ranks(beats, now, silent_s):
        return Verdict(tuple(lost), "ended, or held by native code")
    present = [beat for beat in beats if beat is not None]
    furthest = max((beat.number for beat in present), default=0)
    behind = tuple(beat.rank for beat in present if beat.number < furthest)
    if behind:
        return Verdict(behind, "behind the others")
    busy = tuple(beat.rank for beat in present if not beat.waits)
    if 0 < len(busy) < len(present):
        return Verdict(busy, "not waiting for others, while they wait")
    return Verdict((), "all are at the same place")


def describe(beat: Beat, now: float, silent_s: float) -> str:
    """'rank 1 (node2) in score of step 3 for 612 s at reward.py:12 score', or since when nothing was heard of it."""
    who = f"rank {beat.rank} ({beat.process.host})"
    if now - beat.time > silent_s or beat.process.is_gone():
        return f"{who}, last heartbeat {now - beat.time:.0f} s ago in {beat.place}"
    at = f" at {beat.at}" if beat.at else ""
    return f"{who} in {beat.place} for {now - beat.since:.0f} s{at}"


def summary(
    beats: list[Beat | None], verdict: Verdict, now: float, silent_s: float, *, max_shown: int = 4
) -> str:
    """One line: the ranks at fault and where they are, then where how many others wait."""
    shown = [
        describe(beat, now, silent_s)
        for rank in verdict.guilty[:max_shown]
        if (beat := beats[rank]) is not None
    ]
    more = len(verdict.guilty) - len(shown)
    text = "; ".join(shown) + (f"; and {more} more ranks" if more > 0 else "")
    others = [beat for beat in beats if beat is not None and beat.rank not in verdict.guilty]
    places = Counter((beat.place, beat.at) for beat in others)
    waiting = ", ".join(
        f"{_ranks(others, place)} in {place[0]} at {place[1]}" for place, _ in places.most_common(max_shown)
    )
    if not verdict.guilty:
        return f"{verdict.reason}: {waiting}"
    return f"{text} ({verdict.reason})" + (f"; waiting: {waiting}" if waiting else "")


def _ranks(beats: list[Beat], place: tuple[str, str], max_shown: int = 8) -> str:
    ranks = [beat.rank for beat in beats if (beat.place, beat.at) == place]
    text = ", ".join(map(str, ranks[:max_shown])) + (
        f" and {len(ranks) - max_shown} more" if len(ranks) > max_shown else ""
    )
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
