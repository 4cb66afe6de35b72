"""Which weights vLLM computes without, found by changing one weight of each kind."""

from types import SimpleNamespace

import pytest
import torch

import rl.training  # noqa: F401  (before megatron.core)
from rl.models import by_class
from rl.refit import refit
from rl.refit.gather import RefitMismatch
from tests.checkpoints import tiny_config

PARTS = ["q_proj.weight", "k_proj.weight", "k_proj.bias"]
ROUTER = "router.bias"


class Engine:
    """Joins the parts of each layer, and holds routers' biases in a buffer. Memory that no load reaches holds
    anything, also NaN."""

    device = SimpleNamespace(torch=torch.device("cpu"))

    def __init__(self, left_out: tuple[str, ...]) -> None:
        self.left_out, self.num_loads = left_out, 0
        self.held = {f"layers.{layer}.qk": torch.zeros(4) for layer in range(2)}
        self.model = torch.nn.Module()
        self.model.register_buffer("biases", torch.zeros(2))

    def load_weights(self, weights) -> None:
        self.num_loads += 1
        given = dict(weights)
        for layer in {name.split(".")[1] for name in given}:
            joined = torch.full((4,), float(self.num_loads))
            joined[3] = float("nan")
            for place, part in enumerate(PARTS):
                name = f"layers.{layer}.{part}"
                if part in self.left_out:
                    joined[place] = 0
                elif name in given:
                    joined[place] = given[name]
            self.held[f"layers.{layer}.qk"].copy_(joined)
            if ROUTER not in self.left_out and (name := f"layers.{layer}.{ROUTER}") in given:
                self.model.biases[int(layer)] = given[name]


@pytest.mark.parametrize("left_out", [(), ("k_proj.bias",), ("k_proj.weight",), (ROUTER,)])
def test_a_weight_that_the_engine_leaves_out_is_found(monkeypatch, left_out):
    monkeypatch.setattr(refit, "any_rank", bool)
    monkeypatch.setattr(refit, "gather_objects", lambda own: [own])
    monkeypatch.setattr(refit, "differing", lambda *_: [])
    weights = [
        SimpleNamespace(hf=(f"layers.{layer}.{part}",), vllm=f"layers.{layer}.{part}", layer=layer)
        for layer in range(2)
        for part in (*PARTS, ROUTER)
    ]
    engine = Engine(left_out)
    hf = by_class.described(tiny_config("Olmo2ForCausalLM").to_dict())
    values = SimpleNamespace(
        gathered=lambda own: ((weight.hf[0], torch.tensor(3.0)) for weight in own),
        weight_map=SimpleNamespace(hf=hf),
    )
    planned = SimpleNamespace(equality=None, in_place=[], is_new=True)
    group = SimpleNamespace(weights=weights, values=values, held=engine.held)
    part = SimpleNamespace(group=group, planned=planned, sources={}, destinations={})
    if left_out:
        with pytest.raises(RefitMismatch, match=rf"computes without layers\.\d\.{left_out[0]}"):
            refit._prove_description(engine, part, 512)
    else:
        refit._prove_description(engine, part, 512)
        assert not planned.is_new
