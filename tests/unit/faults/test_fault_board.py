import pytest
import torch
import torch.distributed as dist

from rl.faults.fault_board import FailedElsewhere, Fault, FaultBoard, may_be_secondary
from rl.runtime.job_store import StoreError, own_store


@pytest.fixture
def boards():
    """The boards of three ranks."""
    store = own_store()
    return [FaultBoard(store) for _ in range(3)]


def test_all_ranks_read_the_first_fault(boards):
    assert [board.first() for board in boards] == [None] * 3
    first = Fault("error", 1, "rank 1 failed: 'x' is \"no\"\n")
    assert boards[1].post(first) == first
    assert boards[2].post(Fault("error", 2, "rank 2 lost its connection")) == first
    assert [board.first() for board in boards] == [first] * 3


def test_all_ranks_see_acknowledgements_and_the_report(boards):
    boards[0].acknowledge()
    boards[2].acknowledge()
    assert [board.num_acknowledged() for board in boards] == [2] * 3
    assert not boards[1].is_reported()
    boards[0].mark_reported()
    assert boards[1].is_reported()


def test_errors_that_another_ranks_end_may_cause():
    for error in (
        RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9999"),
        RuntimeError("Timed out waiting 1800000ms for recv operation to complete"),
        dist.DistBackendError("NCCL communicator was aborted on rank 3"),
        ConnectionResetError("Connection reset by peer"),
        FailedElsewhere("rank 1 failed: NameError: x"),
        StoreError("lost the connection to the job's store"),
    ):
        assert may_be_secondary(error), error
    for error in (
        ValueError("connection closed"),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("shape '[3]' is invalid for input of size 4"),
        KeyError("gloo"),
    ):
        assert not may_be_secondary(error), error
