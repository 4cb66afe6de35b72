"""That a loss over a mini-batch is the sum of its micro-batches, in value, gradient and statistics."""

from collections.abc import Callable

import torch
from torch import Tensor

from rl.objectives.aggregate import aggregate


def assert_any_split_gives_the_same(
    loss: Callable[[Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]],
    leaf: Tensor,
    lengths: Tensor,
    mask: Tensor,
    mode: str,
    seed: int,
) -> None:
    """Cut the samples at random into five micro-batches, of which the last is empty.

    loss: from indices of tokens and of samples to the loss per token and the statistics. leaf: float64 [T],
    what the gradient is taken with respect to. lengths: int64 [B]. mask: [T]. mode: how losses per token
    become one.
    """
    whole = dict(num_tokens=int(mask.sum()), num_samples=len(lengths), norm=7.0)

    def share(tokens, samples):
        token_loss, stats = loss(tokens, samples)
        return aggregate(token_loss, mask[tokens], lengths[samples], mode, **whole), stats

    value, stats = share(slice(None), slice(None))
    (grad,) = torch.autograd.grad(value, leaf)
    part_of = torch.randint(0, 4, (len(lengths),), generator=torch.Generator().manual_seed(seed))
    token_part = torch.repeat_interleave(part_of, lengths)
    shares = [share(token_part == part, part_of == part) for part in range(5)]
    (split_grad,) = torch.autograd.grad(sum(value for value, _ in shares), leaf)
    torch.testing.assert_close(sum(value for value, _ in shares), value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(split_grad, grad, rtol=1e-12, atol=0)
    for key, total in stats.items():
        torch.testing.assert_close(sum(part[key] for _, part in shares), total, rtol=1e-12, atol=1e-12)
