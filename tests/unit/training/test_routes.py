"""Experts that are replayed in one layer of one micro-batch."""

from types import SimpleNamespace

import pytest
import torch

from rl.features.router_replay import trainer
from rl.features.router_replay.trainer import LayerReplay, RouterReplay, Routes, WrongRoutes

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


def test_replayed_experts_with_weights_of_others_are_found(monkeypatch):
    monkeypatch.setattr(trainer, "gather_texts", lambda texts: list(texts))
    monkeypatch.setattr(trainer.dist, "get_rank", lambda: 0)
    replay = RouterReplay("engine")
    replay._config = SimpleNamespace(num_moe_experts=8, moe_router_topk=2)
    replay._num_layers, replay._device = 2, torch.device("cpu")
    replay._replays = [LayerReplay(0), LayerReplay(1)]
    replay.check(None, "policy")
    assert [each.routes for each in replay._replays] == [None, None]

    def own_values(scores, *args):
        values, own = args[-1](scores, *args[:-1])
        return values, replay._replays[1].routes.choose(1, own)

    monkeypatch.setattr(replay._replays[1], "get_replay_topk", own_values)
    with pytest.raises(WrongRoutes, match="weights of other experts in layer 1 on rank 0"):
        replay.check(None, "policy")
