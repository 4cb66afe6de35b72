"""The gated delta rule over packed sequences, in chunks (Gated DeltaNet, arXiv:2412.06464, section 3.3).

A head's state S [K, V] maps keys to values. Each token first decays the state. At its key, the token then
replaces a share beta of the state's value by its own value. Finally it reads the state at its query:

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T        o_t = S_t^T q_t

Within a chunk of C tokens the corrections u_t = beta_t (v_t - ...) solve a triangular system, so a chunk
takes a few matrix products and only its last state is passed on. The trainer and the CPU engine call
`gated_delta_rule`.

T tokens of N sequences, H heads, K channels of a key, V of a value. M chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Maximum number of tokens of a chunk, as in the paper's kernels."""
L2_EPSILON = 1e-6
"""Added to the sum of squares of a query or key, as in transformers and vLLM."""


@dataclass(frozen=True)
class Chunks:
    """Division of sequences into chunks of equal length; a sequence's last chunk may have empty places.

    Step s computes the chunks with the number s of all sequences that have one. The chunks are stored in the
    order of the steps, and within a step from the longest sequence to the shortest. The sequences of a step
    are therefore the first sequences of the step before.
    """

    size: int
    """C, tokens of a chunk."""
    places: Tensor
    """int64 [T]: place of each token among the M C places."""
    active: list[int]
    """Number of sequences that have a chunk, for each step."""
    order: Tensor
    """int64 [N]: sequences from the longest to the shortest."""
    rank: Tensor
    """int64 [N]: inverse of `order`."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "Chunks":
        """Return the division of adjacent sequences. lengths: number of tokens of each sequence."""
        size = max(1, min(CHUNK, max(lengths)))
        counts = [-(-length // size) for length in lengths]
        order = sorted(range(len(lengths)), key=lambda sequence: -counts[sequence])
        active = [sum(count > step for count in counts) for step in range(max(counts))]
        begins = torch.tensor([*accumulate(active, initial=0)])
        rank = torch.empty(len(order), dtype=torch.int64)
        rank[torch.tensor(order)] = torch.arange(len(order))
        sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        starts = torch.tensor([*accumulate(lengths[:-1], initial=0)])
        within = torch.arange(len(sequence)) - starts[sequence]
        places = (begins[within // size] + rank[sequence]) * size + within % size
        return cls(size, places.to(device), active, torch.tensor(order).to(device), rank.to(device))

    def split(self, x: Tensor) -> Tensor:
        """Return x [T, H, ...] as chunks [M, H, C, ...]; empty places are 0."""
        whole = x.new_zeros(sum(self.active) * self.size, *x.shape[1:]).index_copy(0, self.places, x)
        return whole.unflatten(0, (-1, self.size)).transpose(1, 2)

    def join(self, x: Tensor) -> Tensor:
        """Return the inverse of `split`."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self.places)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    chunks: Chunks,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs [T, H, V] and the last state of each sequence [N, H, K, V].

    Computed in float32, or in float64 if an input is in float64.

    Args:
        query, key: [T, H, K], normed and scaled.
        value: [T, H, V].
        decay: g, the logarithm of each token's decay, at most 0, [T, H].
        beta: [T, H].
        chunks: division of the sequences, `Chunks.of`.
        initial: state before each sequence [N, H, K, V]; None: 0.
    """
    dtype = torch.promote_types(value.dtype, torch.float32)
    q, k, v, g, b = (chunks.split(x.to(dtype)) for x in (query, key, value, decay, beta))
    total = g.cumsum(-1)
    between = total[..., :, None] - total[..., None, :]
    future = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=q.device).triu(1)
    between = between.masked_fill(future, float("-inf")).exp()  # decay from token j to token i
    # (1 + L) u = beta v - w S, with L strictly lower triangular: solved for both terms at once.
    weighted = k * b[..., None]
    system = weighted @ k.transpose(-1, -2) * between
    known = torch.cat([v * b[..., None], weighted * total.exp()[..., None]], -1)
    known = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    u_alone, w = known.split([v.shape[-1], k.shape[-1]], -1)
    scores = q @ k.transpose(-1, -2) * between
    from_state = q * total.exp()[..., None]
    last = total[..., -1:]
    to_state = (k * (last - total).exp()[..., None]).transpose(-1, -2)
    steps = [x.split(chunks.active) for x in (u_alone, w, scores, from_state, to_state, last.exp())]

    shape = len(chunks.order), *k.shape[1:2], k.shape[-1], v.shape[-1]
    state = q.new_zeros(shape) if initial is None else initial.to(dtype).index_select(0, chunks.order)
    outputs, ended = [], []
    for count, *parts in zip(chunks.active, *steps):
        u_alone, w, scores, from_state, to_state, keep = parts
        if count < len(state):
            ended.append(state[count:])
            state = state[:count]
        u = u_alone - w @ state
        outputs.append(from_state @ state + scores @ u)
        state = state * keep[..., None] + to_state @ u
    final = torch.cat([state, *reversed(ended)]).index_select(0, chunks.rank)
    return chunks.join(torch.cat(outputs)).to(value.dtype), final


def normed(x: Tensor) -> Tensor:
    """Return queries or keys [..., K] divided by their length, in float32 or float64."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPSILON)


def log_decay(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Return g = -exp(A_log) softplus(a + dt_bias) [T, H], at least in float32. a: [T, H]. Others: [H]."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    return -a_log.to(dtype).exp() * F.softplus(a.to(dtype) + dt_bias.to(dtype))


def causal_conv(windows: Sequence[Tensor], weight: Tensor) -> Tensor:
    """Return silu of a convolution per channel [T, C], in the dtype of the windows.

    windows: for each of the W taps, the channels [T, C] of the tokens at this tap. The first tap is the
    oldest token, the last tap the token itself. weight: [C, W].
    """
    dtype = torch.promote_types(windows[0].dtype, torch.float32)
    taps = zip(windows, weight.to(dtype).unbind(-1), strict=True)
    total = sum(window.to(dtype) * tap for window, tap in taps)
    assert isinstance(total, Tensor)
    return F.silu(total).to(windows[0].dtype)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of x [..., V] times silu(gate), in the dtype of x. weight: [V]."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return (F.rms_norm(x.to(dtype), weight.shape, weight.to(dtype), eps) * F.silu(gate.to(dtype))).to(x.dtype)
