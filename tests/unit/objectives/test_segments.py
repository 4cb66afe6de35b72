import pytest
import torch

from rl.objectives.segments import expand, segment_mean, segment_sum
from tests.each import each

LENGTHS = torch.tensor([2, 0, 3, 1, 0])


def double(*shape):
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True
    )


def test_sum_and_mean_of_hand_numbers_with_empty_segments():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert segment_sum(x, LENGTHS).tolist() == [3.0, 0.0, 12.0, 6.0, 0.0]
    assert segment_mean(x, LENGTHS).tolist() == [1.5, 0.0, 4.0, 6.0, 0.0]


def test_expand_repeats_each_value_by_its_length():
    assert expand(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), LENGTHS).tolist() == [1.0, 1.0, 3.0, 3.0, 3.0, 4.0]


@each("function, size", [(segment_sum, 6), (segment_mean, 6), (expand, 5)])
def test_first_and_second_derivatives_against_finite_differences(function, size):
    x = double(size)
    assert torch.autograd.gradcheck(function, (x, LENGTHS))
    assert torch.autograd.gradgradcheck(lambda x: function(x, LENGTHS).pow(3), (x,))


@each("lengths", [[], [0], [0, 0]])
def test_batch_without_tokens_gives_zeros_and_an_empty_gradient(lengths):
    x = torch.zeros(0, requires_grad=True)
    lengths = torch.tensor(lengths, dtype=torch.int64)
    total = segment_sum(x, lengths)
    assert total.tolist() == [0.0] * len(lengths)
    total.sum().backward()
    assert x.grad.shape == (0,)
    assert expand(total, lengths).shape == (0,)


def test_nan_stays_in_its_sample_in_value_and_gradient():
    x = torch.tensor([1.0, float("nan"), 3.0, 4.0], requires_grad=True)
    total = segment_sum(x, torch.tensor([1, 1, 0, 2]))
    assert total[[0, 2, 3]].tolist() == [1.0, 0.0, 7.0] and total[1].isnan()
    (grad,) = torch.autograd.grad(total.square().sum(), x)
    assert grad[[0, 2, 3]].tolist() == [2.0, 14.0, 14.0]


def test_long_float32_segment_keeps_its_digits():
    x = torch.full((200_001,), 0.1)
    assert segment_sum(x, torch.tensor([200_000, 1]))[0] == pytest.approx(
        x[:-1].double().sum().item(), rel=1e-7
    )


def test_lengths_that_do_not_sum_to_the_tokens_are_refused():
    with pytest.raises(RuntimeError):
        segment_sum(torch.ones(5), torch.tensor([2, 2]))
    with pytest.raises(RuntimeError):
        segment_sum(torch.ones(3), torch.tensor([4, -1]))


@each("dtype", [torch.float32, torch.bfloat16])
def test_dtype_is_kept(dtype):
    x = torch.ones(6, dtype=dtype)
    assert segment_sum(x, LENGTHS).dtype == segment_mean(x, LENGTHS).dtype == dtype
    assert expand(x[:5], LENGTHS).dtype == dtype


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_repeats_bit_for_bit_and_agrees_with_cpu():
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 3000, (64,), generator=generator)
    x = torch.randn(int(lengths.sum()), generator=generator)

    def value_and_grads(device):
        leaf = x.to(device).requires_grad_()
        total = segment_sum(leaf, lengths.to(device))
        (grad,) = torch.autograd.grad((expand(total, lengths.to(device)) * leaf).sum(), leaf)
        return total.detach().cpu(), grad.cpu()

    first, reference = value_and_grads("cuda"), value_and_grads("cpu")
    for _ in range(5):
        again = value_and_grads("cuda")
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])
    torch.testing.assert_close(first, reference)
