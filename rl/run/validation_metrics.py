"""Statistics over k samples per held-out prompt: mean, spread, best, worst and majority. Pure numpy, no
state.

P prompts of one data source, k samples of each; `values` is float [P, k], a statistic is one number per
prompt, float64 [P].

Names are those of verl (`process_validation_metrics` and the trainer's `val-core`/`val-aux`), so that
dashboards carry over:

    val-core/<source>/acc/mean@k          and, for k > 1, best@k/* and maj@k/*: the headline
    val-aux/<source>/acc/best@n/mean      for n = 2, 4, ... below k; worst@n/*, maj@n/*, std@k
    val-aux/<source>/acc/best@n/std       the standard deviation over the subsets of n samples of a prompt
    val-aux/<source>/<variable>/...       the same without maj for what else the reward function returned

Two things differ from verl, which resamples with replacement 1,000 times: best@n and worst@n here are exact,
mean and standard deviation, over the subsets of n of the k samples (so best@k is the best of all k, its std
is 0, and for accuracies best@n is the unbiased pass@n of arXiv:2107.03374), and a sample without an extracted
answer does not vote.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import comb

import numpy as np

NUM_SUBSETS = 1000
"""Subsets that stand for all of them in maj@n where there are more; verl's number of bootstrap rounds."""

Values = Mapping[str, Sequence[np.ndarray]]
"""Variable (acc, score, ...) -> for each prompt float [k]; NaN where a sample lacks the variable."""
Predictions = Sequence[Sequence[str | None]]
"""For each prompt the extracted answers of its k samples; None where there is none."""


def mean_at(values: np.ndarray) -> np.ndarray:
    """mean@k: the mean over the k samples."""
    return np.asarray(values, dtype=np.float64).mean(axis=1)


def std_at(values: np.ndarray) -> np.ndarray:
    """std@k: standard deviation over the k samples, with k and not k - 1 in the denominator, as in verl."""
    return np.asarray(values, dtype=np.float64).std(axis=1)


