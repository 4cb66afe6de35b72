"""Layers of a transformer with bitwise reproducible results: the arithmetic of arithmetic.py.

A result is a function of one token's inputs and the weights. It depends neither on the other tokens of a
batch, nor on padding, nor on the number of tensor parallel ranks. Intermediate values are float64; each layer
rounds once, to the dtype of its input. The trainer and the engine call the same functions.

T tokens, K input and N output channels, E experts. Functions with a `group` are collective over it: the ranks
hold parts of the input channels, or of the vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rl.features.bitwise.arithmetic import (
    MAX_TERMS,
    bits_for,
    combine,
    exp,
    log,
    product,
    scale_above,
    slices,
    sum_over,
    total,
)

SCORES = 1 << 22
"""Number of attention scores that are computed at once."""


def _count(dtype: torch.dtype) -> int:
    """Return the number of slices: two exceed the 24 bits of float32, one exceeds the 8 of bfloat16."""
    return 2 if dtype is torch.float32 else 1


@dataclass(frozen=True)
class SlicedWeight:
    """A weight [N, K], or the rank's part [N, K/tp] of it, prepared for `linear`.

    It does not depend on the rank's selection of output channels, nor on the fusion of layers.
    """

    scale: Tensor
    """float64 [1, N]: power of two above each output channel's weights."""
    parts: list[Tensor]
    """Transposed slices, float64 [K, N]."""
    bits: int

    @classmethod
    def of(cls, weight: Tensor, group: dist.ProcessGroup | None = None) -> "SlicedWeight":
        """Slice a weight. group: ranks that hold the other input channels; collective over it."""
        terms = weight.shape[1] * (1 if group is None else group.size())
        return cls.scaled(weight, scale_above(weight, 1, group), terms)

    @classmethod
    def scaled(cls, weight: Tensor, scale: Tensor, terms: int) -> "SlicedWeight":
        """Slice a weight by its scale [N, 1]. terms: number of products in a sum over all ranks."""
        bits = bits_for(terms)
        parts = slices(weight.double() / scale, bits, _count(weight.dtype))
        return cls(scale.T, [part.T for part in parts], bits)


