"""The section teacher: accepted keys, and refusals, for example of teacher.path with algorithm=grpo."""

import pytest

from rl.config.checks import check
from rl.config.needs import keeps_reference, learns_from_data, needs_early_logprobs, needs_reward
from tests.configs import config_with, refusal


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm=distill", "teacher.path=t", "teacher.top_k=64", "teacher.divergence=forward_kl"),
        ("algorithm=distill", "teacher.sources={a: t, b: u}", "teacher.student_share=0.5"),
        ("algorithm=distill", "teacher.path=t", "teacher.student_share=0.5", "teacher.teacher_share=0.5"),
        ("algorithm=distill", "teacher.self_taught=initial", 'teacher.template="{prompt}: {ground_truth}"'),
        ("algorithm=grpo", "teacher.path=t", "teacher.advantage_coef=0.1"),
    ],
)
def test_teachers_are_accepted(overrides):
    assert check(config_with(*overrides)) == []


def test_what_a_teacher_needs():
    distill = config_with("algorithm=distill", "teacher.path=t")
    assert not needs_reward(distill) and not learns_from_data(distill) and not keeps_reference(distill)
    assert learns_from_data(config_with("algorithm=distill", "teacher.path=t", "teacher.student_share=0.9"))
    own = ("algorithm=distill", "teacher.self_taught=initial", 'teacher.template="{prompt}{feedback}"')
    assert needs_reward(config_with(*own)) and keeps_reference(config_with(*own))
    assert needs_early_logprobs(config_with("teacher.path=t", "teacher.advantage_coef=0.1"))


DISTILL = ("algorithm=distill", "teacher.path=t")
COEF = "teacher.advantage_coef=0.1"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("teacher.path=t",), """teacher.path="t" has no effect with algorithm=grpo"""),
        (("teacher.path=t", COEF, "teacher.top_k=4"), "leave it out, or set algorithm=distill"),
        ((*DISTILL, "teacher.beta=0.1"), "no effect with teacher.divergence=reverse_kl; "),
        ((*DISTILL, 'teacher.template="{prompt}?"'), "no effect with teacher.self_taught=none; leave"),
        ((*DISTILL, "teacher.divergence=jensen_shannon", "teacher.beta=1.0"), "teacher.beta=1.0 makes"),
        (("algorithm=distill",), "teacher.path is empty"),
        ((*DISTILL, "teacher.self_taught=present"), "leave out one of them"),
        ((*DISTILL, "teacher.sources={a: 3}"), "teacher.sources.a=3 must be the path"),
        ((*DISTILL, "teacher.student_share=0.7", "teacher.teacher_share=0.7"), "more than 1 together"),
        ((*DISTILL, "teacher.sources={a: u}", "teacher.teacher_share=0.1"), "more than 1 together"),
        (("algorithm=distill", "teacher.self_taught=present", 'teacher.template="x"'), "lacks {prompt}"),
        (
            ("algorithm=distill", "teacher.self_taught=present", 'teacher.template="{y}"'),
            "cannot be formatted",
        ),
    ],
)
def test_what_does_not_fit_is_refused(overrides, words):
    assert words in refusal(*overrides)
