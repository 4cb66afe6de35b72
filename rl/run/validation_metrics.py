"""Statistics over k samples per held-out prompt: mean, spread, best, worst and majority.

All functions are pure numpy without state. For P prompts of one data source and k samples per prompt,
`values` is float [P, k], and a statistic is one number per prompt, float64 [P].

Names are verl's (`process_validation_metrics` and the trainer's `val-core`/`val-aux`), so that existing
dashboards work:

    val-core/<source>/acc/mean@k          main metrics; also best@k/* and maj@k/* if k > 1
    val-aux/<source>/acc/best@n/mean      for n = 2, 4, ... below k; also worst@n/*, maj@n/*, std@k
    val-aux/<source>/acc/best@n/std       standard deviation over the subsets of n samples of a prompt
    val-aux/<source>/<variable>/...       the same without maj, for other numbers of the reward function

Two things differ from verl, which resamples with replacement 1,000 times. First, best@n and worst@n are
exact: mean and standard deviation over all subsets of n of the k samples. Therefore best@k is the best of all
k samples, its std is 0, and for accuracies best@n is the unbiased pass@n of arXiv:2107.03374. Second, a
sample without an extracted answer (None, blank or `rl.rewards.score.INVALID`) does not vote.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import comb

import numpy as np

from rl.rewards.score import INVALID

NUM_SUBSETS = 1000
"""Largest number of subsets that maj@n averages over; verl's number of bootstrap rounds.

If the samples have more subsets, maj@n draws this many at random.
"""

ValuesOfVariables = Mapping[str, Sequence[np.ndarray] | np.ndarray]
"""Variable (acc, score, ...) -> for each prompt float [k]; NaN where a sample lacks the variable."""
Predictions = Sequence[Sequence[str | None]]
"""For each prompt, the extracted answers of its k samples; None, blank or INVALID where a sample has none."""


def best_at(values: np.ndarray, n: int) -> np.ndarray:
    """Return best@n: the expected maximum of n of the k samples, drawn without replacement.

    With v_1 <= ... <= v_k, value v_i is the maximum of comb(i-1, n-1) of the comb(k, n) subsets. If c of the
    k values are 1 and the others 0, best@n is pass@n = 1 - comb(k-c, n) / comb(k, n), arXiv:2107.03374 eq. 1.
    For example, with k = 4, n = 2 and c = 1 it is 1/2.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64), axis=1)
    return ordered @ _share_of_maxima(ordered.shape[1], n)


def best_std_at(values: np.ndarray, n: int) -> np.ndarray:
    """Return best@n/std: the standard deviation of the maximum over all subsets of n samples; 0 for n = k."""
    ordered = np.sort(np.asarray(values, dtype=np.float64), axis=1)
    shares = _share_of_maxima(ordered.shape[1], n)
    return np.sqrt(np.square(ordered - (ordered @ shares)[:, None]) @ shares)


def _share_of_maxima(k: int, n: int) -> np.ndarray:
    """Return for each i the share of n-subsets with the i-th lowest sample as maximum, float64 [k]."""
    assert 1 <= n <= k, (n, k)
    # Exact integers, divided once: binomials of k = 1024 overflow a float.
    return np.array([comb(i, n - 1) / comb(k, n) for i in range(k)])


def worst_at(values: np.ndarray, n: int) -> np.ndarray:
    """Return worst@n: the expected minimum of n of the k samples, drawn without replacement."""
    return 0.0 - best_at(-np.asarray(values, dtype=np.float64), n)  # a plain minus would turn 0 into -0.0


def worst_std_at(values: np.ndarray, n: int) -> np.ndarray:
    """Return worst@n/std: the standard deviation of the minimum over all subsets of n samples."""
    return best_std_at(-np.asarray(values, dtype=np.float64), n)


def majorities(values: np.ndarray, predictions: Predictions, n: int, *, seed: int = 0) -> np.ndarray:
    """Return the value of the most frequent answer among n of the k samples, float64 [P, D].

    maj@n is the mean over the D subsets of n samples. The value of an answer is the mean over its samples. If
    several answers have equally many votes, the result is the mean of these answers' values; the order of the
    samples has no effect. A sample without an answer does not vote. If no sample votes, the result is the
    mean over the samples. If there are at most NUM_SUBSETS subsets, all are taken; with n = k there is only
    one. Otherwise NUM_SUBSETS random subsets are drawn from `seed`, the same subsets for each prompt.
    """
    values = np.asarray(values, dtype=np.float64)
    k = values.shape[1]
    assert 1 <= n <= k, (n, k)
    assert len(predictions) == len(values) and all(len(answers) == k for answers in predictions), (
        "one answer per sample"
    )
    chosen = _subsets(k, n, seed)
    voted = [
        [answer if answer and answer.strip() not in ("", INVALID) else None for answer in answers]
        for answers in predictions
    ]
    return np.array([_majority(row, answers, chosen) for row, answers in zip(values, voted, strict=True)])


