"""Checks that carry-over loses or doubles no group, prefers the oldest ones, and drops only too old ones."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from rl.checks.batches import CheckFailed
from rl.rollout.sampled_group import SampledGroup


def check_groups(
    before: Sequence[SampledGroup],
    num_drawn: int,
    *,
    taken: Sequence[SampledGroup],
    carried: Sequence[SampledGroup],
    dropped: Sequence[SampledGroup],
    due: Sequence[SampledGroup],
    version: int,
    max_staleness: int,
) -> None:
    """Raise CheckFailed if the parts of a step are not its groups, if an older complete group than a taken
    one stays, or if other groups are dropped or due than those that the next step may not use.

    before: groups that were carried into the step or drawn in it. num_drawn: prompts that the run has drawn.
    due: groups as they were before this step had to complete them. version: of the policy in this step.
    """
    numbers = Counter(group.prompt.draw for group in before)
    parts = Counter(group.prompt.draw for part in (taken, carried, dropped) for group in part)
    wrong = [draw for draw in numbers | parts if not numbers[draw] == parts[draw] == (0 <= draw < num_drawn)]
    if wrong:
        draw = min(wrong)
        raise CheckFailed(
            f"carry-over check: of {num_drawn} drawn prompts, number {draw} is {numbers[draw]} times among "
            f"the groups of this step, and {parts[draw]} times among its trained, carried and dropped ones."
        )
    for name, part in {"carried": carried, "dropped": dropped, "completed at once": due}.items():
        for group in part:
            versions = np.concatenate([sample.weight_versions for sample in group.samples])
            staleness = version + 1 - int(versions.min(initial=version + 1))
            if (staleness > max_staleness) != (part is not carried):
                raise CheckFailed(
                    f"carry-over check: group {group.prompt.draw} was {name}, but its oldest token has the "
                    f"staleness {staleness} in the next step, and rollout.max_staleness={max_staleness}."
                )
    left = [group for part in (carried, dropped) for group in part if not group.unfinished]
    ages = [[(group.oldest, group.prompt.draw) for group in part] for part in (taken, left)]
    if all(ages) and max(ages[0]) > min(ages[1]):
        (newer, draw), (older, other) = max(ages[0]), min(ages[1])
        raise CheckFailed(
            f"carry-over check: group {draw} of version {newer} is trained before the complete group "
            f"{other} of version {older}: they are chosen by another order than their age."
        )
