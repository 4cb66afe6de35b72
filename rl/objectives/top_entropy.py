"""Tokens of the highest entropy in a mini-batch ('Beyond the 80/20 rule', arXiv:2506.01939, equation 5)."""

import torch
from torch import Tensor


@torch.no_grad()
def select_tokens(entropy: Tensor, mask: Tensor, *, top_entropy: float) -> Tensor:
    """Return the tokens with the highest entropy of the mini-batch, bool [T].

    The few tokens that decide the direction of a response have a high entropy. The policy loss of all other
    tokens is set to 0. These other tokens still count in the denominators, as in the paper and in TRL
    (`top_entropy_quantile`). The KL term and the entropy bonus count all tokens; in TRL, the bonus counts
    only the selected tokens. For example, top_entropy=0.2 selects 200 of 1,000 tokens.

    The tokens are sorted by descending entropy. The threshold is the entropy of token number max(1,
    floor(top_entropy * unmasked tokens)). All tokens with at least this entropy are selected.

    Args:
        entropy: floating [T], T tokens of the whole mini-batch, under the current weights.
        mask: bool or 0/1 [T].
        top_entropy: share of the tokens, in (0, 1]. The paper: 0.2.
    """
    mask = mask.bool()
    candidates = entropy[mask]
    if not len(candidates):
        return mask
    number = max(1, int(top_entropy * len(candidates)))
    threshold = candidates.topk(number).values[-1]
    return mask & (entropy >= threshold)
