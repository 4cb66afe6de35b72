"""Limits of connections that have not shown the key."""

import asyncio
import resource

from rl.runtime import strangers
from rl.runtime.strangers import Strangers, most_strangers


def test_strangers_use_a_share_of_the_files_that_a_process_may_open(monkeypatch):
    for limit, most in ((1 << 20, 4096), (resource.RLIM_INFINITY, 4096), (4096, 512), (1024, 128), (64, 16)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, limit))
        assert most_strangers() == most


def test_the_oldest_stranger_ends_first_and_nobody_who_has_shown_the_key(monkeypatch):
    monkeypatch.setattr(strangers, "MOST", 3)
    ended: list[int] = []

    async def connect() -> None:
        counted = Strangers[int](ended.append, 3600.0)
        for number in range(3):
            counted.admit(number)
        counted.forget(0)
        for number in range(3, 6):
            counted.admit(number)
        assert ended == [1, 2]
        counted.admit(6, beside=1)  # a client that may connect beside the strangers
        assert ended == [1, 2]

    asyncio.run(connect())


def test_a_stranger_ends_after_its_time():
    async def connect() -> None:
        gone = asyncio.Event()
        counted = Strangers[str](lambda stranger: gone.set(), 0.01)
        counted.admit("stranger")
        await asyncio.wait_for(gone.wait(), 60)

    asyncio.run(connect())
