"""Attention over packed rows equals dense attention in float64."""

from types import SimpleNamespace

import pytest
import torch

from rl.training import cpu_support

cpu_support.install()

from rl.training.attention import CoreAttention, PackedRow  # noqa: E402
from rl.training.rows import row_attention, segments  # noqa: E402
from tests import bounds  # noqa: E402
from tests.unit.training.test_rows import CPU, expected_mask, rows  # noqa: E402

CONFIG = SimpleNamespace(
    softmax_type="vanilla",
    window_size=None,
    window_attn_skip_freq=None,
    context_parallel_size=1,
    attention_dropout=0.0,
)
DIM, SCALE = 16, 0.3


def dense(query, key, value, mask):
    """Return the attention computed from its definition, [T, heads * v]."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    weights = scores.masked_fill(~torch.from_numpy(mask), float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


@pytest.mark.parametrize(("kv_heads", "width"), [(4, DIM), (2, DIM), (4, 10)], ids=["mha", "gqa", "mla"])
def test_values_and_gradients_equal_dense_attention(kv_heads, width):
    attention = CoreAttention(CONFIG, layer_number=1, softmax_scale=SCALE)
    for groups, end in rows(4):
        generator = torch.Generator().manual_seed(end)
        inputs = [
            torch.randn(end, heads, d, generator=generator, requires_grad=True)
            for heads, d in ((4, DIM), (kv_heads, DIM), (kv_heads, width))
        ]
        upstream = torch.randn(end, 4 * width, generator=generator)
        keys = {name: torch.from_numpy(array) for name, array in segments(groups).items()}
        packed = PackedRow(attention=row_attention(groups, keys, CPU))
        found = attention(*inputs, packed_seq_params=packed)
        exact = [x.detach().double().requires_grad_() for x in inputs]
        expected = dense(*exact, expected_mask(groups, end))
        error = bounds.of_gradient(1, end + DIM)
        assert (found - expected).norm() <= error * expected.norm()
        gradients = torch.autograd.grad(found, inputs, upstream)
        for gradient, wanted in zip(gradients, torch.autograd.grad(expected, exact, upstream.double())):
            assert (gradient - wanted).norm() <= error * wanted.norm()
