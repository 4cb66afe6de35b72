"""In which calls messages are posted, for more ranks than a test can start."""

import pytest
import torch
import torch.distributed as dist

from rl.refit import transfer

WORLD = 40


class Operation:
    """In the place of dist.P2POp, which wants a process group."""

    def __init__(self, post, tensor, peer):
        self.sends, self.peer = post is dist.isend, peer


@pytest.fixture
def calls(monkeypatch):
    """rank -> calls of batch_isend_irecv, each a list of (whether it sends, peer), in an exchange of everybody with everybody."""

    def of(rank):
        posted = []
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: WORLD)
        monkeypatch.setattr(dist, "P2POp", Operation)
        monkeypatch.setattr(
            dist, "batch_isend_irecv", lambda ops: posted.append([(op.sends, op.peer) for op in ops]) or []
        )
        buffers = {peer: torch.zeros(1) for peer in range(WORLD) if peer != rank}
        transfer.exchange(buffers, buffers)
        return posted

    return [of(rank) for rank in range(WORLD)]


def test_a_call_has_at_most_32_operations_and_there_are_several(calls):
    assert max(len(call) for of_rank in calls for call in of_rank) == 32
    assert all(len(of_rank) > 1 for of_rank in calls)


def test_both_ends_of_a_message_lie_in_calls_that_wait_for_nothing_else(calls):
    """The n-th calls of all ranks match among themselves: no rank waits in one for a message that another posts in a later."""
    assert len({len(of_rank) for of_rank in calls}) == 1
    for round_of_calls in zip(*calls):
        sent = {(rank, peer) for rank, call in enumerate(round_of_calls) for sends, peer in call if sends}
        received = {
            (peer, rank) for rank, call in enumerate(round_of_calls) for sends, peer in call if not sends
        }
        assert sent == received and sent
