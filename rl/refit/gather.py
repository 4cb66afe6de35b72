"""Refit by gathering: every rank receives each whole weight, and vLLM's own loader reads its shard.

This is correct for any pair of layouts, but moves the whole weights to every rank. `rl.refit.refit` uses it
only for weights that the engine holds in its own format.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rl.models.boxes import index
from rl.models.layout import Weight
from rl.refit.values import Values
from rl.rollout.engine import RolloutEngine
from rl.runtime.checksum import bits
from rl.runtime.collectives import gather_texts


class RefitMismatch(RuntimeError):
    """The engine's weights differ from the trainer's."""


@torch.no_grad()
def differences(
    values: Values, engine: RolloutEngine, held: Mapping[str, Tensor], weights: Sequence[Weight]
) -> list[str]:
    """Return a message, with the first element, for each tensor of these weights that differs on this rank.

    Compares bits, or values if the engine has another dtype. held: the engine's tensors by vLLM's name.
    Collective over the world.
    """
    pieces = {piece.hf: (weight.vllm, piece) for weight in weights for piece in engine.pieces(weight)}
    texts = []
    for name, full in values.gathered(weights):
        if name not in pieces:
            continue
        vllm_name, piece = pieces[name]
        expected = full[index(piece.hf_box)]
        found = held[vllm_name].detach()[index(piece.local_box)].reshape(expected.shape)
        is_same = found.dtype == expected.dtype
        different = bits(found) != bits(expected) if is_same else found.to(expected) != expected
        if different.any():
            first = tuple(different.nonzero()[0].tolist())
            element = tuple(start + i for (start, _), i in zip(piece.hf_box, first))
            texts.append(
                f"{name}{list(element)} on rank {dist.get_rank()}: engine {found[first].item():g}, "
                f"trainer {expected[first].item():g} ({int(different.sum())} of {different.numel()} differ)"
            )
    return texts


def raise_mismatches(texts: list[str]) -> None:
    """Raise RefitMismatch on every rank if any rank has messages. Collective over the world."""
    if found := gather_texts(texts):
        raise RefitMismatch(f"after the refit {len(found)} weights differ: " + "; ".join(found[:8]))
