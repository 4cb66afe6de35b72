"""Checks of a batch between phases. They find errors that no phase notices, but with which a run learns less.

For example, `check_endings` compares the label `truncated` of a response with its last token. A check costs
about as much as one pass over a token column on the host. docs/checks.md lists all checks.

Every function is pure and every rank has the same batch. Therefore CheckFailed is raised on every rank.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl.config.correction import RolloutCorrection
from rl.data.batch import Batch, segment_counts
from rl.data.prompts import Prompt
from rl.objectives.log_ratio import MAX_LOG_RATIO
from rl.objectives.segments import segment_sum

RISK = 1e-12
"""Maximum probability that a statistical check ends a healthy run at one step, for every model and dtype."""
RATIO_ERROR = 0.01
"""Relative rounding error of the ratio of a long sample."""


class CheckFailed(RuntimeError):
    """Raised if a check finds that the run would learn from something wrong."""


def place(batch: Batch, sample: int) -> str:
    """Return text such as 'sample 17 (prompt 5)': the index in the batch, and the row of the prompt in the
    data."""
    group = int(batch.groups[sample])
    return f"sample {sample} (prompt {batch.prompts[group].index})" if batch.prompts else f"sample {sample}"


def check_groups(batch: Batch, *, samples_per_prompt: int) -> None:
    """Check that every sample belongs to the group of its prompt, and that no group lacks a sample.

    Trajectories are not checked, because environments may fail and contexts may be rewritten.
    """
    if not batch.prompts or batch.turns is not None:
        return
    for sample, group in enumerate(batch.groups.tolist()):
        own, ids = batch.prompt_ids[sample], batch.prompts[group].token_ids
        if own is not ids and not np.array_equal(own, ids):
            raise CheckFailed(
                f"group check: {place(batch, sample)} is in group {group}, but its context consists of the "
                "tokens of another prompt, so its reward would be compared with those of other tasks."
            )
    sizes = torch.bincount(batch.groups, minlength=len(batch.prompts))
    wrong = (sizes != samples_per_prompt).nonzero().squeeze(1).tolist()
    if wrong:
        raise CheckFailed(
            f"group check: group {wrong[0]} (prompt {batch.prompts[wrong[0]].index}) has "
            f"{int(sizes[wrong[0]])} samples instead of rollout.samples_per_prompt={samples_per_prompt}, and "
            f"so have {len(wrong) - 1} further groups."
        )


def check_digests(batch: Batch) -> None:
    """Check that each sample still has the tokens and the ending with which it was delivered, and its own
    score.

    A user's algorithm may fill `scores` itself, but it may not move scores to other samples.
    """
    if batch.digests is None:
        return
    delivered = batch.hash_samples()
    pairs = {"the tokens and the ending with which it was delivered": (delivered, batch.digests)}
    if batch.score_digests is not None:
        pairs["the score that was made for it"] = batch.hash_scores(delivered), batch.score_digests
    for what, (own, noted) in pairs.items():
        if (wrong := own != noted).any():
            sample = int(wrong.nonzero()[0])
            raise CheckFailed(
                f"sample check: {place(batch, sample)} no longer has {what}; "
                f"{int(wrong.sum())} of {len(batch)} samples changed: a filter or a reordering between "
                "generation and update moved columns apart, or changed them."
            )


def check_seeds(batch: Batch, earlier: Iterable[Collection[int]]) -> frozenset[int]:
    """Check that no seed was used twice, in this call or in an earlier call. Return the seeds."""
    if batch.seeds is None:
        return frozenset()
    whole = batch.merge_rows()
    known = [(seed, sample) for sample, seed in enumerate(whole.column("seeds").tolist()) if seed != -1]
    own = frozenset(seed for seed, _ in known)
    repeated = frozenset().union(*(own.intersection(seeds) for seeds in earlier))
    if len(own) < len(known):
        counts = Counter(seed for seed, _ in known)
        repeated |= {seed for seed in own if counts[seed] > 1}
    if repeated:
        wrong = [sample for seed, sample in known if seed in repeated]
        raise CheckFailed(
            f"seed check: {place(whole, wrong[0])} was sampled with a seed that another sample of this run "
            f"had, and so were {len(wrong) - 1} further samples of {len(whole)}: seeds depend on the run, "
            "the step, the group and the number of the sample."
        )
    return own


def check_order(batch: Batch, prompts: Sequence[Prompt], *, samples_per_prompt: int) -> None:
    """Check that a batch holds the samples of each prompt one after another, in the order of the prompts."""
    indices = [prompt.index for prompt in prompts for _ in range(samples_per_prompt)]
    found = [batch.prompts[group].index for group in batch.groups.tolist()]
    if found != indices:
        sample = next((i for i, pair in enumerate(zip(found, indices)) if pair[0] != pair[1]), len(found))
        raise CheckFailed(
            f"order check: the samples of a validation are {len(found)} instead of {len(indices)}, or not in "
            f"the order of its prompts, from sample {sample} on: their results would be read as those of "
            "other prompts."
        )


def check_table(batch: Batch, number: int, metrics: Mapping[str, float]) -> None:
    """Check mean, best and spread of the accuracies and scores of a validation, computed again from its
    samples.

    number: samples per prompt.
    """
    columns = {"acc": batch.outcomes, "score": batch.column("scores")}
    of_prompts: dict[tuple[str, str], dict[int, list[float]]] = {}
    for variable, column in columns.items():
        for group, value in zip(batch.groups.tolist(), column.tolist()):
            own = of_prompts.setdefault((batch.prompts[group].data_source, variable), {})
            own.setdefault(group, []).append(value)
    for (source, variable), groups in of_prompts.items():
        statistics: dict[str, Callable[..., Any]] = {f"mean@{number}": np.mean, f"std@{number}": np.std}
        statistics[f"best@{number}/mean"] = max
        for name, statistic in statistics.items():
            value = float(np.mean([statistic(own) for own in groups.values()]))
            names = (f"{section}/{source}/{variable}/{name}" for section in ("val-core", "val-aux"))
            found = next((metrics[key] for key in names if key in metrics), None)
            if found is not None and not abs(found - value) <= 1e-6 * max(1.0, abs(value)):
                raise CheckFailed(
                    f"validation check: {variable}/{name} of {source} is {found:.6g}, but samples of its "
                    f"prompts give {value:.6g}: the table mixes samples of different prompts."
                )


def check_held_out(prompts: Sequence[Prompt], files: Sequence[str]) -> None:
    """Check that the prompts of a validation are different rows of the files of `data.val`."""
    known, seen = {str(Path(file)) for file in files}, set()
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
    if wrong:
        raise CheckFailed(
            f"row check: sample {wrong[0]} and {len(wrong) - 1} further samples of {len(batch)} have another "
            "response, side or label than the rows that were drawn: chosen and rejected responses, or rows, "
            "were exchanged."
        )


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
        "is complete by its label, but does not end with a stop token: it was truncated, or its end is "
        "missing": ~batch.truncated & ~ended & (not ends_at_text),
        f"is truncated by its label, but not at rollout.max_response_tokens={max_tokens}": batch.truncated
        & (lengths != (lengths if max_tokens is None else max_tokens)),
        "continues after a stop token": counts > ended.long(),
        f"is longer than rollout.max_response_tokens={limit}": lengths > limit,
    }
    for problem, found in problems.items():
        if found.any():
            sample = int(found.nonzero()[0])
            raise CheckFailed(
                f"ending check: {place(batch, sample)} with {int(lengths[sample])} tokens {problem}, and so "
                f"do {int(found.sum()) - 1} further samples of {len(batch)}. Stop tokens are "
                f"{sorted(stop_ids)}."
            )


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
        low, high = correction.icepop_low * (1 + RATIO_ERROR), correction.icepop_high * (1 - RATIO_ERROR)
        is_inside = (ratio >= low) & (ratio <= high)
        may_drop = ~is_inside | (correction.icepop_level == "prefix")
        expected = torch.where(may_drop & (weights == 0), 0.0, expected)
        beyond = ratio > correction.icepop_high * (1 + RATIO_ERROR)
        if correction.icepop_level != "prefix":
            expected = torch.where(beyond, 0.0, expected)
    wrong = counted & ~((weights - expected).abs() <= RATIO_ERROR * expected)
    if wrong.any():
        token = int(wrong.nonzero()[0])
        raise CheckFailed(
            f"loss weight check: a token has the importance weight {float(weights[token]):.4g}, but log "
            f"pi_old - log pi_rollout = {float(gap[token]):.4g} gives {float(expected[token]):.4g}: the "
            "weight must be pi_old / pi_rollout, within the bounds of rollout_correction."
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
    for criterion in correction.rejections:
        found = {"k1": ratio, "k2": ratio.square() / 2, "k3": torch.expm1(-ratio) + ratio}[
            criterion.statistic
        ]
        found = torch.where(counted, found, 0.0).double()
        if criterion.level == "sequence":
            number = segment_sum(counted.double(), batch.lengths).clamp(min=1)
            found = (segment_sum(found, batch.lengths) / number).repeat_interleave(batch.lengths)
        slack = RATIO_ERROR * found.abs()
        wrong = counted & ((found < criterion.low - slack) | (found > criterion.high + slack))
        if wrong.any() and (criterion.level == "token" or len(correction.rejections) == 1):
            token = int(wrong.nonzero()[0])
            raise CheckFailed(
                f"rejection check: {int(wrong.sum())} of {int(counted.sum())} tokens count, the first with "
                f"{criterion.name}={float(found[token]):.4g}, outside of the bounds {criterion.low:g} to "
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
