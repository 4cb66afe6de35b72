"""Every architecture: names, shapes and layouts against transformers' models, published sizes, refused
configs."""

import functools
import importlib
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

from rl.models import (
    SUPPORTED,
    architecture,
    by_class,
    check_options,
    form,
    read_hf_config,
    rope,
    value_model,
    value_weights,
)
from rl.models.boxes import extent, index, volume
from rl.models.files import stored_shapes
from rl.models.layout import VOCAB, Weight
from tests.checkpoints import PARTICULAR, PUBLISHED, VISION, tiny_config
from tools.text_model import text_config

CONFIGS = Path(__file__).resolve().parents[3] / "configs" / "models"
DENSE = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM")
QWEN2, QWEN3, LLAMA, MISTRAL = DENSE
V3, V2 = "DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM"
GEMMA, PHI, GRANITE, SEED, SMOL = (
    f"{name}ForCausalLM" for name in ("Gemma3", "Phi3", "Granite", "SeedOss", "SmolLM3")
)
GRANITE4 = "GraniteMoeHybridForCausalLM"
OSS, MINIMAX = "GptOssForCausalLM", "MiniMaxM2ForCausalLM"
NEXT, QWEN35, QWEN35_MOE = "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"
GLM, GLM_LITE = "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM"
EACH = pytest.mark.parametrize("name", PARTICULAR)


def config(name: str, **options) -> dict:
    """config.json as transformers writes it, with the keys of published configs."""
    return json.loads(tiny_config(name, **options).to_json_string(use_diff=False)) | PUBLISHED.get(name, {})


def weights(hf: dict) -> list[Weight]:
    return architecture(hf).weights(hf)


def published(model: str) -> dict:
    return read_hf_config(str(CONFIGS / model))


def test_every_architecture_accepts_its_tiny_model():
    assert set(SUPPORTED) == {*PARTICULAR, *VISION}
    for name in PARTICULAR:
        architecture(config(name)).check(config(name))
    with pytest.raises(ValueError, match="MambaForCausalLM is not supported; supported are Qwen2ForCausalLM"):
        architecture({"architectures": ["MambaForCausalLM"]})


# Weights ----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "name, part, change, words",
    [
        ("qwen3-vl-8b", "rope_scaling", {"mrope_interleaved": False}, "mrope_interleaved False"),
        ("qwen2.5-vl-7b", "rope_scaling", {"mrope_interleaved": True}, "mrope_interleaved True"),
        ("qwen3-vl-30b-a3b", "norm_topk_prob", False, "norm_topk_prob false is not supported"),
    ],
)
def test_other_models_with_a_vision_tower_are_refused(name, part, change, words):
    hf = published(name)
    hf[part] = hf[part] | change if isinstance(change, dict) else change
    with pytest.raises(ValueError, match=words):
        architecture(hf).check(hf)


# Rotary embeddings ------------------------------------------------------------------------------------------


def scaled(name: str, **scaling) -> dict:
    """A tiny config with this scaling in the form of published configs."""
    hf = config(name, max_position_embeddings=4096)
    return {k: v for k, v in hf.items() if k != "rope_parameters"} | dict(
        rope_theta=1e6, rope_scaling=scaling
    )


