"""Checks of a batch between phases. They find errors that no phase notices, but with which a run learns less.

A check costs about as much as one pass over a token column on the host. Every function is pure and every rank
has the same batch. Therefore CheckFailed is raised on every rank.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl.config.correction import RolloutCorrection
from rl.data.batch import Batch, segment_counts
from rl.data.prompts import Prompt
from rl.objectives.log_ratio import MAX_LOG_RATIO
from rl.objectives.segments import segment_sum
from rl.rewards.score import INVALID

RISK = 1e-12
"""Maximum probability that a statistical check ends a healthy run at one step, for every model and dtype."""
MAX_SUBSETS = 10
"""Number of subsets of a prompt's samples above which a statistic of a validation is not computed again."""
STATISTIC = re.compile(r"(mean|std|best|worst|maj)@\d+(/(mean|std))?")
"""Name of a statistic of a validation; a variable of a reward may be named score/x or acc/x."""
Graded = tuple[float, str | None]
"""Value and answer of a sample; None: it has no answer."""
RATIO_ERROR = 0.01
"""Relative rounding error of the ratio of a long sample."""


class CheckFailed(RuntimeError):
    """Raised if a check finds that the run would learn from something wrong."""


def place(batch: Batch, sample: int) -> str:
    """Return text such as 'sample 17 (prompt 5)': the index in the batch, and the row of the prompt in the
    data."""
    group = int(batch.groups[sample])
    return f"sample {sample} (prompt {batch.prompts[group].index})" if batch.prompts else f"sample {sample}"


def token_place(batch: Batch, token: int) -> str:
    """Return text such as 'token 3 of sample 17 (prompt 5)'. token: index in a token column."""
    sample = int((batch.offsets[1:] <= token).sum())
    return f"token {token - int(batch.offsets[sample])} of {place(batch, sample)}"


def refuse(check: str, batch: Batch, wrong: Tensor | Sequence[int], problem: str, cause: str) -> None:
    """Raise CheckFailed that names the first of some wrong samples and their number, if there are any.

    wrong: indices of samples, or bool [N]. problem: with {sample}, which becomes the first sample.
    """
    samples = wrong.nonzero().flatten().tolist() if isinstance(wrong, Tensor) else wrong
    if samples:
        own = problem.replace("{sample}", place(batch, samples[0]))
        others = f"and {len(samples) - 1} further samples of {len(batch)}"
        raise CheckFailed(f"{check} check: {own} ({others}): {cause}.")


def check_groups(batch: Batch, *, samples_per_prompt: int) -> None:
    """Check that every sample belongs to the group of its prompt, and that no group lacks a sample.

    Trajectories are not checked, because environments may fail and contexts may be rewritten.
    """
    if not batch.prompts or batch.turns is not None:
        return
    pairs = [(own, batch.prompts[g].token_ids) for own, g in zip(batch.prompt_ids, batch.groups.tolist())]
    wrong = [i for i, (own, ids) in enumerate(pairs) if own is not ids and not np.array_equal(own, ids)]
    problem = f"{{sample}} is in group {int(batch.groups[wrong[0]])}" if wrong else ""
    refuse("group", batch, wrong, problem, "its context is another prompt's, so tasks would be mixed")
    sizes = torch.bincount(batch.groups, minlength=len(batch.prompts))
    if odd := (sizes != samples_per_prompt).nonzero().flatten().tolist():
        raise CheckFailed(
            f"group check: group {odd[0]} (prompt {batch.prompts[odd[0]].index}) has {int(sizes[odd[0]])} "
            f"samples instead of rollout.samples_per_prompt={samples_per_prompt}, as {len(odd) - 1} further "
            "groups have another number."
        )


