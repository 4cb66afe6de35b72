"""Sort tokens by expert, and sum the experts' outputs, on a GPU without Transformer Engine's fused kernels.

Megatron's own functions add the outputs of a token's experts, and the gradients of its copies, by atomic
operations. The order of atomic operations is undefined, so two passes over the same tokens differ by
rounding. For example, (a + b) + c and a + (b + c) are rounded differently.
"""

from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor

from rl.training.rows import SelectRows, SumRows


def install() -> None:
    """Let Megatron's dispatchers use `permute` and `unpermute` for tensors on a GPU. Idempotent."""
    token_dispatcher.permute = _for_gpus(permute, moe_utils.permute)
    token_dispatcher.unpermute = _for_gpus(unpermute, moe_utils.unpermute)


def _for_gpus(own: Callable[..., Any], megatrons: Callable[..., Any]) -> Callable[..., Any]:
    def chosen(tokens: Tensor, *args: Any, fused: bool = False, **options: Any) -> Any:
        if fused or not tokens.is_cuda:
            return megatrons(tokens, *args, fused=fused, **options)
        return own(tokens, *args, **options)

    return chosen


def permute(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None = None, **options: Any
) -> tuple[Any, ...]:
    """Return copies of `tokens` [T, h] in the order of the experts, their probabilities and their tokens.

    routing_map: bool [T, experts]; probs: [T, experts] or None. This is Megatron's `permute` for the case
    that no tokens are dropped. Megatron 0.19 returns two more values, and so does this function.
    """
    _, permuted_probs, index, *more = moe_utils.permute(
        tokens.detach()[:, :0], routing_map, probs=probs, **options
    )
    return SelectRows.apply(tokens, index), permuted_probs, index, *more


def unpermute(copies: Tensor, index: Tensor, restore_shape: Sequence[int], **options: Any) -> Tensor:
    """Return the sums [T, h] of the copies of each token. index: int64 [copies], as `permute` returns it."""
    return SumRows.apply(copies, index, restore_shape[0])
