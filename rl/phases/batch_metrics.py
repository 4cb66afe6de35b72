"""Metrics of a batch: pure functions with identical results on every rank. Metric names are verl's."""

from collections import Counter

import torch
from torch import Tensor

from rl.data.batch import Batch
from rl.objectives.groups import by_group, centered
from rl.objectives.segments import segment_mean, segment_sum

DEPTHS = {"1k": 1 << 10, "4k": 1 << 12, "16k": 1 << 14, "64k": 1 << 16, "256k": 1 << 18, "1m": 1 << 20}
"""Name and end of each range of contexts, in tokens. A range begins at the end of the previous one."""


def spread(name: str, values: Tensor) -> dict[str, float]:
    """Return mean, maximum and minimum of values [n] as metrics, or no metrics if n is 0."""
    if not len(values):
        return {}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def token_mean(values: Tensor, mask: Tensor) -> float:
    """Return the mean of a token column [T] over the tokens with mask 1."""
    kept = torch.where(mask > 0, values, 0.0)
    return float(kept.double().sum() / mask.sum().clamp(min=1))


def sample_means(values: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Return each sample's mean of a token column [T] over its tokens with mask 1, float64.

    A sample without such a token is left out.
    """
    counts = segment_sum(mask.double(), lengths)
    sums = segment_sum(torch.where(mask > 0, values.double(), 0.0), lengths)
    return sums[counts > 0] / counts[counts > 0]


def length_metrics(batch: Batch, *, max_prompt_tokens: int) -> dict[str, float]:
    """Return the metrics of response and prompt lengths, in tokens.

    `response_length/clip_ratio` is the fraction of responses that ended at the length limit,
    `prompt_length/clip_ratio` is the fraction of prompts with at least `max_prompt_tokens` tokens. As in
    verl, a response without tokens counts as aborted, and `response_length_non_aborted/*` excludes it. In a
    sample of several turns, the length counts only the tokens that the policy sampled;
    `agents/given_length` counts the other tokens.
    """
    batch = batch.merge_rows()
    lengths = batch.sampled_lengths
    responses, prompts = lengths.float(), batch.prompt_lengths.float()
    metrics = spread("response_length", responses) | spread("prompt_length", prompts)
    metrics["response_length/clip_ratio"] = float(batch.truncated.float().mean())
    metrics["prompt_length/clip_ratio"] = float((prompts >= max_prompt_tokens).float().mean())
    if batch.turns is not None:
        metrics |= spread("agents/given_length", (batch.lengths - lengths).float())
        metrics |= spread("num_turns", num_turns(batch))
    finished = lengths > 0
    metrics["response/aborted_ratio"] = 1.0 - float(finished.float().mean())
    if finished.any():
        metrics |= spread("response_length_non_aborted", responses[finished])
        clipped = batch.truncated[finished].float().mean()
        metrics["response_length_non_aborted/clip_ratio"] = float(clipped)
    return metrics


def num_turns(batch: Batch) -> Tensor:
    """Return the number of turns that the policy sampled in each sample, float32 [B]."""
    assert batch.turns is not None
    of_samples = batch.turns.split(batch.lengths.tolist())
    return torch.tensor([float(own.max().clamp(min=0)) if len(own) else 0.0 for own in of_samples])


def balance_metrics(num_tokens: list[int], ranks: list[list[int]]) -> dict[str, float]:
    """Return how evenly the data parallel ranks share a step's tokens: verl's `global_seqlen/*`.

    `num_tokens[i]` counts prompt and response of sample i; `ranks[r]` lists the samples of data parallel rank
    r. `balanced_min` and `balanced_max` are the least and the most tokens of a rank. `min`, `max` and
    `minmax_diff` describe another division, in sample order with equal numbers of samples per rank. For
    example, samples of 30, 10, 10 and 10 tokens on two ranks have `max` 40 in sample order, but
    `balanced_max` 30 if one rank gets the first sample alone. `mean` is the same for both divisions.
    """
    bounds = [len(num_tokens) * rank // len(ranks) for rank in range(len(ranks) + 1)]
    dealt = [sum(num_tokens[start:end]) for start, end in zip(bounds, bounds[1:], strict=False)]
    balanced = [sum(num_tokens[i] for i in samples) for samples in ranks]
    return {
        "global_seqlen/min": min(dealt),
        "global_seqlen/max": max(dealt),
        "global_seqlen/minmax_diff": max(dealt) - min(dealt),
        "global_seqlen/balanced_min": min(balanced),
        "global_seqlen/balanced_max": max(balanced),
        "global_seqlen/mean": sum(num_tokens) / len(ranks),
    }


def imbalance_metrics(costs: list[list[list[int]]]) -> dict[str, float]:
    """Return how evenly the cost of a step's updates is divided over ranks and micro-batches.

    The cost is `rl.training.micro_batch_plans.Cost`.

    costs: cost by mini-batch, data parallel rank and micro-batch. Ranks wait for each other at the end of a
    mini-batch. In pipelines and expert parallel layers they also wait after each micro-batch. The metrics:

        training/imbalance              cost of the busiest rank / mean cost of a rank - 1; each cost
                                        is a sum over mini-batches
        training/micro_batch_imbalance  the same with the most expensive micro-batch and the mean
                                        micro-batch of a mini-batch, over all ranks
        training/micro_batches          number of micro-batches of one rank
        training/empty_micro_batches    number of micro-batches without a sample, over all ranks
    """
    ranks = [[sum(rank) for rank in minibatch] for minibatch in costs]
    micros = [[cost for rank in minibatch for cost in rank] for minibatch in costs]
    return {
        "training/imbalance": _imbalance(ranks),
        "training/micro_batch_imbalance": _imbalance(micros),
        "training/micro_batches": sum(len(minibatch[0]) for minibatch in costs),
        "training/empty_micro_batches": sum(cost == 0 for minibatch in micros for cost in minibatch),
    }


def _imbalance(costs: list[list[int]]) -> float:
    """Return (sum of len(list) * max(list)) / (sum of all costs) - 1; 0 if each list is constant."""
    return sum(len(each) * max(each) for each in costs) / max(sum(map(sum, costs)), 1) - 1


def score_metrics(batch: Batch) -> dict[str, float]:
    """Return metrics of the scores and of the other numbers that the reward function returns.

    Returns no metrics if the batch has no scores.
    """
    if batch.scores is None:
        return {}
    metrics = {"reward/failures": float(batch.score_details["failed"].sum())} | spread(
        "critic/score", batch.scores
    )
    details = ((name, column) for name, column in batch.score_details.items() if name != "failed")
    metrics |= {f"reward/{name}/mean": float(column.nanmean()) for name, column in details}
    return metrics | equal_groups(batch.scores if batch.rewards is None else batch.rewards, batch.groups)


def equal_groups(rewards: Tensor, groups: Tensor) -> dict[str, float]:
    """Return the share of groups whose samples all have the same reward; nothing for groups of one sample.

    rewards: [N]. groups: int64 [N]. TRL's name for the metric is frac_reward_zero_std.
    """
    _, ascending, sizes = by_group(rewards, groups)
    if not (sizes > 1).any():
        return {}
    spreads = segment_mean(centered(ascending, sizes).abs(), sizes)[sizes > 1]
    return {"reward/frac_reward_zero_std": float((spreads == 0).double().mean())}


def agent_metrics(counts: Counter[str], *, capacity: int) -> dict[str, float]:
    """Return metrics of environments. counts: sums over all replicas.

    agents/turns, tool_calls, rows  mean over the trajectories
    agents/tool_errors              calls answered with an error message
    agents/failures/<cause>         failed trajectories
    agents/reopened                 trajectories repeated because the process of their environment, which also
                                    held other trajectories, ended
    agents/diverged                 trajectories that began again because their environment, executed again,
                                    gave other answers than before
    perf/executed_again             trajectories executed again from their log
    agents/dropped                  trajectories that are missing in their groups
    agents/rewrites                 turns after which the template changed earlier tokens
    agents/occupancy                mean over the engine steps of (running requests / capacity)
    timing_s/environments           seconds of all requests to environments
    timing_s/environments_waited    seconds in which a replica's engine only waited for environments, summed
                                    over the replicas
    """
    metrics = {"agents/occupancy": counts["live_steps"] / max(counts["steps"], 1) / capacity}
    for name, value in counts.items():
        if name in ("turns", "tool_calls", "rows"):
            metrics[f"agents/{name}"] = value / max(counts["trajectories"], 1)
        elif name in ("environments", "environments_waited"):
            metrics[f"timing_s/{name}"] = value / 1e6  # counted in microseconds
        elif name == "executed_again":
            metrics[f"perf/{name}"] = value
        elif name not in ("live_steps", "steps", "trajectories", "succeeded"):
            metrics[f"agents/{name}"] = value
    return metrics


def engine_gap(batch: Batch, logprobs: Tensor) -> dict[str, float]:
    """Return mean, maximum and standard deviation of |p_trainer - p_engine| over the sampled tokens.

    Also returns Pearson's correlation of the two probabilities, unless one is the same for all tokens.

    logprobs: the trainer's, float32 [T]. Returns no metrics if the engine gave no log-probs.
    """
    if batch.rollout_logprobs is None:
        return {}
    counted = batch.mask > 0
    ours, engines = logprobs.exp()[counted].double(), batch.rollout_logprobs.exp()[counted].double()
    gap = (ours - engines).abs()
    if not len(gap):
        return {"training/rollout_probs_diff_mean": 0.0, "training/rollout_probs_diff_max": 0.0}
    metrics = {
        "training/rollout_probs_diff_mean": float(gap.mean()),
        "training/rollout_probs_diff_max": float(gap.max()),
        "training/rollout_probs_diff_std": float(gap.std(correction=0)),
    }
    if ours.var(correction=0) > 0 and engines.var(correction=0) > 0:
        correlation = float(torch.corrcoef(torch.stack([ours, engines]))[0, 1])
        metrics["training/rollout_actor_probs_pearson_corr"] = correlation
    return metrics | gap_by_depth(batch, logprobs)


def gap_by_depth(batch: Batch, logprobs: Tensor) -> dict[str, float]:
    """Return the mean |log p_trainer - log p_engine| of the tokens in each range of DEPTHS.

    The context of a token is all tokens before it. Some faults, such as wrong rotary settings, appear only
    in long contexts, where the mean over all tokens hides them. A batch without a context of the second range
    has no such metrics.

    logprobs: the trainer's, float32 [T].
    """
    assert batch.rollout_logprobs is not None
    before = batch.prompt_lengths - batch.offsets[:-1]
    contexts = torch.arange(len(batch.mask)) + before.repeat_interleave(batch.lengths)
    counted = batch.mask > 0
    gaps = (logprobs - batch.rollout_logprobs).abs().double()[counted]
    places = torch.bucketize(contexts[counted], torch.tensor([*DEPTHS.values()]), right=True)
    metrics = {
        f"training/logprob_gap/{name}": float(gaps[places == place].mean())
        for place, name in enumerate(DEPTHS)
        if (places == place).any()
    }
    return metrics if (places > 0).any() else {}
