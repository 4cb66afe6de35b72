"""Bitwise layers equal torch's within rounding, and a token's result depends on no other token or split."""

import pytest
import torch
import torch.nn.functional as F

from rl.features.bitwise import arithmetic, layers
from tests import bounds

DTYPES = (torch.float32, torch.bfloat16)


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(shape, generator=generator) * 20 - 10
    return (torch.randn(shape, generator=generator) * scale.exp2()).to(dtype)  # 20 binades


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_ignores_order_batch_and_split(dtype):
    x, weight, bias = (
        random(37, 96, dtype=dtype),
        random(50, 96, dtype=dtype, seed=1),
        random(50, dtype=dtype),
    )
    found = layers.linear(x, weight, bias)
    expected = x.double() @ weight.double().T + bias.double()
    error = (found.double() - expected).abs().max()
    assert error <= bounds.of_product(x, weight.T, dtype) + torch.finfo(dtype).eps * expected.abs().max()
    order = torch.randperm(96, generator=torch.Generator().manual_seed(2))
    assert torch.equal(layers.linear(x[:, order], weight[:, order], bias), found)
    assert torch.equal(layers.linear(x[5:6], weight, bias), found[5:6])
    # Output channels do not depend on which others a rank holds.
    assert torch.equal(layers.linear(x, weight[20:33], bias[20:33]), found[:, 20:33])
    # Two ranks hold half of the input channels each: common scales, then the parts are added.
    scale = arithmetic.scale_above(weight, 1)
    weights = [layers.SlicedWeight.scaled(part, scale, 96) for part in weight.chunk(2, 1)]
    halves, rows = x.double().chunk(2, 1), arithmetic.scale_above(x, -1)
    parts = [
        arithmetic.product(arithmetic.slices(part / rows, of.bits, len(of.parts)), of.parts)
        for part, of in zip(halves, weights)
    ]
    total = [sum(both) for both in zip(*parts)]
    whole = arithmetic.combine(total, weights[0].bits) * rows * scale.T + bias.double()
    assert torch.equal(whole.to(dtype), found)


def test_elementwise_functions_do_not_depend_on_layout():
    x = random(7, 33) * 3
    for function in (layers.silu, arithmetic.exp):
        found = function(x.double())
        assert torch.equal(function(x.T.double()).T, found)
        assert torch.equal(torch.stack([function(row) for row in x.double()]), found)
    small = x.double().clamp(-600, 600)
    assert torch.allclose(arithmetic.exp(small), small.exp(), rtol=1e-12)
    assert torch.allclose(
        arithmetic.log(small.abs() + 1e-9), (small.abs() + 1e-9).log(), rtol=1e-13, atol=1e-15
    )
    assert torch.allclose(layers.silu(x), F.silu(x), rtol=1e-6, atol=1e-37)


def test_norm_and_softmax_ignore_order_and_batch():
    x, weight = random(9, 70), random(70, seed=1)
    found = layers.rms_norm(x, weight, 1e-6)
    assert torch.allclose(found, F.rms_norm(x, (70,), weight, 1e-6), rtol=1e-5)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(2))
    assert torch.equal(layers.rms_norm(x[3:4, order], weight[order], 1e-6), found[3:4, order])
    logits = random(9, 300)
    logprobs = layers.log_softmax(logits)
    assert torch.allclose(logprobs, logits.log_softmax(-1), rtol=1e-5, atol=1e-5)
    masked = torch.cat([logits, torch.full((9, 5), float("-inf"))], 1)
    assert torch.equal(layers.log_softmax(masked)[:, :300], logprobs)


def test_attention_ignores_padding_and_other_queries():
    query, key, value = (
        random(2, 7, 4, 16) / 32,
        random(2, 20, 2, 16, seed=1) / 32,
        random(2, 20, 2, 12, seed=2),
    )
    visible = (torch.arange(7) + 14).expand(2, 7)
    found = layers.attention(query, key, value, visible, 0.25)
    seen = torch.arange(20) < visible[0, :, None]
    expected = F.scaled_dot_product_attention(
        *(x.double().transpose(1, 2) for x in (query, key, value)),
        attn_mask=seen,
        scale=0.25,
        enable_gqa=True,
    ).transpose(1, 2)
    assert (found - expected).abs().max() <= bounds.of_sum(20) * value.abs().max()
    alone = layers.attention(query[1:, 3:4], key[1:, :17], value[1:, :17], visible[1:, 3:4], 0.25)
    assert torch.equal(alone, found[1:, 3:4])
    packed = layers.packed_attention(
        query[:, [0, 1, 2]].flatten(0, 1),
        torch.tensor([3, 3]),
        torch.arange(40).view(2, 20),
        torch.tensor([16, 16]),
        lambda slots: (key.flatten(0, 1)[slots], value.flatten(0, 1)[slots]),
        0.25,
    )
    assert torch.equal(packed.view(2, 3, 4, 12), found[:, :3])


def test_experts_equal_the_weighted_sum():
    x, ups, downs = random(11, 16) / 16, random(4, 24, 16, seed=1) / 16, random(4, 16, 12, seed=2)
    routing = layers.RouterOptions(topk=2, score_function="sigmoid", topk_scaling_factor=1.5)
    weights, ids = layers.route(random(11, 4, seed=3) / 99, routing, torch.tensor([0.0, 9.0, 0.0, 0.0]))
    assert (ids == 1).any(1).all()  # the bias selects, but is not a part of the weights
    assert torch.allclose(weights.sum(1), torch.full((11,), 1.5))
    found = layers.experts(x, weights, ids, ups, downs)
    expected = torch.zeros(11, 16, dtype=torch.float64)
    for token in range(11):
        for weight, expert in zip(weights[token], ids[token]):
            gate, up = (ups[expert].double() @ x[token].double()).chunk(2)
            expected[token] += weight * (downs[expert].double() @ (F.silu(gate) * up))
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-6 * expected.abs().max())
    assert torch.equal(layers.experts(x[4:5], weights[4:5], ids[4:5], ups, downs), found[4:5])


def test_groups_of_experts_are_ranked_by_two_best():
    scores = torch.tensor([[9.0, 0.0, 0.0, 0.0, 5.0, 5.0, 4.0, 0.0]])
    routing = layers.RouterOptions(topk=2, num_groups=2, group_topk=1)
    assert sorted(layers.choose(scores, routing)[0].tolist()) == [4, 5]
