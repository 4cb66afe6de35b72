"""Training models are offloaded while the engine generates: PPO with a critic and a reference."""

import json
from pathlib import Path

import pytest

from tests.records import comparable
from tests.spawn import run_ranks
from tests.toy import write_config

WORKER = Path(__file__).with_name("memory_worker.py")


def ppo_run(toy: Path, directory: Path, offload: str) -> tuple[list[list[int]], list[dict]]:
    """Return bytes of policy and critic before each generation on rank 0, and comparable metrics."""
    directory.mkdir()
    options = (
        "algorithm=ppo",
        "run.max_steps=3",
        "data.prompts_per_step=16",
        f"data.val=[{toy}/test.parquet]",
        f"training.offload={offload}",
        "critic.optimizer.lr=1.0e-3",
        "objective.kl_coef=0.01",
        "rollout.samples_per_prompt=2",
        "validation.every=1",
        "validation.max_prompts=8",
        "checkpoint.every=1",
        "checkpoint.export_hf=true",
    )
    config = write_config(directory, toy, *options)
    out = run_ranks(2, WORKER, "--config", config, timeout=300)[0]
    return [json.loads(line) for line in out.splitlines()], comparable(directory / "run")


@pytest.mark.slow
def test_models_hold_no_byte_while_the_engine_generates_and_metrics_and_weights_are_the_same_to_the_bit(
    toy, tmp_path
):
    held, metrics = {}, {}
    for offload in ("none", "optimizer", "all"):
        held[offload], metrics[offload] = ppo_run(toy, tmp_path / offload, offload)
    assert metrics["none"] == metrics["optimizer"] == metrics["all"] and len(metrics["all"]) == 4
    weights = [(tmp_path / mode / "run" / "hf" / "model.safetensors").read_bytes() for mode in held]
    assert weights[0] == weights[1] == weights[2]
    assert set(map(tuple, held["all"])) == {(0, 0)}  # of policy and critic
    assert all(0 < some < whole for some, whole in zip(held["optimizer"][-1], held["none"][-1]))