WINDOW = {"factor": 4.0, "original_max_position_embeddings": 1024}
ROTATIONS = {
    "llama3": config(LLAMA),
    "llama-3.1-8b": published("llama-3.1-8b"),
    "qwen3-8b": published("qwen3-8b"),
    "deepseek-yarn": config(V3),
    "deepseek-v3": published("deepseek-v3"),
    "qwen3-8b-yarn": rope.scaled(published("qwen3-8b"), {"rope_type": "yarn", "factor": 4.0}),
    "qwen2.5-7b-yarn": rope.scaled(published("qwen2.5-7b"), {"rope_type": "yarn"} | WINDOW),
    "yarn-default-window": scaled(QWEN2, type="yarn", factor=2),
    "yarn-factor": scaled(QWEN3, rope_type="yarn", attention_factor=1.5, **WINDOW),
    "yarn-betas": scaled(MISTRAL, rope_type="yarn", beta_fast=4.0, beta_slow=2.0, truncate=False, **WINDOW),
    "yarn-mscale": scaled(QWEN2, rope_type="yarn", mscale=1.0, mscale_all_dim=0.5, **WINDOW),
    "glm": config(GLM),
    "glm-4.5": published("glm-4.5"),
    "glm-yarn": rope.scaled(published("glm-4.5-air"), {"rope_type": "yarn"} | WINDOW),
    "glm-parameters-yarn": rope.scaled(config(GLM), {"rope_type": "yarn", "factor": 2.0}),
    "kimi-k2": published("kimi-k2") | {"model_type": "deepseek_v3"},
    "minimax": config(MINIMAX),
    "minimax-m2": published("minimax-m2"),
    "qwen3-next": config(NEXT),
    "qwen3.5": config(QWEN35),
    "qwen3.5-35b": text_config(published("qwen3.5-35b-a3b")),
    "qwen3-next-80b": published("qwen3-next-80b-a3b"),
    "gpt-oss": config(OSS),
    "gpt-oss-20b": published("gpt-oss-20b"),
    "linear": scaled("Qwen3MoeForCausalLM", type="linear", factor=4),
    "dynamic": scaled(LLAMA, rope_type="dynamic", factor=4.0),
}


@pytest.mark.parametrize("name", ROTATIONS)
def test_rotations_are_those_of_transformers(name):
    hf = ROTATIONS[name]
    architecture(hf).check(hf)
    kind = hf["architectures"][0].removesuffix("ForCausalLM")
    quarter = dict.fromkeys(("Qwen3Next", "Qwen3_5", "Qwen3_5Moe"), 0.25)
    part = (quarter | {"Glm4Moe": 0.5, "MiniMaxM2": 0.5}).get(kind, 1.0)
    assert rope.rope_parameters(hf).get("partial_rotary_factor", 1.0) == part
    module = "mixtral" if kind == "Mixtral" else hf["model_type"].removesuffix("_text")
    kind += "Text" * hf["model_type"].endswith("_text")
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    read = getattr(transformers, f"{kind}Config").from_dict(hf)
    expected = getattr(modeling, f"{kind}RotaryEmbedding")(read)
    torch.testing.assert_close(rope.frequencies(hf), expected.inv_freq, rtol=1e-6, atol=0)
    assert rope.magnitude(hf) == pytest.approx(expected.attention_scaling)


@pytest.mark.parametrize("hf", [config(GEMMA), published("gemma-3-1b")], ids=["tiny", "1b"])
def test_gemma_has_a_rotary_embedding_for_each_kind_of_layer(hf):
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    expected = Gemma3RotaryEmbedding(transformers.Gemma3TextConfig.from_dict(hf))
    for given in (hf, hf | rope.engine_fields(hf)):
        for local, frequencies in ((False, "full"), (True, "sliding")):
            found = rope.frequencies(given, local=local)
            inverse = getattr(expected, f"{frequencies}_attention_inv_freq")
            torch.testing.assert_close(found, inverse, rtol=1e-6, atol=0)
    scaled = rope.scaled(hf, {"rope_type": "linear", "factor": 2})
    assert torch.equal(rope.frequencies(scaled, local=True), rope.frequencies(hf, local=True))
    assert rope.rope_parameters(scaled)["factor"] == 2
    # vLLM does not multiply Gemma's max_position_embeddings; the tiny model's are 8 times the original ones.
    positions = hf["max_position_embeddings"]
    original = positions // rope.rope_parameters(hf).get("factor", 1)
    again = rope.scaled(scaled, {"rope_type": "linear", "factor": 4})
    assert [rope.positions(x) for x in (hf, scaled, again)] == [positions, 2 * original, 4 * original]
    assert rope.engine_fields(again)["max_position_embeddings"] == 4 * original


