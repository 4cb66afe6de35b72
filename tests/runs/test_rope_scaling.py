"""A run beyond the window of its model, with rotary scaling turned on by the config."""

import json

import pytest

from tests import bounds
from tests.spawn import RanksFailed
from tests.toy import train

WINDOW = ("model.rope_scaling.original_max_position_embeddings=8", "rollout.max_response_tokens=40")
YARN = ("model.rope_scaling.rope_type=yarn", "model.rope_scaling.factor=8.0", *WINDOW)


def test_trainer_and_engine_agree_beyond_the_window(config, tmp_path):
    export = ("checkpoint.export_hf=true", "run.max_steps=1", "training.cp=2")
    [step] = train(2, config, *YARN, *export)
    assert step["prompt_length/max"] + step["response_length/max"] > 4 * 8
    assert 0 < step["training/rollout_probs_diff_max"] <= bounds.TOY_LOGPROB
    written = json.loads((tmp_path / "run" / "hf" / "config.json").read_text())
    assert written["max_position_embeddings"] == 64 and "rope_parameters" not in written
    assert written["rope_scaling"] == dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=8)
    with pytest.raises(RanksFailed, match="the model has 64 positions"):
        longer = "rollout.max_response_tokens=49"
        train(1, config, f"model.path={tmp_path}/run/hf", longer, run=tmp_path / "longer")
