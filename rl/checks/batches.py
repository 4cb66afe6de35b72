"""Checks of a batch between phases. They are pure, so that every rank raises the same CheckFailed.

A check costs about as much as one pass over a token column on the host.
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

from rl.config.agents import Agents
from rl.config.correction import RolloutCorrection
from rl.config.rollout import Rollout
from rl.config.schema import Config
from rl.data.batch import Batch, segment_counts
from rl.data.prompts import Prompt
from rl.data.reading import num_rows
from rl.objectives.log_ratio import MAX_LOG_RATIO
from rl.objectives.segments import segment_sum
from rl.rewards.score import INVALID
from rl.rollout.inversion import uniforms
from rl.rollout.sampling import PARAMETERS, parameters_code

RISK = 1e-12
"""Maximum probability that a statistical check ends a healthy run at one step, for every model and dtype."""
MAX_SUBSETS = 10
"""Number of subsets of a prompt's samples above which a statistic of a validation is not computed again."""
STATISTIC = re.compile(r"(mean|std|best|worst|maj)@\d+(/(mean|std))?")
"""Name of a statistic of a validation; a variable of a reward may be named score/x or acc/x."""
Graded = tuple[float, str | None]
"""Value and answer of a sample; None: it has no answer."""
RATIO_ERROR, TOKEN_ERROR = 0.01, 1e-5
"""Relative rounding error of the ratio of a long sample, and of one token or a mean."""
SMALLEST_TEMPERATURE = 0.01
"""vLLM raises a lower temperature, except 0, to this value."""


class CheckFailed(RuntimeError):
    """Raised if a check finds that the run would learn from something wrong."""


class StaleTokens(RuntimeError):
    """Raised on every rank if a batch has tokens that were sampled by too old weights."""


def place(batch: Batch, sample: int) -> str:
    """Return text such as 'sample 17 (prompt 5)': index in the batch, and row of the prompt in the data."""
    group = int(batch.groups[sample])
    return f"sample {sample} (prompt {batch.prompts[group].index})" if batch.prompts else f"sample {sample}"


def token_place(batch: Batch, token: int) -> str:
    """Return text such as 'token 3 of sample 17 (prompt 5)'. token: index in a token column."""
    sample = int((batch.offsets[1:] <= token).sum())
    return f"token {token - int(batch.offsets[sample])} of {place(batch, sample)}"


def expect(what: str, found: float, source: str, expected: float, *, slack: float | None = None) -> None:
    """Raise CheckFailed unless a number is the expected one, which `source` gives, up to `slack`."""
    if not abs(found - expected) <= (1e-6 * (1 + abs(expected)) if slack is None else slack):  # or NaN
        raise CheckFailed(f"{what} {found:.6g}, but {source} {expected:.6g}.")


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
    """Raise CheckFailed if a sample is in another prompt's group, or a group lacks a sample.

    Trajectories are not checked: environments may fail, and contexts may be rewritten.
    """
    check_contexts(batch)
    if not batch.prompts or batch.turns is not None:
        return
    sizes = torch.bincount(batch.groups, minlength=len(batch.prompts))
    if odd := (sizes != samples_per_prompt).nonzero().flatten().tolist():
        raise CheckFailed(
            f"group check: group {odd[0]} (prompt {batch.prompts[odd[0]].index}) has {int(sizes[odd[0]])} "
            f"samples instead of rollout.samples_per_prompt={samples_per_prompt}, as {len(odd) - 1} others."
        )


def check_contexts(batch: Batch) -> None:
    """Raise CheckFailed if a sample is in another prompt's group. Trajectories are not checked."""
    if not batch.prompts or batch.turns is not None:
        return
    pairs = [(own, batch.prompts[g].token_ids) for own, g in zip(batch.prompt_ids, batch.groups.tolist())]
    wrong = [i for i, (own, ids) in enumerate(pairs) if own is not ids and not np.array_equal(own, ids)]
    problem = f"{{sample}} is in group {int(batch.groups[wrong[0]])}" if wrong else ""
    refuse("group", batch, wrong, problem, "its context is another prompt's, so tasks would be mixed")


