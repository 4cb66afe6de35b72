"""Attention over packed rows equals dense attention in float64."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from rl.training import cpu_support

cpu_support.install()

from rl.training.attention import AttentionForm, CoreAttention, PackedRow  # noqa: E402
from rl.training.rows import row_attention, segments  # noqa: E402
from tests import bounds  # noqa: E402
from tests.unit.training.test_rows import CPU, expected_mask, rows  # noqa: E402

CONFIG = SimpleNamespace(
    softmax_type="vanilla",
    window_size=None,
    window_attn_skip_freq=None,
    context_parallel_size=1,
    attention_dropout=0.0,
    num_attention_heads=4,
    tensor_model_parallel_size=1,
    params_dtype=torch.float32,
)
DIM, SCALE = 16, 0.3


def dense(query, key, value, mask, sinks=None):
    """Return the attention computed from its definition, [T, heads * v]. sinks: [heads]."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    scores = scores.masked_fill(~torch.from_numpy(mask), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(query), 1)], -1)
    weights = scores.softmax(-1)[..., : len(key)]
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


def kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, scale, window_size, enable_gqa):
    """Return what torch's CUDA kernel does: output, log-sum-exp [heads, T] and a random state."""
    assert is_causal and window_size == [-1, 0] and enable_gqa == (query.shape[1] != key.shape[1])
    out, lse = [], []
    for (q0, q1), (k0, k1) in zip(*(zip(c.tolist(), c.tolist()[1:]) for c in (cu_seq_q, cu_seq_k))):
        q, k, v = query[q0:q1], key[k0:k1], value[k0:k1]
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
        scores = torch.einsum("qhd,khd->hqk", q, k).mul(scale).masked_fill(~seen, float("-inf"))
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        lse.append(scores.logsumexp(-1))
    return torch.cat(out), torch.cat(lse, 1), torch.zeros(2)


def kernel_backward(grad_out, query, key, value, out, lse, cu_seq_q, cu_seq_k, scale, **_):
    """Return the gradients that the kernel computes from output and log-sum-exp, by its formulas."""
    grads = [torch.zeros_like(x) for x in (query, key, value)]
    repeats = query.shape[1] // key.shape[1]
    for (q0, q1), (k0, k1) in zip(*(zip(c.tolist(), c.tolist()[1:]) for c in (cu_seq_q, cu_seq_k))):
        q, g, o = query[q0:q1], grad_out[q0:q1], out[q0:q1]
        k, v = (x[k0:k1].repeat_interleave(repeats, 1) for x in (key, value))
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
        scores = torch.einsum("qhd,khd->hqk", q, k).mul(scale)
        p = (scores - lse[:, q0:q1, None]).exp() * seen
        ds = p * (torch.einsum("qhd,khd->hqk", g, v) - (g * o).sum(-1).t()[..., None]) * scale
        grads[0][q0:q1] = torch.einsum("hqk,khd->qhd", ds, k)
        for into, found in (
            (1, torch.einsum("hqk,qhd->khd", ds, q)),
            (2, torch.einsum("hqk,qhd->khd", p, g)),
        ):
            grads[into][k0:k1] = found.unflatten(1, (-1, repeats)).sum(2)
    return grads


def with_sinks() -> SimpleNamespace:
    return SimpleNamespace(**vars(CONFIG) | {"softmax_type": "learnable"})


def bound(signature: inspect.Signature, function):
    """Return the function, called with the arguments by the real one's names."""

    def call(*args, **options):
        return function(**signature.bind(*args, **options).arguments)

    return call


@pytest.mark.parametrize("path", ["cpu", "varlen", "float32"])
def test_sinks_take_a_share_of_the_softmax(path, monkeypatch):
    from torch.nn.attention import varlen

    for name, stand_in in (("_varlen_attn", kernel), ("_varlen_attn_backward", kernel_backward)):
        real = inspect.signature(getattr(varlen, name)._init_fn)
        monkeypatch.setattr(varlen, name, bound(real, stand_in))
    attention = CoreAttention(with_sinks(), layer_number=1, softmax_scale=SCALE)
    for groups, end in rows(4):
        if path == "float32" and any(group.answers for group in groups):
            continue  # `can_share`
        generator = torch.Generator().manual_seed(end)
        inputs = [
            torch.randn(end, heads, DIM, generator=generator, requires_grad=True) for heads in (4, 2, 2)
        ]
        with torch.no_grad():
            attention.softmax_offset.copy_(torch.randn(4, generator=generator))
        form = AttentionForm(SCALE, sinks=attention.softmax_offset)
        keys = {name: torch.from_numpy(array) for name, array in segments(groups).items()}
        row = row_attention(groups, keys, CPU)
        if path == "cpu":
            found = attention(*inputs, packed_seq_params=PackedRow(attention=row))
        else:
            found = getattr(form, f"_{path}")(*inputs, row).flatten(1)
        learned = [*inputs, attention.softmax_offset]
        exact = [x.detach().double().requires_grad_() for x in learned]
        expected = dense(*exact[:3], expected_mask(groups, end), exact[3])
        upstream, error = torch.randn(end, 4 * DIM, generator=generator), bounds.of_gradient(1, end + DIM)
        assert (found - expected).norm() <= error * expected.norm()
        gradients = torch.autograd.grad(found, learned, upstream)
        for gradient, wanted in zip(gradients, torch.autograd.grad(expected, exact, upstream.double())):
            assert (gradient - wanted).norm() <= error * wanted.norm()
