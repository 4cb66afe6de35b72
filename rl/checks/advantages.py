"""Computes the advantages of some groups of a step a second time: slowly, in float64, from scores and config.

Nothing here calls `rl.objectives`: each formula is written again in plain Python, in the form of its paper.
The numbers of the algorithm must agree with it up to float32 rounding. If the algorithm whitens the
advantages over the batch, they may also differ by a shift and a scale. For example, the values 3 and 5 agree
with the whitened advantages -1 and 1. The advantages of the whole batch must then have a mean of 0 and a
variance of at most 1.

The following is not computed again: the advantages of prime before whitening, because no column holds its
process rewards; the KL penalty with an adaptive coefficient; the baselines of remax; advantages to which a
teacher contributes; and the numbers of a user's algorithm or estimator.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from rl.checks.batches import CheckFailed, place
from rl.config.schema import Config, Objective
from rl.data.batch import COLUMNS, Batch

NUM_VALUES = 500
"""Number of samples and counted tokens for which a step computes advantages again. Whole groups are drawn, at
least one, until it is reached."""
ROUNDING = 16 * torch.finfo(torch.float32).eps
"""Maximum relative error of a result of a few float32 operations."""
WHITEN_EPS = 1e-8
"""Number that whitening adds to the variance."""
EPS = 1e-6
"""Number that is added to standard deviations and means of groups before dividing by them."""
NOT_REWARDS = {"acc", "failed", "judge", "reward_model", "score"}
"""Details of a score that gdpo does not treat as rewards."""


class _Sample:
    """The numbers of one sample, as Python floats."""

    def __init__(self, columns: dict[str, np.ndarray], index: int, start: int, stop: int):
        self._columns, self.index, self.span = columns, index, slice(start, stop)
        self.counted = columns["mask"][self.span] > 0

    def one(self, name: str) -> float:
        """Return the value of the sample in a sample column."""
        return float(self._columns[name][self.index])

    def every(self, name: str) -> list[float]:
        """Return the values of a token column at all tokens of the sample."""
        return self._columns[name][self.span].tolist()

    def tokens(self, name: str) -> list[float]:
        """Return the values of a token column at the counted tokens of the sample."""
        return self._columns[name][self.span][self.counted].tolist()


class _Groups(Sequence[list[_Sample]]):
    """The groups of a batch. A group is built when it is accessed."""

    def __init__(self, samples: Batch):
        columns = samples.score_details | samples.columns()
        self._columns = {name: column.numpy() for name, column in columns.items()}
        self._starts = samples.offsets.tolist()
        numbers = samples.groups.numpy()
        order = np.argsort(numbers, kind="stable")
        self._members = np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, index: Any) -> Any:
        starts = self._starts
        return [_Sample(self._columns, i, starts[i], starts[i + 1]) for i in self._members[index].tolist()]


_Group = list[_Sample]
AllGroups = Sequence[_Group]
Advantages = list[float] | list[list[float]]
"""One number for each sample of a group, or one number for each counted token of each sample."""


def check_advantages(batch: Batch, config: Config) -> None:
    """Check the rewards and advantages of some groups, and the whitening of all advantages.

    The groups are drawn at random, with a seed that depends on the batch. Raises CheckFailed.
    """
    estimator, _ = config.objective.chosen
    if (
        estimator is None
        or config.teacher.advantage_coef
        or batch.advantages is None
        or batch.rewards is None
        or not len(batch)
    ):
        return
    samples, goal = batch.merge_rows(), config.objective
    groups = _Groups(samples)
    chosen = _some(groups, batch.fingerprint)
    if batch.scores is not None and goal.reward_kl.controller != "adaptive":
        for sample in (sample for group in chosen for sample in group):
            _check_reward(samples, sample, config)
    formula = FORMULAS.get(estimator.function)
    raw = [formula(group, goal, groups) if formula else [] for group in chosen]
    pairs: list[tuple[_Sample, np.ndarray]] = []
    sizes: list[float] = []
    for group, values in zip(chosen, raw):
        found = [np.asarray(value, np.float64) for value in values]
        size = _rounded(_rewards(group), found)
        for sample, value in zip(group, found) if math.isfinite(size) else ():
            pairs.append((sample, np.broadcast_to(value, int(sample.counted.sum()))))
            sizes.append(size)
    if "returns" in samples.extra:
        lam = goal.lam if goal.lam_critic is None else goal.lam_critic
        for sample, _ in pairs:
            targets = np.asarray(_summed_errors(sample, goal, lam)) + sample.tokens("old_values")
            _compare(samples, sample, "returns", targets, config)
    if estimator.function in WHITENED and (estimator.function != "gae" or goal.whiten):
        _check_whitened(samples, pairs, config)
    else:
        for (sample, own), size in zip(pairs, sizes):
            _compare(samples, sample, "advantages", own, config, size)


def _rounded(rewards: list[float], advantages: list[np.ndarray]) -> float:
    """Return the size of the rounding errors in a group's advantages; infinity if they consist only of
    errors.

    A reward has a rounding error in proportion to its size. Dividing by a small spread, such as a small
    standard deviation, magnifies the error. For example, the rewards 0.9 and 0.9 + 1e-7 differ by rounding
    only.
    """
    size, spread = max(map(abs, rewards)), max(rewards) - min(rewards)
    largest = max((float(np.abs(own).max()) for own in advantages if own.size), default=0.0)
    if spread <= ROUNDING * size:
        return math.inf if size and largest <= ROUNDING * size / EPS else max(size, largest)
    return max(1e-3, size, size * largest / spread)


def _some(groups: AllGroups, seed: int) -> list[_Group]:
    """Return randomly chosen groups with about NUM_VALUES samples and tokens."""
    chosen: list[_Group] = []
    size = 0
    for index in random.Random(seed).sample(range(len(groups)), len(groups)):
        group = groups[index]
        size += sum(1 + int(sample.counted.sum()) for sample in group)
        if chosen and size > NUM_VALUES:
            break
        chosen.append(group)
    return chosen


def _compare(
    samples: Batch, sample: _Sample, name: str, own: np.ndarray, config: Config, size: float = 1e-3
) -> None:
    """Raise CheckFailed unless a token column has the values `own` at the counted tokens of a sample.

    size: lower bound of the scale to which tolerated errors are relative.
    """
    found = np.asarray(sample.tokens(name))
    wrong = np.abs(found - own) > ROUNDING * max(size, *np.abs(found), *np.abs(own), size)
    if wrong.any():
        token = int(wrong.argmax())
        raise CheckFailed(
            f"advantage check: {place(samples, sample.index)} has {found[token]:.6g} in the column {name} at "
            f"its counted token {token}, but objective.advantage={config.objective.advantage} gives "
            f"{own[token]:.6g} for its reward {sample.one('rewards'):.4g} and those of its group."
        )


def _check_reward(samples: Batch, sample: _Sample, config: Config) -> None:
    """Raise CheckFailed unless a sample's reward is its score minus the penalties of the config."""
    penalty, reward = config.objective.reward_kl, config.reward
    buffer = reward.overlong_buffer_tokens
    expected, slack = sample.one("scores"), abs(sample.one("scores"))
    if buffer:
        turns = sample.every("turns") if samples.turns is not None else [1] * len(sample.counted)
        excess = sum(turn > 0 for turn in turns) - (config.rollout.max_response_tokens - buffer)
        expected -= reward.overlong_penalty * min(max(excess / buffer, 0.0), 1.0)
        slack += reward.overlong_penalty
    if penalty.coef and samples.token_rewards is not None:
        if (divergence := _KL.get(penalty.estimator.rstrip("+"))) is None:
            return
        ratios = zip(sample.tokens("old_logprobs"), sample.tokens("ref_logprobs"))
        terms = [(divergence(old - ref), abs(old) + abs(ref)) for old, ref in ratios]
        expected -= penalty.coef * math.fsum(term for term, _ in terms)
        slack += penalty.coef * math.fsum(abs(term) + size for term, size in terms)
    found = {"reward": sample.one("rewards")}
    if samples.token_rewards is not None and sample.counted.any():
        found["sum of token rewards"] = math.fsum(sample.tokens("token_rewards"))
    for what, value in found.items():
        if not abs(value - expected) <= ROUNDING * max(slack, 1e-3):
            raise CheckFailed(
                f"reward check: {place(samples, sample.index)} has the {what} {value:.6g}, but its score "
                f"{sample.one('scores'):.6g} with the penalties of the config makes {expected:.6g}."
            )


