"""A sweep in one job: its points are the runs that they would be alone, also after a resume.

The engine computes the tokens of all points in one batch. Products of another shape may be summed in another
order on some processors, so the metrics are compared up to CLOSE.
"""

import json
import shutil

import pyarrow.parquet as pq
import pytest

from tests.checkpoints import save_qwen2, save_qwen2_classifier
from tests.records import comparable
from tests.spawn import RanksFailed
from tests.toy import train

ADAPTER = ("adapter.kind=lora", "adapter.rank=4", "adapter.alpha=8", "adapter.in_engine=adapter")
STEPS = ("run.max_steps=4", "checkpoint.every=2", "checkpoint.keep_last=0")
CLOSE = dict(rel=1e-4, abs=1e-5)
POINTS = {
    "lr=0.003_seed=2": {"training.optimizer.lr": 3e-3, "run.seed": 2},
    "rank=8_kind=rslora_advantage=rloo": {
        "adapter.rank": 8,
        "adapter.kind": "rslora",
        "objective.advantage": "rloo",
    },
    "algorithm=dapo": {"algorithm": "dapo"},
}


def adapters(points):
    return "sweep.adapters=" + json.dumps(points)


def overrides(values):
    return [f"{key}={value}" for key, value in values.items()]


def alone(config, world_size, values, directory):
    train(world_size, config, *ADAPTER, *STEPS, *overrides(values), run=directory)
    return comparable(directory)


def assert_close(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert one == pytest.approx(other, **CLOSE)


def test_points_are_the_runs_that_they_are_alone(config, tmp_path):
    sweep = tmp_path / "run"
    together = (*ADAPTER, *STEPS, adapters(list(POINTS.values())))
    train(2, config, *together)
    status = json.loads((sweep / "status.json").read_text())
    assert {status[key] for key in ("step", "checkpoint_step", "max_steps")} == {4 * len(POINTS)}
    for name, values in list(POINTS.items())[1:]:
        assert_close(alone(config, 2, values, tmp_path / name), comparable(sweep / name))
    # Two points lose their last checkpoint; the third is not taken up again.
    before = {name: comparable(sweep / name) for name in POINTS}
    lost, _, over = POINTS
    for name in POINTS:
        if name != over:
            shutil.rmtree(sweep / name / "checkpoints" / "step_000004")
    train(2, config, *together)
    for name in POINTS:
        assert_close(comparable(sweep / name), before[name])
    assert json.loads((sweep / lost / "status.json").read_text())["state"] == "finished"


@pytest.mark.slow
@pytest.mark.covers("sweep", "teacher", "reward model", "judge")
def test_points_share_teacher_reward_model_and_judge(config, toy, tmp_path):
    (tmp_path / "parse.py").write_text("def parse(text):\n    return len(text) % 5 / 4\n")
    judge = dict(
        path=f"{toy}/model",
        parser=f"{tmp_path}/parse.py:parse",
        max_prompt_tokens=48,
        max_response_tokens=8,
        template="'{response}'",
    )
    models = [f"reward.judge.{key}={value}" for key, value in judge.items()]
    models += [f"reward.model.path={save_qwen2_classifier(tmp_path / 'classifier', seed=3)}"]
    models += [f"teacher.path={save_qwen2(tmp_path / 'teacher', seed=5)}", "teacher.advantage_coef=0.5"]
    models += ["training.offload=all", "checkpoint.background=true"]
    points = [{"run.seed": 2}, {"training.optimizer.lr": 3e-3}]
    train(2, config, *ADAPTER, *models, "run.max_steps=2", "checkpoint.every=1", adapters(points))
    values = {"training.optimizer.lr": 3e-3, "run.max_steps": 2}
    train(2, config, *ADAPTER, *models, *overrides(values), run=tmp_path / "alone")
    found = comparable(tmp_path / "run" / "lr=0.003")
    assert_close(comparable(tmp_path / "alone"), found)
    assert found[0]["teacher/advantage_of_teacher/abs"] > 0
    # Both go on from checkpoints that were written while the other point ran.
    train(2, config, *ADAPTER, *models, "run.max_steps=3", "checkpoint.every=1", adapters(points))
    assert comparable(tmp_path / "run" / "lr=0.003")[:2] == found and len(found) == 2


def test_longest_first_keeps_prompts_and_their_baselines(config, toy, tmp_path):
    """From the second epoch on, prompts start in another order than they were drawn in."""
    stops = f"rollout.stop_token_ids={list(range(10, 22))}"  # so that lengths differ
    pq.write_table(pq.read_table(toy / "train.parquet").slice(0, 8), data := tmp_path / "train.parquet")
    options = ("algorithm=remax", "rollout.longest_first=true", f"data.train=[{data}]", stops)
    train(1, config, *ADAPTER, *options, adapters([{}]))
    train(1, config, *ADAPTER, *options, run=tmp_path / "alone")
    assert_close(comparable(tmp_path / "alone"), comparable(tmp_path / "run" / "base"))


def test_a_point_that_diverges_is_named(config):
    points = [{"training.optimizer.lr": 1e-3}, {"training.optimizer.lr": 1e30}]
    with pytest.raises(RanksFailed, match=r"PointFailed: point lr=1e\+30: FloatingPointError"):
        train(1, config, *ADAPTER, adapters(points))


def test_halving_leaves_the_best_points(config, tmp_path):
    points = [{"training.optimizer.lr": lr} for lr in (1e-3, 3e-3, 1e-2, 0.0)]
    rule = ("sweep.stop=halving", "sweep.first=1", "run.max_steps=4", "checkpoint.every=1")
    train(1, config, *ADAPTER, *rule, adapters(points))
    states = [json.loads(path.read_text()) for path in sorted((tmp_path / "run").glob("*/status.json"))]
    early = [state for state in states if state["reason"].startswith("sweep.stop=halving")]
    assert len(states) == 4 and len(early) == 3
    assert all(state["state"] == "finished" and state["step"] < 4 for state in early)


JUDGED = """
import torch.distributed as dist

from rl.algorithms import grpo

NEEDS = ("samples", "reward", "groups")
DEFAULTS = {"objective.advantage": "grpo", "objective.loss": "ppo"}


def collect(phases):
    return grpo.collect(phases)


def learn(phases, batch):
    grpo.learn(phases, batch)
    seed = phases.config.run.seed
    phases.metrics["own/rank"] = float("nan") if seed == 4 else seed * (1 - 2 * dist.get_rank())
"""


@pytest.mark.slow
def test_rank_0_decides_which_points_end_also_after_a_resume(config, tmp_path):
    """The ranks' values are in opposite orders, and one point's are not finite."""
    (tmp_path / "judged.py").write_text(JUDGED)
    rule = ("sweep.stop=halving", "sweep.first=2", "sweep.metric=own/rank")
    points = adapters([{"run.seed": seed} for seed in (4, 1, 2, 3)])
    options = (f"algorithm={tmp_path}/judged.py", *ADAPTER, *STEPS, *rule, points)

    def ended():
        found = {
            path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("run/*/status.json")
        }
        return {name: s["reason"] for name, s in found.items() if s["reason"]}

    train(2, config, *options)
    before = ended()
    assert before.keys() == {"seed=4", "seed=1"}
    # As if the job had been killed before anything of the decision was written.
    for directory in (tmp_path / "run").glob("seed=*"):
        (directory / "status.json").unlink()
        for checkpoint in (directory / "checkpoints").glob("step_00000[34]"):
            shutil.rmtree(checkpoint)
    train(2, config, *options)
    assert ended() == before
