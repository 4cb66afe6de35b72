"""Linear layers that get an adapter, and how its parts are split over tensor parallel ranks. In vLLM the
rows of B are the layer's rows, and the columns of A its columns."""

import json

import numpy as np
import pytest

from rl.models import architecture
from rl.models.adapters import adapters, splits_columns
from rl.models.boxes import index
from tools.tiny_models import PUBLISHED, tiny_config

RANK = 4
FAMILIES = ("Qwen2ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM")


def weights_of(family):
    return architecture(config := json.loads(tiny_config(family).to_json_string(use_diff=False))).weights(
        config
    )


def local(weight, tensors, tp, rank):
    """Return one rank's Megatron parameter of the weight, cut from the tensors of the checkpoint."""
    out = np.zeros(weight.megatron_shape(tp))
    for piece in weight.megatron_pieces(tp, rank):
        out[index(piece.local_box)] = tensors[piece.hf][index(piece.hf_box)]
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_hold_their_part_of_the_product(family):
    for pair in adapters(weights_of(family), rank=RANK):
        rows, columns = pair.base.shapes[pair.part]
        rng = np.random.default_rng(0)
        a, b = rng.normal(size=(RANK, columns)), rng.normal(size=(rows, RANK))
        tensors = {pair.a.hf[0]: a, pair.b.hf[0]: b}
        zeros = {name: np.zeros(shape) for name, shape in zip(pair.base.hf, pair.base.shapes)}
        product = zeros | {pair.base.hf[pair.part]: b @ a}
        marked = zeros | {pair.base.hf[pair.part]: np.ones((rows, columns))}
        for rank in range(2):
            mine = local(pair.base, product, 2, rank)[local(pair.base, marked, 2, rank) == 1]
            parts = local(pair.b, tensors, 2, rank) @ local(pair.a, tensors, 2, rank)
            np.testing.assert_allclose(np.sort(mine), np.sort(parts.ravel()), rtol=1e-12)


def test_targets_are_last_parts_of_names():
    weights = weights_of("Qwen3MoeForCausalLM")
    everything = {pair.module.rpartition(".")[2] for pair in adapters(weights, rank=RANK)}
    assert everything == {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    some = adapters(weights, rank=RANK, targets=["q_proj", "experts.1.up_proj"])
    assert {pair.module.partition(".self_attn.")[2] or pair.module[-17:] for pair in some} == {
        "q_proj",
        "experts.1.up_proj",
    }
    with pytest.raises(ValueError, match="adapter.targets=gate matches no linear layer"):
        adapters(weights, rank=RANK, targets=["gate"])  # the router


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "DeepseekV3ForCausalLM"])
def test_vllm_ranks_hold_the_adapters_of_their_rows(name, tp):
    hf = tiny_config(name).to_dict() | PUBLISHED.get(name, {})
    num_heads = hf["num_key_value_heads"]
    assert name != "Qwen2ForCausalLM" or num_heads == 2  # tp 4 holds each of them twice
    for pair in adapters(architecture(hf).weights(hf), rank=3):
        for rank in range(tp):
            (weight,) = (p for p in pair.base.vllm_pieces(tp, rank) if p.hf == pair.base.hf[pair.part])
            rows, columns = weight.hf_box
            (a,), (b,) = (part.vllm_pieces(tp, rank) for part in (pair.a, pair.b))
            assert a.hf_box == ((0, 3), columns) and b.hf_box == (rows, (0, 3)), pair.module
            assert b.local_box[0] == (0, rows[1] - rows[0]) and a.local_box[1] == (0, columns[1] - columns[0])
            assert splits_columns(pair.base) == (columns != (0, pair.base.shapes[0][1])) or tp == 1


def test_a_model_with_one_head_has_adapters():
    config = json.loads(tiny_config("Qwen2ForCausalLM").to_json_string(use_diff=False))
    config |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    assert {
        pair.b.vllm.rpartition(".")[0] for pair in adapters(architecture(config).weights(config), rank=RANK)
    }
