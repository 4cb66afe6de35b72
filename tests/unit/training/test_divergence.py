"""Divergences of the chunked head against float64 autograd on all logits at once."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from rl.features.teachers.divergence import Targets, head_rows, linear_divergence, top_k, top_k_divergence
from rl.objectives.distillation import divergence_of, jensen_shannon, log_ratio_advantages
from rl.training.logprobs import Softmax
from tests import bounds

T, H, TEACHER_H, V, ROWS, K = 13, 8, 6, 50, 64, 5
NAMES = ("reverse_kl", "forward_kl", "jensen_shannon")
BETA, TEMPERATURE = 0.3, 0.8


@pytest.fixture(scope="module")
def group():
    """A tensor parallel group of one rank."""
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1)


def inputs():
    """hidden and weight of policy and teacher (the teacher's rows from V on are padding); gradients [T]."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    return draw(T, H), draw(ROWS, H) / 2, draw(T, TEACHER_H), draw(ROWS, TEACHER_H) / 2, draw(T)


def reference(hidden, weight, teacher_hidden, teacher_weight, upstream, *, name, k=0):
    """(divergence, gradient of hidden, gradient of weight) in float64, from the formula in the paper."""
    hidden, weight = (t.double().requires_grad_() for t in (hidden, weight))
    p = torch.softmax(hidden @ weight[:V].T / TEMPERATURE, -1)
    q = torch.softmax(teacher_hidden.double() @ teacher_weight[:V].double().T / TEMPERATURE, -1)
    if k:
        ids = q.topk(k).indices
        p, q = (torch.cat([x.gather(1, ids), 1 - x.gather(1, ids).sum(1, keepdim=True)], 1) for x in (p, q))

    def kl(a, b):
        return (a * (a.log() - b.log())).sum(-1)

    m = BETA * q + (1 - BETA) * p
    mixed = BETA * kl(q, m) + (1 - BETA) * kl(p, m)
    found = {"reverse_kl": kl(p, q), "forward_kl": kl(q, p), "jensen_shannon": mixed}[name]
    found.backward(upstream.double())
    return found.detach(), hidden.grad, weight.grad


def chunked(hidden, weight, teacher_hidden, teacher_weight, upstream, *, name, k=0, group, chunk):
    """The same three of the chunked head."""
    hidden, weight = (t.clone().requires_grad_() for t in (hidden, weight))
    softmax = Softmax(TEMPERATURE, V, group, chunk)
    function, given = linear_divergence, (teacher_hidden, teacher_weight)
    if k:
        function, given = top_k_divergence, top_k(*given, softmax, k)
    found = function(hidden, weight, *given, divergence=divergence_of(name, BETA), softmax=softmax)
    found.backward(upstream)
    return found.detach(), hidden.grad, weight.grad


def assert_near(found, expected):
    """Compare with a bound of float32: sums over H, V and T of terms up to 10 times the result."""
    for one, other in zip(found, expected, strict=True):
        error = 10 * (bounds.of_sum(H + TEACHER_H + V) + bounds.of_sum(T))
        assert (one - other).abs().max() <= error * other.abs().max().clamp(min=1.0)


@pytest.mark.parametrize("name", NAMES)
def test_divergence_and_gradient_equal_float64(group, name):
    for k in (0, K):
        expected = reference(*inputs(), name=name, k=k)
        assert expected[0].min() > 1e-3 and expected[2][V:].abs().sum() == 0
        for chunk in (3, 1000):
            assert_near(chunked(*inputs(), name=name, k=k, group=group, chunk=chunk), expected)


def test_top_k_is_a_lower_bound_and_0_for_equal_models(group):
    hidden, weight, *_, upstream = data = inputs()
    for name in NAMES:
        whole, coarse = (reference(*data, name=name, k=k)[0] for k in (0, K))
        assert (coarse <= whole).all() and (coarse > 0).all()
        for k in (0, K):
            own = chunked(hidden, weight, hidden, weight, upstream, name=name, k=k, group=group, chunk=4)
            error = 10 * bounds.of_sum(H + V)
            assert all(part.abs().max() <= error * weight.abs().max() * T for part in own)


def test_jensen_shannon_approaches_both_kl_divergences():
    log_p, log_q = torch.randn(2, T, V, dtype=torch.float64).log_softmax(-1)
    for beta, name in ((1e-6, "forward_kl"), (1 - 1e-6, "reverse_kl")):
        terms, slopes = jensen_shannon(log_p, log_q, beta=beta)
        expected_terms, expected = divergence_of(name, 0.0)(log_p, log_q)
        scale = min(beta, 1 - beta)
        assert torch.allclose(terms.sum(-1) / scale, expected_terms.sum(-1), rtol=1e-3)
        p = log_p.exp()
        found, expected = (s - p * s.sum(-1, keepdim=True) for s in (slopes / scale, expected))
        assert torch.allclose(found, expected, atol=1e-4)


def test_the_head_of_a_larger_teacher_is_cut(group):
    weight = torch.randn(ROWS, H)
    assert torch.equal(head_rows(weight, 40, group), weight[:40])


def test_log_ratio_is_scaled():
    teacher, old = torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -1.0])
    assert log_ratio_advantages(teacher, old, coef=0.5).tolist() == [1.0, -0.5]


def test_no_samples_have_a_divergence_with_gradients(group):
    """The pipeline's schedule and the reduction of gradients require them of every micro-batch."""
    hidden, weight = torch.zeros(0, H, requires_grad=True), torch.randn(ROWS, H, requires_grad=True)
    targets = Targets(divergence_of("reverse_kl", BETA), [], heads=[torch.randn(ROWS, TEACHER_H)])
    found = targets.of([], torch.device("cpu"))(hidden, weight, Softmax(TEMPERATURE, V, group, 4))
    found.sum().backward()
    assert found.shape == (0,) and hidden.grad.shape == (0, H) and not weight.grad.any()
