"""The staleness of tokens: how many versions the policy is ahead of the version that sampled them.

For example, if version 3 sampled a token, it has the staleness 2 when version 5 learns from it. In a healthy
run the check never fails: the samplers of carry-over and roles end, drop or wait for samples early enough.
"""

from rl.checks.batches import token_place
from rl.data.batch import Batch


class StaleTokens(RuntimeError):
    """Raised on every rank if a batch has tokens that were sampled by too old weights."""


def check_staleness(batch: Batch, version: int, limit: int) -> dict[str, float]:
    """Return metrics of the staleness of tokens: `version` minus the version that sampled them.

    version: version of the policy that is about to learn from the batch. limit: largest allowed staleness:
    `rollout.max_staleness` with carry-over, `roles.lag` with roles, 0 otherwise.

    Raises StaleTokens if the staleness of a sampled token exceeds the limit, or if a token is newer than the
    policy.
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
            "or with another point's adapter, or the scheduler kept samples for too long. This is a bug; "
            "please report it."
        )
    if not len(sampled):
        return {}
    return {"staleness/mean": float(sampled.double().mean()), "staleness/max": float(sampled.max())}
