"""Dense architectures: every file's names, shapes and layouts against transformers' models, published sizes, refusals."""

import json
import math
from pathlib import Path

import pytest
import torch
import transformers

from rl.models import SUPPORTED, architecture, dense, llama, mistral, qwen2, qwen3, value_weights
from rl.models.layout import VOCAB, index
from tests.checkpoints import PARTICULAR, tiny_config

FILES = {
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
}
CONFIGS = Path(__file__).resolve().parents[3] / "configs" / "models"
TIED = pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
EACH = pytest.mark.parametrize("name", FILES)


def config(name: str, **options) -> dict:
    """config.json as transformers writes it."""
    return json.loads(tiny_config(name, **options).to_json_string(use_diff=False))


def test_every_dense_architecture_has_a_file_and_a_tiny_model():
    assert set(FILES) <= set(SUPPORTED) and set(FILES) <= PARTICULAR.keys()
    for name, file in FILES.items():
        assert architecture({"architectures": [name]}) is file


@EACH
@TIED
def test_weights_are_those_of_transformers_model(name, tie):
    with torch.device("meta"):
        model = getattr(transformers, name)(tiny_config(name, tie=tie))
    expected = {
        key: tuple(tensor.shape)
        for key, tensor in model.state_dict().items()
        if not tie or key != "lm_head.weight"
    }
    mine = [
        pair
        for weight in FILES[name].weights(config(name, tie=tie))
        for pair in zip(weight.hf, weight.shapes)
    ]
    assert len(mine) == len(dict(mine))
    assert dict(mine) == expected


