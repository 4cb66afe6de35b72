"""The staleness of tokens: how many versions the policy is ahead of the version that sampled them.

For example, if version 3 sampled a token, it has the staleness 2 when version 5 learns from it. Before every
`learn`, the sampler's `check` (`rl.phases.sampler`) refuses a batch with a token that is too old. In a
healthy run this does not happen: the samplers of carry-over and roles end, drop or wait for samples early
enough.
"""

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
    ages = version - batch.weight_versions
    sampled = ages[batch.mask > 0]
    if not len(sampled):
        return {}
    oldest, newest = int(sampled.max()), int(sampled.min())
    if oldest > limit or newest < 0:
        wrong = ((ages > limit) | (ages < 0)) & (batch.mask > 0)
        first = int(wrong.nonzero()[0])
        sample = int((batch.offsets[1:] <= first).sum())
        group = int(batch.groups[sample])
        prompt = batch.prompts[group].index if batch.prompts else group
        raise StaleTokens(
            f"{int(wrong.sum())} of {len(sampled)} tokens have a staleness outside of 0 to {limit} versions "
            f"of the policy, the first one {int(ages[first])} (version {int(batch.weight_versions[first])} "
            f"of {version}, prompt {prompt}): the engine generated without the present weights, or the "
            "scheduler kept samples for too long. This is a bug; please report it."
        )
    return {"staleness/mean": float(sampled.double().mean()), "staleness/max": float(oldest)}
