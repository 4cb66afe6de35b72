"""Checks the gradient of the configured loss at points where theory predicts it.

Once after each start of a run, before the first update, the gradient of the policy-gradient loss with respect
to the log-probs is computed on a few tokens. It must have these properties:

    ratio 1       it increases the log-probs of tokens with positive advantage, and no others; masked tokens
                  have none
    other ratios  at equal ratios r within the clip range the gradient is r times the gradient at ratio 1, for
                  losses of samples too (PROPORTIONAL); for the losses in OTHERWISE it differs from the
                  gradient at ratio 1; for the losses in CLIPPED the gradient beyond the clip range and
                  beyond the dual clip is that of the formula
    KL term       the loss changes by kl_coef * KL with the formula of the estimator, and counts it once
    entropy       the bonus increases the entropy of the counted tokens only

Everything is computed in float64, so that small terms keep enough digits. For example, a KL term that is a
millionth of the entropy bonus keeps four digits.
"""

import math

import torch
from torch import Tensor

from rl.checks.batches import CheckFailed
from rl.config.schema import Config
from rl.data.batch import LOSS_COLUMNS
from rl.training.loss import LossFunction, Totals
from rl.training.packing import MicroBatch

DIVERGENCES = {"k1": lambda d: d, "abs": abs, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}
"""Estimators of the KL divergence at ratio 1, as functions of log pi - log pi_ref."""
PROPORTIONAL = {"cispo", "clip-cov", "dppo-kl", "dppo-tv", "gmpo", "gspo", "kl-cov", "luspo", "ppo"}
"""Losses whose gradient, within the clip range, is proportional to the ratio of the token or of the
sample."""
CLIPPED = {"cispo", "gspo", "ppo"}
"""Losses whose gradient beyond the clip range is known (`_factor`)."""
OTHERWISE = {"dro", "fipo", "sapo", "vespo"}
"""Losses whose gradient depends on the ratio in another way."""
OPTIONAL = ("loss_weights", "sample_weights", "trajectory_tokens")
"""Columns that change the loss if a batch has them."""
LENGTHS = (3, 2, 4)
"""Number of tokens of each sample. The second and the last of all tokens are masked."""


def check_objective(loss: LossFunction, config: Config) -> None:
    """Raise CheckFailed if the gradient of the loss is not the gradient of the configured objective."""
    goal = config.objective
    advantages = torch.tensor([1.0, 1, 1, -1, -1, 1, 1, 1, 1], dtype=torch.float64)
    on_policy = ObjectivePoint(loss, config, advantages=advantages)
    counted = on_policy.mask > 0
    problem = ""
    if on_policy.slope[~counted].any() or (on_policy.entropy_slope is not None and on_policy.leaks_entropy):
        problem = "masked tokens, such as tool output, have a gradient"
    elif goal.kl_estimator in ("k2", "k3", "k1+", "k3+", "k3-weighted") or not goal.kl_coef:
        raised = on_policy.slope < 0  # a loss may ignore negative advantages
        if not (raised == (advantages > 0))[counted].all():
            problem = "at ratio 1 it does not raise the log-probs of tokens with positive advantage only"
    problem = problem or _problem_of_ratios(loss, config, advantages)
    if not problem and goal.kl_coef:
        problem = _problem_of_kl(loss, config)
    if not problem and goal.entropy_coef:
        assert on_policy.entropy_slope is not None
        if not (on_policy.entropy_slope * goal.entropy_coef < 0)[counted].all():
            problem = "objective.entropy_coef does not raise the entropy"
    if problem:
        raise CheckFailed(
            f"objective check: objective.loss={goal.loss}, aggregation={goal.aggregation}: {problem}. The "
            "loss differs from its formula, see docs/algorithms.md."
        )


class ObjectivePoint:
    """The loss and its gradient at one micro-batch of three samples. The ratios are 1 unless others are
    given."""

    def __init__(
        self,
        loss: LossFunction,
        config: Config,
        *,
        advantages: Tensor,
        ratios: Tensor | None = None,
        above_reference: float = 0.0,
    ):
        size = sum(LENGTHS)
        old = -torch.linspace(0.5, 3.0, size, dtype=torch.float64)
        self.mask = torch.ones_like(old)
        self.mask[[1, -1]] = 0.0
        logprobs = (old.clone() if ratios is None else old + ratios.log()).requires_grad_()
        entropy = torch.full_like(old, 1.5).requires_grad_()
        micro = _micro_batch(
            {name: torch.zeros_like(old) for name in LOSS_COLUMNS if name not in OPTIONAL}
            | dict(
                advantages=advantages,
                mask=self.mask,
                old_logprobs=old,
                rollout_logprobs=old,
                ref_logprobs=logprobs.detach() - above_reference,
                # objective.top_entropy keeps only selected tokens, so all are selected. Other losses treat
                # selected tokens differently, so none is selected.
                selected_tokens=torch.full_like(old, float(config.objective.top_entropy < 1)),
            )
        )
        micro.outputs |= dict(logprobs=logprobs, entropy=entropy, sum_p_squared=torch.full_like(old, 0.3))
        counts = [float(part.sum()) for part in self.mask.split(LENGTHS)]
        totals = Totals(num_tokens=sum(counts), num_samples=len(counts), num_units=len(counts))
        with torch.enable_grad():
            value, _ = loss(micro, totals)
            slope, entropy_slope = torch.autograd.grad(value, (logprobs, entropy), allow_unused=True)
        self.value = float(value.detach())
        self.slope = torch.zeros_like(old) if slope is None else slope
        self.entropy_slope = entropy_slope

    @property
    def leaks_entropy(self) -> bool:
        assert self.entropy_slope is not None
        return bool(self.entropy_slope[self.mask == 0].any())


