"""Layouts of weights: the pieces of all ranks against the Hugging Face tensors, and against references written with loops.

The references below share no code with rl.models.layout: they place single rows by the published layout of each side.
"""

import json
import random

import pytest
import torch

from rl.models import SUPPORTED, architecture, qwen2, read_hf_config
from rl.models.layout import VOCAB, assemble, index, padded_vocab, qkv, stage_layers, vocab_multiple

TPS = (1, 2, 4)


def config(*, heads=4, kv_heads=4, head_dim=2, hidden=8, ffn=12, vocab=100, layers=2, tied=False):
    return dict(
        architectures=["Qwen2ForCausalLM"],
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=ffn,
        vocab_size=vocab,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )


def random_config(rng, tp, *, on_vllm):
    """Any sizes that `tp` splits; on vLLM there may be fewer KV heads than ranks."""
    kv_heads = rng.choice([n for n in (1, 2, 4) if on_vllm or n % tp == 0])
    least = max(kv_heads, tp)  # both powers of two: query heads are a multiple of either
    return config(
        heads=least * rng.randint(1, 3),
        kv_heads=kv_heads,
        head_dim=rng.choice((2, 3, 8)),
        hidden=tp * rng.randint(1, 6),
        ffn=tp * rng.randint(1, 7),
        vocab=rng.randint(2, 300),
        layers=rng.randint(1, 3),
        tied=rng.random() < 0.5,
    )


def random_configs(*, on_vllm, trials=12):
    rng = random.Random(7)
    return [(tp, random_config(rng, tp, on_vllm=on_vllm)) for tp in TPS for _ in range(trials)]


def counts_in_hf(weight, pieces_of_ranks):
    """How many times each element of each Hugging Face tensor is held, over all ranks."""
    counts = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in zip(weight.hf, weight.shapes)}
    for pieces in pieces_of_ranks:
        for piece in pieces:
            counts[piece.hf][index(piece.hf_box)] += 1
    return counts


def local_counts(shape, pieces):
    """How many pieces lie on each element of the local parameter. Boxes must lie within it."""
    counts = torch.zeros(shape, dtype=torch.int64)
    for piece in pieces:
        assert all(
            0 <= start < stop <= size for (start, stop), size in zip(piece.local_box, shape, strict=True)
        )
        counts[index(piece.local_box)] += 1
    return counts


def box_shape(box):
    return tuple(stop - start for start, stop in box)


def assert_boxes_match(weight, pieces):
    for piece in pieces:
        hf_shape = weight.shapes[weight.hf.index(piece.hf)]
        assert box_shape(piece.hf_box) == box_shape(piece.local_box)
        assert all(
            0 <= start < stop <= size for (start, stop), size in zip(piece.hf_box, hf_shape, strict=True)
        )


# Coverage -------------------------------------------------------------------------------------------------------------


def test_megatron_ranks_hold_every_element_once_and_replicated_weights_once_per_rank():
    for tp, hf in random_configs(on_vllm=False):
        for weight in qwen2.weights(hf):
            pieces = [weight.megatron_pieces(tp, rank) for rank in range(tp)]
            expected = 1 if weight.cut.split else tp
            for name, counts in counts_in_hf(weight, pieces).items():
                assert (counts == expected).all(), (name, tp, hf)


def test_only_norms_are_replicated():
    replicated = {w.megatron for w in qwen2.weights(config()) if not w.cut.split}
    assert replicated == {
        "decoder.layers.{layer}.input_layernorm.weight",
        "decoder.layers.{layer}.pre_mlp_layernorm.weight",
        "decoder.final_layernorm.weight",
    }


def test_local_boxes_of_megatron_tile_the_parameter_except_vocabulary_padding():
    for tp, hf in random_configs(on_vllm=False):
        for weight in qwen2.weights(hf):
            filled = 0
            for rank in range(tp):
                pieces = weight.megatron_pieces(tp, rank)
                assert_boxes_match(weight, pieces)
                counts = local_counts(weight.megatron_shape(tp), pieces)
                if weight.cut is VOCAB:
                    assert counts.max() <= 1
                    rows = counts[:, 0]  # real rows first, then padding to the end
                    assert (counts == rows[:, None]).all() and (rows.diff() <= 0).all()
                    filled += int(rows.sum())
                else:
                    assert (counts == 1).all(), (weight.megatron, tp, rank, hf)
            if weight.cut is VOCAB:
                assert filled == hf["vocab_size"]