def check_digests(batch: Batch) -> None:
    """Raise CheckFailed unless each sample has the tokens, ending and score of its delivery and scoring, and
    is in the group of its prompt."""
    if batch.digests is None:
        return
    delivered = batch.hash_samples()
    cause = "a filter or a reordering between generation and update moved columns apart, or changed them"
    what = "{sample} no longer has the tokens and the ending with which it was delivered"
    refuse("sample", batch, delivered != batch.digests, what, cause)
    check_contexts(batch)
    if batch.score_digests is not None:
        what = "{sample} no longer has the score that was made for it"
        refuse("sample", batch, batch.hash_scores(delivered) != batch.score_digests, what, cause)


def check_seeds(batch: Batch, earlier: Iterable[Collection[int]]) -> frozenset[int]:
    """Raise CheckFailed if a seed was used twice, in this or an earlier call. Return the seeds."""
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
    """Raise CheckFailed unless a batch holds the samples of each prompt, in the order of the prompts."""
    indices = [prompt.index for prompt in prompts for _ in range(samples_per_prompt)]
    found = [batch.prompts[group].index for group in batch.groups.tolist()]
    if found != indices:
        sample = next((i for i, pair in enumerate(zip(found, indices)) if pair[0] != pair[1]), len(found))
        raise CheckFailed(
            f"order check: the samples of a validation are {len(found)} instead of {len(indices)}, or in "
            f"another order than its prompts, from sample {sample} on."
        )


def check_table(batch: Batch, metrics: Mapping[str, float], answers: Sequence[str | None] = ()) -> None:
    """Raise CheckFailed unless the statistics of a validation follow from its samples.

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
            value = float(np.mean([_statistic(name, own) for own in groups.values()]))
            if not math.isnan(value):
                what = f"validation check: {variable}/{name} of {source} is"
                expect(what, found, "samples of its prompts give", value)


def check_losses(
    losses: Mapping[str, Sequence[Tensor]], metrics: Mapping[str, float], prompts: Sequence[Prompt]
) -> None:
    """Raise CheckFailed unless loss and perplexity of held-out responses follow from the tokens of all.

    losses: -log pi of the trained tokens of each response, by source.
    """
    for source, number in Counter(prompt.data_source for prompt in prompts).items():
        what, source_of = f"validation check: the responses in the loss of {source} are", "data.val has"
        expect(what, len(losses.get(source, ())), source_of, number)
    every = {"val": [own for parts in losses.values() for own in parts]}
    for name, parts in ({f"val-core/{source}": parts for source, parts in losses.items()} | every).items():
        value = float(torch.cat([*parts]).double().mean())
        for key, expected in (("loss", value), ("perplexity", float(np.exp(value)))):
            found = metrics[f"{name}/{key}"]
            if found != expected and not math.isnan(value):  # both may be infinite
                expect(f"validation check: {name}/{key} is", found, "its trained tokens give", expected)


def _statistic(name: str, samples: list[Graded]) -> float:
    """Return a statistic of a prompt's samples, such as best@2/std; NaN if it has more than MAX_SUBSETS."""
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


def check_held_out(prompts: Sequence[Prompt], config: Config) -> None:
    """Raise CheckFailed unless the prompts of a validation are different rows of the files of `data.val`, and
    as many as `validation.max_prompts` says."""
    files, most = config.data.val, config.validation.max_prompts or math.inf
    least = 0 if config.data.overlong_prompts == "drop" else min(most, num_rows(files))
    if not least <= len(prompts) <= most:
        raise CheckFailed(
            f"validation check: {len(prompts)} prompts of data.val are measured, instead of at least {least} "
            f"and at most {most} by validation.max_prompts and data.val."
        )
    known, seen = {str(Path(file)) for file in files}, {""}
    for prompt in prompts:
        if prompt.place and (prompt.place.rpartition(", row ")[0] not in known or prompt.place in seen):
            raise CheckFailed(f"validation check: {prompt.place} is not in data.val, or is measured twice.")
        seen.add(prompt.place)


