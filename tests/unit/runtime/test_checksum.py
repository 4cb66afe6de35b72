"""A checksum of weights: every change counts, and it does not depend on the division into parts."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl.refit import transfer
from rl.runtime import checksum
from rl.runtime.checksum import different, placed_checksum, placed_checksums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_parts_add_up_to_the_whole(dtype):
    whole = (torch.randn(7, 5) * 40).to(dtype)
    parts = [(0, 0, whole[:3, :2]), (0, 2, whole[:3, 2:]), (3, 0, whole[3:4]), (4, 0, whole[4:])]
    total = sum(int(placed_checksum(part, (row, column))) for row, column, part in parts)
    assert (total - int(placed_checksum(whole))) % 2**64 == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.roll(1, 0),
        lambda w: w.roll(2, 1),
        lambda w: torch.cat((w[4:], w[:4])),
        lambda w: w.bfloat16().float(),
        lambda w: torch.where(torch.arange(8)[:, None] == 3, -w, w),
        lambda w: torch.zeros_like(w),
    ],
)
def test_wrong_weights_have_another_checksum(change):
    weights = torch.randn(8, 6)
    assert placed_checksum(change(weights)) != placed_checksum(weights)


def test_vectors_and_stacks_of_matrices_count_by_place():
    vector, stack = torch.randn(6), torch.randn(3, 4, 2)
    parts = int(placed_checksum(vector[:2], (0,))) + int(placed_checksum(vector[2:], (2,)))
    assert (parts - int(placed_checksum(vector))) % 2**64 == 0
    assert placed_checksum(stack.flip(0)) != placed_checksum(stack)
    assert placed_checksum(stack) == placed_checksum(stack.view(12, 2))
    halves = int(placed_checksum(stack[:1], (0, 0, 0))) + int(placed_checksum(stack[1:], (1, 0, 0)))
    assert (halves - int(placed_checksum(stack))) % 2**64 == 0


@pytest.mark.parametrize("alone", [0, 1 << 16])
def test_many_tensors_are_summed_and_compared_as_each_alone(monkeypatch, alone):
    monkeypatch.setattr(checksum, "BUCKET", 200)  # several buckets of one shape
    monkeypatch.setattr(checksum, "ALONE", alone)
    generator = torch.Generator().manual_seed(2)
    wide = torch.randn(40, 12, generator=generator)
    parts = [wide[3 * i : 3 * i + 3, 2:9] for i in range(9)]  # parts of rows
    parts += [wide[i] for i in range(5)] + [wide.bfloat16()[:3, 2:9], wide[0, 0], wide[:30].view(5, 6, 12)]
    starts = [(number, 2 * number)[: part.ndim] for number, part in enumerate(parts)]
    each = [int(placed_checksum(part, start)) for part, start in zip(parts, starts)]
    assert placed_checksums(parts, starts).tolist() == each
    assert placed_checksums([], []).tolist() == []
    others = [part.clone() for part in parts]
    assert different(list(zip(parts, others))) == []
    assert different([(wide[:4, 2:10], wide[:4, 2:10].clone())]) == []  # only one of them is contiguous
    others[4][2, 6] = -others[4][2, 6]
    others[14][0, 0] += 1
    assert different(list(zip(parts, others))) == [4, 14]


class Operations(TorchDispatchMode):
    """Counts the operations within its context: on a GPU each is at least one launch."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_thousand_regions_take_as_many_launches_as_ten():
    """Tens of thousands of regions, one after the other, would take seconds before each generation."""
    counts = []
    for number in (10, 1000):
        parts = [torch.randn(3, 4) for _ in range(number)]
        copies = [torch.empty(3, 4) for _ in range(number)]
        starts = [(place, 0) for place in range(number)]
        with Operations() as sums:
            placed_checksums(parts, starts)
        with Operations() as pack:
            transfer._copy(zip(copies, parts))
        with Operations() as comparison:
            assert different(list(zip(copies, parts))) == []
        # Views launch nothing: each of these tensors is once seen as integers.
        counts.append((sums.count, pack.count, comparison.count))
    assert counts[0] == counts[1], counts
