"""Layouts of weights for many sizes: pieces against the Hugging Face tensors, and against references written
with loops.

The references share no code with rl.models.layout: they place single rows by the published layout of each
side.
"""

import json
import random

import pytest
import torch

from rl.models import qwen2, read_hf_config, sizes
from rl.models.boxes import extent, index
from rl.models.layout import VOCAB, assemble, padded_vocab, qkv, stage_layers, vocab_multiple

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
    """The number of ranks that hold each element of each Hugging Face tensor."""
    counts = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in zip(weight.hf, weight.shapes)}
    for pieces in pieces_of_ranks:
        for piece in pieces:
            counts[piece.hf][index(piece.hf_box)] += 1
    return counts


def local_counts(weight, shape, pieces):
    """The number of pieces on each element of the local parameter. Checks that boxes match and lie inside."""
    counts = torch.zeros(shape, dtype=torch.int64)
    for piece in pieces:
        hf_shape = weight.shapes[weight.hf.index(piece.hf)]
        assert extent(piece.hf_box) == extent(piece.local_box)
        for box, sizes_of_dims in ((piece.hf_box, hf_shape), (piece.local_box, shape)):
            assert all(
                0 <= start < stop <= size for (start, stop), size in zip(box, sizes_of_dims, strict=True)
            )
        counts[index(piece.local_box)] += 1
    return counts


# Coverage ---------------------------------------------------------------------------------------------------


def test_vllm_ranks_tile_parameters_of_any_size():
    replications = set()
    for tp, hf in random_configs(on_vllm=True):
        dim, heads, kv_heads = hf["head_dim"], hf["num_attention_heads"], hf["num_key_value_heads"]
        copies = max(1, tp // kv_heads)
        replications.add(copies)
        for weight in qwen2.weights(hf):
            pieces = [weight.vllm_pieces(tp, rank) for rank in range(tp)]
            for name, counts in counts_in_hf(weight, pieces).items():
                of_kv = ".k_proj." in name or ".v_proj." in name
                expected = copies if of_kv else (1 if weight.cut.split else tp)
                assert (counts == expected).all(), (name, tp, hf)
            shape = list(weight.shapes[0])
            if "qkv_proj" in weight.vllm:
                shape[0] = (heads // tp + 2 * max(1, kv_heads // tp)) * dim
            elif "gate_up" in weight.vllm:
                shape[0] = 2 * hf["intermediate_size"] // tp
            elif "o_proj" in weight.vllm or "down_proj" in weight.vllm:
                shape[1] //= tp
            elif weight.cut is VOCAB:
                shape[0] = -(-hf["vocab_size"] // 64) * 64 // tp
            for of_rank in pieces:
                counts = local_counts(weight, tuple(shape), of_rank)
                assert counts.max() <= 1
                assert weight.cut is VOCAB or (counts == 1).all(), (weight.vllm, tp, hf)
    assert replications == {1, 2, 4}


# Order against independent references -----------------------------------------------------------------------


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
def test_order_of_query_key_value(side, columns):
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
    """8 rows of queries, 4 of keys, 4 of values, heads of 2 channels."""
    q, k, v = numbered_qkv(heads=4, kv_heads=2, dim=2, columns=0)  # q 0..7, k 8..11, v 12..15
    cut, tensors, shapes = qkv(4, 2, 2), dict(q=q, k=k, v=v), ((8,), (4,), (4,))
    both = [[0, 1, 2, 3, 8, 9, 12, 13], [4, 5, 6, 7, 10, 11, 14, 15]]
    assert fill(cut.megatron("qkv", shapes, 1, 0), tensors, (16,)).tolist() == both[0] + both[1]
    assert fill(cut.vllm("qkv", shapes, 1, 0), tensors, (16,)).tolist() == list(range(16))
    assert fill(cut.megatron("qkv", shapes, 2, 1), tensors, (8,)).tolist() == both[1]
    assert fill(cut.vllm("qkv", shapes, 2, 1), tensors, (8,)).tolist() == both[1]
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
def test_assembled_shards_are_bitwise_the_tensors(dtype):
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


# Shapes and padding -----------------------------------------------------------------------------------------


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


def test_shape_of_a_vocabulary_includes_ranks_of_padding():
    embedding = qwen2.weights(config(vocab=10))[0]
    assert embedding.megatron_pieces(4, 1) == [] == embedding.megatron_pieces(4, 3)
    assert embedding.megatron_shape(4) == (16, 8)


def test_padding_of_the_vocabulary():
    for vocab_size, multiple, padded in (
        (1, 64, 64),
        (64, 64, 64),
        (65, 64, 128),
        (151936, 64, 151936),
        (100, 7, 105),
    ):
        assert padded_vocab(vocab_size, multiple) == padded
    assert [vocab_multiple(tp) for tp in (1, 2, 3, 4, 6, 8, 128)] == [64, 64, 192, 64, 192, 64, 128]


# Configs ----------------------------------------------------------------------------------------------------


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


def test_sizes_that_follow_from_other_keys():
    hf = {"hidden_size": 64, "num_attention_heads": 8}
    for absent in ({}, {"head_dim": None}):
        assert sizes.head_dim(hf | absent) == 8 and sizes.head_dim(hf | {"head_dim": 16}) == 16
    assert sizes.num_kv_heads(hf) == 8 and sizes.num_kv_heads(hf | {"num_key_value_heads": 2}) == 2
    assert sizes.num_experts(hf) == 0 and sizes.num_experts({"num_experts": None, "n_routed_experts": 4}) == 4


def test_config_is_read_from_a_checkpoint_directory(tmp_path):
    with pytest.raises(ValueError, match=r"model\.path=.*nowhere is not a directory"):
        read_hf_config(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"critic\.path=.* has no config\.json"):
        read_hf_config(str(tmp_path), key="critic.path")
    (tmp_path / "config.json").write_text(json.dumps(config()))
    assert read_hf_config(str(tmp_path)) == config()


# Stages -----------------------------------------------------------------------------------------------------


def test_stages_with_embedding_or_head_have_fewer_layers():
    for expected in ([2, 2, 2], [2, 1], [1, 2, 2, 1], [3, *[4] * 13, 3, 3], [1] * 5, [7]):
        assert stage_layers(sum(expected), len(expected)) == expected