def _check_whitened(samples: Batch, pairs: list[tuple[_Sample, np.ndarray]], config: Config) -> None:
    """Check the mean and variance of all advantages. Also compare each pair's advantages up to shift and
    scale."""
    counted = samples.column("advantages")[samples.mask > 0].double()
    if len(counted) < 2:
        return
    values = np.concatenate([np.zeros(0), *(own for _, own in pairs)])
    # `part` is at most the variance v of all values, and whitening turns v into v / (v + WHITEN_EPS).
    part = float(np.square(values - values.mean()).sum()) / (len(counted) - 1) if len(values) else 0.0
    least, size = part / (part + WHITEN_EPS), float(counted.abs().max())
    mean, variance = float(counted.mean()), float(counted.var())
    if not abs(mean) <= ROUNDING * size or not least - 1e-4 <= variance <= 1 + 1e-4:
        raise CheckFailed(
            f"advantage check: advantages of {len(counted)} counted tokens have the mean {mean:.4g} and the "
            f"variance {variance:.4g}, but objective.advantage={config.objective.advantage} makes it the "
            f"mean 0 and the variance {least:.4g} to 1."
        )
    found = np.concatenate([np.zeros(0), *(sample.tokens("advantages") for sample, _ in pairs)])
    low, high = (int(values.argmin()), int(values.argmax())) if len(values) else (0, 0)
    if not len(values) or abs(found[high] - found[low]) < 1e-3 * size:
        return
    scale = abs(found[high] - found[low]) / (values[high] - values[low])
    size = max(size, scale * float(np.abs(values).max()))  # the numbers that whitening rounded have this size
    for sample, own in pairs:
        _compare(samples, sample, "advantages", (own - values[low]) * scale + found[low], config, size)


