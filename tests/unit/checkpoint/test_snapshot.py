"""Copies of a rank's shards on their way to the disk."""

import torch

from rl.checkpoint import snapshot
from rl.checkpoint.shards import Shard, in_file_order, write_shards


def test_a_gpus_shards_are_copied_in_batches(tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    monkeypatch.setattr(snapshot, "host_memory", lambda size: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(snapshot, "BATCH_BYTES", 4 * 100)
    sizes = [30] * 9 + [500, 0] + [30] * 9
    shards = in_file_order(
        Shard(f"t{number}", ((0, size),), torch.randn(2 * size)[::2]) for number, size in enumerate(sizes)
    )
    written = write_shards(tmp_path / "batches", shards, snapshot.Snapshot().in_turn(shards))
    assert written == write_shards(tmp_path / "each", shards)
    assert (tmp_path / "batches").read_bytes() == (tmp_path / "each").read_bytes()
    assert len(waits) == 7  # of 3 and 3 and 3 shards, the large one, the rest with the empty one