def check_digests(batch: Batch) -> None:
    """Check that each sample still has the tokens and the ending with which it was delivered, and its own
    score.

    A user's algorithm may fill `scores` itself, but it may not move scores to other samples.
    """
    if batch.digests is None:
        return
    delivered = batch.hash_samples()
    cause = "a filter or a reordering between generation and update moved columns apart, or changed them"
    what = "{sample} no longer has the tokens and the ending with which it was delivered"
    refuse("sample", batch, delivered != batch.digests, what, cause)
    if batch.score_digests is not None:
        what = "{sample} no longer has the score that was made for it"
        refuse("sample", batch, batch.hash_scores(delivered) != batch.score_digests, what, cause)


def check_seeds(batch: Batch, earlier: Iterable[Collection[int]]) -> frozenset[int]:
    """Check that no seed was used twice, in this call or in an earlier call. Return the seeds."""
    if batch.seeds is None:
        return frozenset()
    whole = batch.merge_rows()
    seeds = whole.column("seeds").tolist()
    counts = Counter(seed for seed in seeds if seed != -1)
    used = frozenset(counts).intersection(frozenset().union(*earlier))
    wrong = [i for i, seed in enumerate(seeds) if seed in used or counts[seed] > 1]
    what = "{sample} was sampled with a seed that another sample of this run had"
    refuse("seed", whole, wrong, what, "seeds depend on run, step, group and number of the sample")
    return frozenset(counts)


def check_order(batch: Batch, prompts: Sequence[Prompt], *, samples_per_prompt: int) -> None:
    """Check that a batch holds the samples of each prompt one after another, in the order of the prompts."""
    indices = [prompt.index for prompt in prompts for _ in range(samples_per_prompt)]
    found = [batch.prompts[group].index for group in batch.groups.tolist()]
    if found != indices:
        sample = next((i for i, pair in enumerate(zip(found, indices)) if pair[0] != pair[1]), len(found))
        raise CheckFailed(
            f"order check: the samples of a validation are {len(found)} instead of {len(indices)}, or not in "
            f"the order of its prompts, from sample {sample} on: results would be those of other prompts."
        )


def check_table(batch: Batch, metrics: Mapping[str, float], answers: Sequence[str | None] = ()) -> None:
    """Check the statistics of the accuracies and scores of a validation, computed again from its samples.

    answers: for the majority vote, in the order of the batch.
    """
    columns = {"acc": batch.outcomes, "score": batch.column("scores")}
    of_prompts: dict[tuple[str, str], dict[int, list[Graded]]] = {}
    for variable, column in columns.items():
        samples = zip(batch.groups.tolist(), column.tolist(), answers or [None] * len(batch))
        for group, value, answer in samples:
            own = of_prompts.setdefault((batch.prompts[group].data_source, variable), {})
            own.setdefault(group, []).append((value, answer))
    for (source, variable), groups in of_prompts.items():
        for key, found in metrics.items():
            section, _, name = key.partition(f"/{source}/{variable}/")
            if section not in ("val-core", "val-aux") or not STATISTIC.fullmatch(name):
                continue
            value = np.mean([_statistic(name, own) for own in groups.values()])
            if not (math.isnan(value) or abs(found - value) <= 1e-6 * (1 + abs(value))):
                raise CheckFailed(
                    f"validation check: {variable}/{name} of {source} is {found:.6g}, but samples of "
                    f"its prompts give {value:.6g}: the table mixes samples of different prompts, or another "
                    "statistic has this name."
                )


def check_losses(losses: Mapping[str, Sequence[Tensor]], metrics: Mapping[str, float]) -> None:
    """Check loss and perplexity of held-out responses. losses: -log pi of the trained tokens, by source."""
    every = {"val": [own for parts in losses.values() for own in parts]}
    for name, parts in ({f"val-core/{source}": parts for source, parts in losses.items()} | every).items():
        value = float(torch.cat([*parts]).double().mean())
        for key, expected in (("loss", value), ("perplexity", float(np.exp(value)))):
            found = metrics[f"{name}/{key}"]
            is_equal = found == expected or abs(found - expected) <= 1e-6 * (1 + abs(expected))
            if not (is_equal or math.isnan(value)):
                raise CheckFailed(
                    f"validation check: {name}/{key} is {found:.6g}, but its trained tokens give "
                    f"{expected:.6g}: it is a mean with other weights, or of other responses."
                )