def linear(
    x: Tensor,
    weight: Tensor | SlicedWeight,
    bias: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x @ weight.T + bias [..., N] in x's dtype, or in `dtype`.

    x: [..., K], or the rank's part [..., K/tp].
    """
    if isinstance(weight, Tensor):
        weight = SlicedWeight.of(weight, group)
    flat = x.flatten(0, -2)
    rows = scale_above(flat, -1, group)
    parts = product(slices(flat.double() / rows, weight.bits, len(weight.parts)), weight.parts)
    out = combine(sum_over(parts, group), weight.bits) * rows * weight.scale
    if bias is not None:
        out = out + bias.double()
    return out.to(dtype or x.dtype).unflatten(0, x.shape[:-1])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x**2) + eps) * weight over the last dimension."""
    wide, scale = x.double(), scale_above(x, -1)
    scaled = wide / scale
    mean = total(scaled * scaled) * (scale * scale) / x.shape[-1]
    return (wide / torch.sqrt(mean + eps) * weight.double()).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x)."""
    wide = x.double()
    return (wide / (exp(-wide) + 1.0)).to(x.dtype)


def gated(x: Tensor) -> Tensor:
    """Return silu(gate) * up for x = [gate, up] along the last dimension."""
    gate, up = x.chunk(2, -1)
    return silu(gate) * up


def rotary_table(frequencies: Tensor, positions: int, scale: float = 1.0) -> Tensor:
    """Return cosines and sines side by side of positions 0 to `positions` - 1, float32 [positions, d].

    frequencies: float32 [d / 2], the angle at position 1. Both sides must use one call for all positions.
    """
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies.float()).double()
    return torch.cat([angles.cos() * scale, angles.sin() * scale], -1).float()


def rotate(x: Tensor, rotation: Tensor, adjacent: bool) -> Tensor:
    """Return x [T, heads, d] with the pairs of its first r channels rotated.

    rotation: [T, 1, r], from `rotary_table`.
    adjacent: whether a pair is two adjacent channels or one of each half. In the output it is one of each
    half.
    """
    cos, sin = rotation.double().chunk(2, -1)
    x, rest = x.tensor_split([rotation.shape[-1]], -1)
    first, second = (x[..., ::2], x[..., 1::2]) if adjacent else x.chunk(2, -1)
    first, second = first.double(), second.double()
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    return torch.cat([rotated, rest], -1) if rest.shape[-1] else rotated


def attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Return the attention of B sequences with grouped queries, [B, n, heads, v] in the query's dtype.

    query: [B, n, heads, d]. key: [B, S, kv_heads, d]. value: [B, S, kv_heads, v].
    visible: int64 [B, n], number of keys that each query sees; these are the first ones. Keys that no query
    sees must be finite and change nothing.
    """
    batch, length, heads, _ = query.shape
    kv_heads, count = key.shape[2], _count(query.dtype)
    bits, value_bits = bits_for(query.shape[-1]), bits_for(MAX_TERMS)
    scale = float(torch.tensor(scale, dtype=torch.float32))  # libraries round the float64 differently
    q, k, v = (x.double().permute(0, 2, 1, 3) for x in (query, key, value))  # [B, heads, n or S, d]
    q_scale, k_scale, v_scale = (scale_above(x, -1) for x in (q, k, v))
    k_parts = [part.mT for part in slices(k / k_scale, bits, count)]
    v_parts = slices(v / v_scale, value_bits, count)
    out = query.new_empty(batch, heads, length, value.shape[-1])
    step = max(1, SCORES // (batch * heads * key.shape[1]))
    for start in range(0, length, step):
        part = slice(start, start + step)
        grouped = (q / q_scale)[:, :, part].unflatten(1, (kv_heads, -1)).flatten(2, 3)
        scores = combine(product(slices(grouped, bits, count), k_parts), bits) * k_scale.mT
        scores = scores.unflatten(2, (heads // kv_heads, -1)).flatten(1, 2) * (q_scale[:, :, part] * scale)
        seen = torch.arange(key.shape[1], device=key.device) < visible[:, None, part, None]
        scores.masked_fill_(~seen, float("-inf"))
        powers = exp(scores - scores.amax(-1, keepdim=True)).masked_fill_(~seen, 0.0)
        weighted = powers.unflatten(1, (kv_heads, -1)).flatten(2, 3) * v_scale.mT
        rows = scale_above(weighted, -1)
        sums = combine(product(slices(weighted / rows, value_bits, count), v_parts), value_bits) * rows
        sums = sums.unflatten(2, (heads // kv_heads, -1)).flatten(1, 2)
        out[:, :, part] = (sums / total(powers)).to(out.dtype)
    return out.transpose(1, 2)


def packed_attention(
    query: Tensor,
    lengths: Tensor,
    slots: Tensor,
    key_lengths: Tensor,
    gather: Callable[[Tensor], tuple[Tensor, Tensor]],
    scale: float,
) -> Tensor:
    """Return the causal attention of B sequences with packed queries, [T, heads, v].

    query: [T, heads, d], the sequences' queries one after another. lengths, key_lengths: int64 [B], numbers
    of queries and keys. A sequence's last query sees all of its keys. slots: int64 [B, S], where the keys
    are. gather: slots [b, s] -> keys [b, s, kv_heads, d] and values [b, s, kv_heads, v].
    """
    starts = lengths.cumsum(0) - lengths
    order = key_lengths.argsort(stable=True).tolist()
    sizes = key_lengths.tolist()
    results: list[tuple[Tensor, Tensor]] = []
    while order:
        members = [order.pop()]  # the longest, and others of similar length
        most = max(1, SCORES // (query.shape[1] * sizes[members[0]] * int(lengths[members[0]])))
        while order and len(members) < most and 2 * sizes[order[-1]] >= sizes[members[0]]:
            members.append(order.pop())
        of = torch.tensor(members, device=slots.device)
        key, value = gather(slots[of, : sizes[members[0]]])
        counts = lengths[of, None]
        step = torch.arange(int(counts.max()), device=slots.device)
        at = (starts[of, None] + step).clamp(max=len(query) - 1)
        visible = (key_lengths[of, None] - counts + 1 + step).clamp(max=key.shape[1])
        found = attention(query[at], key, value, visible, scale)
        results.append((at[step < counts], found[step < counts]))
    out = query.new_empty(*query.shape[:2], results[0][1].shape[-1])
    for at, found in results:
        out[at] = found
    return out


@dataclass(frozen=True)
class RouterOptions:
    """Choice of experts by a router: fields of Megatron's config of these names after `moe_router_`."""

    topk: int
    pre_softmax: bool = False
    score_function: str = "softmax"
    num_groups: int | None = None
    group_topk: int | None = None
    topk_scaling_factor: float | None = None

    @classmethod
    def of(cls, fields: dict) -> "RouterOptions":
        """Return the routing of `rl.models.architecture(hf).megatron_config(hf)`."""
        prefix = "moe_router_"
        names = {prefix + name for name in cls.__dataclass_fields__}
        return cls(**{name.removeprefix(prefix): fields[name] for name in names & fields.keys()})


def route(logits: Tensor, routing: RouterOptions, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the weights float32 [T, k] and experts int64 [T, k] of each token.

    logits: float32 [T, E]. bias: float32 [E], added to the scores for the selection only.
    """
    wide = logits.double()
    if routing.score_function == "sigmoid":
        scores = 1.0 / (exp(-wide) + 1.0)
        ids = choose((scores if bias is None else scores + bias.double()).float(), routing)
        scores = scores.gather(1, ids)
        weights = scores / (total(scores) + 1e-20) if routing.topk > 1 else scores
    else:
        powers = exp(wide - wide.amax(-1, keepdim=True))
        ids = choose(logits, routing)
        weights = powers.gather(1, ids)
        weights = weights / total(powers if routing.pre_softmax else weights)
    return (weights * (routing.topk_scaling_factor or 1.0)).float(), ids


def choose(scores: Tensor, routing: RouterOptions) -> Tensor:
    """Return the experts of each token; with groups, only experts of the best groups.

    A group's score is the sum of its two best experts. For example, with 8 groups and `group_topk` 4 the
    experts of the 4 groups with the highest scores are left to choose from.
    """
    if routing.group_topk:
        assert routing.num_groups is not None and routing.topk // routing.group_topk == 2
        grouped = scores.unflatten(1, (routing.num_groups, -1))
        first, second = grouped.topk(2, -1).values.unbind(-1)
        groups = (first + second).topk(routing.group_topk, -1).indices
        kept = torch.zeros_like(first, dtype=torch.bool).scatter_(1, groups, True)
        scores = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)
    return scores.topk(routing.topk, -1).indices


def experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    ups: Sequence[Tensor],
    downs: Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts, [T, H].

    weights, ids: [T, k] from `route`. ups: [2F/tp, H] of each expert, the rows of gate, then of up. downs:
    [H, F/tp]. The weight is applied before the projection down, so that the sum over experts, channels and
    ranks is one sum.
    """
    terms = downs[0].shape[1] * (1 if group is None else group.size()) * ids.shape[1]
    largest = torch.stack([down.abs().amax(1) for down in downs]).amax(0)
    scale = scale_above(largest[:, None], 1, group)
    inputs: list[tuple[Tensor, Tensor, SlicedWeight]] = []
    tallest = x.new_zeros(len(x), 1, dtype=torch.float64)
    for expert in ids.unique().tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        inner = gated(linear(x[token], ups[expert])).double() * weights[token, choice, None].double()
        tallest[token] = torch.maximum(tallest[token], inner.abs().amax(-1, keepdim=True))
        inputs.append((token, inner, SlicedWeight.scaled(downs[expert], scale, terms)))
    rows = scale_above(tallest, -1, group)
    sums = [x.new_zeros(x.shape, dtype=torch.float64) for _ in range(_count(x.dtype))]
    for token, inner, down in inputs:
        found = product(slices(inner / rows[token], down.bits, len(sums)), down.parts)
        for part, more in zip(sums, found):
            part.index_add_(0, token, more)
    return (combine(sum_over(sums, group), bits_for(terms)) * rows * scale.T).to(x.dtype)


def log_softmax(logits: Tensor) -> Tensor:
    """Return the log-probs of logits [T, V], float32; a logit of -inf has probability 0."""
    below = logits.double() - logits.amax(-1, keepdim=True)
    return (below - log(total(exp(below)))).float()


def target_logprobs(logits: Tensor, targets: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the targets' log-probs, float32 [T], and all log-probs of the rank's logits, float64 [T, V/tp].

    logits: float32 [T, V/tp], V/tp may be 0. targets: int64 [T], index among the rank's logits, or -1.
    """
    largest = logits.new_full((len(logits), 1), float("-inf"), dtype=torch.float64)
    if logits.shape[1]:
        largest = logits.amax(-1, keepdim=True).double()
    if group.size() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    below = logits.double() - largest
    logprobs = below - log(total(exp(below), group))
    at = logits.new_zeros(len(logits), dtype=torch.float64)
    if logits.shape[1]:
        at = logprobs.gather(1, targets.clamp(min=0)[:, None])[:, 0].masked_fill(targets < 0, 0.0)
    return sum_over([at], group)[0].float(), logprobs
