"""Importance weights, rejection and metrics for the mismatch between engine and trainer at the same weights.

Kernels, precision and expert routing of engine and trainer differ. Therefore the tokens are drawn from
another policy than the policy that gets the gradient. Training that ignores the difference can collapse (Yao
et al., 'Your efficient RL framework secretly brings you off-policy RL training',
https://fengyao.notion.site/off-policy-rl; Liu et al., 'When speed kills stability',
https://richardli.xyz/rl-collapse). Importance sampling weighs a token's loss by

    w = exp(old_logprobs - rollout_logprobs)          trainer over engine

The functions here bound these weights, or mask tokens. For example, a token with the probability 0.2 in the
trainer and 0.1 in the engine has w = 2. The functions run once on the whole batch of a step, before any
update. Their results are constants, [T], which are cut into micro-batches like `advantages`. Weights multiply
`token_loss`.

Shapes: `T` response tokens of `B` samples, laid end to end; `lengths` int64 [B] is the number of tokens of
each sample, zeros allowed. All functions take:

    old_logprobs: floating [T], log-probs of the trainer with the weights that sampled.
    rollout_logprobs: floating [T], log-probs of the engine, after temperature and truncation.
    mask: bool or 0/1 [T], the tokens that count.

At masked positions the log-probabilities may hold anything, NaN included. Log-ratios, of tokens or of whole
samples, are clamped to +- MAX_LOG_RATIO before exp.
"""

from typing import Literal

import torch
from torch import Tensor

from rl.objectives.log_ratio import MAX_LOG_RATIO, masked_log_ratio
from rl.objectives.returns import kept as kept_tokens
from rl.objectives.returns import put_back, reward_to_go, tokens_after
from rl.objectives.segments import expand, segment_sum

USUAL_UPPER = 2.0
"""Upper bound of truncated weights that is verl's default."""

Level = Literal["token", "sequence"]
Statistic = Literal["k1", "k2", "k3"]


@torch.no_grad()
def token_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, upper: float) -> Tensor:
    """Return truncated importance weights per token, [T]: min(w, upper), and 0 at masked positions (TIS, Yao
    et al.).

    The weights have a low variance, but are biased, because the weight of a token ignores the tokens before
    it. In verl, `upper` is 2. For example, w = 0.5 and w = 3 give weights of 0.5 and 2.

    Raises:
        ValueError: upper is not positive.
    """
    _check_upper(upper)
    mask = mask.bool()
    return torch.where(
        mask, masked_log_ratio(old_logprobs, rollout_logprobs, mask).exp().clamp(max=upper), 0.0
    )


@torch.no_grad()
def sequence_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, lengths: Tensor, mask: Tensor, *, upper: float
) -> Tensor:
    """Return truncated importance weights per sample, [T].

    Each unmasked token of a sample has the weight min(product of w over the sample, upper); masked positions
    have 0. Only the truncation adds a bias. The variance grows with the length of the sample.

    Raises:
        ValueError: upper is not positive.
    """
    _check_upper(upper)
    mask = mask.bool()
    log_weight = segment_sum(torch.where(mask, old_logprobs - rollout_logprobs, 0.0), lengths)
    weights = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=upper)
    return torch.where(mask, expand(weights, lengths, len(mask)), 0.0)


@torch.no_grad()
def icepop(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    lengths: Tensor,
    mask: Tensor,
    *,
    low: float,
    high: float,
    level: Literal["token", "prefix", "sequence"] = "token",
) -> Tensor:
    """Return importance weights, [T]. A weight out of bounds becomes 0. Masked positions have 0.

        token     w where low <= w <= high: IcePop (Ring-1T, arXiv:2510.18855), with 0.5 and 5
        prefix    w where the geometric mean of w from the sample's first token to this one is within the
                  bounds: OpenRLHF's reinforce_pro, with 0.5 and 5
        sequence  the product of w over the sample, where it is within the bounds: TRL's sequence_mask, with
                  no lower bound and 3

    For example, with bounds of 0.5 and 5, a token with w = 6 has the weight 0. Such a token still counts in
    the denominators of the loss, but a token that `reject` masks does not. Use `reject` to mask whole samples
    by their geometric mean, without weights.

    Raises:
        ValueError: 1 is not within the bounds. A token has this weight if engine and trainer agree on it.
    """
    if not 0 <= low <= 1 <= high:
        raise ValueError(
            f"IcePop keeps ratios from {low} to {high}; 1 must be among them and low not negative"
        )
    mask = mask.bool()
    log_weights = judged = masked_log_ratio(old_logprobs, rollout_logprobs, mask)
    if level == "prefix":
        judged = _prefix_means(log_weights, lengths, mask)
    elif level == "sequence":
        products = segment_sum(torch.where(mask, old_logprobs - rollout_logprobs, 0.0), lengths)
        judged = log_weights = expand(products.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), lengths, len(mask))
    weights, ratios = log_weights.exp(), judged.exp()
    return torch.where(mask & (ratios >= low) & (ratios <= high), weights, 0.0)


