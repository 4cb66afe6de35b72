"""Runs with teachers from the command line, with real engines."""

import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests import bounds
from tests.checkpoints import assert_same_checkpoint, save_qwen2, save_qwen2_classifier, save_tiny
from tests.records import comparable
from tests.runs.test_agents import BASE, WAVES
from tests.runs.test_carry_over import CARRIED
from tests.runs.test_roles import ROLES
from tests.spawn import ROOT
from tests.toy import UNSCORED, train
from tools.consumed import count
from tools.make_toy import build_model, build_tokenizer, make_toy

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


@pytest.mark.parametrize(
    "feature",
    [
        "rollout.top_p=1.0",
        pytest.param("rollout.top_p=0.8", marks=pytest.mark.slow),
        pytest.param("model.numerics=bitwise", marks=pytest.mark.slow),
    ],
)
def test_a_teacher_equal_to_the_policy_gives_no_advantage(config, toy, feature):
    """Then only the reward's part is left, until the policy has moved."""
    teacher = (f"teacher.path={toy}/model", "teacher.advantage_coef=0.5")
    first, second = train(1, config, *teacher, feature)
    assert first["teacher/advantage_of_teacher/abs"] <= 0.5 * bounds.TOY_LOGPROB
    assert second["teacher/advantage_of_teacher/abs"] > first["teacher/advantage_of_teacher/abs"]
    assert first["teacher/advantage_of_reward/abs"] > 0.1


def renumbered(model: Path, out: Path) -> Path:
    """Copy a model whose tokens "1" and "7" have each other's ids: the same model of text."""
    shutil.copytree(model, out)
    tokenizer, weights = out / "tokenizer.json", load_file(out / "model.safetensors")
    content = json.loads(tokenizer.read_text())
    vocab = content["model"]["vocab"]
    vocab["1"], vocab["7"] = vocab["7"], vocab["1"]
    tokenizer.write_text(json.dumps(content))
    for name in [name for name in weights if name.endswith(("embed_tokens.weight", "lm_head.weight"))]:
        rows = [vocab["7"], vocab["1"]]
        weights[name][rows] = weights[name][rows[::-1]].clone()
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_a_teacher_reads_the_text_in_its_own_tokens(config, toy, tmp_path):
    coef = "teacher.advantage_coef=0.5"
    same = renumbered(toy / "model", tmp_path / "same")
    first, _ = train(2, config, f"teacher.path={same}", coef, "training.tp=2")
    assert first["teacher/advantage_of_teacher/abs"] <= 0.5 * bounds.TOY_LOGPROB
    words = build_tokenizer(words=["12", "+1", "00"])
    words.save_pretrained(tmp_path / "words")
    build_model(words, layers=2, intermediate=128).save_pretrained(tmp_path / "words")
    for step in train(2, config, f"teacher.path={tmp_path}/words", coef, run=tmp_path / "second"):
        assert 0.1 < step["teacher/advantage_of_teacher/abs"] < 100 and step["actor/grad_norm"] > 0


def test_a_policy_teaches_itself_with_feedback(config, tmp_path):
    (tmp_path / "feedback.py").write_text(FEEDBACK)
    template = 'teacher.template="{prompt} {ground_truth} {feedback}"'
    own = ("algorithm=distill", "teacher.self_taught=initial", template, "teacher.max_prompt_tokens=40")
    reward = f"reward.function={tmp_path}/feedback.py:score"
    first, second = train(1, config, *own, reward, "teacher.divergence=forward_kl")
    assert first["distill/divergence"] > 1e-4 and second["critic/score/mean"] > 0


def learned(run: Path, *patterns: str) -> list[dict]:
    """Return the comparable metrics of each step, without metrics that match a pattern."""
    left_out = re.compile("|".join(["staleness/", "training/epoch", "training/logprob_gap", *patterns]))
    return [
        {name: value for name, value in record.items() if not left_out.match(name)}
        for record in comparable(run)
    ]


@pytest.mark.covers("roles, lag 0", "critic", "teacher", "reward model")
def test_all_models_beside_generators_at_lag_0_equal_the_run_without_roles(config, tmp_path):
    """A teacher, a critic, a reward model and a judge, which generates on the ranks that train."""
    (tmp_path / "parse.py").write_text("def parse(text):\n    return len(text) % 5 / 4\n")
    judge = dict(
        path=save_qwen2(tmp_path / "judge", seed=4, max_position_embeddings=256),
        parser=f"{tmp_path}/parse.py:parse",
        max_prompt_tokens=200,
        max_response_tokens=8,
        template="'{prompt}{response}'",
    )
    models = [f"reward.judge.{key}={value}" for key, value in judge.items()]
    models += [f"reward.model.path={save_qwen2_classifier(tmp_path / 'classifier', seed=3)}"]
    models += [f"teacher.path={save_qwen2(tmp_path / 'teacher', seed=5)}", "teacher.advantage_coef=0.5"]
    models += ["algorithm=ppo", "rollout_correction.truncate_tokens=2", "rollout.samples_per_prompt=4"]
    train(1, config, *models, run=tmp_path / "alone")
    train(2, config, *models, *ROLES[:2], "roles.lag=0")
    assert learned(tmp_path / "run") == learned(tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["carried", "generators"])
