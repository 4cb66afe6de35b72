"""A base in FP8 computes and learns what its dequantised values do, in a quarter of the memory of float32."""

from pathlib import Path

import pytest
import torch

from rl.features.adapters.fp8_base import quantised
from rl.models.boxes import index, whole
from rl.models.layout import COLUMN, ROW, Weight, assemble, cuts_fp8_blocks, qkv
from rl.training.weights import dequantised
from tests import bounds
from tests.checkpoints import SIZES, save_tiny
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "fp8_base_worker.py"


def test_blocks_are_quantised_once():
    matrix = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    matrix[:128, :128] = 0
    values, factors = quantised(matrix)
    assert values.dtype is torch.float8_e4m3fn and factors.shape == (2, 3)
    once = dequantised(values, factors, whole(values.shape))
    assert ((once - matrix).abs() <= matrix.abs() / 16 + factors.max() / 512).all()  # 3 bits of mantissa
    again = dequantised(*quantised(once), whole(values.shape))
    torch.testing.assert_close(again, once, rtol=1e-6, atol=0)


def values_of(matrix: torch.Tensor) -> torch.Tensor:
    return dequantised(*quantised(matrix), whole(matrix.shape))


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("size", [64, 128, 192, 256, 512, 576])
@pytest.mark.parametrize("kind", ["gate_up", "row", "qkv"])
def test_values_depend_on_layouts_only_if_blocks_are_cut(kind, size, tp):
    cut, shapes = {
        "gate_up": (COLUMN, ((size, 200), (size, 200))),
        "row": (ROW, ((200, size),)),
        "qkv": (qkv(8, 4, size // 8), ((size, 200), (size // 2, 200), (size // 2, 200))),
    }[kind]
    weight = Weight(tuple("abc"[: len(shapes)]), shapes, "", "", cut, layer=0)
    generator = torch.Generator().manual_seed(size)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in zip(weight.hf, weight.shapes)}

    def parameter(tp: int, rank: int) -> torch.Tensor:
        found = torch.zeros(weight.megatron_shape(tp))
        for piece in weight.megatron_pieces(tp, rank):
            found[index(piece.local_box)] = tensors[piece.hf][index(piece.hf_box)]
        return found

    parts = assemble(weight, [values_of(parameter(tp, rank)) for rank in range(tp)])
    expected = assemble(weight, [values_of(parameter(1, 0))])
    differs = any((parts[name] != expected[name]).any() for name in expected)
    assert cuts_fp8_blocks(weight, tp) == differs
    assert not cuts_fp8_blocks(weight, 1)


@pytest.mark.parametrize(
    "family, layout, options",
    [
        ("DeepseekV3ForCausalLM", "2x1x2", ["training.recompute=full"]),
        pytest.param("Qwen2ForCausalLM", "1x2x1", ["training.recompute=none"], marks=pytest.mark.slow),
    ],
)
def test_a_base_in_fp8_is_its_dequantised_values(tmp_path, family, layout, options):
    checkpoint = save_tiny(family, tmp_path / "model", seed=1)
    run_ranks(2, WORKER, checkpoint, tmp_path, layout, *options, timeout=300)
    found = torch.load(tmp_path / "found.pt")
    fp8, model = found["fp8"], found["model"]
    assert torch.equal(fp8["logprobs"], model["logprobs"])
    for name, expected in model["gradient"].items():  # the hooks change the order of sums of gradients
        difference = (fp8["gradient"][name] - expected).norm() / (expected.norm() + 1e-3)
        assert difference <= bounds.of_gradient(3, SIZES["hidden_size"]), name
    assert fp8["checksums"] == model["checksums"] != {}
    print("bytes of the linear layers", fp8["bytes"], model["bytes"])
    assert fp8["bytes"] < 0.3 * model["bytes"]  # of float32