def _prefix_means(x: Tensor, lengths: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the unmasked tokens from the sample's first one to each token, [T]."""
    keep, counts = kept_tokens(lengths, mask)
    # Reverse the order, so that the sum over later tokens becomes the sum over earlier tokens.
    backwards = counts.flip(0)
    sums = reward_to_go(x[keep].double().flip(0), backwards, 1.0)
    return put_back((sums / (tokens_after(backwards) + 1)).flip(0), keep, x.dtype)


@torch.no_grad()
def reject(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    lengths: Tensor,
    mask: Tensor,
    *,
    level: Level,
    statistic: Statistic,
    low: float,
    high: float,
) -> Tensor:
    """Return the mask without the tokens, or without the whole samples, whose divergence is outside of low ..
    high.

    The divergence is an estimate of KL(engine || trainer), for a token with x = log w (Schulman,
    http://joschu.net/blog/kl-approx.html):

        k1   -x                    below 0 where the trainer's probability is larger
        k2   x^2 / 2
        k3   exp(x) - 1 - x

    The level "token" judges each token by its own estimate (verl's token_k1 ..). The level "sequence" judges
    each sample by the mean over its unmasked tokens (seq_mean_k1 ..). It is a mean, because a sum would
    reject long samples only for their length: for example, 0.001 nats per token add up to 10 nats over 10,000
    tokens. With "sequence" and "k1", a sample's divergence is the log of 1 / (geometric mean of w).

    Args:
        level, statistic: see above.
        low, high: bounds in nats, low <= 0 <= high. k2 and k3 are never negative, so low = 0 has no effect
            there. verl bounds k1 by ratios: its "0.5_2.0" is low = log 0.5, high = log 2.

    Returns:
        [T], the dtype of `mask`. A token without a finite log-probability is outside of any bounds.

    Raises:
        ValueError: unknown level or statistic, or 0 is not within the bounds. The divergence is 0 if engine
            and trainer agree.
    """
    if not low <= 0 <= high:
        raise ValueError(
            f"rejection keeps {statistic} from {low} to {high} nats; 0 must be among them. For bounds of a "
            "ratio give their logs"
        )
    kept = mask.bool()
    log_ratio = torch.where(kept, old_logprobs - rollout_logprobs, 0.0)
    # An infinite ratio must not be clamped. It means that engine or trainer gives the token a probability of
    # 0.
    broken = ~log_ratio.isfinite()
    divergence = _divergence(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), statistic).masked_fill(
        broken, float("nan")
    )
    if level == "sequence":
        counts = segment_sum(kept.to(divergence.dtype), lengths).clamp(min=1)
        divergence = expand(segment_sum(divergence, lengths) / counts, lengths)
    elif level != "token":
        raise ValueError(f"rejection level {level!r} is not one of {', '.join(Level.__args__)}")
    return (kept & (divergence >= low) & (divergence <= high)).to(mask.dtype)


def _divergence(log_ratio: Tensor, statistic: Statistic) -> Tensor:
    if statistic == "k1":
        return -log_ratio
    if statistic == "k2":
        return 0.5 * log_ratio.square()
    if statistic == "k3":
        return torch.expm1(log_ratio) - log_ratio
    raise ValueError(f"rejection statistic {statistic!r} is not one of {', '.join(Statistic.__args__)}")


def _check_upper(upper: float) -> None:
    if not upper > 0:
        raise ValueError(
            f"importance weights are truncated to {upper}; the bound must be positive, such as 2"
        )


