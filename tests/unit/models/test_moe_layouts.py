"""Layouts of mixtures of experts and of latent attention: every element is held, where each side's published layout has it."""

import pytest
import torch

from rl.models import architecture
from rl.models.layout import index
from tests.checkpoints import PARTICULAR, PUBLISHED, tiny_config

ARCHITECTURES = list(PARTICULAR)


def config(name: str, **options) -> dict:
    return tiny_config(name, **options).to_dict() | {"architectures": [name]} | PUBLISHED.get(name, {})


def pieces_on_megatron(weight, *, tp: int, etp: int):
    size = tp if weight.expert is None else etp
    return [piece for rank in range(size) for piece in weight.megatron_pieces(size, rank)]


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(("tp", "etp"), [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_megatron_holds_every_element_once_and_replicated_weights_once_per_rank(name, tp, etp):
    hf = config(name, num_key_value_heads=4)  # Megatron replicates no KV head
    for weight in architecture(hf).weights(hf):
        counts = {hf: torch.zeros(shape, dtype=torch.int64) for hf, shape in zip(weight.hf, weight.shapes)}
        for piece in pieces_on_megatron(weight, tp=tp, etp=etp):
            counts[piece.hf][index(piece.hf_box)] += 1
        for hf, count in counts.items():
            assert (count == (1 if weight.cut.split else tp)).all(), hf


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_pieces_of_weights_that_share_a_parameter_of_vllm_tile_it(name, tp):
    hf, held = config(name), {}
    for weight in architecture(hf).weights(hf):
        for piece in weight.vllm_pieces(tp, tp - 1):
            held.setdefault(weight.vllm, []).append(piece)
    for parameter, pieces in held.items():
        shape = [max(piece.local_box[dim][1] for piece in pieces) for dim in range(len(pieces[0].local_box))]
        counts = torch.zeros(shape, dtype=torch.int64)
        for piece in pieces:
            sizes, local = ([stop - start for start, stop in box] for box in (piece.hf_box, piece.local_box))
            assert sizes == local[-len(sizes) :] and all(size == 1 for size in local[: -len(sizes)])
            counts[index(piece.local_box)] += 1
        assert (counts == 1).all(), parameter


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_hugging_face_tensor_belongs_to_one_weight(name, tmp_path):
    """Names and shapes are those of a checkpoint that transformers saves, in which experts are apart."""
    import transformers
    from safetensors import safe_open

    getattr(transformers, name)(tiny_config(name, hidden_size=64, kv_lora_rank=32)).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
        expected = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}
    hf = config(name, hidden_size=64, kv_lora_rank=32)
    mine = [
        (tensor, shape)
        for weight in architecture(hf).weights(hf)
        for tensor, shape in zip(weight.hf, weight.shapes)
    ]
    assert len(mine) == len(dict(mine))
    assert dict(mine) == expected


def test_experts_lie_in_vllms_parameters_as_its_own_loader_puts_them():
    """w13_weight [E, 2F/tp, H]: of expert e the rank's rows of gate, then of up; w2_weight [E, H, F/tp]: its columns of down."""
    hf = config("Qwen3MoeForCausalLM")
    experts, ffn, tp, rank = hf["num_local_experts"], hf["moe_intermediate_size"], 2, 1
    found: dict[str, torch.Tensor] = {
        "w13_weight": torch.zeros(experts, 2 * ffn // tp, 128),
        "w2_weight": torch.zeros(experts, 128, ffn // tp),
    }
    tensors = {}
    for weight in architecture(hf).weights(hf):
        if weight.expert is None:
            continue
        tensors |= {name: torch.randn(shape) for name, shape in zip(weight.hf, weight.shapes)}
        for piece in weight.vllm_pieces(tp, rank):
            found[weight.vllm.rpartition(".")[2]][index(piece.local_box)] = tensors[piece.hf][
                index(piece.hf_box)
            ]
    for expert in range(experts):
        gate, up, down = (
            tensors[f"model.layers.1.mlp.experts.{expert}.{p}_proj.weight"] for p in ("gate", "up", "down")
        )
        half = slice(ffn // 2, ffn)
        assert torch.equal(found["w13_weight"][expert], torch.cat([gate[half], up[half]]))
        assert torch.equal(found["w2_weight"][expert], down[:, half])


def test_both_projections_to_latents_are_rows_of_one_parameter_of_vllm():
    hf = config("DeepseekV3ForCausalLM")
    of_layer = {w.hf[0]: w for w in architecture(hf).weights(hf) if w.layer == 0}
    query = of_layer["model.layers.0.self_attn.q_a_proj.weight"]
    key = of_layer["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"]
    assert query.vllm == key.vllm == "model.layers.0.self_attn.fused_qkv_a_proj.weight"
    rank = hf["q_lora_rank"]
    assert query.vllm_pieces(4, 3)[0].local_box == ((0, rank), (0, 128))
    assert key.vllm_pieces(4, 3)[0].local_box == ((rank, rank + 512 + 64), (0, 128))


def test_the_routers_bias_is_a_float32_weight_of_every_mixture_and_of_no_dense_layer():
    hf = config("DeepseekV3ForCausalLM", num_hidden_layers=4, first_k_dense_replace=2)
    assert [w.layer for w in architecture(hf).weights(hf) if w.float32] == [2, 3]
    assert [w.hf[0].rpartition(".")[2] for w in architecture(hf).weights(hf) if w.float32] == [
        "e_score_correction_bias"
    ] * 2


def test_which_layers_of_qwen3_moe_are_mixtures():
    hf = config("Qwen3MoeForCausalLM", num_hidden_layers=6, mlp_only_layers=[3], decoder_sparse_step=2)
    assert architecture(hf).moe_layers(hf) == [False, True, False, False, False, True]
    assert architecture(hf).megatron_config(hf)["moe_layer_freq"] == [0, 1, 0, 0, 0, 1]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tiny_configs_pass_the_check(name):
    architecture(config(name)).check(config(name))


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("DeepseekV3ForCausalLM", dict(num_experts_per_tok=6), "two best experts"),
        ("DeepseekV3ForCausalLM", dict(norm_topk_prob=False), "norm_topk_prob"),
        ("DeepseekV3ForCausalLM", dict(scoring_func="softmax"), "sigmoid"),
        ("DeepseekV3ForCausalLM", dict(rope_parameters={"rope_type": "yarn", "factor": 4.0}), "mscale"),
        ("DeepseekV2ForCausalLM", dict(topk_method="group_limited_greedy"), "group_limited_greedy"),
        ("DeepseekV2ForCausalLM", dict(attention_bias=True), "attention_bias"),
        ("MixtralForCausalLM", dict(sliding_window=64), "sliding_window 64"),
        ("Qwen3MoeForCausalLM", dict(mlp_only_layers=[0, 1]), "without a layer of experts"),
    ],
)
def test_what_is_not_built_is_refused_by_name(name, changes, said):
    hf = config(name) | changes
    with pytest.raises(ValueError, match=f"{said}.*not supported|not supported.*{said}|lacks.*{said}"):
        architecture(hf).check(hf)
