"""A run that goes on from a checkpoint is bitwise the run that never stopped: its metrics and all that it
saves. GRPO's test is in test_train_rl.py."""

import shutil

import pytest

from tests.checkpoints import assert_same_checkpoint
from tests.records import comparable
from tests.toy import train

ALGORITHMS = {
    "ppo": (
        "algorithm=ppo",
        "critic.optimizer.lr=1e-3",
        "critic.warmup_steps=1",
        "objective.reward_kl.controller=adaptive",
        "objective.reward_kl.coef=0.1",
        "objective.reward_kl.horizon=100",
        "objective.adaptive_entropy.target=100",
        "objective.adaptive_entropy.delta=0.001",
    ),
    "compact": ("training.optimizer.moments=bfloat16", "training.optimizer.host_share=0.5", "training.cp=2"),
    "dapo": (
        "algorithm=dapo",
        "dynamic_sampling.prompts_per_round=6",
        "reward.overlong_buffer_tokens=3",
        "rollout.samples_per_prompt=2",  # of more samples few groups have equal scores, to be replaced
    ),
}
FOUR_STEPS = ("run.max_steps=4", "checkpoint.every=2", "checkpoint.keep_last=0")


@pytest.mark.slow  # GRPO's is in test_train_rl.py
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_resumed_run_is_the_undisturbed_one(config, tmp_path, algorithm):
    overrides = (*ALGORITHMS[algorithm], *FOUR_STEPS, "training.optimizer.weight_decay=0.01")
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    train(2, config, *overrides, run=straight)
    # What a run that was killed after step 2 leaves; in another directory, as that is part of no result.
    shutil.copytree(straight, killed)
    (killed / "checkpoints" / "step_000004").rename(killed / "checkpoints" / "step_000004.partial")
    first, *_ = (killed / "metrics.jsonl").read_text().splitlines()
    (killed / "metrics.jsonl").write_text(first + "\n")  # and before it wrote the record of that step
    train(2, config, *overrides, run=killed)
    records = comparable(straight)
    assert comparable(killed) == records
    *others, _ = (killed / "metrics.jsonl").read_text().splitlines(keepends=True)
    (killed / "metrics.jsonl").write_text("".join(others))  # and one killed between its last save and record
    train(2, config, *overrides, run=killed)
    assert comparable(killed) == records
    assert [record["training/global_step"] for record in records] == [1, 2, 3, 4]
    assert_same_checkpoint(*(run / "checkpoints" / "step_000004" for run in (straight, killed)))
    if algorithm == "ppo":  # or there would be nothing to carry over
        weights = [record["actor/reward_kl_penalty_coeff"] for record in records]
        assert weights[0] != weights[2] != weights[3]
        bonus = [record.get("actor/entropy_coef") for record in records]  # of step 1 none: critic only
        assert bonus[0] is None and bonus[1:] == pytest.approx([0.0, 0.001, 0.002])
    elif algorithm == "dapo":
        # Before the checkpoint too, or the place in the data would follow from the number of steps.
        assert all(max(record["dapo/rounds"] for record in part) > 2 for part in (records[:2], records[2:]))
