"""Rotary position embedding of packed rows.

Megatron's code for packed rows slices out every sequence in every layer and reads lengths from the device.
Here the rotation of every token is computed once per micro-batch (`RowRotary.of`), passed with the row, and
applied to the whole row at once.
"""

from typing import Any

import torch
from megatron.core.transformer import attention, multi_latent_attention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from rl.models import rope
from rl.training.attention import PackedRow


class RowRotary(nn.Module):
    """Replaces a model's rotary embedding modules and returns the rotation of the row.

    hf: the model's config.json. fused: as in `rotate_by_row`.
    """

    def __init__(self, hf: dict, *, fused: bool) -> None:
        super().__init__()
        # Megatron's MLA with YaRN calls another class, which returns a scale too.
        self.has_scale = rope.rope_parameters(hf)["rope_type"] == "yarn" and "kv_lora_rank" in hf
        self.fused = fused
        self.frequencies, self.scale = rope.frequencies(hf), rope.magnitude(hf)
        self.local = rope.frequencies(hf, local=True) if rope.has_local(hf) else None
        self.axes = torch.tensor(rope.axes(hf), dtype=torch.int64, device="cpu")

    def local_of(self, position_ids: Tensor) -> Tensor | None:
        """Return the rotation of layers with a window, in the form of `of`.

        None if these layers have no frequencies of their own.
        """
        if self.local is None:
            return None
        self.local = self.local.to(position_ids.device)
        angles = torch.outer(position_ids.flatten().float(), self.local)
        if self.fused:
            return torch.cat([angles, angles], -1)[:, None, None]
        return torch.cat([angles.cos(), angles.sin()], -1)[:, None]

    def of(self, position_ids: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return the rotation of each token: cosines and sines side by side, float32 [T, 1, d].

        For fused kernels, return the angles, float32 [T, 1, 1, d]; for MLA's fused kernels with YaRN, return
        cosines and sines, each of this shape.

        position_ids: int64 [1, T], or of a row with images [3, T] (`rl.models.rope.axes`).
        """
        if self.frequencies.device != position_ids.device:
            self.frequencies = self.frequencies.to(position_ids.device)
            self.axes = self.axes.to(position_ids.device)
        if len(position_ids) > 1:
            angles = position_ids.float()[self.axes].t() * self.frequencies
        else:
            angles = torch.outer(position_ids.flatten().float(), self.frequencies)
        if not self.fused:
            return torch.cat([angles.cos() * self.scale, angles.sin() * self.scale], -1)[:, None]
        whole = torch.cat([angles, angles], -1)[:, None, None]
        return (whole.cos() * self.scale, whole.sin() * self.scale) if self.has_scale else whole

    def get_rotary_seq_len(
        self,
        context: Any,
        transformer: Any,
        x: Tensor,
        config: TransformerConfig,
        packed_seq_params: PackedRow,
    ) -> PackedRow:
        """Return the row, from which `forward` takes the rotation."""
        return packed_seq_params

    def forward(self, row: PackedRow, **_: Any) -> Any:
        """Return the rotation and, if the caller expects it, a scale of 1: the rotation is already scaled."""
        return (row.rotation, 1.0) if self.has_scale else row.rotation

    def get_cached_cos_sin(self, row: PackedRow, dtype: torch.dtype, **_: Any) -> tuple[Tensor, ...]:
        """Return cosines and sines for MLA's fused kernels."""
        assert isinstance(row.rotation, tuple)
        return tuple(x.to(dtype) for x in row.rotation)


class _Rotate(torch.autograd.Function):
    """Rotate pairs of channels of x [T, heads, d]; the backward pass rotates back.

    rotation: [T, 1, r], for the first r channels; the other channels do not change.
    adjacent: whether a pair is two adjacent channels (DeepSeek's weights) or one channel of each half of r.
    In the output, a pair is always one channel of each half.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rotation: Tensor, adjacent: bool) -> Tensor:
        ctx.save_for_backward(rotation)
        ctx.adjacent = adjacent
        cos, sin = rotation.to(x.dtype).chunk(2, -1)
        out, (x, rotated) = _output(x, rotation)
        _rotate(_pairs(x, adjacent), cos, sin, rotated.chunk(2, -1), sign=1)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rotation,) = ctx.saved_tensors
        cos, sin = rotation.to(grad.dtype).chunk(2, -1)
        out, (grad, rotated) = _output(grad, rotation)
        _rotate(grad.chunk(2, -1), cos, sin, _pairs(rotated, ctx.adjacent), sign=-1)
        return out, None, None


def _output(x: Tensor, rotation: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return a copy of x with undefined rotated channels, and the rotated channels of x and of the copy."""
    out, width = torch.empty_like(x, memory_format=torch.contiguous_format), rotation.shape[-1]
    if width < x.shape[-1]:
        out[..., width:] = x[..., width:]
    return out, (x[..., :width], out[..., :width])


def _pairs(x: Tensor, adjacent: bool) -> tuple[Tensor, ...]:
    return (x[..., ::2], x[..., 1::2]) if adjacent else x.chunk(2, -1)


def _rotate(
    pairs: tuple[Tensor, ...], cos: Tensor, sin: Tensor, out: tuple[Tensor, ...], *, sign: int
) -> None:
    (first, second), (out_first, out_second) = pairs, out
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)


_megatrons_apply = attention.apply_rotary_pos_emb


def _apply(t: Tensor, freqs: Tensor, config: TransformerConfig, **options: Any) -> Tensor:
    """Replace Megatron's apply_rotary_pos_emb. t: [T, heads, d]. freqs: from `RowRotary.of`."""
    if config.apply_rope_fusion:  # another model of this process
        return _megatrons_apply(t, freqs, config, **options)
    return config.rotate(t, freqs, config.multi_latent_attention)


def rotate_by_row(model: Any, hf: dict, *, fused: bool) -> RowRotary:
    """Make Megatron's layers rotate by the row's `rotation`; return the module that computes it.

    The layers rotate by `rotate` of the model's Megatron config, which a part may replace.

    hf: the model's config.json. fused: the config's apply_rope_fusion.
    """
    owners = [module for module in model.modules() if hasattr(module, "rotary_pos_emb")]
    rotary = RowRotary(hf, fused=fused)
    for owner in owners:
        owner.rotary_pos_emb = rotary
    if not fused:
        for module in (attention, multi_latent_attention):
            assert "apply_rotary_pos_emb" in vars(module), f"{module.__name__} rotates in another way"
            module.apply_rotary_pos_emb = _apply
        model.config.rotate = _Rotate.apply
    return rotary
