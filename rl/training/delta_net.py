"""Gated delta nets in place of attention (arXiv:2412.06464; Qwen3-Next): the layer, over packed rows.

Queries, keys and values pass a short causal convolution, then the gated delta rule (`rl.models.delta_rule`).
Both restart at each sequence of a row. Answers that share a prompt continue from the window and the state at
the prompt's end. For example, a prompt that eight answers share passes the rule once, and each answer begins
with the prompt's last state. A tensor parallel rank has whole key heads and their value heads.

Each context parallel rank gathers the inputs of the whole row, computes the whole row and keeps its own part.

T: tokens of the row, or of this rank's part. W: tokens of the whole row. G: key heads of the rank, H = r G
value heads, K and V their channels.
"""

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from rl.models.delta_rule import Chunks, causal_conv, gated_delta_rule, gated_norm, log_decay, normed
from rl.training.attention import PackedRow
from rl.training.packing import to_device
from rl.training.rows import RowGroup, ranges, select_rows

if TYPE_CHECKING:
    from rl.training.context_parallel import RowPart


@functools.cache
def has_fused_rule() -> bool:
    """Return whether the fused kernels of flash-linear-attention are installed; they support 16-bit types."""
    return torch.cuda.is_available() and importlib.util.find_spec("fla") is not None


@dataclass
class SequencePass:
    """Sequences that are computed at once."""

    tokens: Tensor | None
    """int64 [n]: the sequences' tokens in the row, one sequence after another; None: the whole row."""
    parents: Tensor | None
    """int64 [sequences]: for each sequence, the sequence of the first pass whose last state it begins with;
    None: all begin with a state of 0."""
    cu_seqlens: Tensor
    """int64 [sequences + 1]: bounds of the sequences among the n tokens, for fused kernels."""
    lengths: list[int]
    chunks: Chunks | None = None
    """Division into chunks, for the rule without fused kernels."""

    def chunked(self) -> Chunks:
        """Return the division of the sequences into chunks."""
        if self.chunks is None:
            self.chunks = Chunks.of(self.lengths, self.cu_seqlens.device)
        return self.chunks


class Recurrence:
    """The order of a row's tokens, for recurrent layers: which token follows which.

    groups: the adjacent groups that fill the row. part: this rank's part of it, if ranks share the row.
    device: of the result.
    """

    def __init__(self, groups: Sequence[RowGroup], part: "RowPart | None", device: torch.device) -> None:
        size, shared = groups[-1].end, [group for group in groups if group.answers]
        firsts = [(group.start, group.prompt) for group in groups]
        answers = [pair for group in shared for pair in list(zip(group.starts, group.segments))[1:]]
        # The token before each token of the row, in its sequence; the place `size` stands for none.
        previous = np.arange(-1, size)
        previous[[start for start, _ in firsts]] = previous[size] = size
        ends = [group.start + group.prompt - 1 for group in shared for _ in group.answers]
        previous[[start for start, _ in answers]] = ends
        parents = [number for number, group in enumerate(groups) for _ in group.answers]
        starts, lengths = (list(column) for column in zip(*firsts, *answers))
        order = ranges(np.array(starts), np.array(lengths))
        sizes = [lengths[: len(firsts)], lengths[len(firsts) :]]
        arrays = [previous, np.array(parents, np.int64), order, np.argsort(order)]
        arrays += [np.cumsum([0, *some]) for some in sizes]
        arrays.append(np.zeros(0, np.int64) if part is None else part.positions)
        self._previous, among, tokens, place, *bounds, own = to_device(arrays, torch.int64, device)
        self.own = None if part is None else own
        """int64 [T]: position in the row of each token of the part; None: the part is the row."""
        self.passes = [SequencePass(tokens[: sum(sizes[0])] if answers else None, None, bounds[0], sizes[0])]
        self.tokens: Tensor | None = None
        """int64 [W]: place of each token of the row in the concatenated passes; None: the row's order."""
        if answers:
            self.passes.append(SequencePass(tokens[sum(sizes[0]) :], among, bounds[1], sizes[1]))
            self.tokens = place

    @classmethod
    def of(cls, row: PackedRow, device: torch.device) -> "Recurrence":
        """Return the recurrence of a row, which all layers share."""
        if row.recurrence is None:
            row.recurrence = cls(row.groups, row.part, device)
        return row.recurrence

    def windows(self, x: Tensor, taps: int) -> list[Tensor]:
        """Return x [W, C] at the last tokens up to each token, the oldest first; 0 before a sequence."""
        padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        index, out = self._previous, [x]
        for _ in range(taps - 1):
            out.insert(0, select_rows(padded, index[:-1]))
            index = self._previous[index]
        return out

    def rule(self, *inputs: Tensor) -> Tensor:
        """Return the outputs [W, H, V] of the gated delta rule; arguments as in `gated_delta_rule`."""
        final: Tensor | None = None
        outputs: list[Tensor] = []
        for part in self.passes:
            own = inputs if part.tokens is None else [select_rows(x, part.tokens) for x in inputs]
            initial = None
            if part.parents is not None:
                assert final is not None, "the first pass has no parents"
                initial = select_rows(final, part.parents)
            out, final = _rule(*own, part=part, initial=initial, needs_final=len(self.passes) > 1)
            outputs.append(out)
        return outputs[0] if self.tokens is None else select_rows(torch.cat(outputs), self.tokens)


