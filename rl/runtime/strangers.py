"""Connections that have not yet shown the key of their listener.

Every user of a node can connect to a listener of a rank, and may open thousands of connections. A connection
without the key is a stranger: it ends after some seconds, and the oldest one ends if there are more than
`most_strangers()`. A connection that has shown the key is not counted. A client sends its key at once, so it
is served even while strangers connect. For example, if 5,000 strangers connect in a second and 4,096 may
stay, a client has 0.8 seconds to send its key.

This module imports only the standard library.
"""

import asyncio
import resource
from collections.abc import Callable
from typing import Generic, TypeVar

Peer = TypeVar("Peer")

MOST = 4096
"""Largest number of strangers of a listener."""


def most_strangers() -> int:
    """Return the maximum number of strangers of a listener of this process.

    It is at most an eighth of the number of files that the process may open. A rank has several listeners,
    and opens files and connections of its own.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if limit == resource.RLIM_INFINITY else min(MOST, max(16, limit // 8))


class Strangers(Generic[Peer]):
    """The strangers of a listener, in an asyncio loop.

    Args:
        end: closes a connection; called once, unless the connection shows the key or ends earlier.
        seconds: time until a connection must show the key.
    """

    def __init__(self, end: Callable[[Peer], object], seconds: float):
        self._end, self._seconds = end, seconds
        self._most = most_strangers()
        self._timers: dict[Peer, asyncio.TimerHandle] = {}
        """Connection -> the timer that ends it, oldest first."""

    def admit(self, connection: Peer, *, beside: int = 0) -> None:
        """Count a new connection. beside: number of clients with a key that may all connect at once."""
        if len(self._timers) >= self._most + beside:
            self._turn_away(next(iter(self._timers)))
        self._timers[connection] = asyncio.get_running_loop().call_later(
            self._seconds, self._turn_away, connection
        )

    def forget(self, connection: Peer) -> None:
        """Stop counting a connection, because it has shown the key or has ended."""
        if (timer := self._timers.pop(connection, None)) is not None:
            timer.cancel()

    def _turn_away(self, connection: Peer) -> None:
        self.forget(connection)
        self._end(connection)
