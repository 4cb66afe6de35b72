"""Any box of a checkpoint in FP8, with a scale per block of 128 x 128, is dequantised."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from rl.models.boxes import index
from rl.models.layout import COLUMN, ROW, Weight
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
def test_a_box_is_multiplied_by_the_scales_of_its_blocks(box):
    values, scales, expected = quantised(300, 200)
    found = dequantised(values[index(box)], scales[index(blocks_of(box))], box)
    assert torch.equal(found, expected[index(box)])


def load(directory, parameter, cut, tp, rank):
    """Fill one rank's parameter of a matrix a.weight [300, 200]."""
    weight = Weight(("a.weight",), ((300, 200),), "a.weight", "a.weight", cut, layer=0)
    local, pieces = (lambda: [(weight, parameter)]), (lambda weight: weight.megatron_pieces(tp, rank))
    load_hf(str(directory), SimpleNamespace(weights=[weight], local=local, pieces=pieces))


@pytest.mark.parametrize(("cut", "tp", "rank"), [(COLUMN, 1, 0), (COLUMN, 2, 1), (ROW, 2, 1), (ROW, 4, 2)])
def test_a_rank_reads_its_part_of_an_fp8_checkpoint(tmp_path, cut, tp, rank):
    values, scales, expected = quantised(300, 200)
    save_file({"a.weight": values, "a.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    expected = expected.chunk(tp, dim=0 if cut is COLUMN else 1)[rank]
    parameter = torch.full_like(expected, float("nan"))
    load(tmp_path, parameter, cut, tp, rank)
    assert torch.equal(parameter, expected)


def test_fp8_without_scales_is_refused(tmp_path):
    save_file({"a.weight": quantised(300, 200)[0]}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="a.weight in F8_E4M3, .*one scale per block"):
        load(tmp_path, torch.zeros(300, 200), COLUMN, 1, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39])
def test_weights_that_are_not_finite_are_refused(value, tmp_path):
    """Training on them gave NaN at the first step. 1e39 is finite in the file, but infinite in float32."""
    values = torch.zeros(300, 200, dtype=torch.float64)
    values[299, 0] = value
    save_file({"a.weight": values}, tmp_path / "model.safetensors")
    load(tmp_path, torch.zeros(150, 200), COLUMN, 2, 0)  # another rank's rows
    with pytest.raises(
        ValueError, match="model.safetensors has a.weight with NaN or values that are infinite"
    ):
        load(tmp_path, torch.zeros(150, 200), COLUMN, 2, 1)