def check_sides(batch: Batch, rows: Sequence[Any]) -> None:
    """Raise CheckFailed unless a batch has the responses of the drawn rows, each on its side."""
    names = ("chosen_ids", "rejected_ids", "response_ids")
    expected = [getattr(row, name) for row in rows for name in names if hasattr(row, name)]
    labels, own = batch.extra.get("labels"), [getattr(row, "label", None) for row in rows]
    wrong = [i for i, ids in enumerate(expected) if not np.array_equal(ids, batch.response_ids[i])]
    wrong += [i for i, label in enumerate(own) if labels is not None and bool(labels[i]) != label]
    what = "{sample} has another response, side or label than the row that was drawn"
    refuse("row", batch, wrong, what, "chosen and rejected responses, or rows, were exchanged")


def check_mismatched(batch: Batch, others: Batch, parts: Sequence[Sequence[int]]) -> None:
    """Raise CheckFailed unless mismatched responses answer other prompts of their part, if it has several.

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


def check_endings(batch: Batch, rollout: Rollout, stop_ids: Collection[int], *, limits_vary: bool) -> None:
    """Raise CheckFailed unless every response ends at its first stop token, or is truncated at the limit.

    limits_vary: whether samples may have smaller limits. Trajectories are not checked.
    """
    limit = rollout.max_response_tokens
    if batch.turns is not None or not len(batch):
        return
    ids = torch.from_numpy(np.concatenate(batch.response_ids))
    is_stop = torch.isin(ids, torch.tensor(sorted(stop_ids), dtype=ids.dtype))
    counts, lengths = segment_counts(is_stop, batch.lengths), batch.lengths
    last = (batch.offsets[1:] - 1).clamp(min=0)
    ended = is_stop[last] & (lengths > 0) if len(ids) else lengths > 0
    is_lost = ~batch.truncated & ~ended & (not rollout.stop)
    is_early = batch.truncated & (lengths != limit) & (not limits_vary)
    problems = {
        "is complete by its label, but does not end with a stop token": is_lost,
        f"is truncated by its label, but not at rollout.max_response_tokens={limit}": is_early,
        "continues after a stop token": counts > ended.long(),
        f"is longer than rollout.max_response_tokens={limit}": lengths > limit,
    }
    for problem, found in problems.items():
        number = int(lengths[found][0]) if found.any() else 0
        cause = f"a wrong label, limit or stop, or a lost end; stop tokens are {sorted(stop_ids)}"
        refuse("ending", batch, found, f"{{sample}} with {number} tokens {problem}", cause)


def warn_of_constant_scores(batch: Batch, history: Counter[float | str]) -> str:
    """Return a warning if every sample has the same score, and few earlier groups had it; "" otherwise.

    history: number of groups so far by the score that all their samples had, or "differs"; updated.
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


def check_turns(batch: Batch, agents: Agents) -> None:
    """Raise CheckFailed if a trajectory exceeds `agents.max_turns` or `max_tokens_per_turn` (0: no limit)."""
    if batch.turns is None:
        return
    owner, own = torch.arange(len(batch)).repeat_interleave(batch.lengths), batch.turns > 0
    turns, sizes = torch.stack([owner[own], batch.turns[own].long()]).unique(dim=1, return_counts=True)
    for key, found in (("max_turns", turns[1]), ("max_tokens_per_turn", sizes)):
        limit = getattr(agents, key)
        if limit and len(found) and int(found.max()) > limit:
            what = f"{{sample}} has {int(found.max())}, but agents.{key}={limit}"
            cause = "a trajectory did not end, or a turn was not cut"
            refuse("turn", batch, [int(turns[0][found.argmax()])], what, cause)