def best_at(values: np.ndarray, n: int) -> np.ndarray:
    """best@n: expected maximum of n of the k samples, drawn without replacement.

    With v_1 <= ... <= v_k the i-th is the maximum of comb(i-1, n-1) of the comb(k, n) subsets. For values 0
    and 1, c of them 1, that is pass@n = 1 - comb(k-c, n) / comb(k, n), arXiv:2107.03374 eq. 1.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64), axis=1)
    return ordered @ _share_of_maxima(ordered.shape[1], n)


def best_std_at(values: np.ndarray, n: int) -> np.ndarray:
    """best@n/std: standard deviation of the maximum of n of the k samples, over all subsets; 0 for n = k."""
    ordered = np.sort(np.asarray(values, dtype=np.float64), axis=1)
    shares = _share_of_maxima(ordered.shape[1], n)
    return np.sqrt(np.square(ordered - (ordered @ shares)[:, None]) @ shares)


def _share_of_maxima(k: int, n: int) -> np.ndarray:
    """Share of the subsets of n of k samples in which the i-th lowest sample is the maximum, float64 [k]."""
    assert 1 <= n <= k, (n, k)
    # Exact integers, divided once: binomials of k = 1024 overflow a float.
    return np.array([comb(i, n - 1) / comb(k, n) for i in range(k)])


def worst_at(values: np.ndarray, n: int) -> np.ndarray:
    """worst@n: expected minimum of n of the k samples, drawn without replacement."""
    return 0.0 - best_at(-np.asarray(values, dtype=np.float64), n)  # a plain minus would make -0.0 of 0


def worst_std_at(values: np.ndarray, n: int) -> np.ndarray:
    """worst@n/std: standard deviation of the minimum of n of the k samples, over all subsets."""
    return best_std_at(-np.asarray(values, dtype=np.float64), n)


def majority_at(values: np.ndarray, predictions: Predictions, n: int, *, seed: int = 0) -> np.ndarray:
    """maj@n: expected value of the most frequent answer among n of the k samples, drawn without replacement.

    The value of an answer is the mean over its samples; between answers with equally many votes it is the
    mean of theirs, so that the order of the samples decides nothing. A None does not vote; where nobody
    votes, the mean over the samples counts (for an accuracy that is 0: there is nothing to be right). Exact
    if there are at most NUM_SUBSETS subsets, as for n = k; else the mean over NUM_SUBSETS random ones, the
    same for each prompt, from `seed`.
    """
    return _majorities(values, predictions, n, seed).mean(axis=1)


def _majorities(values: np.ndarray, predictions: Predictions, n: int, seed: int) -> np.ndarray:
    """Value of the most frequent answer in each of the D subsets of each prompt, float64 [P, D]."""
    values = np.asarray(values, dtype=np.float64)
    k = values.shape[1]
    assert 1 <= n <= k, (n, k)
    assert len(predictions) == len(values) and all(len(answers) == k for answers in predictions), (
        "one answer per sample"
    )
    chosen = _subsets(k, n, seed)
    return np.array(
        [_majority(row, answers, chosen) for row, answers in zip(values, predictions, strict=True)]
    )


def validation_metrics(
    values: Mapping[str, Values],
    predictions: Mapping[str, Predictions] | None = None,
    *,
    core: str = "acc",
    seed: int = 0,
) -> dict[str, float]:
    """All statistics of all data sources, averaged over their prompts, under verl's names.

    values: data source -> variable -> for each prompt float [k], with one k per source. A NaN is a sample
        that lacks the variable; such a variable has only mean@k, over the samples that have it, and none of
        them no metric at all.
    predictions: data source -> extracted answers, where the reward function gives them (`pred`); without
        them, or if every one is None, there is no maj@n.
    core: the variable of `val-core`; `score` for a source that lacks it.
    seed: of the random subsets of maj@n.
    """
    metrics: dict[str, float] = {}
    for source, variables in values.items():
        core_variable = core if core in variables else "score"
        answers = (predictions or {}).get(source)
        if answers is not None and all(answer is None for row in answers for answer in row):
            answers = None
        for variable, rows in variables.items():
            stacked = np.stack([np.asarray(row, dtype=np.float64) for row in rows])
            is_core = variable == core_variable
            k = stacked.shape[1]
            for name, value in _statistics(stacked, answers if is_core else None, seed).items():
                at_k = name.split("/")[0] in (f"mean@{k}", f"best@{k}", f"maj@{k}")
                section = "val-core" if is_core and at_k else "val-aux"
                metrics[f"{section}/{source}/{variable}/{name}"] = value
    return metrics


def _statistics(values: np.ndarray, predictions: Predictions | None, seed: int) -> dict[str, float]:
    """Name -> mean over the prompts, for one variable of one source, float [P, k]."""
    k = values.shape[1]
    missing = np.isnan(values)
    if missing.any():
        prompts = [
            row[~absent].mean() for row, absent in zip(values, missing, strict=True) if not absent.all()
        ]
        return {f"mean@{k}": float(np.mean(prompts))} if prompts else {}
    found = {f"mean@{k}": mean_at(values)}
    if k > 1:
        found[f"std@{k}"] = std_at(values)
    for n in _subset_sizes(k):
        found[f"best@{n}/mean"] = best_at(values, n)
        found[f"best@{n}/std"] = best_std_at(values, n)
        found[f"worst@{n}/mean"] = worst_at(values, n)
        found[f"worst@{n}/std"] = worst_std_at(values, n)
        if predictions is not None:
            majorities = _majorities(values, predictions, n, seed)
            found[f"maj@{n}/mean"], found[f"maj@{n}/std"] = majorities.mean(axis=1), majorities.std(axis=1)
    return {name: float(per_prompt.mean()) for name, per_prompt in found.items()}


def _subset_sizes(k: int) -> list[int]:
    """2, 4, 8, ... below k, and k; none for k = 1."""
    return [2**i for i in range(1, k.bit_length()) if 2**i < k] + ([k] if k > 1 else [])


def _subsets(k: int, n: int, seed: int) -> np.ndarray:
    """Subsets of n of k samples as 0/1, float [D, k]: all of them, or NUM_SUBSETS random ones if they are
    more.
    """
    if comb(k, n) <= NUM_SUBSETS:
        chosen = np.array(list(combinations(range(k), n)))
    else:
        chosen = np.random.default_rng([seed, k, n]).random((NUM_SUBSETS, k)).argsort(axis=1)[:, :n]
    subsets = np.zeros((len(chosen), k))
    np.put_along_axis(subsets, chosen, 1.0, axis=1)
    return subsets


def _majority(values: np.ndarray, answers: Sequence[str | None], subsets: np.ndarray) -> np.ndarray:
    """Value of the majority answer in each subset [D, k] for one prompt with values [k], float64 [D]."""
    codes = {answer: code for code, answer in enumerate(dict.fromkeys(a for a in answers if a is not None))}
    if not codes:  # then each subset would count by its mean
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
