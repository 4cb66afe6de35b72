"""The prompts of a step of distillation: each has one source of responses, and the shares are exact."""

import pytest

from rl.algorithms.distill import counts
from rl.features.roles.stream_schedule import Batches


@pytest.mark.parametrize("count", [1, 3, 4, 8])
@pytest.mark.parametrize("shares", [(1.0, 0.0), (0.0, 1.0), (0.5, 0.5), (0.35, 0.05), (0.5, 0.2), (0.0, 0.0)])
def test_prompts_are_divided_in_the_shares(count, shares):
    own = taught = 0
    for step in range(200):
        options = dict(student_share=shares[0], teacher_share=shares[1])
        mine, theirs = counts(count, before=step * count, **options)
        assert mine >= 0 and theirs >= 0 and mine + theirs <= count
        own, taught = own + mine, taught + theirs
    assert own == pytest.approx(shares[0] * 200 * count, abs=1)
    assert taught == pytest.approx(shares[1] * 200 * count, abs=1)


@pytest.mark.parametrize("share", [1.0, 0.9, 0.35, 0.25])
def test_generators_number_the_same_groups(share):
    batches, number = Batches(4, share), 0
    for step in range(200):
        own, _ = counts(4, before=step * 4, student_share=share, teacher_share=0.0)
        groups = batches.groups(step)
        assert groups == range(number, number + own) and {batches.of(group) for group in groups} == {step}
        number += own