def _statistic(name: str, samples: list[Graded]) -> float:
    """Return a statistic of a prompt's samples; NaN for one over more than MAX_SUBSETS subsets of them.

    name: as in `rl.run.validation_metrics`, for example best@2/std.
    """
    kind, _, size = name.partition("/")[0].partition("@")
    values = [value for value, _ in samples]
    if kind in OF_SUBSETS:
        if math.comb(len(samples), int(size)) > MAX_SUBSETS:
            return math.nan
        values = [OF_SUBSETS[kind](subset) for subset in combinations(samples, int(size))]
    return float(np.std(values) if "std" in name else np.mean(values))


def _majority(samples: Sequence[Graded]) -> float:
    """Return the mean value of the most frequent answer, or of all samples if none votes."""
    votes = Counter(answer for _, answer in samples if answer and answer.strip() not in ("", INVALID))
    most = max(votes.values(), default=0)
    tied = [answer for answer, count in votes.items() if count == most]
    means = [float(np.mean([value for value, own in samples if own == answer])) for answer in tied]
    return float(np.mean(means or [value for value, _ in samples]))


OF_SUBSETS: dict[str, Callable[[Sequence[Graded]], float]] = {
    "best": lambda samples: max(value for value, _ in samples),
    "worst": lambda samples: min(value for value, _ in samples),
    "maj": _majority,
}
"""Statistic over subsets of the samples of a prompt -> its value for one subset."""


def check_held_out(prompts: Sequence[Prompt], files: Sequence[str]) -> None:
    """Check that the prompts of a validation are different rows of the files of `data.val`."""
    known, seen = {str(Path(file)) for file in files}, {""}
    for prompt in prompts:
        if prompt.place and (prompt.place.rpartition(", row ")[0] not in known or prompt.place in seen):
            raise CheckFailed(
                f"validation check: {prompt.place} is not in data.val, or is measured twice: the results "
                "would not be those of the held-out prompts."
            )
        seen.add(prompt.place)


def check_sides(batch: Batch, rows: Sequence[Any]) -> None:
    """Check that a batch of responses from the data has the drawn rows' responses, each on its side."""
    expected: list[np.ndarray] = []
    for row in rows:
        names = ("chosen_ids", "rejected_ids") if hasattr(row, "chosen_ids") else ("response_ids",)
        expected += [getattr(row, name) for name in names]
    labels, own = batch.extra.get("labels"), [getattr(row, "label", None) for row in rows]
    wrong = [i for i, ids in enumerate(expected) if not np.array_equal(ids, batch.response_ids[i])]
    wrong += [i for i, label in enumerate(own) if labels is not None and bool(labels[i]) != label]
    what = "{sample} has another response, side or label than the row that was drawn"
    refuse("row", batch, wrong, what, "chosen and rejected responses, or rows, were exchanged")


def check_mismatched(batch: Batch, others: Batch, parts: Sequence[Sequence[int]]) -> None:
    """Check that prompts have responses to other prompts of their part, if the part has several prompts.

    others: the batch with exchanged responses. parts: lists of indices of samples.
    """
    for part in parts:
        answered: dict[bytes, set[bytes]] = defaultdict(set)
        for i in part:
            answered[batch.response_ids[i].tobytes()].add(batch.prompt_ids[i].tobytes())
        pairs = {i: (others.response_ids[i].tobytes(), others.prompt_ids[i].tobytes()) for i in part}
        wrong = [i for i, (response, prompt) in pairs.items() if not answered[response] - {prompt}]
        what = "{sample} has no response to another prompt of its mini-batch"
        has_several = len(set().union(*answered.values())) > 1
        cause = "KTO's estimate would be of responses to the same prompts"
        refuse("loss", batch, wrong if has_several else [], what, cause)


