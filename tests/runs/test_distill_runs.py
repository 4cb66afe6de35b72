"""Runs with teachers from the command line, with real engines."""

import pytest

from tests import bounds
from tests.checkpoints import save_qwen2
from tests.spawn import ROOT
from tests.toy import UNSCORED, train
from tools.make_toy import make_toy

FEEDBACK = """
def score(prompt, response, ground_truth, **extra):
    return {"score": len(set(response)) / 6, "feedback": f"{len(response)} characters"}
"""


def test_responses_come_from_all_three_in_their_shares(config, tmp_path):
    teacher = save_qwen2(tmp_path / "teacher", seed=5)
    shares = ("teacher.student_share=0.5", "teacher.teacher_share=0.25")
    keys = ("teacher.divergence=jensen_shannon", "teacher.top_k=5", "training.tp=2", "training.offload=all")
    # The teacher of two layers is on the grid, and generates with an engine of its own.
    steps = train(2, config, "algorithm=distill", f"teacher.path={teacher}", *shares, *keys, *UNSCORED)
    for step in steps:
        assert step["distill/divergence"] > 0.01 and step["actor/grad_norm"] > 0
        assert step["timing_s/teacher"] > 0 and step["timing_s/teacher_gen"] > 0


def test_a_teacher_equal_to_the_policy_gives_no_advantage(config, toy):
    """Then only the reward's part is left, until the policy has moved."""
    teacher = (f"teacher.path={toy}/model", "teacher.advantage_coef=0.5")
    first, second = train(1, config, *teacher)
    assert first["teacher/advantage_of_teacher/abs"] <= 0.5 * bounds.TOY_LOGPROB
    assert second["teacher/advantage_of_teacher/abs"] > first["teacher/advantage_of_teacher/abs"]
    assert first["teacher/advantage_of_reward/abs"] > 0.1


def test_a_policy_teaches_itself_with_feedback(config, tmp_path):
    (tmp_path / "feedback.py").write_text(FEEDBACK)
    template = 'teacher.template="{prompt} {ground_truth} {feedback}"'
    own = ("algorithm=distill", "teacher.self_taught=initial", template, "teacher.max_prompt_tokens=40")
    reward = f"reward.function={tmp_path}/feedback.py:score"
    first, second = train(1, config, *own, reward, "teacher.divergence=forward_kl")
    assert first["distill/divergence"] > 1e-4 and second["critic/score/mean"] > 0


@pytest.mark.slow
def test_a_student_overtakes_grpo_at_equal_samples(tmp_path):
    """The teacher is GRPO's result after more steps. Both have the same start, samples and schedule."""
    make_toy(tmp_path / "toy")

    def accuracies(name, *overrides):
        files = (f"data.train=[{tmp_path}/toy/train.parquet]", f"run.dir={tmp_path}/{name}")
        limits = ("checkpoint.every=0", "checkpoint.export_hf=true", "logging.tensorboard=false")
        config, *rest = overrides
        records = train(2, ROOT / "configs" / config, *files, *limits, *rest, run=tmp_path / name)
        key = "val-core/addition/acc/mean@1"
        return {r["training/global_step"]: r[key] for r in records if key in r}

    accuracies("sft", "quickstart_sft.yaml", f"model.path={tmp_path}/toy/model", "checkpoint.resume=auto")
    start = (
        f"model.path={tmp_path}/sft/hf",
        f"data.val=[{tmp_path}/toy/test.parquet]",
        "validation.every=25",
    )
    teacher = accuracies("teacher", "quickstart.yaml", *start, "run.max_steps=75")
    few = "run.max_steps=12"
    grpo = accuracies("grpo", "toy/grpo.yaml", *start, few)
    student = accuracies("distill", "toy/distill.yaml", *start, few, f"teacher.path={tmp_path}/teacher/hf")
    # Accuracy on 500 held-out problems.
    assert grpo[0] == student[0] < grpo[12] < student[12]
    assert teacher[75] > grpo[12]
