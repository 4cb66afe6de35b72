"""Computes rewards, advantages, labels and weights of some groups of a step a second time, in float64.

Nothing here calls `rl.objectives`: each formula is written again. Results must agree up to float32 rounding,
whitened ones up to a shift and a scale. Numbers of a teacher or of a user's algorithm are not compared.
"""

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import torch

from rl.checks.batches import CheckFailed, expect, place
from rl.config.objective import Objective
from rl.config.schema import Config
from rl.config.terms import AdaptiveEntropy
from rl.data.batch import COLUMNS, Batch

NUM_VALUES = 500
"""Number of samples and counted tokens up to which whole groups are computed again, at least one group."""
ROUNDING = 16 * float(np.finfo(np.float32).eps)
"""Maximum relative error of a result of a few float32 operations."""
WHITEN_EPS, EPS = 1e-8, 1e-6
"""Numbers that are added to the variance by whitening, and to standard deviations and means of groups."""
NOT_REWARDS = {"acc", "failed", "judge", "reward_model", "score"}
"""Details of a score that gdpo does not treat as rewards."""
GroupValues = Sequence[float | np.ndarray] | np.ndarray
"""For each sample of a group one number, or one number for each counted token."""
OfGroup = Callable[["_Numbers", list[int]], GroupValues]


class _Numbers:
    """The numbers of a batch with one sample per trajectory, float64."""

    def __init__(self, samples: Batch, goal: Objective):
        self.samples, self.goal = samples, goal
        self.rewards = samples.column("rewards").double().numpy()
        members: dict[int, list[int]] = {}
        for sample, group in enumerate(samples.groups.tolist()):
            members.setdefault(group, []).append(sample)
        self.groups = list(members.values())

    def tokens(
        self, name: str, sample: int, *, default: float | None = None, counted: bool = True
    ) -> np.ndarray:
        """Return a token column, or `default` without it, at the counted or all tokens of a sample."""
        span = slice(*self.samples.offsets[sample : sample + 2].tolist())
        mask, has_column = self.samples.mask[span], self.samples.named(name) is not None
        has_column |= default is None  # then `column` raises an error
        own = self.samples.column(name)[span] if has_column else torch.full_like(mask, default or 0.0)
        return (own[mask > 0] if counted else own).double().numpy()

    def size(self, sample: int) -> int:
        """Return the number of counted tokens."""
        return len(self.tokens("mask", sample))

    def some(self) -> list[list[int]]:
        """Return randomly chosen groups with about NUM_VALUES samples and tokens."""
        chosen, size = list[list[int]](), 0
        for group in random.Random(self.samples.fingerprint).sample(self.groups, len(self.groups)):
            size += sum(1 + self.size(sample) for sample in group)
            if chosen and size > NUM_VALUES:
                break
            chosen.append(group)
        return chosen


def check_baselines(batch: Batch, greedy: Batch, config: Config) -> None:
    """Raise CheckFailed unless each sample has the reward of the greedy response to its own prompt."""
    numbers, of_prompt = _Numbers(greedy, config.objective), dict[int, list[float]]()
    for response, group in enumerate(greedy.groups.tolist()):
        _check_reward(numbers, response, config, coef=0.0)
        of_prompt.setdefault(greedy.prompts[group].index, []).append(numbers.rewards[response])
    for sample, (group, found) in enumerate(zip(batch.groups.tolist(), batch.column("baselines").tolist())):
        own = of_prompt.get(batch.prompts[group].index, [math.nan])  # several if two epochs meet in the step
        expected = min(own, key=lambda value: abs(found - value))
        what = f"baseline check: {place(batch, sample)} has the baseline"
        source = "the greedy response to its prompt has the reward"
        expect(what, found, source, expected, slack=ROUNDING * abs(expected))