def test_which_layers_have_windows_or_no_rotation():
    hf = published("gemma-3-1b")
    windowed = architecture(hf).megatron_config(hf)["window_attn_skip_freq"]
    assert windowed == [1, 1, 1, 1, 1, 0] * 4 + [1, 1]
    assert architecture(hf).megatron_config(hf)["window_size"] == (511, 0)
    assert form(hf).windowed == tuple(map(bool, windowed))
    hf = published("smollm3-3b")
    for given in (hf, hf | {"no_rope_layers": None}):
        assert architecture(hf).megatron_config(given)["no_rope_freq"] == [0, 0, 0, 1] * 9


def test_rope_base_is_read_from_old_and_new_configs():
    default = {"rope_type": "default"}
    for hf, base in (
        ({}, 1e4),
        ({"rope_theta": 1000000.0}, 1e6),
        ({"rope_theta": 10000, "rope_scaling": None}, 1e4),
        ({"rope_parameters": default | {"rope_theta": 5e5}}, 5e5),
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4}, 5e5),
        ({"rope_parameters": default, "rope_theta": 1e6}, 1e6),
    ):
        assert rope.rope_theta(hf) == base
    for name in DENSE:
        architecture(config(name)).check(config(name) | {"rope_parameters": default | {"rope_theta": 5e5}})


@EACH
def test_a_config_without_a_base_has_that_of_transformers(name):
    keys = ("rope_theta", "rope_parameters", "rope_local_base_freq", "rope_scaling")
    hf = {key: value for key, value in config(name).items() if key not in keys}
    kind = name.removesuffix("ForCausalLM") + "Text" * (name in (GEMMA, QWEN35, QWEN35_MOE))
    expected = getattr(transformers, f"{kind}Config").from_dict(hf).rope_parameters
    kinds = (expected["full_attention"], expected["sliding_attention"]) if name == GEMMA else (expected,)
    for local, of_kind in enumerate(kinds):
        assert rope.rope_parameters(hf, local=bool(local))["rope_theta"] == of_kind["rope_theta"]


def test_window_of_every_scaling():
    windows = {name: rope.positions(hf) for name, hf in ROTATIONS.items() if not name.startswith("llama")}
    assert windows == {
        "qwen3-8b": 40960,
        "glm": 256,
        "glm-4.5": 131072,
        "glm-yarn": 4096,
        "glm-parameters-yarn": 512,
        "kimi-k2": 131072,
        "deepseek-yarn": 256,
        "deepseek-v3": 163840,
        "qwen3-8b-yarn": 4 * 40960,
        "qwen2.5-7b-yarn": 4096,
        "yarn-default-window": 8192,
        "minimax": 256,
        "minimax-m2": 196608,
        "qwen3-next": 256,
        "qwen3-next-80b": 262144,
        "qwen3.5": 256,
        "qwen3.5-35b": 262144,
        "gpt-oss": 256,
        "gpt-oss-20b": 131072,
        "linear": 4 * 4096,
        "dynamic": 4096,
    } | dict.fromkeys(("yarn-factor", "yarn-betas", "yarn-mscale"), 4096)


def test_a_scaling_given_in_the_run_replaces_that_of_the_config():
    hf = config(QWEN3, max_position_embeddings=1024) | {"rope_theta": 5e5}
    for given in (
        hf,
        hf | {"rope_scaling": {"type": "linear", "factor": 8.0}},
        hf | {"rope_parameters": YARN},
    ):
        found = rope.scaled(given, {"rope_type": "yarn", "factor": 4.0})
        assert rope.rope_parameters(found) == {
            "rope_theta": 5e5 if given.get("rope_parameters") is None else rope.rope_theta(given),
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
        }
        assert found["max_position_embeddings"] == rope.positions(found) == 4096
    assert rope.scaled(hf, {}) is hf
    for scaling, text in (
        ({"factor": 4.0}, "needs a rope_type, one of default, linear"),
        ({"rope_type": "yarn", "factors": 4.0}, "factors=4.0, which rope_type=yarn does not read"),
        ({"rope_type": "linear", "factor": 4.0, "beta_fast": 1}, "beta_fast=1, which rope_type=linear"),
    ):
        with pytest.raises(ValueError, match=text):
            rope.scaled(hf, scaling)


# Refusals ---------------------------------------------------------------------------------------------------