@torch.no_grad()
def metrics(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    lengths: Tensor,
    mask: Tensor,
    *,
    level: Level = "token",
    upper: float = USUAL_UPPER,
) -> dict[str, float]:
    """Measure how far engine and trainer are apart, under verl's names with its prefix `rollout_corr/`.

    Statistics of tokens, as means over all unmasked tokens:
        kl, k3_kl: k1 and k3 estimates of KL(engine || trainer), nats.
        chi2_token: w^2 - 1, the chi-squared divergence.
        rollout_is_mean, _std, _min, _max: of w before any truncation. The mean is 1 up to noise if
            `rollout_logprobs` belong to the distribution sampled from; another mean shows a bug. (verl takes
            the std of truncated weights.)
        rollout_is_eff_sample_size: (mean w)^2 / mean w^2, the effective share of the batch, 0 to 1.
    Statistics of samples, as means over samples with an unmasked token; ppl is exp(-mean log-prob of its
        tokens): training_ppl, training_log_ppl, rollout_ppl, rollout_log_ppl: of the trainer and of the
        engine.
        ppl_ratio: training ppl / rollout ppl.
        log_ppl_diff, log_ppl_abs_diff, log_ppl_diff_max, log_ppl_diff_min: log of ppl_ratio.
        chi2_seq: (product of w)^2 - 1.
    Statistics of weights before truncation, at `level`: the weight of a token is its w, or the product of w
    over its sample. A weight is high above `upper`, and low below 1 / upper.
        rollout_is_ratio_fraction_high, _low: share of the tokens, or samples, with a high or low weight.
        rollout_is_seq_mean, _std, _min, _max: of the samples' mean weights; the std is unbiased, 0 for one
            sample.
        rollout_is_seq_max_deviation: largest distance of a sample's mean weight from 1.
        rollout_is_seq_fraction_high, _low: share of the samples with a high or low mean weight.

    Args:
        level: whether tokens or whole samples are weighed.
        upper: the bound that the weights are truncated to, positive.

    Computed in float64. Returns an empty dict if no token is unmasked.

    Raises:
        ValueError: upper is not positive.
    """
    _check_upper(upper)
    mask = mask.bool()
    if not mask.any():
        return {}
    old, rollout = (torch.where(mask, x, 0.0).double() for x in (old_logprobs, rollout_logprobs))
    log_ratio = (old - rollout).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weights = log_ratio.exp()[mask]
    square = weights.square().mean()
    values = {
        "kl": (rollout - old)[mask].mean(),
        "k3_kl": _divergence(log_ratio, "k3")[mask].mean(),
        "chi2_token": square - 1,
        "rollout_is_mean": weights.mean(),
        "rollout_is_std": weights.std(correction=0),
        "rollout_is_min": weights.min(),
        "rollout_is_max": weights.max(),
        "rollout_is_eff_sample_size": weights.mean().square() / square,
    }
    counts = segment_sum(mask.double(), lengths)
    log_ppl, rollout_log_ppl, log_weight = (
        segment_sum(x, lengths)[counts > 0] for x in (-old, -rollout, old - rollout)
    )
    log_ppl, rollout_log_ppl = log_ppl / counts[counts > 0], rollout_log_ppl / counts[counts > 0]
    diff = log_ppl - rollout_log_ppl
    products = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    values |= {
        "training_ppl": log_ppl.exp().mean(),
        "training_log_ppl": log_ppl.mean(),
        "rollout_ppl": rollout_log_ppl.exp().mean(),
        "rollout_log_ppl": rollout_log_ppl.mean(),
        "ppl_ratio": diff.exp().mean(),
        "log_ppl_diff": diff.mean(),
        "log_ppl_abs_diff": diff.abs().mean(),
        "log_ppl_diff_max": diff.max(),
        "log_ppl_diff_min": diff.min(),
        "chi2_seq": (2 * products).exp().mean() - 1,
    }
    per_sample = products.exp()
    weighed = per_sample
    if level == "token":
        weighed = weights
        per_sample = _sample_means(log_ratio.exp(), mask, lengths)
    values |= {
        "rollout_is_ratio_fraction_high": _share(weighed > upper),
        "rollout_is_ratio_fraction_low": _share(weighed < 1 / upper),
        "rollout_is_seq_mean": per_sample.mean(),
        "rollout_is_seq_std": _unbiased_std(per_sample),
        "rollout_is_seq_max": per_sample.max(),
        "rollout_is_seq_min": per_sample.min(),
        "rollout_is_seq_max_deviation": (per_sample - 1).abs().max(),
        "rollout_is_seq_fraction_high": _share(per_sample > upper),
        "rollout_is_seq_fraction_low": _share(per_sample < 1 / upper),
    }
    return {f"rollout_corr/{name}": float(value) for name, value in values.items()}