def _micro_batch(columns: dict[str, Tensor]) -> MicroBatch:
    none = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        samples=list(range(len(LENGTHS))),
        tokens=none[None],
        position_ids=none[None],
        bounds=none,
        attention=None,  # type: ignore[arg-type]  # losses do not read it
        predict_at=none,
        targets=torch.zeros(sum(LENGTHS), dtype=torch.int64),
        lengths=torch.tensor(LENGTHS),
        column_index=torch.arange(sum(LENGTHS)),
        columns=columns,
    )


def total_weight(config: Config) -> float:
    """Return the sum of the weights that `objective.aggregation` gives the tokens of an `ObjectivePoint`."""
    tokens, samples = sum(LENGTHS) - 2, len(LENGTHS)
    return {
        "token-mean": 1.0,
        "token-sum": float(tokens),
        "seq-mean-token-sum": tokens / samples,
        "seq-mean-token-mean": 1.0,
        "seq-mean-token-sum-norm": tokens / samples / config.rollout.max_response_tokens,
    }[config.objective.aggregation]


def _problem_of_ratios(loss: LossFunction, config: Config, advantages: Tensor) -> str:
    goal = config.objective
    near = 1 + min(goal.clip_low, goal.clip_high) / 2
    if goal.loss not in PROPORTIONAL | OTHERWISE:
        return ""

    def slope(ratio: float) -> Tensor:
        # With advantages of 0, only the KL term, the entropy bonus and other penalties have a gradient.
        of, penalties = (
            ObjectivePoint(loss, config, advantages=a, ratios=torch.full_like(a, ratio)).slope
            for a in (advantages, torch.zeros_like(advantages))
        )
        return of - penalties * (goal.loss in PROPORTIONAL)

    at_one, dual = slope(1.0), getattr(goal, "dual_clip", 0.0) or goal.kwargs.get("dual_clip", 0.0)
    if goal.loss in OTHERWISE:
        is_equal = near > 1 and torch.equal(slope(near), at_one)
        return f"at ratio {near:g} its gradient is that at ratio 1" if is_equal else ""
    ratios = [near] if near > 1 else []
    if goal.loss in CLIPPED:
        ratios += [1 + 1.5 * goal.clip_high, 1.5 * max(dual, 1 + goal.clip_high)]
        ratios += [1 - 1.5 * goal.clip_low] if goal.clip_low < 0.6 else []
    for ratio in ratios:
        factors = torch.tensor([_factor(ratio, a, config, dual) for a in advantages.tolist()])
        error = (slope(ratio) - factors * at_one).abs()
        if (error > 1e-3 * abs(ratio - 1) * at_one.abs() + 1e-6 * at_one.abs().max()).any():
            if ratio == near:
                return f"at ratio {ratio:g} its gradient is not the ratio times that at ratio 1"
            return (
                f"at ratio {ratio:g}, beyond the clip range {1 - goal.clip_low:g} to {1 + goal.clip_high:g}, "
                "its gradient is not that of the formula"
            )
    return ""


def _factor(ratio: float, advantage: float, config: Config, dual: float) -> float:
    """Return the gradient at a ratio, in units of the gradient at ratio 1."""
    goal = config.objective
    low, high = 1 - goal.clip_low, 1 + goal.clip_high
    if goal.loss == "cispo":
        return min(max(ratio, low), high)
    is_cut = ratio > high if advantage > 0 else ratio < low or (goal.loss == "ppo" and dual and ratio > dual)
    return 0.0 if is_cut and goal.loss in CLIPPED else ratio


def _problem_of_kl(loss: LossFunction, config: Config) -> str:
    none, distance = torch.zeros(sum(LENGTHS), dtype=torch.float64), 0.5
    far, near = (ObjectivePoint(loss, config, advantages=none, above_reference=d) for d in (distance, 0.0))
    goal = config.objective
    formula = goal.kl_estimator.removesuffix("+").removesuffix("-weighted")  # at ratio 1
    expected = goal.kl_coef * DIVERGENCES[formula](distance) * total_weight(config)
    rounding = 16 * torch.finfo(torch.float64).eps * abs(near.value)  # of the sum
    if not math.isclose(far.value - near.value, expected, rel_tol=1e-3, abs_tol=rounding):
        return (
            f"a policy {distance} nats above its reference changes the loss by {far.value - near.value:.4g} "
            f"instead of kl_coef * KL = {expected:.4g}"
        )
    if not (far.slope > 0)[far.mask > 0].all():
        return "the KL term does not pull the policy towards the reference"
    return ""
