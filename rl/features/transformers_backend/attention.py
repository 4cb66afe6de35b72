"""Attention over packed rows for the classes of transformers, through their AttentionInterface."""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from rl.training.attention import AttentionForm, PackedRow
from rl.training.rows import RowAttention, windowed

NAME = "lockstep_rows"
"""Name of `attend_rows` in the AttentionInterface."""


def attend_rows(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    row: PackedRow,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the attention of a row [1, T, heads, v], and no weights.

    query: [1, heads, T, d]. key, value: [1, kv_heads, T, ...]. scaling, sliding_window, softcap, s_aux
    (sinks): as the classes of transformers give them to every function of the interface.
    """
    assert attention_mask is None and dropout == 0.0
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if softcap is None:
        form = AttentionForm(scaling, sliding_window, s_aux)
        return form.attend(query, key, value, row)[None], None
    assert s_aux is None and row.attention is not None and row.position_ids is not None
    attention, positions = row.attention, row.position_ids[0]
    if sliding_window is not None:
        attention = windowed(attention, positions, positions, sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _capped(query, key, value, attention, scale, softcap)[None], None


AttentionInterface.register(NAME, attend_rows)


def _capped(query: Tensor, key: Tensor, value: Tensor, row: RowAttention, scale: float, cap: float) -> Tensor:
    """Return attention with scores cap * tanh(score / cap), block by block; [T, heads, v].

    No flash attention of torch caps scores, so the scores [heads, L, L] of a sequence of L tokens are in
    memory. Shapes as in `CoreAttention`; the row shares no prompts.
    """
    assert not row.prefixes
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    out = []
    sizes = [run.count * run.length for run in row.runs]
    for run, *parts in zip(row.runs, *(x.split(sizes) for x in (query, key, value))):
        q, k, v = (x.unflatten(0, (run.count, run.length)).transpose(1, 2) for x in parts)
        scores = cap * torch.tanh(q @ k.mT * (scale / cap))
        mask = run.mask
        if mask is None:
            mask = torch.full((run.length, run.length), float("-inf"), device=q.device).triu(1)
        weights = (scores.float() + mask).softmax(-1).to(v.dtype)
        out.append((weights @ v).transpose(1, 2).flatten(0, 1))
    return torch.cat(out)