def check_endings(
    batch: Batch, *, max_tokens: int | None, limit: int, stop_ids: Collection[int], ends_at_text: bool
) -> None:
    """Check that every response ends at its first stop token, or is truncated at the length limit.

    max_tokens: length of truncated responses; None if samples may have different limits, of at most `limit`.
    ends_at_text: whether the engine may also stop at stop strings.
    Responses with environments are not checked, because their budgets differ.
    """
    if batch.turns is not None or not len(batch):
        return
    ids = torch.from_numpy(np.concatenate(batch.response_ids))
    is_stop = torch.isin(ids, torch.tensor(sorted(stop_ids), dtype=ids.dtype))
    counts, lengths = segment_counts(is_stop, batch.lengths), batch.lengths
    last = (batch.offsets[1:] - 1).clamp(min=0)
    ended = is_stop[last] & (lengths > 0) if len(ids) else lengths > 0
    problems = {
        "is complete by its label, but does not end with a stop token": ~batch.truncated
        & ~ended
        & (not ends_at_text),
        f"is truncated by its label, but not at rollout.max_response_tokens={max_tokens}": batch.truncated
        & (lengths != (lengths if max_tokens is None else max_tokens)),
        "continues after a stop token": counts > ended.long(),
        f"is longer than rollout.max_response_tokens={limit}": lengths > limit,
    }
    for problem, found in problems.items():
        number = int(lengths[found][0]) if found.any() else 0
        cause = f"a wrong label, limit or stop, or a lost end; stop tokens are {sorted(stop_ids)}"
        refuse("ending", batch, found, f"{{sample}} with {number} tokens {problem}", cause)


def warn_of_constant_scores(batch: Batch, history: Counter[float | str]) -> str:
    """Return a warning if every sample has the same score, and few earlier groups had it; "" otherwise.

    history: number of groups so far by the score that all their samples had, and under "differs" the number
        of groups with several scores. The groups of the batch are added to it.
    """
    assert batch.scores is not None
    value, total = float(batch.scores[0]), sum(history.values())
    share = (history[value] + 1) / (total + 2)
    groups = [batch.scores[batch.groups == group] for group in batch.groups.unique()]
    equal = [float(scores[0]) if (scores == scores[0]).all() else math.nan for scores in groups]
    is_constant = len(batch) > 1 and bool((batch.scores == value).all())
    history.update("differs" if math.isnan(score) else score for score in equal)
    if not is_constant or (total and len(groups) * math.log(share) > math.log(RISK)):
        return ""
    return (
        f"warning: score check: all {len(batch)} samples have the score {value:g}"
        + (f", as only {history[value] - len(groups)} of {total} groups before" if total else "")
        + "; no advantage differs from 0. Does the reward function work? Or does the model never "
        "answer right? See `lockstep samples RUN --show 3`."
    )


def check_turns(batch: Batch, *, max_turns: int, max_tokens: int) -> None:
    """Check that trajectories keep to `agents.max_turns` and `agents.max_tokens_per_turn` (0: no limit)."""
    if batch.turns is None:
        return
    owner = torch.arange(len(batch)).repeat_interleave(batch.lengths)
    own = batch.turns > 0
    turns, sizes = torch.stack([owner[own], batch.turns[own].long()]).unique(dim=1, return_counts=True)
    for key, limit, found in (("max_turns", max_turns, turns[1]), ("max_tokens_per_turn", max_tokens, sizes)):
        if limit and len(found) and int(found.max()) > limit:
            raise CheckFailed(
                f"turn check: {place(batch, int(turns[0][found.argmax()]))} has {int(found.max())}, but "
                f"agents.{key}={limit}: a trajectory did not end, or a turn was not cut, where it should."
            )


