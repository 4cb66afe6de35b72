"""Checkpoints of a run: any layout continues what another one began; SFT runs show it in seconds."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

from tests import bounds
from tests.checkpoints import SIZES, save_qwen2
from tests.full_disk import full_disk
from tests.spawn import LOCKSTEP, ROOT, RanksFailed, run_ranks
from tests.toy import SFT, write_config
from tests.toy import train as train_ranks

GRADIENT = bounds.of_gradient(SIZES["num_hidden_layers"], SIZES["hidden_size"])
"""Relative bound of a loss and a norm. An epsilon of 1e-2 keeps Adam from amplifying it in the second step.
"""


@pytest.fixture(scope="module")
def config(toy, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("store")
    model = save_qwen2(directory / "model", seed=7, tie=True)
    options = (
        "run.max_steps=4",
        "training.optimizer.weight_decay=0.1",
        "training.optimizer.eps=1.0e-2",
        "checkpoint.every=1",
    )
    return write_config(directory, toy, *SFT, f"model.path={model}", *options)


def train(world_size: int, config: Path, directory: Path, *overrides: str) -> dict[int, dict]:
    records = train_ranks(world_size, config, *overrides, run=directory, timeout=120)
    return {record["training/global_step"]: record for record in records}


def checkpoints(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").glob("step_*"))


@pytest.mark.slow  # weights and optimizer alone: test_layouts.py
def test_a_run_continues_on_another_world_and_layout(config, tmp_path):
    straight = train(2, config, tmp_path / "straight")
    layouts = {
        "one_rank": (1,),
        "pp2": (2, "training.pp=2"),
        "tp2": (2, "training.tp=2"),
        "tp2_pp2": (4, "training.tp=2", "training.pp=2"),
    }
    for name, (world_size, *layout) in layouts.items():
        train(2, config, tmp_path / name, "run.max_steps=2")
        resumed = train(world_size, config, tmp_path / name, *layout)
        assert resumed.keys() == {1, 2, 3, 4}
        for step in (3, 4):
            for metric in ("sft/loss", "actor/grad_norm"):
                expected = pytest.approx(straight[step][metric], rel=GRADIENT)
                assert resumed[step][metric] == expected, (name, step, metric)
        environments = {path.name for path in (tmp_path / name).glob("environment*.json")}
        assert environments == {"environment.json", "environment-after-step-0.json"}


def test_the_newest_are_kept_and_partial_ones_do_not_count(config, tmp_path):
    train(1, config, tmp_path, "checkpoint.keep_last=2")
    assert checkpoints(tmp_path) == ["step_000003", "step_000004"]
    (tmp_path / "checkpoints" / "step_000004").rename(tmp_path / "checkpoints" / "step_000004.partial")
    train(1, config, tmp_path, "checkpoint.keep_last=1")
    assert json.loads((tmp_path / "environment.json").read_text())["after_step"] == 3
    assert checkpoints(tmp_path) == ["step_000004"]


def test_retention_keeps_multiples_and_the_best(config, tmp_path):
    best = ("checkpoint.keep_best=1", "checkpoint.best_metric=sft/loss", "checkpoint.best_is=highest")
    records = train(
        1, config, tmp_path, "run.max_steps=6", "checkpoint.keep_last=1", "checkpoint.keep_every=2", *best
    )
    worst = max(records, key=lambda step: records[step]["sft/loss"])
    assert checkpoints(tmp_path) == [f"step_{step:06d}" for step in sorted({2, 4, 6, worst})]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_000006\n"


def test_a_run_starts_from_another_runs_checkpoint(config, tmp_path):
    first = train(2, config, tmp_path / "first")
    longer = ("run.max_steps=5", "checkpoint.background=true")
    assert train(2, config, tmp_path / "second", *longer, f"checkpoint.resume={tmp_path}/first").keys() == {5}
    # Once the run has a checkpoint of its own, it uses that.
    (tmp_path / "first").rename(tmp_path / "gone")
    assert train(
        2, config, tmp_path / "second", "run.max_steps=6", f"checkpoint.resume={tmp_path}/first"
    ).keys() == {5, 6}
    one = f"checkpoint.resume={tmp_path}/gone/checkpoints/step_000003"
    alone = (one, "checkpoint.weights_only=true", "model.dtype=bfloat16")
    weights = train(1, config, tmp_path / "third", "run.max_steps=1", *alone)
    assert weights[1]["sft/loss"] < first[1]["sft/loss"] - 0.1  # of the same prompts
    with pytest.raises(RanksFailed) as failure:
        train(1, config, tmp_path / "fourth", f"checkpoint.resume={tmp_path}/first")
    assert failure.value.returncodes == [2]
    assert "is neither a checkpoint nor the directory of a run with one" in failure.value.stderr[0]


def test_a_read_only_run_directory_is_refused(config, read_only):
    with pytest.raises(RanksFailed) as failure:
        train(2, config, read_only / "run")
    assert set(failure.value.returncodes) == {2} and "Read-only file system" in failure.value.stderr[0]


@pytest.fixture
def read_only(tmp_path):
    command = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("no file system can be mounted here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_finished_run_can_still_be_exported(config, tmp_path):
    train(2, config, tmp_path, "run.max_steps=1")
    results = ("metrics.jsonl", "environment.json", "checkpoint.json", "state.json")
    written = {path: path.read_bytes() for path in tmp_path.rglob("*.json*") if path.name in results}
    assert len(written) == len(results)
    train(1, config, tmp_path, "run.max_steps=1", "checkpoint.export_hf=true")
    assert all(path.read_bytes() == content for path, content in written.items())
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert exported.config.tie_word_embeddings and exported.dtype is torch.float32


def test_a_full_disk_at_an_export_is_a_fault(config, tmp_path):
    """It ended in a traceback of rank 0, for which the other ranks waited."""
    train(2, config, tmp_path, "run.max_steps=1")
    more = f"run.dir={tmp_path}", "run.max_steps=1", "checkpoint.export_hf=true"
    with pytest.raises(RanksFailed) as failure, full_disk(50_000):
        run_ranks(2, ROOT / "train_rl.py", "--config", config, *more, fresh=True, timeout=200)
    assert set(failure.value.returncodes) == {2}
    text = failure.value.stderr[0]
    assert f"error: the export {tmp_path}/hf could not be written: " in text and "File too large" in text
    assert "Traceback" not in text and not list(tmp_path.glob("hf*"))
    train(1, config, tmp_path, *more[1:])
    assert (tmp_path / "hf" / "model.safetensors").exists()


def test_resume_never_refuses_a_run_with_checkpoints(config, tmp_path):
    train(1, config, tmp_path, "run.max_steps=1")
    with pytest.raises(RanksFailed) as failure:
        train(2, config, tmp_path, "checkpoint.resume=never")
    assert set(failure.value.returncodes) == {2}
    assert "checkpoint.resume=never" in failure.value.stderr[0] and "run.dir" in failure.value.stderr[0]
    assert checkpoints(tmp_path) == ["step_000001"]


def test_another_run_neither_continues_a_directory_nor_changes_its_status(config, tmp_path):
    train(1, config, tmp_path, "run.max_steps=2")
    with pytest.raises(RanksFailed) as failure:
        train(1, config, tmp_path, "run.max_steps=1", "run.name=other")
    assert (
        failure.value.returncodes == [2] and "belongs to another run (checkpoint " in failure.value.stderr[0]
    )
    train(1, config, tmp_path, "run.max_steps=1", "training.optimizer.lr=1e-4")
    status = json.loads((tmp_path / "status.json").read_text())
    assert [status[key] for key in ("state", "step", "max_steps")] == ["finished", 2, 2]


def test_any_checkpoint_can_be_exported_in_another_layout(config, tmp_path):
    train(2, config, tmp_path, "run.max_steps=2", "checkpoint.export_hf=true")
    tool = (LOCKSTEP, "export")
    # The first start's model may have been moved; the checkpoint names the present one.
    started = yaml.safe_load((tmp_path / "config.yaml").read_text())
    started["model"]["path"] = "/nowhere"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(started))
    run_ranks(2, *tool, tmp_path, "--out", tmp_path / "now", "--pp", 2, timeout=120)
    run_ranks(1, *tool, tmp_path, "--out", tmp_path / "first", "--step", 1, timeout=120)
    at_end, now, first = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "now", "first"))
    assert at_end.keys() == now.keys() and all(torch.equal(at_end[name], now[name]) for name in now)
    assert any(not torch.equal(first[name], now[name]) for name in now)
    with pytest.raises(RanksFailed) as failure:
        run_ranks(1, *tool, tmp_path, "--out", tmp_path / "none", "--step", 7, timeout=120)
    assert failure.value.returncodes == [2] and "one of step 1, step 2" in failure.value.stderr[0]
