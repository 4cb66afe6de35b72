"""A run that goes on from a checkpoint is the run that never stopped, bit for bit: metrics, weights, optimizer, everything that
is saved. GRPO's test is in tests/runs/test_train_rl.py."""

import shutil
from pathlib import Path

import pytest

from tests.checkpoints import assert_same_checkpoint
from tests.spawn import ROOT, run_ranks
from tests.records import comparable
from tools.make_toy import make_toy

ALGORITHMS = {
    "ppo": (
        "algorithm=ppo", "critic.optimizer.lr=1e-3", "critic.warmup_steps=1", "objective.reward_kl.controller=adaptive",
        "objective.reward_kl.coef=0.1", "objective.reward_kl.horizon=100",
    ),
    "dapo": ("algorithm=dapo", "dynamic_sampling.prompts_per_round=6", "reward.overlong_buffer_tokens=3"),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """Four steps on two ranks, a checkpoint after each second one."""
    directory = make_toy(tmp_path_factory.mktemp("toy"), layers=2, intermediate=128)
    (directory / "reward.py").write_text(
        "def score(prompt, response, ground_truth, **extra):\n    return {'score': len(set(response)) / 6, 'acc': 0.0}\n"
    )
    (directory / "config.yaml").write_text(
        f"""
        run: {{name: test, max_steps: 4}}
        model: {{path: {directory}/model, dtype: float32}}
        data: {{train: [{directory}/train.parquet], max_prompt_tokens: 16, prompts_per_step: 8}}
        training: {{micro_batch_tokens: 200, prompts_per_minibatch: 4, optimizer: {{lr: 1.0e-3, weight_decay: 0.01}}}}
        rollout: {{samples_per_prompt: 4, max_response_tokens: 6, deterministic: true, cpu_kv_cache_mib: 16}}
        reward: {{function: "{directory}/reward.py:score"}}
        checkpoint: {{every: 2, keep_last: 0}}
        logging: {{tensorboard: false}}
        """
    )
    return directory / "config.yaml"


def train(config: Path, directory: Path, *overrides: str) -> list[dict]:
    run_ranks(2, ROOT / "train_rl.py", "--config", config, f"run.dir={directory}", *overrides, timeout=400)
    return comparable(directory)


@pytest.mark.slow  # GRPO's is in tests/runs/test_train_rl.py
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_resumed_run_is_the_undisturbed_one(config, tmp_path, algorithm):
    overrides = ALGORITHMS[algorithm]
    straight = train(config, tmp_path / "straight", *overrides)
    # What a run that was killed after step 2 leaves; in another directory, as that is part of no result.
    shutil.copytree(tmp_path / "straight", tmp_path / "killed")
    (tmp_path / "killed" / "checkpoints" / "step_000004").rename(tmp_path / "killed" / "checkpoints" / "step_000004.partial")
    first, *_ = (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "killed" / "metrics.jsonl").write_text(first + "\n")  # and before it wrote the record of that step
    resumed = train(config, tmp_path / "killed", *overrides)
    assert [record["training/global_step"] for record in resumed] == [1, 2, 3, 4] and resumed == straight
    assert_same_checkpoint(*(tmp_path / name / "checkpoints" / "step_000004" for name in ("straight", "killed")))
    if algorithm == "ppo":  # or there would be nothing to carry over
        weights = [record["actor/reward_kl_penalty_coeff"] for record in straight]
        assert weights[0] != weights[2] != weights[3]
    else:
        assert any(record["dapo/rounds"] > 2 for record in straight)