def check_loss_weights(batch: Batch, correction: RolloutCorrection) -> None:
    """Check that the loss weights are the ratios pi_old / pi_rollout, within the bounds of the config.

    A weight of 0 is allowed for ratios outside of the bounds of icepop. Those of prefixes are not known here.
    """
    gap = batch.column("old_logprobs") - batch.column("rollout_logprobs")
    gap = torch.where(batch.mask > 0, gap, 0.0).double()
    if correction.weighs_samples:
        gap = segment_sum(gap, batch.lengths).repeat_interleave(batch.lengths)
    ratio = gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weights, counted = batch.column("loss_weights").double(), batch.mask > 0
    upper = correction.truncate_tokens or correction.truncate_samples
    expected = ratio.clamp(max=upper) if upper else ratio
    if not upper:  # icepop
        low, high = correction.icepop_low, correction.icepop_high
        is_inside = (ratio >= low * (1 + RATIO_ERROR)) & (ratio <= high * (1 - RATIO_ERROR))
        is_prefix = correction.icepop_level == "prefix"
        drops = (ratio > high * (1 + RATIO_ERROR)) & (not is_prefix)
        expected = torch.where(drops | ((~is_inside | is_prefix) & (weights == 0)), 0.0, expected)
    wrong = counted & ~((weights - expected).abs() <= RATIO_ERROR * expected)
    if wrong.any():
        token = int(wrong.nonzero()[0])
        raise CheckFailed(
            f"loss weight check: a token has the importance weight {float(weights[token]):.4g}, but log "
            f"pi_old - log pi_rollout = {float(gap[token]):.4g} gives {float(expected[token]):.4g} within "
            f"the bounds of rollout_correction ({token_place(batch, token)})."
        )


def check_rejections(batch: Batch, correction: RolloutCorrection) -> None:
    """Raise CheckFailed if a token counts that `rollout_correction.reject` leaves out.

    Samples are compared only with one criterion, because another one may have left out their tokens.
    """
    if batch.rollout_logprobs is None or not correction.rejections:
        return
    if batch.old_logprobs is None:
        raise CheckFailed(
            "rejection check: the update begins without old_logprobs, so rollout_correction.reject="
            f"{correction.reject} has left out no token."
        )
    counted, ratio = batch.mask > 0, batch.rollout_logprobs - batch.old_logprobs
    statistics = {"k1": ratio, "k2": ratio.square() / 2, "k3": torch.expm1(-ratio) + ratio}
    for criterion in correction.rejections:
        found = torch.where(counted, statistics[criterion.statistic], 0.0).double()
        if criterion.level == "sequence":
            number = segment_sum(counted.double(), batch.lengths).clamp(min=1)
            found = (segment_sum(found, batch.lengths) / number).repeat_interleave(batch.lengths)
        slack = RATIO_ERROR * found.abs()
        wrong = counted & ((found < criterion.low - slack) | (found > criterion.high + slack))
        if wrong.any() and (criterion.level == "token" or len(correction.rejections) == 1):
            raise CheckFailed(
                f"rejection check: {int(wrong.sum())} of {int(counted.sum())} tokens count, the first with "
                f"{criterion.name}={float(found[wrong][0]):.4g}, outside of the bounds {criterion.low:g} to "
                f"{criterion.high:g} of rollout_correction.reject."
            )


def check_informative(batch: Batch, everything: Batch | None, wanted: int) -> None:
    """Check that dynamic sampling has kept the first groups whose samples have different scores.

    everything: all groups of the step's rounds; None if unknown. wanted: data.prompts_per_step.
    """
    if batch.scores is None or not len(batch):
        return

    def ranges(batch: Batch) -> list[tuple[int, bool]]:
        scores = batch.column("scores")
        groups = [(group, scores[batch.groups == group]) for group in batch.groups.unique().tolist()]
        return [(batch.prompts[group].index, bool((own != own[0]).any())) for group, own in groups]

    kept = ranges(batch)
    if equal := [index for index, differs in kept if not differs]:
        raise CheckFailed(
            f"group check: all samples of prompt {equal[0]} have the same score, but dynamic sampling keeps "
            "only groups whose samples have different scores."
        )
    if everything is not None and everything.scores is not None:
        expected = [index for index, differs in ranges(everything) if differs][:wanted]
        if (found := [index for index, _ in kept]) != expected:
            raise CheckFailed(
                f"group check: dynamic sampling kept the groups of the prompts {found[:8]}, but the first "
                f"with different scores are those of {expected[:8]}: groups were selected by other numbers."
            )
