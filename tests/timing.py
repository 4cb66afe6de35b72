"""Growth of the time of a call with its input, on any processor and beside any load."""

import gc
import time
from collections.abc import Callable, Iterable
from typing import Any

FACTOR = 16
"""Ratio of the long input to the short one."""
LIMIT = FACTOR**1.5
"""Largest growth of a linear time: four times linear growth, 16, and a quarter of quadratic growth, 256."""
TICK_S = 1e-4
"""Shorter times count as this many seconds: page faults and the steps of the clock are of that size."""
REPEATS = 5


def assert_linear(call: Callable[[Any], object], make: Callable[[int], Any], size: int) -> None:
    """Raise AssertionError if the CPU time of `call(make(n))` grows much faster than n up to n = size.

    Compares size with size / 16. Load on the machine can only add to a time, so the least of five counts for
    each size; the calls with the long input end at the first one that is fast enough.
    """
    short, long = make(size // FACTOR), make(size)
    before = max(min(cpu_seconds(call, short) for _ in range(REPEATS)), TICK_S)
    growth = []
    while not growth or min(growth) > LIMIT:
        assert len(growth) < REPEATS, f"{FACTOR} times the input takes {min(growth):.0f} times {before:.1e} s"
        growth.append(cpu_seconds(call, long) / before)


def assert_linear_in_text(
    call: Callable[[str], object],
    unit: str,
    around: Iterable[tuple[str, str]] = (("", ""),),
    size: int = 100_000,
) -> None:
    """Call assert_linear for `unit` repeated up to `size` characters, between each pair of `around`."""
    for before, after in around:
        assert_linear(call, lambda n: before + unit * (n // len(unit)) + after, size)  # noqa: B023


def cpu_seconds(call: Callable[[Any], object], argument: Any) -> float:
    """Return the CPU seconds of this process in one call, without collections of its modules' objects.

    It does not collect before either: in a process that has imported vLLM each collection takes a second.
    """
    gc.disable()
    try:
        start = time.process_time()
        call(argument)
        return time.process_time() - start
    finally:
        gc.enable()
