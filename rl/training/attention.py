"""Causal attention over packed rows, in which several answers may share a prompt (`rl.training.rows`)."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from rl.training.extras import Extras
from rl.training.rows import BlockRun, Prefix, RowAttention, RowGroup, select_rows, windowed

if TYPE_CHECKING:
    from rl.training.context_parallel import RowPart
    from rl.training.delta_net import Recurrence


@dataclass
class PackedRow(PackedSeqParams):
    """Megatron's parameters of a packed row.

    Megatron's rotary code sees one sequence, `cu_seqlens_q` = [0, T], because `rotation` holds the rotation
    of each token of the row. The attention reads `attention`.
    """

    attention: RowAttention | None = None
    rotation: Tensor | tuple[Tensor, Tensor] | None = None
    """Result of `rl.training.rotary.RowRotary.of`."""
    local_rotation: Tensor | None = None
    """Rotation for layers with a window, if these layers rotate by other angles than the other layers."""
    position_ids: Tensor | None = None
    """int64 [1, T]."""
    near: dict[int, RowAttention] = field(default_factory=dict)
    """Window -> `attention` with this window; filled when the first layer needs it."""
    part: "RowPart | None" = None
    """This rank's part, if context parallel ranks share the row."""
    groups: Sequence[RowGroup] = ()
    """`MicroBatch.groups`."""
    recurrence: "Recurrence | None" = None
    """The row as recurrent layers read it; filled when the first recurrent layer needs it."""
    extras: Extras = Extras()
    """`MicroBatch.extras`."""

    def keys(self, x: Tensor) -> Tensor:
        """Return keys or values of the whole row, [W, ...].

        x: this rank's part of the keys or values, or all of them if the row is not divided.

        Collective over the context parallel group if the row is divided.
        """
        return x if self.part is None or len(x) == len(self.part.order) else self.part.row(x)

    def within(self, window: int | None) -> RowAttention:
        """Return the row's attention, with masks if there is a window; with one, collective as `keys` is."""
        assert self.attention is not None
        if window is None:
            return self.attention
        if window not in self.near:
            assert self.position_ids is not None
            query = self.position_ids[0]
            self.near[window] = windowed(self.attention, query, self.keys(query), window)
        return self.near[window]


class CoreAttention(MegatronModule):
    """Causal attention over packed rows (thd), with grouped queries.

    With softmax_type=learnable each head has a sink (arXiv:2309.17453, gpt-oss): a learned score that enters
    the softmax's denominator but adds no value.

    On CUDA with 16-bit types it calls torch's variable-length flash attention once. On the CPU it calls
    torch's flash attention a few times on parts of the row, without copies of the inputs.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert config.softmax_type in ("vanilla", "learnable")
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        has_sinks = config.softmax_type == "learnable"
        sinks = nn.Parameter(torch.empty(heads, dtype=config.params_dtype)) if has_sinks else None
        self.register_parameter("softmax_offset", sinks)
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if has_window else None
        assert config.context_parallel_size == 1
        assert (config.attention_dropout if attention_dropout is None else attention_dropout) == 0.0
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedRow,
        **_: Any,
    ) -> Tensor:
        """Compute the attention that the row's `attention` describes; return [T, heads/tp * v].

        query: [T, heads/tp, d]. key: [T, kv_heads/tp, d]. value: [T, kv_heads/tp, v].
        """
        form = AttentionForm(self.scale, self.window, self.softmax_offset)
        return form.attend(query, key, value, packed_seq_params).flatten(1)


@dataclass(frozen=True)
class AttentionForm:
    """Causal attention over packed rows, as one layer computes it (`CoreAttention`)."""

    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(d)."""
    window: int | None = None
    """Number of tokens that a token sees, itself included; None: all."""
    sinks: Tensor | None = None
    """Learned score of each head that enters the softmax's denominator, [heads]."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedRow) -> Tensor:
        """Return the attention of a row, [T, heads, v]. Shapes as in `CoreAttention.forward`."""
        uses_masks = not query.is_cuda or query.dtype is torch.float32
        row, width = packed.within(self.window if uses_masks else None), value.shape[-1]
        key, value = packed.keys(key), packed.keys(value)
        if query.shape[-1] != width:  # MLA: flash attention requires one width
            value = F.pad(value, (0, query.shape[-1] - width))
        if not query.is_cuda:
            out = _AttendOnCpu.apply(query, key, value, self.sinks, row, self.scale)
        elif query.dtype is torch.float32:  # flash attention supports only 16 bits
            out = self._float32(query, key, value, row)
        else:
            out = self._varlen(query, key, value, row)
        return out[..., :width] if out.shape[-1] != width else out

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, row: RowAttention) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        if row.kv_index is not None:
            key, value = (select_rows(x, row.kv_index) for x in (key, value))
        if self.sinks is not None:
            window = (-1 if self.window is None else self.window - 1, 0)
            return _VarlenWithSinks.apply(query, key, value, self.sinks, row, self.scale, window)
        options: dict[str, Any] = _grouped(query, key)
        out = varlen_attn(
            query,
            key,
            value,
            row.cu_seqlens_q,
            row.cu_seqlens_kv,
            row.max_seqlen_q,
            row.max_seqlen_kv,
            scale=self.scale,
            # Causal; the last query is aligned with the last key.
            window_size=(-1 if self.window is None else self.window - 1, 0),
            **options,
        )
        assert isinstance(out, Tensor), "log-sum-exps were not asked for"
        return out

    def _float32(self, query: Tensor, key: Tensor, value: Tensor, row: RowAttention) -> Tensor:
        assert not row.prefixes, "see `can_share`"
        sizes = [run.count * run.length for run in row.runs]
        out = []
        for run, *parts in zip(row.runs, *(x.split(sizes) for x in (query, key, value))):
            q, k, v = (x.unflatten(0, (run.count, run.length)).transpose(1, 2) for x in parts)
            if self.sinks is not None:
                out.append(self._with_sink_key(q, k, v, run.mask).transpose(1, 2).flatten(0, 1))
                continue
            attended = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=run.mask,
                is_causal=run.mask is None,
                scale=self.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            out.append(attended.transpose(1, 2).flatten(0, 1))
        return torch.cat(out)

    def _with_sink_key(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Compute the attention of blocks [count, heads, length, d] with a last key, scored by the sinks."""
        length = q.shape[2]
        if mask is None:
            mask = torch.full((1, 1, length, length), float("-inf"), device=q.device).triu(1)
        mask = mask.expand(len(q), q.shape[1], length, length)
        assert self.sinks is not None
        sinks = self.sinks.float()[:, None, None].expand(len(q), -1, length, 1)
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        mask, grouped = torch.cat([mask, sinks], -1), q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=grouped)