def check_loss_weights(batch: Batch, correction: RolloutCorrection) -> None:
    """Raise CheckFailed unless the loss weights are the ratios pi_old / pi_rollout, within their bounds."""
    gap = batch.column("old_logprobs") - batch.column("rollout_logprobs")
    gap = torch.where(batch.mask > 0, gap, 0.0).double()
    error = TOKEN_ERROR
    if correction.weighs_samples:
        gap, error = segment_sum(gap, batch.lengths).repeat_interleave(batch.lengths), RATIO_ERROR
    ratio = gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weights, counted = batch.column("loss_weights").double(), batch.mask > 0
    upper = correction.truncate_tokens or correction.truncate_samples
    expected = ratio.clamp(max=upper) if upper else ratio
    if not upper:  # icepop
        low, high, judged = correction.icepop_low, correction.icepop_high, ratio
        if correction.icepop_level == "prefix":
            counts = _sums_so_far(counted.double(), batch).clamp(min=1)
            judged = (_sums_so_far(ratio.log(), batch) / counts).exp()
        is_inside = (judged >= low * (1 + error)) & (judged <= high * (1 - error))
        drops = (judged > high * (1 + error)) | (judged < low * (1 - error))
        expected = torch.where(drops | (~is_inside & (weights == 0)), 0.0, expected)
    wrong = counted & ~((weights - expected).abs() <= error * expected)
    if wrong.any():
        token = int(wrong.nonzero()[0])
        raise CheckFailed(
            f"loss weight check: a token has the importance weight {float(weights[token]):.4g}, but log "
            f"pi_old - log pi_rollout = {float(gap[token]):.4g} gives {float(expected[token]):.4g} by the "
            f"bounds of rollout_correction ({token_place(batch, token)})."
        )


def _sums_so_far(x: Tensor, batch: Batch) -> Tensor:
    """Return the sum over each sample's tokens up to each one: float64 [T] -> [T]."""
    sums = torch.cat([x.new_zeros(1), x.cumsum(0)])
    return sums[1:] - sums[batch.offsets[:-1]].repeat_interleave(batch.lengths)


def check_rejections(batch: Batch, correction: RolloutCorrection, *, loses_nothing: bool = True) -> None:
    """Raise CheckFailed unless the tokens that count pass each criterion of `reject`.

    loses_nothing: whether all tokens that pass must count; your own algorithm may leave out some.
    """
    if batch.rollout_logprobs is None or not correction.rejections:
        return
    if batch.old_logprobs is None:
        reject = correction.reject
        raise CheckFailed(
            f"rejection check: the update begins without old_logprobs for rollout_correction.reject={reject}."
        )
    counted, ratio = batch.mask > 0, batch.rollout_logprobs - batch.old_logprobs
    ratio = ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    before = passes = batch.extra.get("unrejected_mask", batch.mask) > 0
    statistics = {"k1": ratio, "k2": ratio.square() / 2, "k3": torch.expm1(-ratio) + ratio}
    for criterion in correction.rejections:
        found = torch.where(before, statistics[criterion.statistic], 0.0).double()
        if criterion.level == "sequence":
            number = segment_sum(before.double(), batch.lengths).clamp(min=1)
            found = (segment_sum(found, batch.lengths) / number).repeat_interleave(batch.lengths)
        slack = RATIO_ERROR * found.abs()
        wrong = counted & ~((found >= criterion.low - slack) & (found <= criterion.high + slack))
        passes = passes & (found > criterion.low + slack) & (found < criterion.high - slack)
        if wrong.any():
            raise CheckFailed(
                f"rejection check: {int(wrong.sum())} of {int(counted.sum())} tokens count, the first with "
                f"{criterion.name}={float(found[wrong][0]):.4g}, outside of the bounds {criterion.low:g} to "
                f"{criterion.high:g} of rollout_correction.reject."
            )
    if loses_nothing and (lost := passes & ~counted).any():
        raise CheckFailed(
            f"rejection check: {int(lost.sum())} tokens pass rollout_correction.reject={correction.reject}, "
            f"but do not count, first {token_place(batch, int(lost.nonzero()[0]))}."
        )