# Formulas --------------------------------------------------------------------------------------------------


def _mean(x: list[float]) -> float:
    return math.fsum(x) / len(x)


def _std(x: list[float]) -> float:
    return math.sqrt(math.fsum((v - _mean(x)) ** 2 for v in x) / max(len(x) - 1, 1))


def _rewards(group: _Group) -> list[float]:
    return [sample.one("rewards") for sample in group]


def _relative(x: list[float], *, by_std: bool) -> list[float]:
    """Return numbers minus their mean, divided by their standard deviation if `by_std`."""
    mean, scale = _mean(x), _std(x) + EPS if by_std else 1.0
    return [(v - mean) / scale for v in x]


def _centred(group: _Group) -> list[float]:
    return _relative(_rewards(group), by_std=False)


def _to_go(x: Iterable[float], gamma: float) -> list[float]:
    """Return for each number the discounted sum of the numbers from it to the last one."""
    total, found = 0.0, []
    for value in reversed(list(x)):
        total = value + gamma * total
        found.append(total)
    return found[::-1]


def _rloo(group: _Group, goal: Objective, groups: AllGroups) -> Advantages:
    x = _rewards(group)
    others = [x[:k] + x[k + 1 :] for k in range(len(x))]
    return [v - _mean(rest) if rest else 0.0 for v, rest in zip(x, others)]


def _opo(group: _Group, goal: Objective, groups: AllGroups) -> Advantages:
    x, lengths = _rewards(group), [int(sample.counted.sum()) for sample in group]
    weights = lengths if any(lengths) else [1] * len(x)
    baseline = math.fsum(v * w for v, w in zip(x, weights)) / sum(weights)
    return [v - baseline for v in x]


def _gpg(group: _Group, goal: Objective, groups: AllGroups) -> Advantages:
    everyone = [_rewards(other) for other in groups]
    differing = sum(len(x) for x in everyone if max(x) > min(x))
    factor = sum(map(len, everyone)) / max(differing, 1)
    return [factor * v for v in _centred(group)]


def _grpo_passk(group: _Group, goal: Objective, groups: AllGroups) -> Advantages:
    x = _rewards(group)
    gain = max(x) - sorted(x)[-2] if len(x) > 1 else 0.0
    scale = _std(x) + EPS if goal.normalize_by_std else 1.0
    return [gain / scale if v == max(x) else 0.0 for v in x]


def _gdpo(group: _Group, goal: Objective, groups: AllGroups) -> Advantages:
    details = group[0]._columns
    given = sorted(name for name in details if name not in COLUMNS and name not in NOT_REWARDS)
    names = goal.reward_columns or given
    weights = goal.reward_weights or [1.0] * len(names)

    def totals(own: _Group) -> list[float]:
        parts = [
            [0.0 if math.isnan(sample.one(name)) else sample.one(name) for sample in own] for name in names
        ]
        relative = [_relative(part, by_std=True) for part in parts]
        return [math.fsum(w * v for w, v in zip(weights, each)) for each in zip(*relative)]

    everyone = [v for other in groups for v in totals(other)]
    scale = math.sqrt(math.fsum(v * v for v in everyone) / max(len(everyone) - 1, 1)) + EPS
    return [v / scale for v in totals(group)]


def _gae(group: _Group, goal: Objective, groups: AllGroups) -> Advantages:
    alpha, found = goal.length_adaptive_alpha, []
    for sample in group:
        length = int(sample.counted.sum())
        lam = max(1 - 1 / (alpha * length), 0.0) if alpha and length else goal.lam
        found.append(_summed_errors(sample, goal, lam))
    return found


def _summed_errors(sample: _Sample, goal: Objective, lam: float) -> list[float]:
    """Return for each counted token the sum of the errors of the values from it on, weighted with lam."""
    rewards, values = sample.tokens("token_rewards"), sample.tokens("old_values")
    errors = [r + goal.gamma * after - v for r, v, after in zip(rewards, values, [*values[1:], 0.0])]
    return _to_go(errors, goal.gamma * lam)


