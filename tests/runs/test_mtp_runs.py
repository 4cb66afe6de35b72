"""A run with a head that proposes tokens and learns: the policy learns bitwise as without the head."""

import re

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import save_tiny
from tests.records import comparable
from tests.toy import train, write_config

HEAD = ("rollout.draft.method=mtp", "rollout.draft.min_tokens_per_step=1", "training.mtp.head_lr=0.003")
OTHERS = re.compile("mtp/|perf/(draft|refit)|rollout_corr/|training/(rollout|logprob_gap)")
"""Metrics of the head, and of the engine's log-probs, which latent attention rounds."""


@pytest.mark.slow
def test_a_run_with_a_head_learns_the_same(toy, tmp_path):
    model = save_tiny("DeepseekV3ForCausalLM", tmp_path / "model", seed=3, num_nextn_predict_layers=1)
    layout = ("training.pp=2", "rollout.tp=2", "training.shared_prefix=false")
    shared = (f"model.path={model}", *layout, "rollout.top_p=0.9")
    config = write_config(tmp_path, toy, *shared)
    plain, whole, resumed = (tmp_path / name for name in ("plain", "whole", "resumed"))
    train(2, config, "run.max_steps=4", run=plain)
    found = train(2, config, *HEAD, "run.max_steps=4", "checkpoint.export_hf=true", run=whole)
    train(2, config, *HEAD, "run.max_steps=2", "checkpoint.every=2", run=resumed)
    train(2, config, *HEAD, "run.max_steps=4", "checkpoint.every=2", "checkpoint.export_hf=true", run=resumed)
    for record in found:
        print({name: record[name] for name in record if "mtp" in name or "draft" in name})
    assert found[-1]["mtp/acceptance"] > found[0]["mtp/acceptance"]
    kept = [
        [{k: v for k, v in record.items() if not OTHERS.match(k)} for record in comparable(run)]
        for run in (plain, whole)
    ]
    assert kept[0] == kept[1]
    assert comparable(whole) == comparable(resumed)
    exported = [load_file(run / "hf" / "model.safetensors") for run in (whole, resumed)]
    assert all(torch.equal(tensor, exported[1][name]) for name, tensor in exported[0].items())
    head = {name for name in exported[0] if name.startswith("model.layers.3.")}
    start = load_file(f"{model}/model.safetensors")
    assert head == {name for name in start if name.startswith("model.layers.3.")}
    assert not torch.equal(
        exported[0]["model.layers.3.eh_proj.weight"], start["model.layers.3.eh_proj.weight"]
    )
