"""How long a function computes, whatever else the machine does."""

import time


def cpu_seconds(function, *args, **kwargs) -> float:
    """CPU seconds of this process in the call; the least of three."""
    seconds = []
    for _ in range(3):
        start = time.process_time()
        function(*args, **kwargs)
        seconds.append(time.process_time() - start)
    return min(seconds)