def _rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    *,
    part: SequencePass,
    initial: Tensor | None,
    needs_final: bool,
) -> tuple[Tensor, Tensor]:
    """Return outputs and last states of a pass, by the fused kernels where they are installed."""
    if not (v.is_cuda and v.dtype is not torch.float32 and has_fused_rule()):
        return gated_delta_rule(q, k, v, decay, beta, part.chunked(), initial)
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    one = [x[None].contiguous() for x in (q.to(v.dtype), k.to(v.dtype), v, decay, beta)]
    options = dict(scale=1.0, initial_state=initial, output_final_state=needs_final)
    out, final = chunk_gated_delta_rule(*one, **options, cu_seqlens=part.cu_seqlens)
    return out[0], final


class GatedDeltaNet(MegatronModule):
    """The layer, with the linear layers and submodules of Megatron's self-attention."""

    def __init__(
        self, config: TransformerConfig, submodules: Any, layer_number: int, *, pg_collection: Any, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.group, tp = pg_collection.tp, pg_collection.tp.size()
        self.key_heads, self.value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        options = dict(config=config, bias=False, is_expert=False, tp_group=self.group)
        options |= dict(init_method=config.init_method)
        into = functools.partial(
            submodules.linear_qkv, config.hidden_size, gather_output=False, skip_bias_add=False, **options
        )
        self.in_proj_qkvz = into(2 * keys + 2 * values)
        self.in_proj_ba = into(2 * self.value_heads)
        self.out_proj = submodules.linear_proj(
            values, config.hidden_size, input_is_parallel=True, skip_bias_add=True, **options
        )
        self.key_heads, self.value_heads = self.key_heads // tp, self.value_heads // tp

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=config.params_dtype))

        self.conv_weight = parameter((2 * keys + values) // tp, 1, config.linear_conv_kernel_dim)
        self.a_log, self.dt_bias = parameter(self.value_heads), parameter(self.value_heads)
        self.norm_weight = parameter(self.value_dim)
        selective = config.recompute_granularity == "selective"
        self.computes_again = selective and "core_attn" in config.recompute_modules

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedRow,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Return (output [T, 1, hidden], None); with sequence parallelism T/tp in input and output."""
        qkvz, ba = self.in_proj_qkvz(hidden_states)[0][:, 0], self.in_proj_ba(hidden_states)[0][:, 0]
        per_key = self.value_heads // self.key_heads
        q, k, v, z = qkvz.unflatten(-1, (self.key_heads, -1)).split(
            [self.key_dim, self.key_dim, per_key * self.value_dim, per_key * self.value_dim], -1
        )
        b, a = (x.flatten(1) for x in ba.unflatten(-1, (self.key_heads, -1)).split(per_key, -1))
        inputs = torch.cat([*(x.flatten(1) for x in (q, k, v)), b, a], -1)
        row = Recurrence.of(packed_seq_params, inputs.device)
        core = functools.partial(self._core, row)
        inputs = packed_seq_params.keys(inputs)
        parameters = self.conv_weight, self.a_log, self.dt_bias
        if self.computes_again and self.training:
            out = tensor_parallel.checkpoint(core, False, inputs, *parameters)
        else:
            out = core(inputs, *parameters)
        if row.own is not None:
            out = select_rows(out, row.own)
        # Each rank norms its own heads, so the weight's gradient is summed over the ranks.
        weight = tensor_parallel.copy_to_tensor_model_parallel_region(self.norm_weight, group=self.group)
        out = gated_norm(out, z.reshape(out.shape), weight, self.config.layernorm_epsilon)
        return self.out_proj(out.flatten(1)[:, None])

    def _core(
        self, row: Recurrence, inputs: Tensor, conv_weight: Tensor, a_log: Tensor, dt_bias: Tensor
    ) -> Tensor:
        """Return the states' value for each query [W, H, V]. inputs: [W, 2 G K + H V + 2 H]."""
        heads, keys = self.value_heads, self.key_heads * self.key_dim
        mixed, b, a = inputs.split([inputs.shape[-1] - 2 * heads, heads, heads], -1)
        mixed = causal_conv(row.windows(mixed, conv_weight.shape[-1]), conv_weight[:, 0])
        q, k, v = mixed.split([keys, keys, mixed.shape[-1] - 2 * keys], -1)
        repeats = heads // self.key_heads
        q, k = (normed(x.unflatten(-1, (-1, self.key_dim))).repeat_interleave(repeats, 1) for x in (q, k))
        v = v.unflatten(-1, (-1, self.value_dim))
        return row.rule(q * self.key_dim**-0.5, k, v, log_decay(a, a_log, dt_bias), b.float().sigmoid())


class Mixer:
    """Builds a layer's attention, or a gated delta net in its place."""

    def __new__(cls, config: TransformerConfig, submodules: Any, layer_number: int, **options: Any) -> Any:
        kind = GatedDeltaNet if config.linear_attention_freq[layer_number - 1] else SelfAttention
        return kind(config, submodules, layer_number, **options)
