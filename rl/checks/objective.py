"""Compares value and gradient of each loss with its formula in plain torch, which is written again here.

The tokens are random: ratios near and far from 1, advantages of both signs, masked tokens, and denominators
of a mini-batch that is larger than the micro-batch.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from rl.checks.batches import CheckFailed
from rl.config.schema import Config
from rl.training.loss import Loss, LossFunction, Totals
from rl.training.packing import MicroBatch

LENGTHS = (3, 2, 4, 1) * 10
"""Number of tokens of each sample. The second of each ten tokens is masked."""
SCALES = (0.0, 3e-4, 0.1, 0.5, 1.5)
"""Standard deviations of the log-ratios of a sample; one of them for each sample."""
KL, TOLERANCE = 0.3, 1e-6
"""KTO's estimate of the divergence, and the maximum relative difference of values and gradients."""


class LossPoint:
    """Random columns and outputs of a micro-batch, `p.name`, float64 [T]. scale: factor of the advantages."""

    def __init__(self, config: Config, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(7)
        lengths, size = torch.tensor(LENGTHS), sum(LENGTHS)
        rand = torch.rand(6, size, generator=generator, dtype=torch.float64)
        randn = torch.randn(5, size, generator=generator, dtype=torch.float64)
        spread = torch.tensor(SCALES, dtype=torch.float64).repeat(len(LENGTHS))[: len(LENGTHS)]
        self.config, self.goal, self.lengths = config, config.objective, lengths
        self.option = self.goal.option
        self.mask = torch.ones(size, dtype=torch.float64)
        self.mask[1::10] = 0.0
        self.counts = self.of_samples(self.mask)
        logprobs = -0.2 - 3 * rand[0]
        of_sample = torch.randn(2, len(LENGTHS), generator=generator, dtype=torch.float64)
        self.columns = dict(
            mask=self.mask,
            advantages=scale * of_sample[0].repeat_interleave(lengths),
            old_logprobs=(logprobs - randn[1] * spread.repeat_interleave(lengths)).clamp(max=-0.05),
            ref_logprobs=logprobs - 0.4 * randn[2],
            implicit_ref_logprobs=logprobs - 0.4 * randn[3],
            selected_tokens=(rand[1] < 0.3).double(),
            loss_weights=0.5 + rand[5],
            sample_weights=(0.5 + of_sample[1].abs()).repeat_interleave(lengths),
            old_values=rand[2],
            returns=rand[3],
        )
        self.columns["rollout_logprobs"] = self.columns["old_logprobs"] - 0.3 * randn[0]
        self.labels = (of_sample[1] > 0).double()
        self.outputs = dict(
            logprobs=logprobs,
            entropy=1 + rand[4],
            values=self.columns["old_values"] + 0.3 * randn[4],
            divergence=rand[5],
        )
        self.outputs = {name: x.requires_grad_() for name, x in self.outputs.items()}
        self.totals = Totals(float(self.counts.sum()) + 7, len(LENGTHS) + 7.0, len(LENGTHS) / 2 + 3)

    def __getattr__(self, name: str) -> Tensor:
        return {**self.columns, **self.outputs}[name]

    def of_samples(self, x: Tensor) -> Tensor:
        """Return the sum of the unmasked tokens of each sample, [B]."""
        return torch.stack([part.sum() for part in (x * self.mask).split(LENGTHS)])

    def per_token(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.lengths)

    def of_sign(self, one: float, other: float, is_one: Tensor) -> Tensor:
        """Return one of two numbers for each token. `torch.where` alone would round them to float32."""
        return torch.where(is_one, one, torch.full_like(self.mask, other))

    def means(self) -> Tensor:
        """Return the mean log-prob of each sample, [B]."""
        return self.of_samples(self.logprobs) / self.counts.clamp(min=1)

    def log_ratios(self, reference: str) -> Tensor:
        """Return the log-ratio of each sample, [B]; 0 for samples that have no unmasked token."""
        return self.of_samples(self.logprobs - getattr(self, reference))

    def mean(self, of_tokens: Tensor, mode: str) -> Tensor:
        """Return the mean that `objective.aggregation` defines."""
        tokens, samples = self.totals.num_tokens, self.totals.num_samples
        weights: dict[str, float | Tensor] = {
            "token-mean": 1 / tokens,
            "token-sum": 1.0,
            "seq-mean-token-sum": 1 / samples,
            "seq-mean-token-mean": 1 / samples / self.per_token(self.counts).clamp(min=1),
            "seq-mean-token-sum-norm": 1 / samples / self.config.rollout.max_response_tokens,
        }
        return (of_tokens * self.mask * weights[mode]).sum()

    def micro_batch(self) -> MicroBatch:
        none = torch.zeros(0, dtype=torch.int64)
        return MicroBatch(
            samples=list(range(len(LENGTHS))),
            tokens=none[None],
            position_ids=none[None],
            bounds=none,
            attention=None,  # type: ignore[arg-type]  # losses do not read it
            predict_at=none,
            targets=torch.zeros(sum(LENGTHS), dtype=torch.int64),
            lengths=self.lengths,
            column_index=torch.arange(sum(LENGTHS)),
            columns=self.columns,
            sample_columns={"labels": self.labels},
            outputs=self.outputs | {"sum_p_squared": torch.full_like(self.mask, 0.3)},
        )


def check_loss(name: str, loss: LossFunction, config: Config) -> None:
    """Raise CheckFailed unless value and gradient of a loss are those of FORMULAS, if it has `name`."""
    if (formula := FORMULAS.get(name)) is None:
        return
    if name == "kto":
        loss = Loss.of(loss).given(kl=KL)
    # With advantages of 0, the gradients of a small KL term stand alone.
    problems = (_problem(LossPoint(config, scale), loss, formula) for scale in (1.0, 0.0))
    if problem := next(filter(None, problems), ""):
        goal = config.objective
        options = f"aggregation={goal.aggregation}"
        options += f", off_policy_mask={goal.off_policy_mask:g}" if goal.off_policy_mask else ""
        raise CheckFailed(
            f"objective check: objective.loss={goal.loss}, {options}: the loss {name} "
            f"differs from its formula: {problem}, see docs/algorithms.md."
        )


def _problem(p: LossPoint, loss: LossFunction, formula: Callable[[LossPoint], Tensor]) -> str:
    """Return a text about the first difference from the formula; "" if there is none."""
    with torch.enable_grad():
        values = loss(p.micro_batch(), p.totals)[0], formula(p)
        slopes = [torch.autograd.grad(v, list(p.outputs.values()), allow_unused=True) for v in values]
    for output, *pair in zip(p.outputs, *slopes):
        own, expected = (torch.zeros_like(p.mask) if x is None else x for x in pair)
        size = torch.maximum(expected.abs(), expected.abs().max() / 1e3)
        wrong = (own - expected).abs() > TOLERANCE * size
        if wrong[p.mask == 0].any():
            return "masked tokens, such as tool output, have a gradient"
        if wrong.any():
            token = int(wrong.nonzero()[0])
            ratio = float((p.logprobs - p.old_logprobs)[token].detach().exp())
            low, high = 1 - p.goal.clip_low, 1 + p.goal.clip_high
            return (
                f"the gradient for {output} is {float(own[token]):.4g} instead of "
                f"{float(expected[token]):.4g} at a token with advantage {float(p.advantages[token]):.3g} "
                f"and ratio {ratio:.4g}, {'within' if low <= ratio <= high else 'beyond'} the clip range "
                f"{low:g} to {high:g}"
            )
    found, wanted = (float(v.detach()) for v in values)
    is_equal = abs(found - wanted) <= TOLERANCE * max(1e-3, abs(wanted))
    return "" if is_equal else f"its value is {found:.6g} instead of {wanted:.6g}"


# Losses of single tokens ---------------------------------------------------------------------------------


def _ratio(p: LossPoint) -> Tensor:
    return (p.logprobs - p.old_logprobs).exp()


def _of_sample(p: LossPoint) -> Tensor:
    """Return GSPO's ratio of each token: the sample's geometric mean, with the token's gradient."""
    mean = p.of_samples(p.logprobs - p.old_logprobs) / p.counts.clamp(min=1)
    return (p.per_token(mean).detach() + p.logprobs - p.logprobs.detach()).exp()


def _clipped(p: LossPoint, r: Tensor, dual: float = 0.0) -> Tensor:
    """Return PPO's loss of each token with the ratio r."""
    low, high = 1 - p.goal.clip_low, 1 + p.goal.clip_high
    gains = torch.where(p.advantages > 0, r.clamp(max=high), r.clamp(min=low))
    if dual:
        gains = torch.where(p.advantages < 0, gains.clamp(max=max(dual, low)), gains)
    return -gains * p.advantages


def _dppo(p: LossPoint, divergence: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return DPPO's loss: none where a token has left the trust region in the advantage's direction."""
    p_new, p_old = p.logprobs.exp(), p.old_logprobs.exp()
    radius = torch.where(p.advantages > 0, p.goal.clip_high, p.goal.clip_low)
    leaves = ((p_new - p_old) * p.advantages.sign() > 0) & (divergence(p_new, p_old) > radius)
    ratio = _ratio(p).clamp(max=p.option("dppo_max_ratio") or 20.0).detach()
    return torch.where(leaves, 0.0, -ratio * p.advantages * p.logprobs)


def _binary_kl(new: Tensor, old: Tensor) -> Tensor:
    return old * (old / new).log() + (1 - old) * ((1 - old) / (1 - new)).log()


def _gmpo(p: LossPoint) -> Tensor:
    d, is_good = p.logprobs - p.old_logprobs, p.advantages > 0
    d = torch.where(is_good, d.clamp(max=p.goal.clip_high), d.clamp(min=-p.goal.clip_low))
    return p.per_token(-(p.of_samples(d) / p.counts.clamp(min=1)).exp()) * p.advantages


def _sapo(p: LossPoint) -> Tensor:
    tau = p.of_sign(p.option("sapo_tau_positive"), p.option("sapo_tau_negative"), p.advantages > 0)
    return -p.advantages * 4 / tau * torch.sigmoid(tau * (_ratio(p) - 1))


def _vespo(p: LossPoint) -> Tensor:
    logs, is_bad = p.logprobs - p.old_logprobs + p.loss_weights.log(), p.advantages < 0
    w = p.per_token(p.of_samples(logs).exp()).detach()
    names = "vespo_k", "vespo_lambda"
    k, decay = (p.of_sign(p.option(f"{x}_negative"), p.option(f"{x}_positive"), is_bad) for x in names)
    return -(w**k) * (decay * (1 - w)).exp() * p.advantages * p.logprobs


def _kl_cov(p: LossPoint) -> Tensor:
    penalty = p.selected_tokens * p.option("kl_cov_coef") * (p.logprobs - p.old_logprobs).abs()
    return penalty - _ratio(p) * p.advantages


TOKEN_LOSSES: dict[str, Callable[[LossPoint], Tensor]] = {
    "ppo": lambda p: _clipped(p, _ratio(p), p.option("dual_clip")),
    "gspo": lambda p: _clipped(p, _of_sample(p)),
    "luspo": lambda p: _clipped(p, _of_sample(p)),
    "cispo": lambda p: (
        -_ratio(p).clamp(1 - p.goal.clip_low, 1 + p.goal.clip_high).detach() * p.advantages * p.logprobs
    ),
    "clip-cov": lambda p: (1 - p.selected_tokens) * _clipped(p, _ratio(p)),
    "kl-cov": _kl_cov,
    "dppo-tv": lambda p: _dppo(p, lambda new, old: (new - old).abs()),
    "dppo-kl": lambda p: _dppo(p, _binary_kl),
    "dro": lambda p: (
        -p.advantages * p.logprobs + p.option("dro_beta") / 2 * (p.logprobs - p.old_logprobs) ** 2
    ),
    "gmpo": _gmpo,
    "gpg": lambda p: -p.advantages * p.logprobs,
    "reinforce": lambda p: -p.advantages * p.logprobs,
    "sapo": _sapo,
    "vespo": _vespo,
}
"""`objective.loss` -> loss of each token, [T]."""


def _divergence(p: LossPoint, estimator: str) -> Tensor:
    """Return the estimate of the divergence from the reference at each token, [T]."""
    d = p.logprobs - p.ref_logprobs
    values = {"k1": d, "abs": d.abs(), "k2": d * d / 2, "k3": (-d).exp() - 1 + d}
    if estimator in values:
        return values[estimator]
    squares = d * d / 2
    value = values[estimator[:2]].detach() + squares - squares.detach()
    return value * _ratio(p).detach() if estimator == "k3-weighted" else value


def _policy_gradient(p: LossPoint, of_tokens: Tensor) -> Tensor:
    """Return the loss with the masks and weights of tokens, KL term and entropy bonus of the config."""
    if p.goal.top_entropy < 1:
        of_tokens = of_tokens * p.selected_tokens
    if bound := p.goal.off_policy_mask:
        far = p.of_samples(p.rollout_logprobs - p.logprobs) / p.counts.clamp(min=1) > bound
        of_tokens = torch.where((p.advantages < 0) & p.per_token(far), 0.0, of_tokens)
    if p.goal.loss != "vespo":  # its ratio contains them
        of_tokens = of_tokens * p.loss_weights
    total = of_tokens * p.sample_weights - p.goal.entropy_coef * p.entropy
    if p.goal.kl_coef:
        total = total + p.goal.kl_coef * _divergence(p, p.goal.kl_estimator)
    return p.mean(total, p.goal.aggregation)


# Losses of whole responses -------------------------------------------------------------------------------


def _pairs(p: LossPoint, of_samples: Tensor, loss: str, *, gamma: float = 0.0) -> Tensor:
    goal, enters = p.config.preference, (p.counts > 0).view(-1, 2).all(1)
    margin = of_samples[::2] - of_samples[1::2]
    m = goal.beta * margin - gamma
    value = {
        "sigmoid": -(1 - goal.label_smoothing) * F.logsigmoid(m) - goal.label_smoothing * F.logsigmoid(-m),
        "hinge": F.relu(1 - m),
        "ipo": (margin - 1 / (2 * goal.beta)) ** 2,
    }[loss]
    return (value * enters).sum() / p.totals.num_units


def _orpo(p: LossPoint) -> Tensor:
    q = p.means().exp()
    odds = q / (1 - q)
    value = -p.means()[::2] + p.config.preference.beta * (1 + odds[1::2] / odds[::2]).log()
    return (value * (p.counts > 0).view(-1, 2).all(1)).sum() / p.totals.num_units


def _samples(p: LossPoint, value: Tensor) -> Tensor:
    return (value * (p.counts > 0)).sum() / p.totals.num_samples


def _kto(p: LossPoint) -> Tensor:
    goal, ratios = p.config.preference, p.log_ratios("ref_logprobs")
    good = goal.desirable_weight * (1 - torch.sigmoid(goal.beta * (ratios - KL)))
    bad = goal.undesirable_weight * (1 - torch.sigmoid(goal.beta * (KL - ratios)))
    return _samples(p, torch.where(p.labels > 0, good, bad))


def _sppo(p: LossPoint) -> Tensor:
    return _samples(p, (p.log_ratios("old_logprobs") - (p.labels - 0.5) / p.config.preference.beta) ** 2)


def _outcome(p: LossPoint) -> Tensor:
    z = p.config.implicit_reward.beta * p.log_ratios("implicit_ref_logprobs")
    return _samples(p, -p.labels * F.logsigmoid(z) - (1 - p.labels) * F.logsigmoid(-z))


def _value(p: LossPoint) -> Tensor:
    clip = p.config.critic.value_clip
    errors = (p.values - p.returns) ** 2
    if clip:
        near = torch.minimum(torch.maximum(p.values, p.old_values - clip), p.old_values + clip)
        errors = torch.maximum(errors, (near - p.returns) ** 2)
    return p.mean(errors / 2, "token-mean")


FORMULAS: dict[str, Callable[[LossPoint], Tensor]] = {
    **{name: lambda p, f=f: _policy_gradient(p, f(p)) for name, f in TOKEN_LOSSES.items()},  # type: ignore[misc]
    "critic": _value,
    "implicit_reward": _outcome,
    "sft": lambda p: p.mean(-p.logprobs, "token-mean"),
    "distill": lambda p: p.mean(p.divergence, p.goal.aggregation),
    "dpo": lambda p: _pairs(p, p.log_ratios("ref_logprobs"), p.config.preference.loss),
    "spin": lambda p: _pairs(p, p.log_ratios("old_logprobs"), p.config.preference.loss),
    "simpo": lambda p: _pairs(p, p.means(), "sigmoid", gamma=p.config.preference.gamma),
    "orpo": _orpo,
    "kto": _kto,
    "sppo": _sppo,
}
"""Name of `objective.loss`, of another algorithm, or of a model other than the policy -> its formula."""