def check_kl_coef(batch: Batch, config: Config, before: float, after: float, *, moves: bool) -> None:
    """Raise CheckFailed unless the coefficient of `objective.reward_kl` follows from the one before the step.

    before: the coefficient with which rewards follow from scores. moves: whether an adaptive one may change.
    """
    penalty, samples = config.objective.reward_kl, batch.merge_rows()
    expected, divergence = penalty.coef, _KL.get(penalty.estimator.rstrip("+"))
    if penalty.controller == "adaptive" and penalty.coef:
        if divergence is None:
            return
        numbers = _Numbers(samples, config.objective)
        for each in (each for group in numbers.some() for each in group if batch.scores is not None):
            _check_reward(numbers, each, config, coef=before)
        counted = samples.mask > 0
        sample = np.repeat(np.arange(len(samples)), samples.lengths)[counted]
        gaps = samples.column("old_logprobs") - samples.column("ref_logprobs")
        terms, sizes = divergence(gaps[counted].double().numpy()), np.bincount(sample)
        means = (np.bincount(sample, terms) / sizes.clip(1))[sizes > 0]
        error = np.clip(means.mean() / penalty.target - 1, -0.2, 0.2) if len(means) else -0.2
        expected = before * (1 + moves * error * len(means) / penalty.horizon)
    _check_coef(
        "objective.reward_kl", after, expected, f"{before:.6g} and {len(samples)} samples of the step"
    )


def check_entropy_coef(
    control: AdaptiveEntropy, entropy: float, before: float, found: tuple[float, ...]
) -> None:
    """Raise CheckFailed unless `objective.adaptive_entropy` follows from its coefficient before the step.

    found: weight of the bonus in this step, and coefficient after it.
    """
    low = entropy <= control.target
    after = min(max(before + (control.delta if low else -control.delta), control.low), control.high)
    for value, expected in zip(found, (before * low, after), strict=True):
        given = f"{before:.6g} and the entropy {entropy:.4g}"
        _check_coef("objective.adaptive_entropy", value, expected, given)


def _check_coef(key: str, found: float, expected: float, given: str) -> None:
    slack, source = max(1e-5 * max(abs(found), abs(expected)), 1e-12), f"by its formula {given} give"
    expect(f"coefficient check: {key} has the coefficient", found, source, expected, slack=slack)


def check_advantages(batch: Batch, config: Config) -> None:
    """Check the rewards and advantages of some groups, and the whitening of all. Raises CheckFailed."""
    (estimator, _), goal = config.objective.chosen, config.objective
    if config.teacher.advantage_coef or not len(batch) or batch.rewards is None:
        return
    numbers = _Numbers(batch.merge_rows(), goal)
    chosen = numbers.some()
    if batch.scores is not None and goal.reward_kl.controller != "adaptive":
        for sample in (sample for group in chosen for sample in group):
            _check_reward(numbers, sample, config, coef=goal.reward_kl.coef)
    for group in chosen if config.algorithm in LABELS else ():
        labels, source = numbers.samples.column("labels"), f"algorithm={config.algorithm} makes it"
        for sample, own in zip(group, LABELS[config.algorithm](numbers, group)):
            what = f"advantage check: {place(numbers.samples, sample)} has the label"
            expect(what, float(labels[sample]), source, own, slack=ROUNDING)
    if estimator is None or batch.advantages is None:
        return
    pairs: list[tuple[int, np.ndarray, float]] = []
    formula = FORMULAS.get(estimator.function)
    # It weights samples before the penalty of the divergence, and an overlong penalty rounds equal scores.
    is_filtered = goal.filtration != "none" and not config.reward.overlong_buffer_tokens
    for group in chosen if is_filtered and batch.scores is not None else ():
        scores = numbers.samples.column("scores").double().numpy()
        for sample, weight in zip(group, _filtration(scores, group, goal)):
            _compare(numbers, sample, "sample_weights", np.full(numbers.size(sample), weight))
    for group in chosen if formula else ():
        assert formula is not None
        found = [np.asarray(value) for value in formula(numbers, group)]
        compared = numbers.rewards[group]
        if estimator.function == "turn_return":
            compared = np.array([x for own in _turn_returns(numbers, group) for x in own.values()] or [0.0])
        if math.isfinite(size := _rounded(compared, found)):
            counts = map(numbers.size, group)
            pairs += [(i, np.broadcast_to(own, n), size) for i, own, n in zip(group, found, counts)]
    if "returns" in batch.extra:
        lam = goal.lam if goal.lam_critic is None else goal.lam_critic
        for sample, _, _ in pairs:
            targets = _summed_errors(numbers, sample, lam) + numbers.tokens("old_values", sample)
            _compare(numbers, sample, "returns", targets)
    if estimator.function in WHITENED and (estimator.function != "gae" or goal.whiten):
        _check_whitened(numbers, [(sample, own) for sample, own, _ in pairs])
    else:
        for sample, own, size in pairs:
            _compare(numbers, sample, "advantages", own, size)


