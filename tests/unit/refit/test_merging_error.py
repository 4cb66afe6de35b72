"""Why merged weights travel: what bfloat16 loses of scale * B A over many refits, in two ways of merging."""

import torch


def test_subtracting_the_product_before_loses_it():
    """Merge once per refit from W, or add the difference to the product of the refit before, in place."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    size, rank, scale, lr = 256, 16, 2.0, 1e-4
    base = (0.02 * normal(size, size)).bfloat16()
    a, b = (2 * torch.rand(rank, size, generator=generator) - 1) / size**0.5, torch.zeros(size, rank)
    in_place, before, errors = base.clone(), torch.zeros(size, size), {}
    for refit in range(1, 1001):
        b += lr * (normal(size, rank) + 0.3).sign()  # steps of Adam's size
        product = scale * b @ a
        in_place = (in_place.float() + product - before).bfloat16()
        before, exact = product, base.float() + product
        if refit in (1, 10, 100, 1000):
            lost = [
                float((found.float() - exact).norm() / product.norm())
                for found in (exact.bfloat16(), in_place)
            ]
            errors[refit] = lost
            share = float(product.norm() / base.float().norm())
            print(
                f"{refit} refits: product / W {share:.4f}, lost: merged {lost[0]:.2f}, in place {lost[1]:.2f}"
            )
    assert errors[1000][0] < 0.05 and errors[1000][1] > 0.5
    assert errors[1][0] > 0.5  # a first small update is rounded away in both