@EACH
@TIED
@pytest.mark.parametrize("side", ["megatron", "vllm"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ranks_hold_every_element_and_no_more_copies_than_they_must(name, tie, side, tp):
    # Four KV heads for Megatron, which cannot split fewer; vLLM copies its two over four ranks.
    hf = config(name, tie=tie, **({"num_key_value_heads": 4} if side == "megatron" else {}))
    for weight in FILES[name].weights(hf):
        counts = {key: torch.zeros(shape, dtype=torch.int8) for key, shape in zip(weight.hf, weight.shapes)}
        for rank in range(tp):
            pieces = weight.megatron_pieces(tp, rank) if side == "megatron" else weight.vllm_pieces(tp, rank)
            sizes = [math.prod(stop - start for start, stop in piece.local_box) for piece in pieces]
            for piece in pieces:
                counts[piece.hf][index(piece.hf_box)] += 1
            if side == "megatron" and weight.cut is not VOCAB:
                assert sum(sizes) == math.prod(weight.megatron_shape(tp)), weight.megatron
        for key, count in counts.items():
            copies = 1 if weight.cut.split else tp
            if side == "vllm" and (".k_proj." in key or ".v_proj." in key):
                copies = max(1, tp // hf["num_key_value_heads"])
            assert (count == copies).all(), (key, tp)


@EACH
def test_names_on_each_side_belong_to_one_weight_and_layers_say_where_they_are(name):
    weights = FILES[name].weights(config(name))
    assert len({weight.vllm for weight in weights}) == len(weights)
    assert len({(weight.megatron, weight.layer) for weight in weights}) == len(weights)
    for weight in weights:
        assert (
            ("{layer}" in weight.megatron)
            == (weight.layer is not None)
            == weight.hf[0].startswith("model.layers.")
        )


def test_qwen3_normalises_queries_and_keys_per_head_on_every_rank():
    norms = {
        weight.megatron: weight for weight in qwen3.weights(config("Qwen3ForCausalLM")) if weight.layer == 1
    }
    for side in "qk":
        weight = norms[f"decoder.layers.{{layer}}.self_attention.{side}_layernorm.weight"]
        assert weight.hf == (weight.vllm,) == (f"model.layers.1.self_attn.{side}_norm.weight",)
        assert weight.shapes == ((64,),) and weight.megatron_shape(2) == (64,) and not weight.cut.split


def test_only_qwen2_has_biases_and_only_qwen3_norms_of_queries():
    with_bias = {
        name
        for name, file in FILES.items()
        if any(w.hf[0].endswith(".bias") for w in file.weights(config(name)))
    }
    assert with_bias == {
        name for name, file in FILES.items() if file.megatron_config(config(name))["add_qkv_bias"]
    }
    assert with_bias == {"Qwen2ForCausalLM"}
    normed = {name for name, file in FILES.items() if file.megatron_config(config(name)).get("qk_layernorm")}
    assert normed == {"Qwen3ForCausalLM"}


@EACH
def test_a_value_model_has_its_own_head_in_the_place_of_the_vocabulary(name):
    hf = config(name)
    names = [key for weight in value_weights(hf, needs_head=True) for key in weight.hf]
    assert names[-1] == "score.weight" and "lm_head.weight" not in names
    assert len(names) == sum(len(weight.hf) for weight in FILES[name].weights(hf))


# Published models -----------------------------------------------------------------------------------------------------

# Elements as the model cards' safetensors metadata counts them.
PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "qwen3-8b": 8_190_735_360,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-0.5b": 494_032_768,
}


@pytest.mark.parametrize("model", PARAMETERS)
def test_shipped_config_has_as_many_parameters_as_the_published_model(model):
    hf = json.loads((CONFIGS / model / "config.json").read_text())
    file = architecture(hf)
    file.check(hf)
    assert (
        sum(math.prod(shape) for weight in file.weights(hf) for shape in weight.shapes) == PARAMETERS[model]
    )


# Rotary embeddings ----------------------------------------------------------------------------------------------------


def transformers_frequencies(hf: dict) -> torch.Tensor:
    """What transformers multiplies positions with."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return LlamaRotaryEmbedding(transformers.LlamaConfig.from_dict(hf)).inv_freq


@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.1-70b", "tiny"])
def test_scaled_frequencies_are_those_of_transformers(model):
    hf = (
        config("LlamaForCausalLM")
        if model == "tiny"
        else json.loads((CONFIGS / model / "config.json").read_text())
    )
    found = dense.scaled_frequencies(hf)
    torch.testing.assert_close(found, transformers_frequencies(hf), rtol=1e-6, atol=0)
    plain = 1 / dense.rope_theta(hf) ** (torch.arange(0, 2 * len(found), 2) / (2 * len(found)))
    factor = plain / found
    assert factor[0] == 1 and factor[-1] == pytest.approx(8)
    assert ((factor > 1.01) & (factor < 7.99)).any()  # and some in between


def test_scaling_by_hand():
    """Base 1 gives the frequency 1 everywhere: C / (2 pi) turns. Between 1 and 4 turns, the mix is linear in their number."""
    for turns, expected in ((0.5, 1 / 8), (1.0, 1 / 8), (2.5, 0.5 + 0.5 / 8), (4.0, 1.0), (100.0, 1.0)):
        context = turns * 2 * math.pi
        scaling = dict(
            rope_type="llama3",
            factor=8,
            low_freq_factor=1,
            high_freq_factor=4,
            original_max_position_embeddings=context,
        )
        found = dense.scaled_frequencies(dict(head_dim=4, rope_theta=1.0, rope_scaling=scaling))
        assert found.tolist() == pytest.approx([expected, expected])


@EACH
def test_default_rotary_embeddings_are_left_to_megatron(name):
    hf = config(name) | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    FILES[name].check(hf)
    assert dense.scaled_frequencies(hf) is None
    assert FILES[name].rope_theta(hf) == 5e5


# Refusals -------------------------------------------------------------------------------------------------------------


@EACH
def test_an_ordinary_config_passes_the_check(name):
    FILES[name].check(config(name))


YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
REFUSED = [
    *((name, YARN, "rotary embeddings of type yarn") for name in FILES),
    *((name, PARTIAL, "partial_rotary_factor 0.5") for name in FILES),
    *((name, {"hidden_act": "gelu"}, "hidden_act gelu") for name in FILES),
    ("Qwen2ForCausalLM", {"use_sliding_window": True}, "use_sliding_window"),
    ("Qwen3ForCausalLM", {"use_sliding_window": True}, "use_sliding_window"),
    ("Qwen3ForCausalLM", {"attention_bias": True}, "attention_bias"),
    ("LlamaForCausalLM", {"attention_bias": True}, "attention_bias"),
    ("LlamaForCausalLM", {"mlp_bias": True}, "mlp_bias"),
    ("MistralForCausalLM", {"sliding_window": 4096}, "sliding_window 4096"),
]


@pytest.mark.parametrize(("name", "changes", "said"), REFUSED)
def test_variants_that_are_not_built_are_refused_by_name(name, changes, said):
    family = name.removesuffix("ForCausalLM")
    with pytest.raises(ValueError, match=f"^{family} with {said} is not supported"):
        FILES[name].check(config(name) | changes)


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"])
def test_llama3_scaling_is_known_of_llama_only(name):
    scaling = config("LlamaForCausalLM")["rope_parameters"]
    with pytest.raises(ValueError, match="type llama3 is not supported; only the default ones are"):
        FILES[name].check(config(name) | {"rope_scaling": scaling})


def test_a_mistral_that_does_not_say_has_transformers_window():
    hf = {key: value for key, value in config("MistralForCausalLM").items() if key != "sliding_window"}
    assert transformers.MistralConfig().sliding_window == 4096
    with pytest.raises(ValueError, match="sliding_window 4096"):
        mistral.check(hf)


def test_llama3_scaling_without_its_numbers_is_refused_by_what_it_lacks():
    scaling = {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}
    with pytest.raises(
        ValueError, match="lacks low_freq_factor, original_max_position_embeddings in its rope_scaling"
    ):
        llama.check(config("LlamaForCausalLM") | {"rope_scaling": scaling})