YARN = {"type": "yarn", "factor": 4.0}
EVERY_DENSE = (
    (
        {"rope_scaling": {"rope_type": "longrope"}},
        "embeddings of type longrope is not supported; only default",
    ),
    (
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn"}},
        "embeddings of type yarn lacks factor in its rope_scaling",
    ),
    (
        {"rope_scaling": YARN | {"factor": 0.5}},
        "factor 0.5 in its rope_scaling is not supported; use 1 or more",
    ),
    (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}},
        "lacks low_freq_factor, original_max_position_embeddings in its rope_scaling",
    ),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 is not supported"),
    ({"hidden_act": "gelu"}, "hidden_act gelu is not supported"),
)
REFUSED = [
    *((name, changes, text) for name in DENSE for changes, text in EVERY_DENSE),
    (
        V3,
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "type linear is not supported; only default, yarn",
    ),
    (QWEN2, {"use_sliding_window": True}, "use_sliding_window is not supported"),
    (QWEN3, {"use_sliding_window": True}, "use_sliding_window is not supported"),
    (QWEN3, {"attention_bias": True}, "attention_bias is not supported"),
    (LLAMA, {"attention_bias": True}, "attention_bias is not supported"),
    (LLAMA, {"mlp_bias": True}, "mlp_bias is not supported"),
    (MISTRAL, {"sliding_window": 4096}, "sliding_window 4096 is not supported"),
    ("MixtralForCausalLM", {"sliding_window": 64}, "sliding_window 64 is not supported"),
    ("Qwen3MoeForCausalLM", {"mlp_only_layers": [0, 1]}, "without a layer of experts is not supported"),
    (V3, {"num_experts_per_tok": 6}, "two best experts"),
    (V3, {"norm_topk_prob": False}, "norm_topk_prob false is not supported"),
    (V3, {"scoring_func": "softmax"}, "scoring_func sigmoid"),
    (V3, {"topk_method": "greedy"}, "topk_method noaux_tc"),
    (V3, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "lacks .*mscale"),
    (V3, {"rope_interleave": False}, "rope_interleave false is not supported"),
    (V3, {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
    (GLM, {"norm_topk_prob": False}, "norm_topk_prob false is not supported"),
    (GLM, {"n_group": 2, "topk_group": 2}, "two best experts"),
    (GLM, {"hidden_act": "gelu"}, "hidden_act gelu is not supported"),
    (GLM, {"first_k_dense_replace": 2}, "without a layer of experts is not supported"),
    (GLM, {"partial_rotary_factor": None, "rope_parameters": None}, "requires partial_rotary_factor"),
    (GLM_LITE, {"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types .*'dense'. is not supported"),
    (GLM_LITE, {"attention_bias": True}, "attention_bias is not supported"),
    (GEMMA, {"hidden_activation": "gelu"}, "hidden_activation gelu is not supported"),
    (GEMMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supported"),
    (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
    (GEMMA, {"layer_types": ["chunked_attention"] * 4}, "chunked_attention in layer_types"),
    (GEMMA, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "type yarn is not supported"),
    (MINIMAX, {"scoring_func": "softmax"}, "scoring_func softmax is not supported; only sigmoid"),
    (MINIMAX, {"shared_intermediate_size": 64}, "shared_intermediate_size 64 is not supported"),
    (MINIMAX, {"attn_type_list": [0, 1]}, "attn_type_list .0, 1. is not supported"),
    (
        MINIMAX,
        {"rotary_dim": None, "rope_parameters": None, "partial_rotary_factor": None},
        "requires partial_rotary_factor",
    ),
    (NEXT, {"layer_types": ["sliding_attention"] * 4}, "sliding_attention in layer_types"),
    (NEXT, {"linear_num_value_heads": 3}, "linear_num_value_heads 3 is not supported: it must be a multiple"),
    (NEXT, {"mlp_only_layers": [0, 1, 2, 3]}, "without a layer of experts is not supported"),
    (NEXT, {"tie_word_embeddings": True}, "tie_word_embeddings is not supported: vLLM reads a head"),
    (QWEN35, {"layer_types": ["sliding_attention"] * 4}, "sliding_attention in layer_types"),
    (QWEN35_MOE, {"attn_output_gate": False}, "attn_output_gate False is not supported; only True"),
    (NEXT, {"attention_bias": True}, "attention_bias is not supported"),
    (OSS, {"swiglu_limit": 5.0}, "swiglu_limit 5.0 is not supported: vLLM computes only 7.0"),
    (OSS, {"sliding_window": None}, "sliding_window None is not supported"),
    (OSS, {"attention_bias": False}, "attention_bias False is not supported"),
    (OSS, {"layer_types": ["full_attention"] * 3}, "layer_types .*'full_attention'. is not supported"),
    (OSS, {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "lacks beta_fast in its rope_scaling"),
    (OSS, {"rope_parameters": {"rope_type": "default"}}, "type default is not supported; only yarn"),
    (OSS, {"quantization_config": {"quant_method": "quark"}}, "quant_method quark is not supported"),
    (GRANITE4, {"layer_types": ["mamba", "attention"]}, "layers of type mamba is not supported"),
    (GRANITE4, {"num_local_experts": 64}, "num_local_experts 64 is not supported; only 0 is"),
    (GRANITE4, {"position_embedding_type": "nope"}, "position_embedding_type nope is not supported"),
    (PHI, {"rope_scaling": {"type": "longrope"}}, "type longrope is not supported; only default"),
    (PHI, {"sliding_window": 2047}, "sliding_window 2047 is not supported"),
    (PHI, {"rope_parameters": None, "partial_rotary_factor": 0.75}, "partial_rotary_factor 0.75 is not"),
    (GRANITE, {"logits_scaling": 0}, "logits_scaling 0 is not supported; it must be positive"),
    (GRANITE, {"mlp_bias": True}, "mlp_bias is not supported"),
    (SEED, {"attention_out_bias": True}, "attention_out_bias is not supported"),
    (SMOL, {"use_sliding_window": True}, "use_sliding_window is not supported"),
    (V2, {"topk_method": "group_limited_greedy"}, "topk_method group_limited_greedy is not supported"),
    (V2, {"norm_topk_prob": True}, "norm_topk_prob false"),
    (V2, {"attention_bias": True}, "attention_bias is not supported"),
]
"""(architecture, changed keys, part of the error)."""


def test_unsupported_options_are_refused_by_name():
    for name, changes, text in REFUSED:
        hf = config(name) | changes
        with pytest.raises(ValueError, match=text) as caught:
            architecture(hf).check(hf)
        family = {V3: "DeepSeek-V3", V2: "DeepSeek-V2", "Qwen3MoeForCausalLM": "Qwen3-MoE"}
        family |= {
            GLM: "GLM-4.5",
            GLM_LITE: "GLM-4.7-Flash",
            GEMMA: "Gemma 3",
            PHI: "Phi-4",
            SEED: "Seed",
            GRANITE4: "Granite 4",
            OSS: "gpt-oss",
            MINIMAX: "MiniMax-M2",
            NEXT: "Qwen3-Next",
            QWEN35: "Qwen3.5",
            QWEN35_MOE: "Qwen3.5",
        }
        assert str(caught.value).startswith(family.get(name, name.removesuffix("ForCausalLM")))


def test_a_refusal_names_the_class_if_it_may_train():
    for hf, has_class in (
        (config(MISTRAL, sliding_window=4096), True),
        (config(PHI) | {"rope_scaling": {"type": "longrope"}}, False),
        (published("qwen3-vl-30b-a3b") | {"norm_topk_prob": False}, False),
    ):
        with pytest.raises(ValueError, match="is not supported") as caught:
            check_options(hf)
        assert str(caught.value).endswith("training.backend=transformers.") == has_class


def test_mistral_without_the_key_has_a_window():
    hf = {key: value for key, value in config(MISTRAL).items() if key != "sliding_window"}
    assert transformers.MistralConfig().sliding_window == 4096
    with pytest.raises(ValueError, match="sliding_window 4096"):
        architecture(hf).check(hf)
