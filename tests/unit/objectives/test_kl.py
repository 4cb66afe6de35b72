import math

import numpy as np
import pytest
import torch

from rl.objectives.kl import ESTIMATORS, kl
from tests.each import each


def reference(d, estimator):
    """One token, float64: value and derivative for logprobs."""
    if estimator.endswith("+"):
        return reference(d, estimator[:-1])[0], d
    if estimator == "k3-weighted":  # under the policy that sampled the token
        return reference(d, "k3+")
    if estimator == "k1":
        return d, 1.0
    if estimator == "abs":
        return (d, 1.0) if d >= 0 else (-d, -1.0)
    if estimator == "k2":
        return d * d / 2, d
    x = min(max(-d, -20.0), 20.0)
    value = math.exp(x) - 1 - x
    return (10.0, 0.0) if value > 10 else (value, 0.0 if abs(d) > 20 else 1 - math.exp(x))


def near_zero(size, seed):
    """Logits of distributions so close to each other that no clamp of k3 binds."""
    return 0.5 * torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@each(
    "estimator, expected",
    [
        ("k1", [math.log(2), -math.log(2), 0.0]),
        ("abs", [math.log(2), math.log(2), 0.0]),
        ("k2", [math.log(2) ** 2 / 2, math.log(2) ** 2 / 2, 0.0]),
        ("k3", [0.5 - 1 + math.log(2), 2 - 1 - math.log(2), 0.0]),
        ("k1+", [math.log(2), -math.log(2), 0.0]),
        ("k3+", [0.5 - 1 + math.log(2), 2 - 1 - math.log(2), 0.0]),
    ],
)
def test_hand_numbers(estimator, expected):
    # The policy gives twice, half and equally the reference's probability.
    logprobs, ref_logprobs = (
        torch.log(torch.tensor([0.5, 0.25, 0.5])),
        torch.log(torch.tensor([0.25, 0.5, 0.5])),
    )
    values = kl(logprobs, ref_logprobs, torch.ones(3), estimator=estimator)
    torch.testing.assert_close(values, torch.tensor(expected, dtype=torch.float32))


def test_weighted_k3_is_the_product_of_ratio_and_k3():
    # pi = 0.5 and 0.25, reference 0.25 and 0.5, old policy 0.25 and 0.25; a masked token.
    new = torch.log(torch.tensor([0.5, 0.25, math.nan], dtype=torch.float64)).requires_grad_()
    ref, old = (torch.log(torch.tensor(x, dtype=torch.float64)) for x in ([0.25, 0.5, 1], [0.25, 0.25, 1]))
    values = kl(new, ref, torch.tensor([1, 1, 0]), estimator="k3-weighted", old_logprobs=old)
    (grad,) = torch.autograd.grad(values.sum(), new)
    expected = [2 * (0.5 - 1 + math.log(2)), 2 - 1 - math.log(2), 0.0]
    torch.testing.assert_close(values.tolist(), expected)
    product = (new - old).exp() * ((ref - new).exp() - 1 - (ref - new))
    (slope,) = torch.autograd.grad(product[:2].sum(), new)
    torch.testing.assert_close(grad[:2], slope[:2])
    assert grad.tolist() == pytest.approx([2 * math.log(2), -math.log(2), 0.0])


def test_mean_gradient_of_weighted_k3_is_that_of_the_kl():
    logits, old_logits, ref_logits = (near_zero(7, seed) for seed in (1, 2, 3))
    logits.requires_grad_()
    new, old, ref = logits.log_softmax(0), old_logits.log_softmax(0), ref_logits.log_softmax(0)
    estimate = kl(new, ref, torch.ones(7), estimator="k3-weighted", old_logprobs=old)
    exact = (new.exp() * (new - ref)).sum()  # of the whole distribution; the tokens are drawn from the old
    grads = [
        torch.autograd.grad(x, logits, retain_graph=True)[0] for x in ((old.exp() * estimate).sum(), exact)
    ]
    torch.testing.assert_close(*grads)
    torch.testing.assert_close((old.exp() * estimate).sum(), exact)