def _optimal_token_baseline(group: _Group, goal: Objective, groups: AllGroups) -> Advantages:
    to_go = [_to_go(sample.tokens("token_rewards"), 1.0) for sample in group]
    energies = []
    for sample in group:
        squares = [1.0] * int(sample.counted.sum())
        if "loss_weights" in sample._columns:
            squares = [w * w for w in sample.tokens("loss_weights")]
        pairs = zip(sample.tokens("old_logprobs"), sample.tokens("sum_p_squared"), squares)
        terms = [max(1 - 2 * math.exp(logprob) + square, 0.0) * w for logprob, square, w in pairs]
        energies.append(_to_go(terms[::-1], 1.0)[::-1])
    found: list[list[float]] = [[] for _ in group]
    for t in range(max(map(len, to_go))):
        cell = [k for k in range(len(group)) if len(to_go[k]) > t]
        weights = [energies[k][t] for k in cell] if any(energies[k][t] for k in cell) else [1.0] * len(cell)
        baseline = math.fsum(to_go[k][t] * w for k, w in zip(cell, weights)) / math.fsum(weights)
        for k in cell:  # beyond the end of all other samples there is no baseline
            found[k].append(to_go[k][t] - (0.0 if len(cell) == 1 < len(group) else baseline))
    return found


def _turns(sample: _Sample) -> list[int]:
    """Return for each token the number of its turn; 1 if the response has one turn."""
    has_turns = "turns" in sample._columns
    return [int(n) for n in sample.every("turns")] if has_turns else [1] * len(sample.counted)


def _of_turns(sample: _Sample, values: dict[int, float]) -> list[float]:
    return [values.get(n, 0.0) for n, counts in zip(_turns(sample), sample.counted) if counts]


def _turn_return(group: _Group, goal: Objective, groups: AllGroups) -> Advantages:
    found = []
    for sample in group:
        numbers = sorted({n for n in _turns(sample) if n > 0})
        given = (
            sample.every("turn_rewards") if "turn_rewards" in sample._columns else [0.0] * len(sample.counted)
        )
        of_turns = [math.fsum(r for n, r in zip(_turns(sample), given) if n == number) for number in numbers]
        if of_turns:
            of_turns[-1] += sample.one("rewards") - math.fsum(given)
        found.append(dict(zip(numbers, _to_go(of_turns, goal.turn_gamma))))
    every = [value for own in found for value in own.values()]
    relative = iter(_relative(every, by_std=goal.normalize_by_std) if len(group) > 1 else [0.0] * len(every))
    return [_of_turns(sample, {n: next(relative) for n in own}) for sample, own in zip(group, found)]


def _turn_spread(group: _Group, goal: Objective, groups: AllGroups) -> Advantages:
    found = []
    for sample, whole in zip(group, _relative(_rewards(group), by_std=goal.normalize_by_std)):
        numbers = sorted({n for n in _turns(sample) if n > 0}, reverse=True)
        found.append(_of_turns(sample, {n: whole * goal.turn_gamma**k for k, n in enumerate(numbers)}))
    return found


FORMULAS: dict[str, Callable[[_Group, Objective, AllGroups], Advantages]] = {
    "grpo": lambda group, goal, _: _relative(_rewards(group), by_std=goal.normalize_by_std),
    "rloo": _rloo,
    "maxrl": lambda group, goal, _: [v / (_mean(_rewards(group)) + EPS) for v in _centred(group)],
    "opo": _opo,
    "gpg": _gpg,
    "grpo_passk": _grpo_passk,
    "gdpo": _gdpo,
    "remax": lambda group, goal, _: [s.one("rewards") - s.one("baselines") for s in group],
    "reinforce_pp": lambda group, goal, _: [_to_go(s.tokens("token_rewards"), goal.gamma) for s in group],
    "reinforce_pp_baseline": lambda group, goal, _: _centred(group),
    "gae": _gae,
    "optimal_token_baseline": _optimal_token_baseline,
    "turn_return": _turn_return,
    "turn_spread": _turn_spread,
}
"""Function of an estimator -> its formula for one group, before whitening. The last argument is all
groups."""
WHITENED = {"reinforce_pp", "reinforce_pp_baseline", "gae", "prime"}
"""Estimators whose result is whitened over the tokens of the batch. For gae, only with `objective.whiten`."""
_KL: dict[str, Callable[[float], float]] = {
    "k1": lambda d: d,
    "abs": abs,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: min(math.expm1(min(max(-d, -20.0), 20.0)) + min(max(d, -20.0), 20.0), 10.0),
}
"""Estimate of the KL divergence at a token, as a function of the log-ratio d."""