def test_distillation_from_older_weights_resumes_exactly(config, tmp_path, form):
    """Without a correction, which the divergence at given tokens does not need."""
    teacher = save_qwen2(tmp_path / "teacher", seed=5)
    keys = ("algorithm=distill", f"teacher.path={teacher}", "rollout.samples_per_prompt=2", *UNSCORED)
    if form == "carried":
        without = [key for key in CARRIED if not key.startswith("rollout_correction")]
        keys += tuple(without)
    else:
        keys += (*ROLES[:2], "roles.granularity=group", "roles.refit_after_steps=4")
    keys += ("teacher.student_share=0.45", "teacher.teacher_share=0.25")  # 3 or 4 of 8 prompts
    steps = ("run.max_steps=4", "checkpoint.every=2", "checkpoint.keep_last=0")
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    records = train(2, config, *keys, *steps, run=straight)
    shutil.copytree(straight, killed)
    shutil.rmtree(killed / "checkpoints" / "step_000004")
    train(2, config, *keys, *steps, run=killed)
    assert comparable(killed) == comparable(straight)
    assert_same_checkpoint(*(run / "checkpoints" / "step_000004" for run in (straight, killed)))
    assert records[-1]["staleness/max"] == 1 and records[-1]["distill/divergence"] > 0
    found = count(straight)
    assert found.is_exact and found.consumed == 14


TEMPLATE = 'teacher.template="{prompt} {ground_truth} {feedback}"'


@pytest.mark.slow
@pytest.mark.parametrize("form", ["one_turn", "agents"])
def test_train_only_repeats_a_run_with_a_teacher(config, tmp_path, form):
    """Feedback is stored with the samples; what the teacher computes is computed again."""
    (tmp_path / "feedback.py").write_text(FEEDBACK)
    keys = ["logging.rollouts=all"]
    if form == "agents":
        keys += [*BASE, WAVES, f"teacher.path={save_qwen2(tmp_path / 'teacher', seed=5)}"]
        keys += ["teacher.advantage_coef=0.5"]
    else:
        keys += ["algorithm=distill", "teacher.self_taught=initial", TEMPLATE]
        keys += [f"reward.function={tmp_path}/feedback.py:score", "teacher.max_prompt_tokens=40"]
    train(2, config, *keys, run=tmp_path / "whole")
    half = ("run.mode=train_only", f"run.rollouts={tmp_path}/whole")
    train(2, config, *keys, *half)
    found, expected = (learned(tmp_path / name, "agents/", "perf/", "reward/") for name in ("run", "whole"))
    assert found == expected and found[0]["actor/grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("form", ["agents", "replayed_experts"])
def test_a_context_equal_to_the_prompt_teaches_nothing(config, tmp_path, form):
    """A self-taught policy reads the conversations that it had; its own router chooses its experts."""
    keys = ["teacher.self_taught=present", 'teacher.template="{prompt}"', "teacher.advantage_coef=1"]
    keys += ["teacher.max_prompt_tokens=60"]
    if form == "agents":
        keys += [*BASE, WAVES]
    else:
        model = save_tiny("Qwen3MoeForCausalLM", tmp_path / "moe", seed=1)
        keys += [f"model.path={model}", "training.router_replay=engine"]
    for step in train(2, config, *keys):
        assert step["teacher/advantage_of_teacher/abs"] <= bounds.TOY_LOGPROB
        assert step["teacher/advantage_of_reward/abs"] > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("mixture", ["policy", "teacher"])
def test_a_mixture_beside_dense_models_has_the_metrics_of_ep_1(config, tmp_path, mixture):
    """The layout of experts applies to the mixture alone, not to a dense critic, reward model or teacher."""
    moe = save_tiny("Qwen3MoeForCausalLM", tmp_path / "moe", seed=1)
    dense = save_qwen2(tmp_path / "dense", seed=5)
    keys = [f"model.path={moe if mixture == 'policy' else dense}", "algorithm=ppo"]
    keys += [f"critic.path={dense}", "teacher.advantage_coef=0.5", "training.optimizer.lr=1e-4"]
    keys += [f"teacher.path={dense if mixture == 'policy' else moe}", "training.tp=2"]
    keys += [f"reward.model.path={save_qwen2_classifier(tmp_path / 'classifier', seed=3)}"]
    one = learned(tmp_path / "one") if train(2, config, *keys, run=tmp_path / "one") else []
    train(2, config, *keys, "training.ep=2")
    for found, expected in zip(learned(tmp_path / "run"), one, strict=True):
        for name in ("actor/grad_norm", "actor/pg_loss", "critic/grad_norm", "critic/vf_loss"):
            assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-4), name
        for name in ("reward/reward_model/mean", "teacher/advantage_of_teacher/abs"):
            assert found[name] == pytest.approx(expected[name], rel=1e-3), name


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