def check_informative(batch: Batch, everything: Batch | None, wanted: int) -> None:
    """Raise CheckFailed unless dynamic sampling has kept the first groups with different scores.

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
            f"group check: all samples of prompt {equal[0]} have the same score, but dynamic sampling is on."
        )
    if everything is not None and everything.scores is not None:
        expected = [index for index, differs in ranges(everything) if differs][:wanted]
        if (found := [index for index, _ in kept]) != expected:
            raise CheckFailed(
                f"group check: dynamic sampling kept the groups of the prompts {found[:8]}, but the first "
                f"with different scores are those of {expected[:8]}."
            )


def check_staleness(batch: Batch, version: int, limit: int) -> dict[str, float]:
    """Return metrics of the staleness of tokens. Raises StaleTokens if it is not within 0 to `limit`.

    version: of the policy that learns from the batch. limit: `rollout.max_staleness` with carry-over,
    `roles.lag` with roles, 0 otherwise.
    """
    assert batch.weight_versions is not None and batch.mask is not None, "the policy sampled no tokens"
    ages, counted = version - batch.weight_versions, batch.mask > 0
    sampled, wrong = ages[counted], counted & ((ages > limit) | (ages < 0))
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise StaleTokens(
            f"{int(wrong.sum())} of {len(sampled)} tokens have a staleness outside of 0 to {limit} versions "
            f"of the policy, the first one {int(ages[first])} ({token_place(batch, first)}, version "
            f"{version - int(ages[first])} of {version}): the engine generated without the present weights, "
            "with another point's adapter, or samples were kept too long. This is a bug; please report it."
        )
    if not len(sampled):
        return {}
    return {"staleness/mean": float(sampled.double().mean()), "staleness/max": float(sampled.max())}


def expected_parameters(config: Config, purpose: str) -> dict[str, Any]:
    """Return the parameters by vLLM's names. purpose: training, greedy or validation (sampled)."""
    rollout, validation = config.rollout, config.validation
    found: dict[str, Any] = {"stop": rollout.stop, "stop_token_ids": rollout.stop_token_ids}
    if purpose == "greedy":
        found["temperature"] = 0.0
    elif purpose == "validation":
        found |= {"temperature": validation.temperature, "min_p": rollout.min_p}
        found |= {"top_p": validation.top_p or rollout.top_p, "top_k": validation.top_k or rollout.top_k}
    else:
        found |= {name: getattr(rollout, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    if not found["temperature"]:
        return {name: value for name, value in found.items() if name not in ("top_p", "top_k", "min_p")}
    return found | {"temperature": max(found["temperature"], SMALLEST_TEMPERATURE)}


def check_uniforms() -> None:
    """Raise CheckFailed if two tokens of a sample, or two samples, get the same random number."""
    seeds, positions = (index.ravel() for index in np.indices((16, 32)))
    found = uniforms(seeds.astype(np.uint64), positions)
    if len(np.unique(found)) < len(found) or abs(found.mean() - 0.5) > 0.1:
        raise CheckFailed(
            f"sampling check: {len(found)} tokens of different samples and positions get only "
            f"{len(np.unique(found))} random numbers, with the mean {found.mean():.3g}."
        )


def check_sampling(batch: Batch, config: Config, purpose: str) -> None:
    """Raise CheckFailed if the engine sampled with other parameters than the config has for the purpose."""
    if batch.sampled_with is None:
        return
    expected = expected_parameters(config, purpose)
    wrong = (batch.sampled_with != parameters_code(expected)) & (batch.sampled_with != -1)
    if not wrong.any():
        return
    purposes = ("training", "greedy", "validation")
    others = {f"the parameters of {other}": expected_parameters(config, other) for other in purposes}
    for name, neutral in PARAMETERS.items():
        values = (True, False) if isinstance(neutral, bool) else (neutral,)
        others |= {f"{name}={value}": expected | {name: value} for value in values}
    code = int(batch.sampled_with[wrong][0])
    named = [what for what, parameters in others.items() if code == parameters_code(parameters)]
    given = ", ".join(f"{name}={value}" for name, value in expected.items())
    what = f"the engine sampled {{sample}} with {['other parameters', *named][-1]}"
    refuse("sampling", batch, wrong, what, f"the config gives {given} for {purpose}")
