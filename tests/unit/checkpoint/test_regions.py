"""Ranges of a flattened parameter as boxes of Hugging Face tensors, against torch's indexing."""

import itertools

import pytest
import torch

from rl.checkpoint.regions import blocks, regions
from rl.models.boxes import extent, index, volume, whole
from rl.models.layout import COLUMN, ROW, VOCAB, Weight, qkv


@pytest.mark.parametrize("shape", [(7,), (4, 5), (3, 2, 4)])
def test_blocks_are_the_elements_of_a_range_in_order(shape):
    numbers = torch.arange(volume(whole(shape))).view(shape)
    for start, stop in itertools.combinations(range(numbers.numel() + 1), 2):
        found = blocks(start, stop, shape)
        elements = torch.cat([numbers[index(box)].reshape(-1) for box in found])
        assert elements.tolist() == list(range(start, stop))
        assert len(found) <= 2 * len(shape) - 1
    assert blocks(3, 3, shape) == []


@pytest.mark.parametrize(
    "cut, shapes",
    [
        (COLUMN, [(6, 4), (6, 4)]),
        (ROW, [(5, 8)]),
        (VOCAB, [(100, 3)]),  # padded to 128: rank 1 of 2 holds rows that are in no tensor
        (qkv(4, 2, 2), [(8, 3), (4, 3), (4, 3)]),
        (qkv(4, 2, 2), [(8,), (4,), (4,)]),
    ],
)
def test_regions_of_all_ranks_are_the_tensors_once(cut, shapes):
    """Each of three data parallel ranks has a range of every tensor parallel rank's parameter."""
    names = [f"t{i}" for i in range(len(shapes))]
    full = {name: torch.rand(shape) for name, shape in zip(names, shapes)}
    seen = {name: torch.zeros(shape) for name, shape in zip(names, shapes)}
    for tp_rank in range(2):
        weight = Weight(hf=tuple(names), shapes=tuple(shapes), megatron="", vllm="", cut=cut)
        parameter = torch.full(weight.megatron_shape(2), float("nan"))
        pieces = weight.megatron_pieces(2, tp_rank)
        for piece in pieces:
            parameter[index(piece.local_box)] = full[piece.hf][index(piece.hf_box)]
        for start, stop in itertools.pairwise([0, 5, 6, parameter.numel()]):
            for region in regions(pieces, tuple(parameter.shape), start, stop):
                view = region.view(parameter.view(-1)[start:stop])
                assert view.shape == extent(region.box)
                assert torch.equal(view, full[region.hf][index(region.box)])
                seen[region.hf][index(region.box)] += 1
    assert all(torch.equal(count, torch.ones_like(count)) for count in seen.values())
