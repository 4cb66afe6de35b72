"""Metrics of a step's speed: pure functions. Metric names are verl's."""

from collections.abc import Mapping, Sequence

UTILISATION = {"update_actor": "actor", "update_critic": "critic", "old_log_prob": "actor_infer"}
"""Map from the key in timing_s/<key> to the name in perf/mfu/<name>."""
WHOLE = ("ref", "values", "adv", "update_critic", "update_actor")
"""Keys of timing_per_token_ms/<key> that divide by the number of prompt and response tokens.

`gen` divides by the number of response tokens only.
"""


def time_per_token(
    metrics: Mapping[str, float], prompt_tokens: int, response_tokens: int
) -> dict[str, float]:
    """Return timing_per_token_ms/*: milliseconds of a phase per token of the batch."""
    counts = {"gen": response_tokens} | dict.fromkeys(WHOLE, prompt_tokens + response_tokens)
    return {
        f"timing_per_token_ms/{key}": 1e3 * metrics[f"timing_s/{key}"] / count
        for key, count in counts.items()
        if count and f"timing_s/{key}" in metrics
    }


def utilisation(
    metrics: Mapping[str, float], operations: Mapping[str, float], peak: float
) -> dict[str, float]:
    """Return perf/mfu/*: a model's operations, divided by what all devices could compute in the same time.

    operations: by <key> of timing_s/<key>, without recomputation. peak: operations per second of all devices.
    For example, 2e15 operations in 4 s with a peak of 1e15 give 0.5.
    """
    return {
        f"perf/mfu/{name}": operations[key] / (metrics[f"timing_s/{key}"] * peak)
        for key, name in UTILISATION.items()
        if operations.get(key)
    }


def slowest_rank(late_s: Sequence[float]) -> dict[str, float]:
    """Return the rank that was latest in a step, and by how much. late_s: seconds by rank."""
    if len(late_s) == 1:
        return {}
    rank = max(range(len(late_s)), key=late_s.__getitem__)
    return {"perf/slowest_rank": rank, "perf/slowest_rank_late_s": late_s[rank]}