def _rounded(rewards: np.ndarray, advantages: list[np.ndarray]) -> float:
    """Return the size of the rounding errors in a group's advantages; infinity if there is nothing else.

    A reward has an error in proportion to its size. Dividing by a small spread magnifies it.
    """
    size, spread = float(np.abs(rewards).max()), float(np.ptp(rewards))
    largest = max((float(np.abs(own).max()) for own in advantages if own.size), default=0.0)
    if spread <= ROUNDING * size:
        return math.inf if size and largest <= ROUNDING * size / EPS else max(size, largest)
    return max(1e-3, size, size * largest / spread)


def _compare(numbers: _Numbers, sample: int, name: str, own: np.ndarray, size: float = 1e-3) -> None:
    """Raise CheckFailed unless a column is `own` at a sample's counted tokens, relative to `size` or more."""
    found = numbers.tokens(name, sample)
    wrong = np.abs(found - own) > ROUNDING * max(size, *np.abs(found), *np.abs(own), size)
    if wrong.any():
        token = int(wrong.argmax())
        key = "objective.filtration" if name == "sample_weights" else "objective.advantage"
        source = f"{key}={getattr(numbers.goal, key.split('.')[1])} makes it"
        what = f"advantage check: {place(numbers.samples, sample)} has in the column {name} at its counted"
        expect(f"{what} token {token} the value", found[token], source, own[token], slack=0.0)


def _check_reward(numbers: _Numbers, sample: int, config: Config, *, coef: float) -> None:
    """Raise CheckFailed unless a reward is the score minus the penalties. coef: of the KL penalty."""
    samples, penalty, reward = numbers.samples, config.objective.reward_kl, config.reward
    score = float(samples.column("scores")[sample])
    expected, slack, penalties = score, abs(score), "the penalties"
    if buffer := reward.overlong_buffer_tokens:
        excess = int(samples.sampled_lengths[sample]) - (config.rollout.max_response_tokens - buffer)
        expected -= reward.overlong_penalty * min(max(excess / buffer, 0.0), 1.0)
        slack += reward.overlong_penalty
        penalties += f" (overlong: {int(samples.sampled_lengths[sample])} sampled tokens)"
    if coef and samples.token_rewards is not None:
        if (divergence := _KL.get(penalty.estimator.rstrip("+"))) is None:
            return
        old, reference = (numbers.tokens(name, sample) for name in ("old_logprobs", "ref_logprobs"))
        terms = divergence(old - reference)
        expected -= coef * terms.sum()
        slack += coef * (np.abs(terms) + np.abs(old) + np.abs(reference)).sum()
    found = {"reward": numbers.rewards[sample]}
    if samples.token_rewards is not None and numbers.size(sample):
        found["sum of token rewards"] = numbers.tokens("token_rewards", sample).sum()
    slack, source = ROUNDING * max(slack, 1e-3), f"its score {score:.6g} with {penalties} makes"
    for what, value in found.items():
        name = f"reward check: {place(samples, sample)} has the {what}"
        expect(name, value, source, expected, slack=slack)


def _check_whitened(numbers: _Numbers, pairs: list[tuple[int, np.ndarray]]) -> None:
    """Check mean and variance of all advantages, and compare those of the pairs up to shift and scale."""
    samples = numbers.samples
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
            f"variance {variance:.4g}, but whitening makes them 0 and {least:.4g} to 1."
        )
    if not len(values):
        return
    found = np.concatenate([numbers.tokens("advantages", sample) for sample, _ in pairs])
    low, high = int(values.argmin()), int(values.argmax())
    if abs(found[high] - found[low]) < 1e-3 * size:
        return
    scale = abs(found[high] - found[low]) / (values[high] - values[low])
    size = max(size, scale * float(np.abs(values).max()))  # the numbers that whitening rounded have this size
    for sample, own in pairs:
        _compare(numbers, sample, "advantages", (own - values[low]) * scale + found[low], size)


# Formulas --------------------------------------------------------------------------------------------------


def _relative(x: np.ndarray, by_std: bool = False) -> np.ndarray:
    """Return numbers minus their mean, divided by their standard deviation if `by_std`."""
    return (x - x.mean()) / (_std(x) + EPS if by_std else 1.0)


def _std(x: np.ndarray) -> float:
    return float(x.std(ddof=1)) if len(x) > 1 else 0.0


def _passk(x: np.ndarray, by_std: bool) -> np.ndarray:
    gain = x.max() - np.sort(x)[-2] if len(x) > 1 else 0.0
    return gain / (_std(x) + EPS if by_std else 1.0) * (x == x.max())