@torch.no_grad()
def criterion_metrics(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    lengths: Tensor,
    mask: Tensor,
    kept: Tensor,
    *,
    level: Level,
    statistic: Statistic,
    low: float,
    high: float,
) -> dict[str, float]:
    """Measure one criterion of `reject`, under verl's names `rollout_corr/rollout_rs_<criterion>_*`.

    <criterion> is token_k1 .. token_k3 or seq_mean_k1 .. seq_mean_k3. The divergence of a token is its own
    estimate, or, for seq_mean, the mean over its sample. Only samples with an unmasked token count.
        mean, std: over the unmasked tokens. For the std, the divergence is clamped to the bounds.
        max, min, fraction_high, fraction_low: over the tokens, or samples, that the criterion judges; the
            fractions are above `high` and below `low`.
        seq_mean, seq_std, seq_max, seq_min, seq_max_deviation, seq_fraction_high, seq_fraction_low: over the
            samples' means; the std is unbiased, 0 for one sample; the deviation is the largest absolute
            value.
        masked_fraction, seq_masked_fraction: share of the tokens rejected, and of the samples that lose a
            token.

    `kept` [T] is the result of `reject` with the same arguments. Computed in float64. Returns an empty dict
    if no token is unmasked.
    """
    mask = mask.bool()
    if not mask.any():
        return {}
    log_ratio = masked_log_ratio(old_logprobs.double(), rollout_logprobs.double(), mask)
    divergence = _divergence(log_ratio, statistic)
    per_sample = _sample_means(divergence, mask, lengths)
    per_token, judged = divergence[mask], divergence[mask]
    if level == "sequence":
        counts = segment_sum(mask.double(), lengths).long()
        per_token, judged = expand(per_sample, counts[counts > 0]), per_sample
    values = {
        "mean": per_token.mean(),
        "max": judged.max(),
        "min": judged.min(),
        "fraction_high": _share(judged > high),
        "fraction_low": _share(judged < low),
        "std": per_token.clamp(low, high).std(correction=0),
        "seq_mean": per_sample.mean(),
        "seq_std": _unbiased_std(per_sample),
        "seq_max": per_sample.max(),
        "seq_min": per_sample.min(),
        "seq_max_deviation": per_sample.abs().max(),
        "seq_fraction_high": _share(per_sample > high),
        "seq_fraction_low": _share(per_sample < low),
    }
    name = f"rollout_rs_{'token' if level == 'token' else 'seq_mean'}_{statistic}"
    values |= _masked_fractions(lengths, mask, kept)
    return {f"rollout_corr/{name}_{key}": float(value) for key, value in values.items()}


@torch.no_grad()
def rejection_metrics(lengths: Tensor, mask: Tensor, kept: Tensor) -> dict[str, float]:
    """Return the share of unmasked tokens that all criteria together reject, and the share of samples that
    lose any.

    The names are verl's, `rollout_corr/rollout_rs_masked_fraction` and `rollout_rs_seq_masked_fraction`.
    `mask` and `kept` [T]: before and after. Returns an empty dict if no token is unmasked.
    """
    if not mask.any():
        return {}
    fractions = _masked_fractions(lengths, mask.bool(), kept)
    return {f"rollout_corr/rollout_rs_{key}": float(value) for key, value in fractions.items()}


def _masked_fractions(lengths: Tensor, mask: Tensor, kept: Tensor) -> dict[str, Tensor]:
    lost = (mask & ~kept.bool()).double()
    counts = segment_sum(mask.double(), lengths)
    return {
        "masked_fraction": lost.sum() / mask.sum(),
        "seq_masked_fraction": _share(segment_sum(lost, lengths)[counts > 0] > 0),
    }


def _sample_means(values: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean of float64 [T] over the unmasked tokens of each sample that has one."""
    counts = segment_sum(mask.double(), lengths)
    return segment_sum(torch.where(mask, values, 0.0), lengths)[counts > 0] / counts[counts > 0]


def _unbiased_std(values: Tensor) -> Tensor:
    return values.std() if len(values) > 1 else values.new_zeros(())


def _share(flags: Tensor) -> Tensor:
    return flags.double().mean()
