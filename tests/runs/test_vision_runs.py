"""Runs with images: learning, resuming and exporting; runs without them import nothing of it."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.checkpoints import assert_same_checkpoint, save_tiny
from tests.records import comparable
from tests.spawn import LOCKSTEP, run_ranks
from tests.toy import train
from tools.make_image_toy import make_image_toy

GRPO = (
    "algorithm=grpo",
    "validation.loss=false",
    "validation.greedy=true",
    "training.optimizer.lr=3.0e-4",
    "objective.entropy_coef=0.02",
    "rollout.samples_per_prompt=16",
    "rollout.deterministic=true",
    "rollout.cpu_kv_cache_mib=64",
    "reward.workers=1",
)


@pytest.fixture(scope="module")
def squares(tmp_path_factory) -> Path:
    return make_image_toy(tmp_path_factory.mktemp("squares"), rows=2000)


def write_config(directory: Path, squares: Path) -> Path:
    """Return the config of a supervised run on the squares."""
    config = {
        "algorithm": "sft",
        "run": {"name": "squares", "max_steps": 30},
        "model": {"path": f"{squares}/model", "dtype": "float32", "vision": "train"},
        "data": {
            "train": [f"{squares}/train.parquet"],
            "val": [f"{squares}/test.parquet"],
            "image_key": "images",
            "max_prompt_tokens": 32,
            "prompts_per_step": 32,
        },
        "training": {"micro_batch_tokens": 2048, "optimizer": {"lr": 1.0e-3}},
        "rollout": {"max_response_tokens": 8},
        "validation": {"every": 30},
        "logging": {"tensorboard": False},
    }
    path = directory / "config.yaml"
    path.write_text(yaml.dump(config))
    return path


@pytest.mark.slow
def test_colours_are_learned_from_images_only(tmp_path, squares):
    config = write_config(tmp_path, squares)
    shuffled = f"data.train=[{squares}/shuffled.parquet]"
    *_, learned = train(1, config, "run.max_steps=60", run=tmp_path / "sft")
    assert learned["val/loss"] < 0.05
    # It answers with some colour: -ln(1/4) over five or six tokens.
    *_, guessed = train(1, config, shuffled, "checkpoint.export_hf=true", run=tmp_path / "start")
    assert guessed["val/loss"] > 0.2
    start = f"model.path={tmp_path / 'start' / 'hf'}"
    for data, run in (((), "grpo"), ((shuffled,), "grpo-shuffled")):
        found = train(
            1, config, start, *GRPO, *data, "run.max_steps=60", "validation.every=60", run=tmp_path / run
        )
        accuracy = [each for record in found for name, each in record.items() if "/acc/mean@1" in name]
        assert accuracy[0] < 0.4
        assert accuracy[-1] >= 0.9 if run == "grpo" else accuracy[-1] < 0.4


@pytest.mark.slow
@pytest.mark.parametrize("how", ["train", "frozen", "adapter"])
def test_a_resumed_run_continues_exactly(tmp_path, squares, how):
    config = write_config(tmp_path, squares)
    vision = "train" if how == "train" else "frozen"
    keys = (*GRPO, f"model.vision={vision}", "checkpoint.every=2")
    keys += ("checkpoint.keep_last=0", "validation.every=0")
    if how == "adapter":
        keys += ("adapter.kind=lora", "adapter.in_engine=adapter", "objective.kl_coef=0.01")
    keys += ("data.prompts_per_step=8", "rollout.samples_per_prompt=4", "training.pp=2")
    whole = train(2, config, *keys, "run.max_steps=3", run=tmp_path / "whole")
    train(2, config, *keys, "run.max_steps=2", run=tmp_path / "parts")
    train(2, config, *keys, "run.max_steps=3", run=tmp_path / "parts")
    assert comparable(tmp_path / "parts") == comparable(tmp_path / "whole")
    assert_same_checkpoint(*(tmp_path / name / "checkpoints" / "step_000003" for name in ("whole", "parts")))
    assert whole[-1]["perf/held_bytes_received"] == whole[-1]["perf/held_bytes_planned"]
    exported = train(2, config, *keys, "run.max_steps=3", "checkpoint.export_hf=true", run=tmp_path / "parts")
    assert exported and json.loads((tmp_path / "parts" / "hf" / "config.json").read_text())["vision_config"]
    assert (tmp_path / "parts" / "adapter").exists() == (how == "adapter")
    run_ranks(1, LOCKSTEP, "export", tmp_path / "parts", "--out", tmp_path / "later", timeout=200)
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("later", "parts/hf")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())


@pytest.mark.slow
def test_layers_that_add_inner_outputs_are_recomputed_equally(tmp_path, squares):
    config = write_config(tmp_path, squares)
    model = save_tiny("Qwen3VLForConditionalGeneration", tmp_path / "model", seed=0)
    keys = (*GRPO, f"model.path={model}", "validation.every=0", "run.max_steps=2")
    keys += ("data.prompts_per_step=8", "rollout.samples_per_prompt=4")

    def run(name: str, *more: str) -> list[dict]:
        return train(1, config, *keys, *more, run=tmp_path / name)

    kept, recomputed = run("kept"), run("recomputed", "training.recompute=full")
    assert [r["actor/grad_norm"] for r in recomputed] == [r["actor/grad_norm"] for r in kept]
    assert len(run("bfloat16", "model.dtype=bfloat16", "training.recompute=full")) == 2


@pytest.mark.slow
def test_a_teacher_sees_the_images(tmp_path, squares):
    """A teacher with the policy's weights has the policy's distributions, until the policy moves."""
    keys = ("algorithm=distill", f"teacher.path={squares}/model", *GRPO[1:3], *GRPO[5:8], "run.max_steps=2")
    keys += ("data.prompts_per_step=8", "validation.every=0", "training.pp=2")
    first, _ = train(2, write_config(tmp_path, squares), *keys)
    assert first["distill/divergence"] < 1e-6 and first["actor/grad_norm"] < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("game", ["Views", "Shown"])
def test_images_that_an_environment_returns_reach_engine_and_trainer(tmp_path, squares, game):
    """The engine's log-probs of turns after images are the trainer's, on two pipeline stages."""
    rows = pq.read_table(squares / "train.parquet").slice(0, 16).to_pylist()
    for row in rows[::2]:  # prompts without an image
        row["images"], row["prompt"][0]["content"] = [], "colour?"
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    config = write_config(tmp_path, squares)
    keys = (*GRPO, f"data.train=[{tmp_path}/rows.parquet]", "run.max_steps=2", "validation.every=0")
    keys += ("data.prompts_per_step=4", "rollout.samples_per_prompt=2", "training.pp=2")
    file = Path(__file__).parent / "image_game.py"
    keys += (f"agents.environment={file}:{game}", "agents.workers=1", "agents.max_tokens_per_turn=6")
    keys += ("rollout.max_response_tokens=90", "agents.max_turns=4")
    found = train(2, config, *keys)
    for record in found:
        assert record["num_turns/min"] == 4
        assert record["perf/held_bytes_received"] == record["perf/held_bytes_planned"] > 0
        assert record["training/logprob_gap"] < record["training/logprob_gap_limit"]