def _opo(numbers: _Numbers, group: list[int]) -> GroupValues:
    x, lengths = numbers.rewards[group], [numbers.size(sample) for sample in group]
    return x - np.average(x, weights=lengths if any(lengths) else None)


def _win_rates(x: np.ndarray) -> GroupValues:
    """Return the share of the other samples that each sample beats; a tie counts half."""
    if len(x) == 1:
        return [0.5]
    return [(np.sign(own - np.delete(x, i)).mean() + 1) / 2 for i, own in enumerate(x)]


def _gpg(numbers: _Numbers, group: list[int]) -> GroupValues:
    differing = sum(len(each) for each in numbers.groups if np.ptp(numbers.rewards[each]) > 0)
    return len(numbers.rewards) / max(differing, 1) * _relative(numbers.rewards[group])


def _gdpo(numbers: _Numbers, group: list[int]) -> GroupValues:
    details, goal = numbers.samples.score_details, numbers.goal
    given = sorted(name for name in details if name not in COLUMNS and name not in NOT_REWARDS)
    names = goal.reward_columns or given
    weights = goal.reward_weights or [1.0] * len(names)

    def totals(own: list[int]) -> np.ndarray:
        parts = [_relative(details[name][own].nan_to_num().double().numpy(), by_std=True) for name in names]
        return np.sum([w * part for w, part in zip(weights, parts)], axis=0)

    return totals(group) / (_std(np.concatenate([totals(each) for each in numbers.groups])) + EPS)


def _filtration(scores: np.ndarray, group: list[int], goal: Objective) -> GroupValues:
    """PF-PPO: the share of a group's draws that each rank gets; equal scores share those of their ranks."""
    own, size = scores[group], len(group)
    if goal.filtration == "power":
        powers = np.abs(scores) ** goal.filtration_power
        return powers[group] / powers.mean() if powers.any() else np.ones(size)
    if size == 1:
        return [1.0]
    best, worst = np.eye(size)[[-1, 0]]
    others = {"best": best, "best-random": (1 - best) / (size - 1), "best-worst": worst}[goal.filtration]
    draws = size * (best + others) / 2
    return [draws[np.sort(own) == score].mean() for score in own]


def _to_go(x: np.ndarray, gamma: float = 1.0) -> np.ndarray:
    """Return for each number the discounted sum of the numbers from it to the last one."""
    found = x.copy()
    for t in range(len(x) - 2, -1, -1):
        found[t] += gamma * found[t + 1]
    return found


def _optimal_token_baseline(numbers: _Numbers, group: list[int]) -> GroupValues:
    """arXiv:2602.07078: a mean of the rewards to go at each position, weighted with the energies up to it."""
    to_go = [_to_go(numbers.tokens("token_rewards", sample)) for sample in group]
    energies, is_weighted = [], "loss_weights" in numbers.samples.extra
    for sample in group:
        p, squares = np.exp(numbers.tokens("old_logprobs", sample)), numbers.tokens("sum_p_squared", sample)
        weights = numbers.tokens("loss_weights", sample) if is_weighted else 1.0
        energies.append(np.cumsum((1 - 2 * p + squares).clip(0) * weights**2))
    found = [row.copy() for row in to_go]
    for t in range(max(map(len, to_go))):
        own = [row for row in range(len(group)) if len(to_go[row]) > t]
        if len(own) > 1 or len(group) == 1 or not numbers.goal.kwargs.get("zero_tail", True):
            shares = [energies[row][t] for row in own]
            baseline = np.average([to_go[row][t] for row in own], weights=shares if any(shares) else None)
            for row in own:
                found[row][t] -= baseline
    return found


def _gae(numbers: _Numbers, group: list[int]) -> GroupValues:
    alpha, found = numbers.goal.length_adaptive_alpha, []
    for sample in group:
        length = numbers.size(sample)
        lam = max(1 - 1 / (alpha * length), 0.0) if alpha and length else numbers.goal.lam
        found.append(_summed_errors(numbers, sample, lam))
    return found


def _summed_errors(numbers: _Numbers, sample: int, lam: float) -> np.ndarray:
    """Return for each counted token the sum of the errors of the values from it on, weighted with lam."""
    gamma = numbers.goal.gamma
    rewards, values = numbers.tokens("token_rewards", sample), numbers.tokens("old_values", sample)
    return _to_go(rewards + gamma * np.append(values[1:], 0.0)[: len(values)] - values, gamma * lam)


