"""A disk that is full for a while, as an ordinary user can make one: a limit of the size of every file."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(num_bytes: int = 0) -> Iterator[None]:
    """Let every write of this process beyond that position of a file fail with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
