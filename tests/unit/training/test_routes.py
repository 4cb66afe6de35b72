"""Experts that are replayed in one layer of one micro-batch."""

import torch

from rl.features.router_replay.trainer import Routes

ENGINE = torch.tensor([[[0, 1], [2, 3], [0, 0]]], dtype=torch.uint8)
OWN = torch.tensor([[1, 0], [2, 1], [3, 2]])
"""The same experts in another order, one other expert, and experts of padding."""


def test_differences_are_counted_in_the_first_pass_over_a_layer():
    given, counts = torch.tensor([[True], [True], [False]]), torch.zeros(4, 1, dtype=torch.float64)
    routes = Routes(ENGINE.clone(), given, chosen={0}, counts=counts)
    for _ in range(2):  # an update, or a recomputation, calls the router again
        assert routes.choose(0, OWN).tolist() == [[0, 1], [2, 3], [3, 2]]
    assert counts.tolist() == [[1], [2], [2], [2]]


def test_the_first_pass_is_recorded_and_replayed():
    routes = Routes(torch.zeros_like(ENGINE), torch.tensor(True))
    assert routes.choose(0, OWN).tolist() == OWN.tolist()
    assert routes.choose(0, OWN.flip(0)).tolist() == OWN.tolist()
