"""A run with FP8 weights in the engine corrects for them, and continues bitwise after a resume."""

import pytest

from tests.records import comparable
from tests.toy import train, write_config
from tools.make_toy import make_toy

LORA = ("adapter.kind=lora", "adapter.rank=4", "adapter.in_engine=merged")
FP8 = ("model.dtype=bfloat16", "rollout.quantization=fp8", "checkpoint.every=2")


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), LORA])
def test_a_run_in_fp8_is_corrected_and_resumed(toy, tmp_path, more):
    blocks = make_toy(tmp_path / "blocks", hidden=128, heads=4, kv_heads=4, intermediate=128)
    config = write_config(tmp_path, toy, f"model.path={blocks}/model")
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    found = train(2, config, *FP8, *more, "run.max_steps=4", run=whole)
    train(2, config, *FP8, *more, "run.max_steps=2", run=resumed)
    train(2, config, *FP8, *more, "run.max_steps=4", run=resumed)
    assert comparable(whole) == comparable(resumed)
    # The engine's weights are rounded, so its probabilities are not the trainer's.
    assert all(abs(record["rollout_corr/rollout_is_mean"] - 1) > 1e-5 for record in found)