def validation_metrics(
    values: Mapping[str, ValuesOfVariables], predictions: Mapping[str, Predictions] | None = None
) -> dict[str, float]:
    """Return all statistics of all data sources, averaged over their prompts, under verl's names. `val-core`
    has acc, or for a source without it score.

    values: data source -> variable -> for each prompt float [k], with one k per source. NaN marks a sample
        that lacks the variable. A variable with NaNs has only mean@k, taken over the samples that have the
        variable. If no sample has it, there is no metric.
    predictions: data source -> extracted answers, where the reward function gives answers (`pred`). Without
        answers, or if all are None, there is no maj@n.
    """
    metrics: dict[str, float] = {}
    for source, variables in values.items():
        core_variable = "acc" if "acc" in variables else "score"
        answers = (predictions or {}).get(source)
        if answers is not None and all(answer is None for row in answers for answer in row):
            answers = None
        for variable, rows in variables.items():
            stacked = np.stack([np.asarray(row, dtype=np.float64) for row in rows])
            is_core = variable == core_variable
            k = stacked.shape[1]
            for name, value in _statistics(stacked, answers if is_core else None).items():
                at_k = name.split("/")[0] in (f"mean@{k}", f"best@{k}", f"maj@{k}")
                section = "val-core" if is_core and at_k else "val-aux"
                metrics[f"{section}/{source}/{variable}/{name}"] = value
    return metrics


def _statistics(values: np.ndarray, predictions: Predictions | None) -> dict[str, float]:
    """Return statistic -> mean over the prompts, for one variable of one data source, float [P, k]."""
    k = values.shape[1]
    missing = np.isnan(values)
    if missing.any():
        prompts = [
            row[~absent].mean() for row, absent in zip(values, missing, strict=True) if not absent.all()
        ]
        return {f"mean@{k}": float(np.mean(prompts))} if prompts else {}
    found = {f"mean@{k}": values.mean(axis=1)}
    if k > 1:
        found[f"std@{k}"] = values.std(axis=1)  # with denominator k, as in verl
    for n in _subset_sizes(k):
        found[f"best@{n}/mean"] = best_at(values, n)
        found[f"best@{n}/std"] = best_std_at(values, n)
        found[f"worst@{n}/mean"] = worst_at(values, n)
        found[f"worst@{n}/std"] = worst_std_at(values, n)
        if predictions is not None:
            voted = majorities(values, predictions, n)
            found[f"maj@{n}/mean"], found[f"maj@{n}/std"] = voted.mean(axis=1), voted.std(axis=1)
    return {name: float(per_prompt.mean()) for name, per_prompt in found.items()}


def _subset_sizes(k: int) -> list[int]:
    """Return the sizes n of subsets: 2, 4, 8, ... below k, and k; none for k = 1."""
    return [2**i for i in range(1, k.bit_length()) if 2**i < k] + ([k] if k > 1 else [])


def _subsets(k: int, n: int, seed: int) -> np.ndarray:
    """Return subsets of n of k samples as 0/1, float [D, k].

    Returns all subsets if there are at most NUM_SUBSETS, and otherwise NUM_SUBSETS random subsets.
    """
    if comb(k, n) <= NUM_SUBSETS:
        chosen = np.array(list(combinations(range(k), n)))
    else:
        chosen = np.random.default_rng([seed, k, n]).random((NUM_SUBSETS, k)).argsort(axis=1)[:, :n]
    subsets = np.zeros((len(chosen), k))
    np.put_along_axis(subsets, chosen, 1.0, axis=1)
    return subsets


def _majority(values: np.ndarray, answers: Sequence[str | None], subsets: np.ndarray) -> np.ndarray:
    """Return one prompt's value of the majority answer in each subset, float64 [D].

    values: float [k]. subsets: 0/1, float [D, k].
    """
    codes = {answer: code for code, answer in enumerate(dict.fromkeys(a for a in answers if a is not None))}
    if not codes:  # no sample votes
        return np.full(len(subsets), values.mean())
    gave = np.zeros((len(answers), len(codes)))  # [k, A]: sample i gave answer a
    for i, answer in enumerate(answers):
        if answer is not None:
            gave[i, codes[answer]] = 1.0
    votes = subsets @ gave  # [D, A]
    mean_of_answer = (subsets @ (gave * values[:, None])) / np.maximum(votes, 1.0)
    winners = (votes == votes.max(axis=1, keepdims=True)) & (votes > 0)
    num_winners = winners.sum(axis=1)
    of_majority = (mean_of_answer * winners).sum(axis=1) / np.maximum(num_winners, 1)
    of_nobody = (subsets @ values) / subsets.sum(axis=1)
    return np.where(num_winners > 0, of_majority, of_nobody)
