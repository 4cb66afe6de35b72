"""Whole runs with several chunks of the model per pipeline stage (`training.vpp`)."""

import shutil

import pytest

from tests.checkpoints import assert_same_checkpoint, save_tiny
from tests.records import comparable
from tests.toy import train

PIPELINE = ("training.pp=2", "run.max_steps=2", "checkpoint.every=1", "checkpoint.keep_last=0")
RUNS = {
    # Micro-batches of 4 or more, so that both schedules have the same ones.
    "ppo": ("algorithm=ppo", "critic.optimizer.lr=1e-3", "critic.warmup_steps=0"),
    "replay": ("training.router_replay=engine", "training.recompute=full"),
    "adapters": ("adapter.kind=lora", "adapter.rank=4", "training.optimizer.lr=1e-2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_continues_with_other_chunks(config, tmp_path, name):
    """Step 2 from the checkpoint of step 1 is the same with chunks and without, and the run learns."""
    kind = "Qwen3MoeForCausalLM" if name == "replay" else "Qwen2ForCausalLM"
    model = save_tiny(kind, tmp_path / "model", seed=1, num_hidden_layers=5)
    options = (f"model.path={model}", *PIPELINE, *RUNS[name], "rollout.deterministic=true")
    options += ("training.micro_batch_tokens=64",)
    chunks, plain = tmp_path / "chunks", tmp_path / "plain"
    train(2, config, *options, "training.vpp=2", run=chunks)
    shutil.copytree(chunks, plain)
    (plain / "checkpoints" / "step_000002").rename(plain / "checkpoints" / "step_000002.partial")
    first, *_ = (plain / "metrics.jsonl").read_text().splitlines()
    (plain / "metrics.jsonl").write_text(first + "\n")
    train(2, config, *options, run=plain)
    with_chunks, without = (comparable(run)[-1] for run in (chunks, plain))
    assert with_chunks.keys() == without.keys()
    assert with_chunks["actor/grad_norm"] > 0
    for key, value in with_chunks.items():
        assert without[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    print(name, {key: (value, without[key]) for key, value in with_chunks.items() if value != without[key]})
    if name == "ppo":  # and back, exactly
        again = tmp_path / "again"
        shutil.copytree(chunks, again)
        (again / "checkpoints" / "step_000002").rename(again / "checkpoints" / "step_000002.partial")
        (again / "metrics.jsonl").write_text(first + "\n")
        train(2, config, *options, "training.vpp=2", run=again)
        assert comparable(again) == comparable(chunks)
        assert_same_checkpoint(*(run / "checkpoints" / "step_000002" for run in (chunks, again)))
