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
from rl.models.boxes import index
from rl.models.layout import assemble, padded_vocab, qkv, stage_layers, vocab_multiple

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


def random_configs(trials: int):
    """Yield (tp, config) of any sizes that tp splits."""
    rng = random.Random(7)
    for tp in TPS:
        for _ in range(trials):
            kv_heads = rng.choice([n for n in (1, 2, 4) if n % tp == 0])
            yield (
                tp,
                config(
                    heads=kv_heads * rng.randint(1, 3),
                    kv_heads=kv_heads,
                    head_dim=rng.choice((2, 3, 8)),
                    hidden=tp * rng.randint(1, 6),
                    ffn=tp * rng.randint(1, 7),
                    vocab=rng.randint(2, 300),
                    layers=rng.randint(1, 3),
                    tied=rng.random() < 0.5,
                ),
            )


# Order against independent references -----------------------------------------------------------------------


def numbered_qkv(heads, kv_heads, dim, columns):
    """Query, key and value with a different number in every element."""
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
    for tp, hf in random_configs(4):
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
