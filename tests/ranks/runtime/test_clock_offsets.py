"""Clocks of ranks compared with rank 0's."""

from tests.spawn import run_ranks

PROGRAM = """
import time
import torch.distributed as dist
from rl.features.trace import recorder as trace_recorder

dist.init_process_group("gloo")
group, rank = dist.new_group(backend="gloo"), dist.get_rank()
ahead = rank * 5_000_000_000
trace_recorder.now = lambda: time.monotonic_ns() + ahead
offset, error = trace_recorder.compare_clocks(group)
assert abs(offset + ahead) <= error, (rank, offset, error)  # on one host all clocks are the same
assert (error == 0) is (rank == 0)
dist.barrier()
dist.destroy_process_group()
"""


def test_a_clock_that_is_ahead_is_measured_within_its_bound():
    run_ranks(3, PROGRAM)
