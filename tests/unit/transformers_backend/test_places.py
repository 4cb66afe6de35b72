"""The places of checkpoints' tensors in the parameters of a class of transformers, and their pieces."""

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from rl.checkpoint.regions import regions
from rl.config.run_models import hf_config_of, run_models
from rl.config.schema import load_config
from rl.dry_run.grids import layout_of
from rl.dry_run.shape import models_of
from rl.features.transformers_backend import shards
from rl.models import by_class
from rl.models.boxes import index
from rl.run import set_up
from tests.checkpoints import tiny_config

QUICKSTART = Path(__file__).resolve().parents[3] / "configs" / "quickstart.yaml"


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_experts_of_checkpoints_fill_the_rows_of_each_rank(tp):
    hf = by_class.described(tiny_config("OlmoeForCausalLM").to_dict())
    [weight] = [w for w in by_class.weights(hf) if w.megatron.endswith("gate_up_proj") and w.layer == 1]
    assert weight.vllm == "model.layers.1.mlp.experts.routed_experts.w13_weight"
    tensors = {name: torch.randn(shape) for name, shape in zip(weight.hf, weight.shapes, strict=True)}
    prefix = "model.layers.1.mlp.experts."
    gates, ups = (
        torch.stack([tensors[f"{prefix}{number}.{part}_proj.weight"] for number in range(8)])
        for part in ("gate", "up")
    )
    whole, size = torch.cat([gates, ups], 1), -(-8 // tp)
    for rank in range(tp):
        found = torch.zeros(weight.megatron_shape(tp))
        for piece in weight.megatron_pieces(tp, rank):
            found[index(piece.local_box)] = tensors[piece.hf][index(piece.hf_box)]
        own = whole[rank * size :][:size]
        assert found[: len(own)].equal(own)
        flat, half = torch.zeros_like(found).view(-1), found.numel() // 3 + 7
        for start, stop in ((0, half), (half, found.numel())):  # as the optimizer's state is divided
            for region in regions(weight.megatron_pieces(tp, rank), tuple(found.shape), start, stop):
                region.view(flat[start:stop]).copy_(tensors[region.hf][index(region.box)])
        assert flat.equal(found.view(-1))
    if 96 % tp == 0:  # the engine's ranks hold parts of each expert
        half = 96 // tp
        found = torch.zeros(8, 2 * half, 128)
        for piece in weight.vllm_pieces(tp, tp - 1):
            found[index(piece.local_box)] = tensors[piece.hf][index(piece.hf_box)]
        assert found.equal(torch.cat([gates[:, -half:], ups[:, -half:]], 1))


def test_names_in_checkpoints_are_those_of_transformers():
    config = dict(model_type="gpt_neox", architectures=["GPTNeoXForCausalLM"], num_hidden_layers=1)
    config |= dict(hidden_size=64, num_attention_heads=2, intermediate_size=64, vocab_size=128)
    names = [name for weight in by_class.weights(by_class.described(config)) for name in weight.hf]
    assert "embed_out.weight" in names and "lm_head.weight" not in names


@pytest.mark.parametrize(
    "family, change, tensor, words",
    [
        ("Cohere2", dict(attention_bias=True), "model.layers.1.self_attn.k_proj.bias", "attention_bias=true"),
        ("Gemma2", dict(tie_word_embeddings=False), "lm_head.weight", "tie_word_embeddings=false"),
        ("Gemma2", {}, "model.norm.weight", "architectures=Gemma2ForCausalLM"),
    ],
)
def test_a_refusal_names_the_setting_that_gives_the_weight(family, change, tensor, words):
    hf = tiny_config(f"{family}ForCausalLM", tie=True).to_dict() | change
    text = str(by_class.refusal(by_class.described(hf), "it is lacking", tensor))
    assert text.startswith(f"training.backend=transformers with {words} in config.json: it is lacking; use ")
    assert ("use a model with" in text) == bool(change)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)), "rope_type=dynamic"),
        (dict(vision_config={}), "reads images"),
    ],
)
def test_models_that_cannot_agree_are_refused(change, words):
    hf = tiny_config("Olmo2ForCausalLM").to_dict() | change
    with pytest.raises(ValueError, match=words):
        by_class.check(by_class.described(hf))


def test_only_large_models_are_divided_by_default(monkeypatch):
    hf = by_class.described(tiny_config("LlamaForCausalLM").to_dict())
    model, not_a_class = (hf, False), (tiny_config("LlamaForCausalLM").to_dict(), False)
    assert by_class.ranks_per_copy(0, [model, model], 4) == 1
    monkeypatch.setattr(by_class, "WHOLE", sum(own.numel() for own in by_class.on_meta(hf).parameters()))
    assert by_class.ranks_per_copy(0, [model], 4) == 1
    assert by_class.ranks_per_copy(0, [model, model], 4) == 4
    assert by_class.ranks_per_copy(2, [model, model], 4) == 2
    assert by_class.ranks_per_copy(0, [not_a_class] * 2, 4) == 1


def test_the_dry_run_divides_the_copies_of_a_run(monkeypatch, tmp_path):
    """A tied critic, and a reward model that is a classifier, have no head over the vocabulary."""
    policy = tiny_config("Olmo2ForCausalLM", tie=True).to_dict()
    reward = tiny_config("LlamaForCausalLM").to_dict()
    reward |= dict(architectures=["LlamaForSequenceClassification"], num_labels=1)
    for name, hf in (("policy", policy), ("reward", reward)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(hf))
    paths = (f"model.path={tmp_path}/policy", f"reward.model.path={tmp_path}/reward")
    config = load_config(str(QUICKSTART), ("algorithm=ppo", *paths))
    files = {
        name: SimpleNamespace(hf=hf_config_of(config, model, reward if model.own_path else policy))
        for name, model in run_models(config).items()
    }
    assert [*files] == ["policy", "critic", "reward_model"]
    monkeypatch.setattr(shards, "gather_objects", lambda host: [host] * 4)
    monkeypatch.setattr(set_up, "build_grid", lambda etp, **_: Mock(etp=etp))
    monkeypatch.setattr(set_up, "warm_up", Mock())
    head = reward["vocab_size"] * reward["hidden_size"]
    total = sum(
        own.numel()
        for hf in (policy, policy, reward | {"architectures": ["LlamaForCausalLM"]})
        for own in by_class.on_meta(by_class.described(hf)).parameters()
    )
    for limit, expected in ((total - head, 1), (total - head - 1, 4)):
        monkeypatch.setattr(by_class, "WHOLE", limit)
        assert set_up.make_grid(config, SimpleNamespace(models=files), None).etp == expected
        assert layout_of(config, 4, 4, models_of(config)[0]).shard == expected