def te_attention(te_class: Any) -> type:
    """Return a subclass of Megatron's TEDotProductAttention for packed rows."""

    class RowTEAttention(te_class):
        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: PackedRow, **__: Any
        ) -> Tensor:
            """Compute the attention that the row's `attention` describes; shapes as in `CoreAttention`.

            It calls Transformer Engine's forward directly, because Megatron's does not offer the causal mask
            that is aligned at the bottom right (cuDNN 9.7 and flash attention have it).
            """
            row = packed_seq_params.attention
            assert row is not None
            key, value = packed_seq_params.keys(key), packed_seq_params.keys(value)
            mask = "padding_causal"
            if row.kv_index is not None:
                key, value = (select_rows(x, row.kv_index) for x in (key, value))
                mask = "padding_causal_bottom_right"
            return super(te_class, self).forward(
                query,
                key,
                value,
                qkv_format="thd",
                attn_mask_type=mask,
                cu_seqlens_q=row.cu_seqlens_q,
                cu_seqlens_kv=row.cu_seqlens_kv,
                max_seqlen_q=row.max_seqlen_q,
                max_seqlen_kv=row.max_seqlen_kv,
            )

    return RowTEAttention


def can_share(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the attention for this device and dtype supports shared prompts."""
    return device.type == "cpu" or dtype is not torch.float32


_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _AttendOnCpu(torch.autograd.Function):
    """torch's flash attention for CPU on parts of a row.

    The parts are views of the row, and results are written into the row's own tensors. Autograd's backward
    pass of a slice would allocate a zero-filled row for each part.

    Answers attend to their prompt in a second call. The outputs of both calls are merged by their
    log-sum-exp. Given the merged output and log-sum-exp, the backward pass of each call is exact.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        row: RowAttention,
        scale: float | None,
    ) -> Tensor:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)  # [T, heads]
        for run in row.runs:
            q, k, v = _blocks(query, run), _keys(key, run), _keys(value, run)
            found = _forward(q, k, v, 0.0, run.mask is None, attn_mask=_mask(run, q), scale=scale)
            _blocks(out, run).copy_(found[0])
            _blocks(lse, run).copy_(found[1])
        for part in row.prefixes:
            queries, keys = slice(part.start, part.end), slice(part.first, part.last)
            inputs = _one(query[queries]), _one(key[keys]), _one(value[keys])
            more, lse_more = _forward(*inputs, 0.0, False, attn_mask=_mask(part, query), scale=scale)
            if part.mask is not None:  # torch returns 0 for queries without any of these keys in their window
                lse_more = lse_more.masked_fill(part.mask.isinf().all(-1), float("-inf"))
            weight = torch.sigmoid(lse_more - _one(lse[queries]))
            _one(out[queries]).lerp_(more, weight[..., None].to(more.dtype))
            _one(lse[queries]).copy_(torch.logaddexp(_one(lse[queries]), lse_more))
        if sinks is not None:
            lse = _take_share(out, lse, sinks)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.row, ctx.scale = row, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
        if len(key) > len(query):  # the runs cover only the keys of these queries
            grads[1].zero_(), grads[2].zero_()
        views = (_blocks, _blocks, _keys, _keys, _blocks, _blocks)
        for run in ctx.row.runs:
            parts = (view(x, run) for view, x in zip(views, (grad, query, key, value, out, lse)))
            mask = _mask(run, query)
            found = _backward(*parts, 0.0, mask is None, attn_mask=mask, scale=ctx.scale)
            for view, whole, part in zip(views[1:], grads, found):
                view(whole, run).copy_(part)
        for part in ctx.row.prefixes:
            queries, keys = slice(part.start, part.end), slice(part.first, part.last)
            places = (queries, queries, keys, keys, queries, queries)
            parts = (_one(x[at]) for x, at in zip((grad, query, key, value, out, lse), places))
            mask = _mask(part, query)
            found = _backward(*parts, 0.0, False, attn_mask=mask, scale=ctx.scale)
            for whole, at, more in zip(grads, (queries, keys, keys), found):
                _one(whole[at]).add_(more)
        of_sinks = None if sinks is None else _sinks_gradient(grad, out, lse, sinks)
        return *grads, of_sinks, None, None


