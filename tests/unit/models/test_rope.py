"""Rotary embeddings and windows of every architecture, against transformers' models."""

import importlib

import pytest
import torch
import transformers

from rl.models import architecture, form, rope
from tests.architectures import (
    DENSE,
    GEMMA,
    GLM,
    LLAMA,
    MINIMAX,
    MISTRAL,
    NEXT,
    OSS,
    QWEN2,
    QWEN3,
    QWEN35,
    QWEN35_MOE,
    V3,
    YARN,
    config,
    published,
)
from tests.checkpoints import PARTICULAR
from tools.text_model import text_config

EACH = pytest.mark.parametrize("name", PARTICULAR)


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
