"""Checkpoints in FP8 with a factor per block of 128 x 128 are multiplied out slice by slice."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from rl.models.layout import COLUMN, ROW, Weight, index
from rl.training import cpu_support

cpu_support.install()

from rl.training.weights import blocks_of, dequantised, load_hf  # noqa: E402


def quantised(rows: int, columns: int):
    """FP8 values, a factor for each block, and the matrix, element by element."""
    generator = torch.Generator().manual_seed(rows)
    values = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // 128), -(-columns // 128), generator=generator) + 0.5
    row, column = torch.arange(rows)[:, None] // 128, torch.arange(columns)[None] // 128
    return values, scales, values.float() * scales[row, column]


BOXES = [
    ((0, 300), (0, 200)),
    ((0, 128), (0, 128)),
    ((5, 6), (199, 200)),
    ((100, 290), (127, 129)),
    ((256, 300), (128, 200)),
]


@pytest.mark.parametrize("box", BOXES, ids=str)
def test_any_box_of_a_matrix_takes_the_factors_of_its_blocks(box):
    values, scales, expected = quantised(300, 200)
    assert torch.equal(
        dequantised(values[index(box)], scales[index(blocks_of(box))], box), expected[index(box)]
    )


def weight_map(weights, parameters, tp, rank):
    return SimpleNamespace(
        weights=weights, local=lambda: zip(weights, parameters), tensor_split=lambda weight: (tp, rank)
    )


@pytest.mark.parametrize(("cut", "tp", "rank"), [(COLUMN, 1, 0), (COLUMN, 2, 1), (ROW, 2, 1), (ROW, 4, 2)])
def test_a_rank_reads_its_part_of_an_fp8_checkpoint(tmp_path, cut, tp, rank):
    values, scales, expected = quantised(300, 200)
    save_file({"a.weight": values, "a.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    weight = Weight(("a.weight",), ((300, 200),), "a.weight", "a.weight", cut, layer=0)
    parameter = torch.full(weight.megatron_shape(tp), float("nan"))
    load_hf(str(tmp_path), weight_map([weight], [parameter], tp, rank))
    assert torch.equal(parameter, expected.chunk(tp, dim=0 if cut is COLUMN else 1)[rank])


def test_fp8_without_factors_is_refused(tmp_path):
    save_file({"a.weight": quantised(300, 200)[0]}, tmp_path / "model.safetensors")
    weight = Weight(("a.weight",), ((300, 200),), "a.weight", "a.weight", COLUMN, layer=0)
    with pytest.raises(ValueError, match="a.weight in FP8, but no a.weight_scale_inv"):
        load_hf(str(tmp_path), weight_map([weight], [torch.zeros(300, 200)], 1, 0))