@each("estimator", list(ESTIMATORS))
def test_value_and_gradient_against_the_reference(estimator):
    rng = np.random.default_rng(0)
    d = np.concatenate([rng.normal(0, 0.5, 60), [-30.0, -3.0, -2.5, 2.5, 12.0, 30.0]])
    ref = rng.normal(-2, 1, len(d))
    mask = rng.random(len(d)) > 0.2
    mask[-6:] = True
    leaf = torch.tensor(ref + d, requires_grad=True)
    options = dict(estimator=estimator, old_logprobs=leaf.detach())
    values = kl(leaf, torch.tensor(ref), torch.tensor(mask), **options)
    (grad,) = torch.autograd.grad(values.sum(), leaf)
    expected = np.array([reference(x, estimator) if m else (0.0, 0.0) for x, m in zip(d, mask)])
    np.testing.assert_allclose(values.detach(), expected[:, 0], rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(grad, expected[:, 1], rtol=1e-9, atol=1e-14)


def test_k1_and_k3_average_to_the_divergence():
    p, q = (torch.softmax(near_zero(50, seed), 0) for seed in range(2))
    divergence = (p * (p / q).log()).sum()
    for estimator in ("k1", "k3", "k1+", "k3+"):
        torch.testing.assert_close(
            (p * kl(p.log(), q.log(), torch.ones(50), estimator=estimator)).sum(), divergence
        )


def test_mean_gradients_are_the_ones_the_docstring_states():
    logits = near_zero(30, seed=0).requires_grad_()
    q = torch.softmax(near_zero(30, seed=1), 0)
    p = torch.softmax(logits, 0)
    (forward,) = torch.autograd.grad((p * (p / q).log()).sum(), logits, retain_graph=True)
    (reverse,) = torch.autograd.grad((q * (q / p).log()).sum(), logits, retain_graph=True)
    expectations = [
        ("k1", torch.zeros(30).double()),
        ("k2", forward),
        ("k3", reverse),
        ("k1+", forward),
        ("k3+", forward),
    ]
    for estimator, expected in expectations:
        loss = (p.detach() * kl(p.log(), q.log(), torch.ones(30), estimator=estimator)).sum()
        (grad,) = torch.autograd.grad(loss, logits, retain_graph=True)
        torch.testing.assert_close(grad, expected)


def test_k3_is_cut_at_ten_as_in_verl():
    d = torch.tensor([-2.5, -2.7, -30.0, 12.0])
    assert kl(d, torch.zeros(4), torch.ones(4), estimator="k3").tolist() == pytest.approx(
        [8.6825, 10, 10, 10], rel=1e-4
    )


def test_k3_of_an_absurd_log_ratio_has_a_finite_gradient():
    leaf = torch.tensor([-1000.0, 1000.0], requires_grad=True)
    values = kl(leaf, torch.zeros(2), torch.ones(2), estimator="k3")
    assert values.tolist() == [10, 10]
    assert torch.autograd.grad(values.sum(), leaf)[0].tolist() == [0, 0]


def test_straight_through_keeps_the_gradient_of_k2():
    leaf = torch.tensor([-1e30, 1000.0], requires_grad=True)
    for estimator, value in (("k1+", [-1e30, 1000.0]), ("k3+", [10.0, 10.0])):
        values = kl(leaf, torch.zeros(2), torch.ones(2), estimator=estimator)
        assert values.tolist() == pytest.approx(value)
        assert torch.equal(torch.autograd.grad(values.sum(), leaf)[0], leaf.detach())


def test_k3_keeps_its_digits_in_float32():
    d = torch.tensor([1e-4])
    assert kl(d, torch.zeros(1), torch.ones(1), estimator="k3").item() == pytest.approx(5e-9, rel=1e-2)


@each("estimator", list(ESTIMATORS))
@each("bad", [float("nan"), float("inf"), -float("inf")])
def test_masked_positions_never_reach_value_or_gradient(bad, estimator):
    for bad_logprob, bad_ref in ((bad, 0.0), (0.0, bad), (bad, bad)):
        leaf = torch.tensor([0.5, bad_logprob, -0.5], requires_grad=True)
        ref = torch.tensor([0.0, bad_ref, 0.0])
        options = dict(estimator=estimator, old_logprobs=leaf.detach())
        values = kl(leaf, ref, torch.tensor([1.0, 0.0, 1.0]), **options)
        (grad,) = torch.autograd.grad(values.sum(), leaf)
        expected = [reference(d, estimator) if d else (0.0, 0.0) for d in (0.5, 0.0, -0.5)]
        assert values.tolist() == pytest.approx([value for value, _ in expected])
        assert grad.tolist() == pytest.approx([slope for _, slope in expected])


@each("estimator", list(ESTIMATORS))
def test_equal_policies_give_exactly_zero(estimator):
    logprobs = torch.randn(9)
    options, none = dict(estimator=estimator, old_logprobs=logprobs + 1), torch.zeros(0)
    assert not kl(logprobs, logprobs.clone(), torch.ones(9), **options).any()
    assert kl(none, none, none, estimator=estimator, old_logprobs=none).shape == (0,)


def test_names_are_those_of_the_estimators():
    assert tuple(ESTIMATORS) == ("k1", "abs", "k2", "k3", "k1+", "k3+", "k3-weighted")
    with pytest.raises(ValueError, match=r"k4.*k1, abs, k2, k3, k1\+, k3\+, k3-weighted"):
        kl(torch.zeros(1), torch.zeros(1), torch.ones(1), estimator="k4+")