class _VarlenWithSinks(torch.autograd.Function):
    """torch's variable-length flash attention, with sinks.

    As in `_AttendOnCpu`, the kernel's backward pass is exact if it gets output and log-sum-exp with sinks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        row: RowAttention,
        scale: float | None,
        window: tuple[int, int],
    ) -> Tensor:
        from torch.nn.attention import varlen

        places = row.cu_seqlens_q, row.cu_seqlens_kv, row.max_seqlen_q, row.max_seqlen_kv
        mask = dict(is_causal=window == (-1, 0), scale=scale, window_size=list(window))
        options = mask | _grouped(query, key)
        out, lse, state = varlen._varlen_attn(query, key, value, *places, **options)
        lse = _take_share(out, lse.t(), sinks)  # the kernel's is [heads, T]
        ctx.save_for_backward(query, key, value, sinks, out, lse, state)
        ctx.places, ctx.mask = places, mask
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from torch.nn.attention import varlen

        query, key, value, sinks, out, lse, state = ctx.saved_tensors
        inputs = grad.contiguous(), query, key, value, out, lse.t().contiguous()
        grads = varlen._varlen_attn_backward(*inputs, *ctx.places, rng_state=state, **ctx.mask)
        return *grads, _sinks_gradient(grad, out, lse, sinks), None, None, None


def _grouped(query: Tensor, key: Tensor) -> dict[str, bool]:
    """Return the argument that lets query heads share a key head; torch 2.11, with vLLM 0.25, needs none."""
    from torch.nn.attention.varlen import varlen_attn

    has_flag = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return {"enable_gqa": query.shape[1] != key.shape[1]} if has_flag else {}


def _take_share(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Scale out [T, heads, d] in place by 1 minus the sinks' share; return the new log-sum-exp.

    lse: float32 [T, heads], log-sum-exp of the scores without sinks.
    """
    out.mul_(torch.sigmoid(lse - sinks.float())[..., None].to(out.dtype))
    return torch.logaddexp(lse, sinks.float())


def _sinks_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks [heads]. out, lse: with sinks."""
    shares = torch.exp(sinks.float() - lse)  # [T, heads]
    return -(shares * (grad.float() * out.float()).sum(-1)).sum(0).to(sinks.dtype)


def _blocks(x: Tensor, run: BlockRun, start: int | None = None) -> Tensor:
    """Return a view [count, heads, length, ...] of x at a run. start: first token; None: `run.start`."""
    start = run.start if start is None else start
    part = x[start : start + run.count * run.length]
    return part.unflatten(0, (run.count, run.length)).transpose(1, 2)


def _keys(x: Tensor, run: BlockRun) -> Tensor:
    """Return a view [count, heads, length, ...] of a run's keys."""
    return _blocks(x, run, run.first_key)


def _mask(part: BlockRun | Prefix, query: Tensor) -> Tensor | None:
    return None if part.mask is None else part.mask.to(query.dtype)


def _one(x: Tensor) -> Tensor:
    """Return a view [1, heads, length, ...] of x [length, heads, ...]."""
    return x[None].transpose(1, 2)