def test_vllm_ranks_hold_every_element_and_kv_heads_as_often_as_there_are_too_few_of_them():
    replications = set()
    for tp, hf in random_configs(on_vllm=True):
        copies = max(1, tp // hf["num_key_value_heads"])
        replications.add(copies)
        for weight in qwen2.weights(hf):
            pieces = [weight.vllm_pieces(tp, rank) for rank in range(tp)]
            for name, counts in counts_in_hf(weight, pieces).items():
                of_kv = ".k_proj." in name or ".v_proj." in name
                expected = copies if of_kv else (1 if weight.cut.split else tp)
                assert (counts == expected).all(), (name, tp, hf)
    assert replications == {1, 2, 4}


def test_local_boxes_of_vllm_tile_the_parameter_except_vocabulary_padding():
    for tp, hf in random_configs(on_vllm=True):
        dim, heads, kv_heads = hf["head_dim"], hf["num_attention_heads"], hf["num_key_value_heads"]
        for weight in qwen2.weights(hf):
            shape = list(weight.shapes[0])
            if "qkv_proj" in weight.vllm:
                shape[0] = (heads // tp + 2 * max(1, kv_heads // tp)) * dim
            elif "gate_up" in weight.vllm:
                shape[0] = 2 * hf["intermediate_size"] // tp
            elif "o_proj" in weight.vllm or "down_proj" in weight.vllm:
                shape[1] //= tp
            elif weight.cut is VOCAB:
                shape[0] = -(-hf["vocab_size"] // 64) * 64 // tp
            for rank in range(tp):
                pieces = weight.vllm_pieces(tp, rank)
                assert_boxes_match(weight, pieces)
                counts = local_counts(tuple(shape), pieces)
                assert counts.max() <= 1
                if weight.cut is not VOCAB:
                    assert (counts == 1).all(), (weight.vllm, tp, rank, hf)


# Order against independent references ---------------------------------------------------------------------------------


def numbered_qkv(heads, kv_heads, dim, columns):
    """Query, key and value whose every element is its own number."""
    rows = (heads + 2 * kv_heads) * dim
    whole = torch.arange(rows * columns).view(rows, columns) if columns else torch.arange(rows)
    return tuple(whole.split([heads * dim, kv_heads * dim, kv_heads * dim]))


def megatron_qkv_by_loops(q, k, v, heads, kv_heads, dim, tp, rank):
    """Megatron's linear_qkv: of each KV group of the rank its queries, then its key, then its value."""
    rows = []
    for group in range(kv_heads):
        if group * tp // kv_heads != rank:  # ranks take neighbouring groups
            continue
        for head in range(heads):
            if head * kv_heads // heads == group:  # queries of a group are neighbours
                for channel in range(dim):
                    rows.append(q[head * dim + channel])
        for part in (k, v):
            for channel in range(dim):
                rows.append(part[group * dim + channel])
    return torch.stack(rows)


def vllm_qkv_by_loops(q, k, v, heads, kv_heads, dim, tp, rank):
    """vLLM's qkv_proj: the rank's queries, then the keys that these queries meet, then their values."""
    my_heads = [head for head in range(heads) if head * tp // heads == rank]
    my_kv_heads = sorted({head * kv_heads // heads for head in my_heads})
    rows = []
    for part, part_heads in ((q, my_heads), (k, my_kv_heads), (v, my_kv_heads)):
        for head in part_heads:
            for channel in range(dim):
                rows.append(part[head * dim + channel])
    return torch.stack(rows)


def fill(pieces, tensors, shape):
    """The local parameter; -1 where no piece lies."""
    local = torch.full(shape, -1, dtype=next(iter(tensors.values())).dtype)
    for piece in pieces:
        local[index(piece.local_box)] = tensors[piece.hf][index(piece.hf_box)]
    return local


@pytest.mark.parametrize("columns", [0, 3], ids=["bias", "weight"])
@pytest.mark.parametrize("side", ["megatron", "vllm"])
def test_order_of_query_key_value_is_that_of_each_side(side, columns):
    reference = {"megatron": megatron_qkv_by_loops, "vllm": vllm_qkv_by_loops}[side]
    for tp in TPS:
        for kv_heads in (1, 2, 4):
            if side == "megatron" and kv_heads % tp:
                continue
            for per_kv in (1, 3) if kv_heads >= tp else (tp // kv_heads, 3 * tp // kv_heads):
                heads, dim = kv_heads * per_kv, 2
                parts = numbered_qkv(heads, kv_heads, dim, columns)
                names = ("q", "k", "v")
                pieces_of = getattr(qkv(heads, kv_heads, dim), side)
                for rank in range(tp):
                    expected = reference(*parts, heads, kv_heads, dim, tp, rank)
                    pieces = pieces_of(names, tuple(tuple(p.shape) for p in parts), tp, rank)
                    local = fill(pieces, dict(zip(names, parts)), expected.shape)
                    assert torch.equal(local, expected), (tp, kv_heads, heads, rank)


def test_example_of_two_groups_with_two_queries_each():
    """8 rows of queries, 4 of keys, 4 of values, heads of 2 channels; written out, so that one can see the layouts."""
    q, k, v = numbered_qkv(heads=4, kv_heads=2, dim=2, columns=0)  # q 0..7, k 8..11, v 12..15
    cut, tensors, shapes = qkv(4, 2, 2), dict(q=q, k=k, v=v), ((8,), (4,), (4,))
    assert fill(cut.megatron("qkv", shapes, 1, 0), tensors, (16,)).tolist() == [
        0,
        1,
        2,
        3,
        8,
        9,
        12,
        13,
        4,
        5,
        6,
        7,
        10,
        11,
        14,
        15,
    ]
    assert fill(cut.vllm("qkv", shapes, 1, 0), tensors, (16,)).tolist() == list(range(16))
    assert fill(cut.megatron("qkv", shapes, 2, 1), tensors, (8,)).tolist() == [4, 5, 6, 7, 10, 11, 14, 15]
    assert fill(cut.vllm("qkv", shapes, 2, 1), tensors, (8,)).tolist() == [4, 5, 6, 7, 10, 11, 14, 15]
    assert [fill(cut.vllm("qkv", shapes, 4, rank), tensors, (6,)).tolist() for rank in range(4)] == [
        [0, 1, 8, 9, 12, 13],
        [2, 3, 8, 9, 12, 13],
        [4, 5, 10, 11, 14, 15],
        [6, 7, 10, 11, 14, 15],
    ]


def megatron_shard_by_torch(weight, tensors, hf, tp, rank):
    """A rank's Megatron parameter by torch operations and loops, found by the parameter's name."""
    first = tensors[weight.hf[0]]
    name = weight.megatron

    def by_name(*parts):
        return [tensor for part in parts for n, tensor in tensors.items() if f".{part}_proj." in n]

    if "linear_qkv" in name:
        parts = by_name("q", "k", "v")
        return megatron_qkv_by_loops(
            *parts, hf["num_attention_heads"], hf["num_key_value_heads"], hf["head_dim"], tp, rank
        )
    if "linear_fc1" in name:
        return torch.cat([tensor.chunk(tp)[rank] for tensor in by_name("gate", "up")])
    if "linear_proj" in name or "linear_fc2" in name:
        return first.chunk(tp, dim=1)[rank]
    if "word_embeddings" in name or "output_layer" in name:
        multiple = 64  # tp is 1, 2 or 4 here, which divide it
        padding = first.new_full((-len(first) % multiple, first.shape[1]), float("nan"))
        return torch.cat([first, padding]).chunk(tp)[rank]
    assert "layernorm" in name
    return first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_assembling_the_shards_of_all_ranks_gives_back_the_tensors_bit_for_bit(dtype):
    generator = torch.Generator().manual_seed(0)
    for tp, hf in random_configs(on_vllm=False, trials=4):
        for weight in qwen2.weights(hf):
            tensors = {
                name: torch.randn(shape, generator=generator).to(dtype)
                for name, shape in zip(weight.hf, weight.shapes)
            }
            shards = [megatron_shard_by_torch(weight, tensors, hf, tp, rank) for rank in range(tp)]
            for shard in shards:
                assert tuple(shard.shape) == weight.megatron_shape(tp), (weight.megatron, tp, hf)
            full = assemble(weight, shards)
            assert list(full) == list(weight.hf)
            for name in weight.hf:
                assert full[name].dtype is dtype
                assert torch.equal(full[name], tensors[name]), (name, tp, hf)


def test_a_replicated_weight_is_assembled_from_the_first_shard_alone():
    norm = next(w for w in qwen2.weights(config()) if not w.cut.split)
    shards = [torch.full(norm.shapes[0], 1.0)]
    assert torch.equal(assemble(norm, shards)[norm.hf[0]], shards[0])


# Shapes and padding ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", TPS)
def test_shapes_of_megatron_parameters(tp):
    hf = config(heads=8, kv_heads=4, head_dim=16, hidden=64, ffn=96, vocab=130)
    shapes = {w.megatron: w.megatron_shape(tp) for w in qwen2.weights(hf) if w.layer in (None, 0)}
    layer = "decoder.layers.{layer}."
    assert shapes == {
        "embedding.word_embeddings.weight": (192 // tp, 64),
        layer + "input_layernorm.weight": (64,),
        layer + "self_attention.linear_qkv.weight": ((8 + 2 * 4) * 16 // tp, 64),
        layer + "self_attention.linear_qkv.bias": ((8 + 2 * 4) * 16 // tp,),
        layer + "self_attention.linear_proj.weight": (64, 128 // tp),
        layer + "pre_mlp_layernorm.weight": (64,),
        layer + "mlp.linear_fc1.weight": (2 * 96 // tp, 64),
        layer + "mlp.linear_fc2.weight": (64, 96 // tp),
        "decoder.final_layernorm.weight": (64,),
        "output_layer.weight": (192 // tp, 64),
    }


def test_shape_of_a_vocabulary_counts_padding_on_ranks_that_hold_nothing_else():
    embedding = qwen2.weights(config(vocab=10))[0]
    assert embedding.megatron_pieces(4, 1) == [] == embedding.megatron_pieces(4, 3)
    assert embedding.megatron_shape(4) == (16, 8)


@pytest.mark.parametrize(
    ("vocab_size", "multiple", "padded"),
    [(1, 64, 64), (64, 64, 64), (65, 64, 128), (151936, 64, 151936), (100, 7, 105)],
)
def test_vocabulary_is_padded_up_to_a_multiple(vocab_size, multiple, padded):
    assert padded_vocab(vocab_size, multiple) == padded


def test_vocabulary_multiple_serves_64_and_the_tensor_parallel_ranks():
    assert [vocab_multiple(tp) for tp in (1, 2, 3, 4, 6, 8, 128)] == [64, 64, 192, 64, 192, 64, 128]


# The list of weights --------------------------------------------------------------------------------------------------


def test_every_hugging_face_tensor_of_the_model_belongs_to_one_weight():
    transformers = pytest.importorskip("transformers")
    for tied in (False, True):
        hf = config(heads=4, kv_heads=2, head_dim=2, hidden=8, tied=tied)
        with torch.device("meta"):
            model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**hf))
        expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        mine = [
            (name, shape) for weight in qwen2.weights(hf) for name, shape in zip(weight.hf, weight.shapes)
        ]
        assert len(mine) == len(dict(mine))
        assert dict(mine) == expected


def test_a_tied_embedding_is_said_to_be_the_head_and_there_is_no_other():
    tied, untied = qwen2.weights(config(tied=True)), qwen2.weights(config(tied=False))
    assert [w.hf[0] for w in tied if w.tied_to_head] == ["model.embed_tokens.weight"]
    assert not any(w.tied_to_head for w in untied)
    assert {w.megatron for w in untied} - {w.megatron for w in tied} == {"output_layer.weight"}


def test_weights_say_which_layer_they_belong_to():
    for weight in qwen2.weights(config(layers=3)):
        in_layer = weight.hf[0].startswith("model.layers.")
        assert (weight.layer is not None) == in_layer == ("{layer}" in weight.megatron)
        if in_layer:
            assert all(name.startswith(f"model.layers.{weight.layer}.") for name in (*weight.hf, weight.vllm))
    assert [w.hf[0] for w in qwen2.weights(config()) if w.first_stage] == ["model.embed_tokens.weight"]


# Configs --------------------------------------------------------------------------------------------------------------


def test_megatron_config_follows_from_the_hugging_face_config():
    fields = qwen2.megatron_config(config(heads=8, kv_heads=2, head_dim=16, hidden=64, ffn=96, layers=3))
    assert fields == dict(
        num_layers=3,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=8,
        num_query_groups=2,
        kv_channels=16,
        layernorm_epsilon=1e-6,
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=True,
    )


@pytest.mark.parametrize("absent", [{}, {"head_dim": None}])
def test_head_dim_follows_from_the_hidden_size_where_the_config_does_not_say(absent):
    assert qwen2.head_dim({"hidden_size": 64, "num_attention_heads": 8, **absent}) == 8


def test_rope_base_is_read_from_configs_of_transformers_4_and_5():
    assert qwen2.rope_theta({"rope_theta": 1000000.0}) == 1e6
    assert qwen2.rope_theta({"rope_theta": 10000, "rope_scaling": None}) == 1e4
    assert qwen2.rope_theta({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}) == 5e5
    assert qwen2.rope_theta({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4}) == 5e5


@pytest.mark.parametrize(
    ("hf", "base"), [({"rope_parameters": {"rope_type": "default"}, "rope_theta": 1e6}, 1e6), ({}, 1e4)]
)
def test_rope_base_that_rope_parameters_leave_out(hf, base):
    assert qwen2.rope_theta(hf) == base


def test_an_ordinary_config_passes_the_check():
    qwen2.check(config())
    qwen2.check(config() | {"rope_scaling": None, "use_sliding_window": False, "hidden_act": "silu"})
    qwen2.check(config() | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}}, "yarn"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "linear"),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                "rope_scaling": {"type": "yarn", "factor": 4.0},
            },
            "yarn",
        ),
    ],
)
def test_scaled_rotary_embeddings_are_refused_by_their_kind(changes, kind):
    with pytest.raises(ValueError, match=f"rotary embeddings of type {kind} .*not supported"):
        qwen2.check(config() | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"use_sliding_window": True}, "use_sliding_window"), ({"hidden_act": "gelu"}, "hidden_act gelu")],
)
def test_variants_that_are_not_built_are_refused(changes, said):
    with pytest.raises(ValueError, match=f"{said}.* not supported"):
        qwen2.check(config() | changes)


def test_qwen2_is_found_by_its_architecture():
    assert architecture(config()) is qwen2
    assert qwen2.ARCHITECTURES == ("Qwen2ForCausalLM",)
    assert set(qwen2.ARCHITECTURES) <= set(SUPPORTED)


def test_an_unknown_architecture_is_named_with_those_that_are_supported():
    with pytest.raises(
        ValueError, match=r"architecture MambaForCausalLM is not supported; supported are Qwen2ForCausalLM"
    ):
        architecture({"architectures": ["MambaForCausalLM"]})


def test_config_is_read_from_a_checkpoint_directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config()))
    assert read_hf_config(str(tmp_path)) == config()


def test_a_missing_directory_is_named(tmp_path):
    path = str(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"model\.path=.*nowhere is not a directory"):
        read_hf_config(path)


def test_a_directory_without_config_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"model\.path=.* has no config\.json"):
        read_hf_config(str(tmp_path))


# Stages ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_layers", "pp", "expected"),
    [
        (6, 3, [2, 2, 2]),
        (3, 2, [2, 1]),
        (6, 4, [1, 2, 2, 1]),
        (61, 16, [3, *[4] * 13, 3, 3]),
        (5, 5, [1] * 5),
        (7, 1, [7]),
    ],
)
def test_stages_with_the_embedding_or_the_head_have_fewer_layers(num_layers, pp, expected):
    assert stage_layers(num_layers, pp) == expected and sum(expected) == num_layers