def _turns(numbers: _Numbers, sample: int, name: str = "turns") -> np.ndarray:
    """Return a column at all tokens of a sample. Without turns all belong to turn 1, without reward."""
    return numbers.tokens(name, sample, default=float(name == "turns"), counted=False)


def _at_turns(numbers: _Numbers, sample: int, values: dict[float, float]) -> np.ndarray:
    """Return the value of each counted token's turn."""
    return np.array([values.get(turn, 0.0) for turn in numbers.tokens("turns", sample, default=1.0)])


def _turn_values(numbers: _Numbers, sample: int, total: float, rewards: np.ndarray) -> dict[float, float]:
    """Return the discounted rewards from each turn on. The last turn has the rest of `total`, too."""
    turns = _turns(numbers, sample)
    own = sorted({turn for turn in turns if turn > 0})
    x = np.array([rewards[turns == turn].sum() for turn in own])
    x[-1:] += total - rewards.sum()
    return dict(zip(own, _to_go(x, numbers.goal.turn_gamma)))


def _turn_spread(numbers: _Numbers, group: list[int]) -> GroupValues:
    whole = _relative(numbers.rewards[group], by_std=numbers.goal.normalize_by_std)
    values = [_turn_values(numbers, i, own, 0 * _turns(numbers, i)) for i, own in zip(group, whole)]
    return [_at_turns(numbers, i, own) for i, own in zip(group, values)]


def _turn_returns(numbers: _Numbers, group: list[int]) -> list[dict[float, float]]:
    return [_turn_values(numbers, i, numbers.rewards[i], _turns(numbers, i, "turn_rewards")) for i in group]


def _turn_return(numbers: _Numbers, group: list[int]) -> GroupValues:
    returns = _turn_returns(numbers, group)
    every = np.array([value for own in returns for value in own.values()])
    scale = _std(every) + EPS if numbers.goal.normalize_by_std else 1.0
    scale = scale if len(group) > 1 else math.inf
    values = [{turn: (value - every.mean()) / scale for turn, value in own.items()} for own in returns]
    return [_at_turns(numbers, i, own) for i, own in zip(group, values)]


def _of_rewards(formula: Callable[[np.ndarray, bool], np.ndarray]) -> OfGroup:
    """Return a formula that needs only the rewards of a group, and `objective.normalize_by_std`."""
    return lambda numbers, group: formula(numbers.rewards[group], numbers.goal.normalize_by_std)


FORMULAS: dict[str, OfGroup] = {
    "grpo": _of_rewards(_relative),
    "rloo": _of_rewards(lambda x, _: (x - x.mean()) * len(x) / max(len(x) - 1, 1)),
    "maxrl": _of_rewards(lambda x, _: _relative(x) / (x.mean() + EPS)),
    "grpo_passk": _of_rewards(_passk),
    "reinforce_pp_baseline": _of_rewards(lambda x, _: _relative(x)),
    "opo": _opo,
    "gpg": _gpg,
    "gdpo": _gdpo,
    "remax": lambda n, group: n.rewards[group] - n.samples.column("baselines")[group].double().numpy(),
    "reinforce_pp": lambda n, group: [_to_go(n.tokens("token_rewards", i), n.goal.gamma) for i in group],
    "optimal_token_baseline": _optimal_token_baseline,
    "turn_spread": _turn_spread,
    "turn_return": _turn_return,
    "gae": _gae,
}
"""Function of an estimator -> its formula for one group, before whitening."""
WHITENED = {"reinforce_pp", "reinforce_pp_baseline", "gae", "prime"}
"""Estimators whose result is whitened over the tokens of the batch. For gae, only with `objective.whiten`."""
LABELS: dict[str, OfGroup] = {
    "sppo": lambda numbers, group: _win_rates(numbers.rewards[group]),
    "prime": lambda numbers, group: numbers.samples.outcomes[group].clamp(0, 1).tolist(),
}
"""Algorithm -> its column `labels` for a group: win rates, and outcomes."""
_KL: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "k1": lambda d: d,
    "abs": np.abs,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: np.minimum(np.expm1(np.clip(-d, -20.0, 20.0)) + np.clip(d, -20.0, 20.0), 10.0),
}
"""Estimate of the KL divergence at a token, as a function of the log-ratio d."""
