"""Rows of held columns reach the ranks that train on their samples."""

import pytest

from tests.spawn import RanksFailed, run_ranks

PROGRAM = """
    import sys
    import numpy as np
    import torch
    import torch.distributed as dist
    from rl.rollout.batches import batch_of
    from rl.rollout.exchange import exchange
    from rl.rollout.samples import Sample, Segment
    from rl.runtime.device import choose_device
    from rl.data.held import ColumnBytes
    from rl.runtime import collectives
    from rl.training import held_transfer
    from rl.training.grid import Grid

    dist.init_process_group("gloo")
    rank, device = dist.get_rank(), choose_device(0)
    collectives.BUFFER = 80  # 10 bytes to each rank at a time, so that a row needs several messages
    tp, dp, pp = 2, 2, 2
    grid = Grid(None, tp, pp, dp, rank % tp, rank // (tp * dp), rank // tp % dp)

    def sample(number):  # of 3 + number tokens, after a prompt of 2
        ids = np.arange(3 + number, dtype=np.int32) + 10 * number
        held = {
            "routes": np.arange((4 + number) * 6, dtype=np.uint8).reshape(-1, 3, 2) + number,
            "kept": np.arange(2 * number, dtype=np.int32),
        }
        return Sample(0, number, (Segment(ids, np.zeros(len(ids), np.float32), ids, held=held),))

    own = [sample(i) for i in range(6) if i % 4 * 2 == rank]  # leaders of engines of tp 2
    prompt = np.ones(2, np.int32)
    batch = batch_of(exchange(own, device), [prompt], samples_per_prompt=6)
    assert batch.held["routes"].holders.tolist() == [0, 2, 4, 6, 0, 2]
    if sys.argv[1] == "swapped" and rank == 2:
        rows = batch.held["routes"].rows
        rows[1] = rows[1]._replace(key=rows[5].key)
    stage = [slice(0, 1), slice(1, 3)]
    needs = {"routes": stage.__getitem__, "kept": [None, slice(None)].__getitem__}
    plans = [[[[0, 1]], [[2]]], [[[3], []], [[], [4, 5]]]]
    moved = [held_transfer.fetch(batch, plan, needs, grid, device.torch) for plan in plans]
    assert all(m.received == m.planned for m in moved)
    again = held_transfer.fetch(batch, plans[0], needs, grid, device.torch)
    assert again == ColumnBytes(), again
    mine = [0, 1, 3] if grid.dp_rank == 0 else [2, 4, 5]
    assert set(batch.held["routes"].local) == set(mine)
    for i in mine:
        values = np.arange((4 + i) * 6, dtype=np.uint8).reshape(-1, 3, 2) + i
        assert (batch.held["routes"].local[i] == values[:, stage[grid.pp_rank]]).all()
    assert set(batch.held["kept"].local) == (set(mine) if grid.is_last_stage else set())
    if grid.is_last_stage:
        kept = batch.held["kept"].of(mine)
        assert kept.tolist() == [k for i in mine for k in range(2 * i)]
    # 8 bytes of key and 2 per token and layer; then 8 and 8 per number of the response.
    sizes = [(8 + (4 + i) * 2 * (1, 2)[grid.pp_rank]) + grid.is_last_stage * (8 + 8 * i)
             for i in mine if batch.held["routes"].holders[i] != rank]
    print(sum(m.received for m in moved), sum(sizes))
    dist.destroy_process_group()
"""


def test_rows_travel_once_to_the_ranks_of_their_samples():
    out = run_ranks(8, PROGRAM, "right")
    for received, expected in (line.split() for line in out):
        assert received == expected != "0"


def test_the_row_of_another_sample_is_an_error():
    with pytest.raises(RanksFailed, match="row of sample 1 that rank . has from rank 2 is that of another"):
        run_ranks(8, PROGRAM, "swapped")
