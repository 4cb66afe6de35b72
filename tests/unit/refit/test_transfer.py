"""The calls in which messages are posted, for more ranks than a test can start."""

import pytest
import torch
import torch.distributed as dist

from rl.refit import transfer

WORLD = 40


class Operation:
    """Replaces dist.P2POp, which requires a process group."""

    def __init__(self, post, tensor, peer, group):
        self.sends, self.peer = post is dist.isend, peer


@pytest.fixture
def calls(monkeypatch):
    """The calls of batch_isend_irecv of each rank, lists of (whether it sends, peer), where all ranks
    exchange with all."""

    def of(rank):
        posted = []
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: WORLD)
        monkeypatch.setattr(dist, "P2POp", Operation)
        monkeypatch.setattr(
            dist, "batch_isend_irecv", lambda ops: posted.append([(op.sends, op.peer) for op in ops]) or []
        )
        buffers = {peer: [torch.zeros(1)] * 2 for peer in range(WORLD) if peer != rank}
        transfer.exchange(buffers, buffers)
        return posted

    return [of(rank) for rank in range(WORLD)]


def test_each_of_several_calls_has_at_most_32_operations(calls):
    assert max(len(call) for of_rank in calls for call in of_rank) == 32
    assert all(len(of_rank) > 1 for of_rank in calls)


def test_both_ends_of_a_message_are_in_matching_calls(calls):
    """The n-th calls of all ranks match each other, so no rank waits for a message of a later call."""
    assert len({len(of_rank) for of_rank in calls}) == 1
    for round_of_calls in zip(*calls):
        sent = {(rank, peer) for rank, call in enumerate(round_of_calls) for sends, peer in call if sends}
        received = {
            (peer, rank) for rank, call in enumerate(round_of_calls) for sends, peer in call if not sends
        }
        assert sent == received and sent
