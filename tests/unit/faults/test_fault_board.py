import pytest
import torch
import torch.distributed as dist

from rl.faults.fault_board import FailedElsewhere, Fault, FaultBoard, may_be_secondary


@pytest.fixture
def boards():
    """Those of three ranks; the first holds the store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield [FaultBoard(dist.PrefixStore("default_pg", store)) for _ in range(3)]
    del store  # boards have connections of their own: nobody else keeps the server alive


def test_the_first_claim_is_the_fault_of_the_run_on_every_rank(boards):
    assert [board.first() for board in boards] == [None] * 3
    mine, late = (
        Fault("error", 1, "rank 1 failed: 'x' is \"no\"\n"),
        Fault("error", 2, "rank 2 lost its connection"),
    )
    assert boards[1].post(mine) == mine
    assert boards[2].post(late) == mine and [board.first() for board in boards] == [mine] * 3


def test_ranks_see_who_knows_and_when_the_case_is_closed(boards):
    boards[0].acknowledge()
    boards[2].acknowledge()
    assert [board.num_acknowledged() for board in boards] == [2] * 3
    assert not boards[1].is_reported()
    boards[0].mark_reported()
    assert boards[1].is_reported()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9999"),
        RuntimeError("Timed out waiting 1800000ms for recv operation to complete"),
        dist.DistBackendError("NCCL communicator was aborted on rank 3"),
        ConnectionResetError("Connection reset by peer"),
        FailedElsewhere("rank 1 failed: NameError: x"),
    ],
)
def test_an_error_that_may_come_of_another_ranks_end_is_an_echo(error):
    assert may_be_secondary(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("connection closed"),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("shape '[3]' is invalid for input of size 4"),
        KeyError("gloo"),
    ],
)
def test_an_error_of_the_ranks_own_is_none(error):
    assert not may_be_secondary(error)
