"""Losses of whole responses: for pairs (DPO and its variants, SimPO, ORPO), labels (KTO, PRIME) and win rates
(SPPO).

Shapes: `T` response tokens of `B` samples, flat; `lengths` int64 [B]. With pairs, samples 2k and 2k + 1 are
the chosen and the rejected response to one prompt, and the number of pairs is `P = B / 2`. For example, B = 4
samples are P = 2 pairs: (0, 1) and (2, 3). At masked positions the inputs may hold anything, including NaN.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rl.objectives.log_ratio import sample_mean
from rl.objectives.segments import segment_sum


def log_ratios(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Return log(pi(y) / pi_ref(y)) of each response, [B]: the sum over unmasked tokens; 0 without any."""
    return segment_sum(torch.where(mask.bool(), logprobs - ref_logprobs, 0.0), lengths)


def mean_logprobs(logprobs: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Return log pi(y) / |y| of each response, [B]: the mean over unmasked tokens; 0 without any."""
    mask = mask.bool()
    return sample_mean(torch.where(mask, logprobs, 0.0), mask, lengths)


def counted(mask: Tensor, lengths: Tensor, *, unit: int = 1) -> Tensor:
    """Return whether each sample enters the losses, bool [B]: whether all samples of its unit have an
    unmasked token.

    A response without an unmasked token has a log-ratio of 0 for every policy. For example, a pair with such
    a response has no preference to learn. Losses take `log_ratios(...)[counted(...)]`, and divide by the
    number of units counted in the whole mini-batch.

    mask: bool or 0/1 [T]; lengths: int64 [B]; unit: consecutive samples in a unit, 2 for pairs, divides B.
    """
    has_tokens = segment_sum(mask.double(), lengths) > 0
    return has_tokens.view(-1, unit).all(1).repeat_interleave(unit)


def pair_loss(
    ratios: Tensor,
    *,
    beta: float,
    loss: Literal["sigmoid", "hinge", "ipo"],
    label_smoothing: float = 0.0,
    gamma: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each pair.

    With m = log-ratio of the chosen response minus log-ratio of the rejected response, the loss is

        sigmoid  -(1 - s) log sigmoid(beta m) - s log sigmoid(-beta m)     DPO, arXiv:2305.18290, equation 7
        hinge    max(0, 1 - beta m)                                        SLiC, arXiv:2305.10425
        ipo      (m - 1 / (2 beta))^2                                      IPO, arXiv:2310.12036, equation 17

    s is `label_smoothing`. With s > 0, sigmoid is conservative DPO (the section on noisy labels in the DPO
    paper). hinge compares the rewards of DPO, which are beta times the log-ratio. If `ratios` are
    `mean_logprobs`, and beta m - gamma replaces beta m, then sigmoid is the loss of SimPO (arXiv:2405.14734,
    equation 6).

    Args:
        ratios: floating [B], `log_ratios` of chosen and rejected responses in turn.
        beta: > 0.
        label_smoothing: s in [0, 0.5), sigmoid only.
        gamma: required margin, sigmoid only.

    Returns:
        [P], and sums over the pairs without a graph: `accuracy` (pairs with m > 0), `margin` (beta m),
        `chosen_reward` and `rejected_reward` (beta times the log-ratio).

    Raises:
        ValueError: unknown loss.
    """
    chosen, rejected = ratios.view(-1, 2).unbind(1)
    margin = chosen - rejected
    if loss == "sigmoid":
        # logsigmoid, unlike the log of sigmoid, is exact where the margin is far from 0.
        logits = beta * margin - gamma
        value = -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)
    elif loss == "hinge":
        value = torch.relu(1 - beta * margin)
    elif loss == "ipo":
        value = (margin - 1 / (2 * beta)).square()
    else:
        raise ValueError(f"preference loss {loss!r} is not one of sigmoid, hinge, ipo")
    stats = {
        "accuracy": (margin > 0).to(value.dtype),
        "margin": beta * margin,
        "chosen_reward": beta * chosen,
        "rejected_reward": beta * rejected,
    }
    return value, {name: stat.detach().sum() for name, stat in stats.items()}


