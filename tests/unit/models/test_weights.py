"""Weights of every architecture: names, shapes and layouts, compared with transformers; published sizes."""

import functools
import itertools
import math

import pytest
import torch
import transformers
from safetensors import safe_open

from rl.models import SUPPORTED, architecture, by_class, value_model, value_weights
from rl.models.boxes import extent, index, volume
from rl.models.files import stored_shapes
from rl.models.layout import VOCAB, Weight
from tests.architectures import CONFIGS, DENSE, QWEN2, V3, config, published
from tests.checkpoints import PARTICULAR, tiny_config

EACH = pytest.mark.parametrize("name", PARTICULAR)


def weights(hf: dict) -> list[Weight]:
    return architecture(hf).weights(hf)


@EACH
def test_tensors_are_those_of_transformers(name, tmp_path):
    for tie in (False, True) if name in DENSE else (False,):
        sizes = dict(hidden_size=64, kv_lora_rank=32, tie=tie)
        getattr(transformers, name)(tiny_config(name, **sizes)).save_pretrained(tmp_path)
        with safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
            expected = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}
        found = [(pair, w) for w in weights(config(name, **sizes)) for pair in stored_shapes(w).items()]
        assert dict(pair for pair, _ in found) == expected
        parts = sum(1 / (w.stored.count if w.stored else 1) for _, w in found)
        assert round(parts) == len(expected)


@EACH
def test_megatron_ranks_hold_every_element(name):
    grids = (1, 1), (2, 1), (2, 2), (4, 1), (4, 4)
    found = weights(config(name, num_key_value_heads=4))  # Megatron replicates no KV head
    for weight, (tp, etp) in itertools.product(found, grids):
        counts = {key: torch.zeros(shape, dtype=torch.int8) for key, shape in zip(weight.hf, weight.shapes)}
        size = tp if weight.expert is None else etp
        for rank in range(size):
            pieces = weight.megatron_pieces(size, rank)
            for piece in pieces:
                counts[piece.hf][index(piece.hf_box)] += 1
            if weight.cut is not VOCAB:
                assert sum(volume(piece.local_box) for piece in pieces) == math.prod(
                    weight.megatron_shape(size)
                )
        for key, count in counts.items():
            assert (count == (1 if weight.cut.split else size)).all(), key


