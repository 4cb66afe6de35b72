"""The calls that post messages, for more ranks than a test can start."""

from types import SimpleNamespace

import torch
import torch.distributed as dist

from rl.refit import transfer
from rl.refit.plan import Copy

WORLD = 40


class Operation:
    """Replaces dist.P2POp, which requires a process group."""

    def __init__(self, post, tensor, peer, group):
        self.sends, self.peer = post is dist.isend, peer


def test_calls_of_all_ranks_match_and_are_small(monkeypatch):
    """The n-th calls of all ranks match each other, so no rank waits for a message of a later call."""
    posted: list[list] = []
    monkeypatch.setattr(dist, "get_world_size", lambda: WORLD)
    monkeypatch.setattr(dist, "P2POp", Operation)
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: posted[-1].append(operations) or [])
    for rank in range(WORLD):
        posted.append([])
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        buffers = {peer: [torch.zeros(1)] * 2 for peer in range(WORLD) if peer != rank}
        transfer.exchange(buffers, buffers)
    assert len({len(calls) for calls in posted}) == 1 < len(posted[0])
    for calls in zip(*posted):
        assert max(map(len, calls)) <= 32
        messages = [(op.sends, rank, op.peer) for rank, call in enumerate(calls) for op in call]
        sent = {(rank, peer) for sends, rank, peer in messages if sends}
        assert sent and sent == {(peer, rank) for sends, rank, peer in messages if not sends}


def test_copies_within_a_rank_are_made_in_groups(monkeypatch):
    """Sources that are computed, such as merged weights, do not exist all at once."""
    sizes, copy = [], transfer._copy

    def counted(pairs):
        sizes.append(sum(source.nbytes for _, source in pairs))
        copy(pairs)

    monkeypatch.setattr(transfer, "_copy", counted)
    monkeypatch.setattr(transfer, "LOCAL_BYTES", 100)
    whole = ((0, 4), (0, 4))
    copies = [Copy(n, f"weight {n}", whole, whole) for n in range(7)]
    sources = {n: torch.full((4, 4), float(n)) for n in range(7)}
    destinations = {n: torch.full((4, 4), -1.0) for n in range(7)}
    plan = SimpleNamespace(copies=copies, batches=[], bytes_sent=0, bytes_received=0)
    done = transfer.transfer(plan, sources, destinations, torch.device("cpu"))
    assert done.local == 7 * 64 and sizes == [128, 128, 128, 64]
    assert all(torch.equal(destinations[n], sources[n]) for n in range(7))