def mean_of_pairs(
    value: Tensor, stats: dict[str, Tensor], enters: Tensor, *, num_pairs: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return this part's share of the mean over the mini-batch's pairs, and the metrics.

    value, stats: results of `pair_loss` or `orpo_loss`, whose inputs were 0 for pairs that do not enter.
    enters: bool [B], `counted` with unit=2. num_pairs: pairs of the whole mini-batch that enter.
    """
    total = torch.where(enters[::2], value, 0.0).sum() / num_pairs
    return total, {"preference/loss": total} | {
        f"preference/{name}": stat / num_pairs for name, stat in stats.items()
    }


def orpo_loss(means: Tensor, *, beta: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each pair, from likelihood and odds ratio (ORPO, arXiv:2403.07691, equations 6 and
    7).

        -log P(chosen) - beta log sigmoid(log odds(chosen) - log odds(rejected))
        log P(y) = log pi(y) / |y|,   odds(y) = P(y) / (1 - P(y))

    In TRL, the first term is instead the mean over all tokens of the batch, including the prompts.

    Args:
        means: floating [B], `mean_logprobs` of chosen and rejected responses in turn.
        beta: the paper's lambda, > 0.

    Returns:
        [P], and sums over the pairs without a graph: `accuracy` (pairs with the chosen response more
        likely), `nll` (first term), `log_odds_ratio`.
    """
    chosen, rejected = means.view(-1, 2).unbind(1)
    # A probability of 1 has infinite odds. The bound keeps value and gradient finite.
    log_odds = means - torch.log(-torch.expm1(means.clamp(max=-1e-6)))
    ratio = log_odds[::2] - log_odds[1::2]
    stats = {"accuracy": (chosen > rejected).to(means.dtype), "nll": -chosen, "log_odds_ratio": ratio}
    value = -chosen - beta * F.logsigmoid(ratio)
    return value, {name: stat.detach().sum() for name, stat in stats.items()}


def kto_loss(
    ratios: Tensor,
    labels: Tensor,
    *,
    beta: float,
    kl: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the loss of each response by its label (Kahneman-Tversky optimization, arXiv:2402.01306).

        desirable_weight   (1 - sigmoid(beta (log-ratio - kl)))     label 1
        undesirable_weight (1 - sigmoid(beta (kl - log-ratio)))     label 0

    Args:
        ratios: floating [B], `log_ratios`.
        labels: 0/1 [B].
        beta: > 0.
        kl: estimate of KL(policy || reference), `mismatch_kl` over the mini-batch; without a gradient.

    Returns:
        [B], and [B] without a graph: beta times the distance to kl, positive on the label's side.
    """
    is_desirable = labels > 0.5
    margin = beta * torch.where(is_desirable, ratios - kl, kl - ratios)
    weights = torch.full_like(ratios, undesirable_weight).masked_fill(is_desirable, desirable_weight)
    return weights * torch.sigmoid(-margin), margin.detach()


@torch.no_grad()
def mismatch_kl(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, lengths: Tensor) -> float:
    """Return KTO's estimate of KL(policy || reference) from prompts with responses to other prompts.

        max(0, mean over samples of log(pi(y') / pi_ref(y')))

    Arguments are as in `log_ratios`; a sample without an unmasked token is excluded.
    """
    ratios = log_ratios(logprobs, ref_logprobs, mask, lengths).double()[counted(mask, lengths)]
    return max(0.0, float(ratios.mean())) if len(ratios) else 0.0


def sppo_loss(ratios: Tensor, win_rates: Tensor, *, eta: float) -> Tensor:
    """Return the squared distance of each response's log-ratio from its win rate, scaled by eta.

        (log(pi(y) / pi_t(y)) - eta (P(y beats pi_t) - 1/2))^2            SPPO, arXiv:2405.00675, equation 4.2

    ratios: floating [B] against the policy pi_t that sampled; win_rates: floating [B] in [0, 1]. Returns [B].
    """
    return (ratios - eta * (win_rates - 0.5)).square()


@torch.no_grad()
def win_rates(scores: Tensor, groups: Tensor) -> Tensor:
    """Return P(y beats pi_t), estimated over the group.

    It is the share of the other responses that score lower; a tie counts half.

    scores: floating [N]; groups: int64 [N], any numbers in any order. Returns [N]; a group of one gives 1/2.
    SPPO takes P(y beats y') from a preference model; here the response with the higher score wins. For
    example, scores of 0, 1 and 1 give win rates of 0, 3/4 and 3/4.
    """
    order = torch.argsort(groups, stable=True)
    _, sizes = torch.unique_consecutive(groups[order], return_counts=True)
    rates = torch.full_like(scores, 0.5)
    for members in order.split(sizes.tolist()):
        if len(members) > 1:
            own = scores[members]
            beats = (own[:, None] > own).double() + 0.5 * (own[:, None] == own).double()
            rates[members] = ((beats.sum(1) - 0.5) / (len(members) - 1)).to(scores.dtype)
    return rates


def outcome_loss(ratios: Tensor, labels: Tensor, *, beta: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the cross-entropy of an implicit reward model: sigmoid(beta log-ratio) is the probability that
    the response is right.

        -(l log sigmoid(beta m) + (1 - l) log(1 - sigmoid(beta m)))       PRIME, arXiv:2502.01456, equation 4

    ratios: floating [B]; labels: floating [B] in [0, 1]. Returns [B], and the sum `accuracy` of samples on
        the right side.
    """
    logits = beta * ratios
    right = ((logits > 0) == (labels > 0.5)).to(logits.dtype).detach()
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none"), {"accuracy": right.sum()}
