"""A random state per trajectory, for packages that draw from the global one."""

import random
import threading
from types import TracebackType

import numpy as np

_LOCK = threading.Lock()


class PrivateRandom:
    """Context that gives Python and numpy the random states of one trajectory as their global states.

    The trajectories of a worker run in threads of one process. Without this class, the draws of a game would
    depend on the moves of the other games.
    """

    def __init__(self, seed: int) -> None:
        self._states = (random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state())

    def __enter__(self) -> None:
        _LOCK.acquire()
        self._outside = (random.getstate(), np.random.get_state())
        random.setstate(self._states[0])
        np.random.set_state(self._states[1])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._states = (random.getstate(), np.random.get_state())
        random.setstate(self._outside[0])
        np.random.set_state(self._outside[1])
        _LOCK.release()
