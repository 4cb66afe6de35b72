"""The order of tokens at the experts of a GPU without Transformer Engine, against Megatron's functions."""

import torch

from rl.training import permutation


def test_values_and_gradients_are_megatrons():
    torch.manual_seed(0)
    tokens, probs = torch.randn(9, 4), torch.rand(9, 5)
    routing_map = torch.zeros(9, 5, dtype=torch.bool).scatter_(1, probs.topk(2).indices, True)
    routing_map[3] = False  # a token without an expert
    found = []
    for module in (permutation, permutation.moe_utils):
        x, p = tokens.clone().requires_grad_(), probs.clone().requires_grad_()
        copies, chosen, index, *_ = module.permute(x, routing_map, probs=p, num_out_tokens=16)
        y = module.unpermute(copies * chosen[:, None], index, torch.Size([9, 4]), routing_map=routing_map)
        gradients = torch.autograd.grad((y * torch.arange(36.0).view(9, 4)).sum(), (x, p))
        found.append((copies, chosen, index, y, *gradients))
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs)
    assert found[0][3][3].abs().sum() == 0