@EACH
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_vllm_ranks_tile_their_parameters(name, tp):
    hf = config(name)
    counts = {k: torch.zeros(s, dtype=torch.int8) for w in weights(hf) for k, s in zip(w.hf, w.shapes)}
    for rank in range(tp):
        held: dict[str, list] = {}
        for weight in weights(hf):
            for piece in weight.vllm_pieces(tp, rank):
                counts[piece.hf][index(piece.hf_box)] += 1
                held.setdefault(weight.vllm, []).append(piece)
        for parameter, pieces in held.items():
            shape = [max(stops) for stops in zip(*([stop for _, stop in p.local_box] for p in pieces))]
            local = torch.zeros(shape, dtype=torch.int8)
            for piece in pieces:
                extra = len(piece.local_box) - len(piece.hf_box)
                assert extent(piece.local_box) == (1,) * extra + extent(piece.hf_box)
                local[index(piece.local_box)] += 1
            assert (local == 1).all(), parameter
    for weight in weights(hf):
        for key in weight.hf:
            copies, count = max(1, tp // hf["num_key_value_heads"]), counts[key]
            if "qkv_proj" in key:
                assert (count[hf["hidden_size"] :] == copies).all()
                count = count[: hf["hidden_size"]]
            of_kv = "k_proj" in key or "k_norm" in key or ".v_proj" in key
            whole = 1 if weight.expert is not None else tp  # a bias that only the first rank adds
            assert (count == ((copies if of_kv else 1) if weight.cut.split else whole)).all(), (key, tp)


@EACH
def test_names_are_unique_and_name_the_layer(name):
    found = weights(config(name))
    assert len({(w.megatron, w.layer, w.expert) for w in found}) == len(found)
    for weight in found:
        in_layer = weight.layer is not None
        assert ("{layer}" in weight.megatron) == in_layer and ("{expert}" in weight.megatron) == (
            weight.expert is not None
        )
        for key in (*weight.hf, weight.vllm):
            assert key.startswith(f"model.layers.{weight.layer}." if in_layer else ("model.", "lm_head"))
    assert [w.hf[0] for w in found if w.first_stage] == ["model.embed_tokens.weight"]


def test_a_tied_embedding_is_the_only_head():
    tied, untied = (weights(config(QWEN2, tie=tie)) for tie in (True, False))
    assert [w.hf[0] for w in tied if w.tied_to_head] == ["model.embed_tokens.weight"]
    assert not any(w.tied_to_head for w in untied)
    assert {w.megatron for w in untied} - {w.megatron for w in tied} == {"output_layer.weight"}


@EACH
def test_a_value_model_has_a_value_head(name):
    for needs_head in (True, False):
        found = value_weights(config(name), needs_head=needs_head)
        names = [key for weight in found for key in weight.hf]
        assert names[-1] == "score.weight" and "lm_head.weight" not in names
        assert len(names) == sum(len(weight.hf) for weight in weights(config(name)))
        assert found[-1].optional == (not needs_head)


def test_only_classifiers_with_one_label_are_value_models():
    hf = {"architectures": ["Qwen2ForSequenceClassification"], "tie_word_embeddings": True}
    assert value_model(hf | {"id2label": {"0": "LABEL_0"}})["architectures"] == [QWEN2]
    assert value_model(hf | {"num_labels": 1})["tie_word_embeddings"] is False
    for labels in ({}, {"num_labels": 3}, {"id2label": {"0": "a", "1": "b"}}):
        with pytest.raises(ValueError, match="is no reward model; it must have num_labels 1"):
            value_model(hf | labels)


def test_experts_lie_where_vllms_loader_puts_them():
    """w13_weight [E, 2F/tp, H]: an expert's rows of gate, then of up; w2_weight [E, H, F/tp]: its columns of
    down."""
    hf, rank = config("Qwen3MoeForCausalLM"), 1
    num_experts, ffn, tp = hf["num_local_experts"], hf["moe_intermediate_size"], 2
    found = {
        "w13_weight": torch.zeros(num_experts, 2 * ffn // tp, 128),
        "w2_weight": torch.zeros(num_experts, 128, ffn // tp),
    }
    tensors = {}
    for weight in (weight for weight in weights(hf) if weight.expert is not None):
        tensors |= {name: torch.randn(shape) for name, shape in zip(weight.hf, weight.shapes)}
        for piece in weight.vllm_pieces(tp, rank):
            parameter = found[weight.vllm.rpartition(".")[2]]
            parameter[index(piece.local_box)] = tensors[piece.hf][index(piece.hf_box)]
    half = slice(ffn // 2, ffn)
    for expert in range(num_experts):
        prefix = f"model.layers.1.mlp.experts.{expert}."
        gate, up, down = (tensors[f"{prefix}{p}_proj.weight"] for p in ("gate", "up", "down"))
        assert torch.equal(found["w13_weight"][expert], torch.cat([gate[half], up[half]]))
        assert torch.equal(found["w2_weight"][expert], down[:, half])


def test_projections_to_latents_share_one_vllm_parameter():
    hf = config(V3)
    of_layer = {w.hf[0]: w for w in weights(hf) if w.layer == 0}
    query = of_layer["model.layers.0.self_attn.q_a_proj.weight"]
    key = of_layer["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"]
    assert query.vllm == key.vllm == "model.layers.0.self_attn.fused_qkv_a_proj.weight"
    rank = hf["q_lora_rank"]
    assert query.vllm_pieces(4, 3)[0].local_box == ((0, rank), (0, 128))
    assert key.vllm_pieces(4, 3)[0].local_box == ((rank, rank + 512 + 64), (0, 128))


def test_routers_biases_are_float32_and_only_in_mixtures():
    found = [w for w in weights(config(V3, num_hidden_layers=4, first_k_dense_replace=2)) if w.float32]
    assert [w.layer for w in found] == [2, 3]
    assert {w.hf[0].rpartition(".")[2] for w in found} == {"e_score_correction_bias"}


def test_which_layers_of_qwen3_moe_are_mixtures():
    hf = config("Qwen3MoeForCausalLM", num_hidden_layers=6, mlp_only_layers=[3], decoder_sparse_step=2)
    assert architecture(hf).moe_layers(hf) == [False, True, False, False, False, True]
    assert architecture(hf).megatron_config(hf)["moe_layer_freq"] == [0, 1, 0, 0, 0, 1]


PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "qwen3-8b": 8_190_735_360,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-0.5b": 494_032_768,
    "deepseek-v3": pytest.approx(671.03e9, rel=1e-3),
    "mixtral-8x7b": pytest.approx(46.70e9, rel=1e-3),
    "qwen2.5-1.5b": pytest.approx(1.544e9, rel=1e-3),
    "qwen2.5-32b": pytest.approx(32.76e9, rel=1e-3),
    "qwen3-30b-a3b": pytest.approx(30.53e9, rel=1e-3),
    "qwen3-30b-a3b-thinking-2507": pytest.approx(30.53e9, rel=1e-3),
    "glm-4.5": pytest.approx(355e9, rel=1e-2),
    "glm-4.5-air": pytest.approx(106e9, rel=1e-2),
    "glm-4.7-flash": pytest.approx(30e9, rel=1e-2),
    "kimi-k2": pytest.approx(1.03e12, rel=1e-2),
    "seed-oss-36b": pytest.approx(36.15e9, rel=1e-3),
    "smollm3-3b": 3_075_098_624,
    "granite-3.3-8b": 8_170_864_640,
    "granite-4.0-micro": pytest.approx(3.4e9, rel=1e-2),
    "deepseek-coder-6.7b": 6_740_512_768,
    "deepseek-llm-7b": 6_910_365_696,
    "mistral-nemo": 12_247_782_400,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2.5-coder-14b": 14_770_033_664,
    "qwen2.5-math-7b": 7_615_616_512,
    "qwen2.5-vl-3b": 3_754_622_976,
    "qwen2.5-vl-32b": 33_452_718_336,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-235b-a22b-instruct-2507": pytest.approx(235.09e9, rel=1e-3),
    "qwen3-vl-2b": 2_127_532_032,
    "qwen3-vl-235b-a22b": pytest.approx(235.67e9, rel=1e-3),
    "fsfairx-llama3-rm": pytest.approx(7.50e9, rel=1e-3),
    "skywork-reward-llama-3.1-8b": pytest.approx(7.50e9, rel=1e-3),
    "skywork-reward-v2-llama-3.2-3b": pytest.approx(3.21e9, rel=1e-2),
    "gemma-2b": 2_506_172_416,
    "gemma-1.1-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-1b": 999_885_952,
    "phi-4": 14_659_507_200,
    "gpt-oss-20b": 20_914_757_184,
    "minimax-m2": pytest.approx(228.7e9, rel=1e-3),
    "gpt-oss-120b": 116_829_156_672,
    # The paper counts 15.29e9 without the token embedding and the head.
    "moonlight-16b-a3b": pytest.approx(15.29e9 + 2 * 163840 * 2048, rel=1e-3),
    # The model card counts also a layer for multi-token prediction, its three norms and a matrix [H, 2H].
    "qwen3-next-80b-a3b": 81_324_862_720 - 1_642_076_672 - 3 * 2048 - 2 * 2048**2,
    "qwen3.5-2b": pytest.approx(2.2e9, rel=1e-2),
    "qwen3.5-4b": pytest.approx(4.5e9, rel=1e-2),
    "qwen3.5-9b": 9_409_813_744,
    "qwen3.5-27b": pytest.approx(27.4e9, rel=1e-2),
    "qwen3.5-35b-a3b": pytest.approx(35e9, rel=1e-2),
    "qwen3.5-122b-a10b": pytest.approx(122e9, rel=1e-2),
    "qwen3.5-397b-a17b": pytest.approx(397e9, rel=1e-2),
    "qwen1.5-moe-a2.7b": pytest.approx(14.3e9, rel=1e-2),
    "nvidia-nemotron-3-nano-30b-a3b": pytest.approx(31.6e9, rel=1e-2),
    "qwen3-235b-a22b": pytest.approx(235.09e9, rel=1e-3),
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen3-vl-8b": 8_767_123_696,
    "qwen3-vl-32b": 33_357_390_064,
    "qwen3-vl-30b-a3b": 31_070_754_032,
    "qwen3-32b": pytest.approx(32.76e9, rel=1e-3),
}
"""Elements as the model cards' safetensors metadata counts them, or as their text rounds them; without
multi-token prediction."""


def test_shipped_configs_have_published_sizes():
    assert PARAMETERS.keys() == {path.name for path in CONFIGS.iterdir()}
    for model, count in PARAMETERS.items():
        hf, found = published(model), weights
        if hf["architectures"][0].endswith("ForSequenceClassification"):
            hf, found = value_model(hf), functools.partial(value_weights, needs_head=True)
        if hf["architectures"][0] not in SUPPORTED:
            hf = by_class.described(hf)
        architecture(hf).check(hf)
        assert sum(weight.num_elements for weight in found(hf)) == count, model
