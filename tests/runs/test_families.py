"""GRPO on tiny models of newer families: engine and trainer agree, resuming is exact, exports load."""

import shutil

import pytest
from transformers import AutoModelForCausalLM

from tests import bounds
from tests.checkpoints import assert_same_checkpoint, quantise_experts, save_tiny
from tests.records import comparable
from tests.toy import train

FAMILIES = (
    *("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "Gemma3ForCausalLM", "GraniteForCausalLM"),
    *(
        "GraniteMoeHybridForCausalLM",
        "SeedOssForCausalLM",
        "SmolLM3ForCausalLM",
        "Phi3ForCausalLM",
        "GptOssForCausalLM",
        "MiniMaxM2ForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
    ),
)
STEPS = ("run.max_steps=3", "checkpoint.every=2", "checkpoint.keep_last=0", "checkpoint.export_hf=true")
MORE = {
    "GptOssForCausalLM": ("training.router_replay=engine", "rollout.max_response_tokens=24"),
    "Qwen3NextForCausalLM": ("training.router_replay=engine",),
}
"""Further keys: routes of models with several kinds of caches, longer than the window if there is one."""


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_three_steps_of_grpo_resumed_and_exported(config, tmp_path, family):
    tied = family in (
        "Gemma3ForCausalLM",
        "SmolLM3ForCausalLM",
        "Qwen3_5ForCausalLM",
        "GraniteMoeHybridForCausalLM",
    )
    model = save_tiny(family, tmp_path / "tiny", seed=1, tie=tied)
    if family == "GptOssForCausalLM":
        quantise_experts(tmp_path / "tiny")
    more = MORE.get(family, ())
    overrides = (f"model.path={model}", *STEPS, *more)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    steps = train(2, config, *overrides, run=straight)
    for step in steps:
        assert 0 < step["training/rollout_probs_diff_max"] <= bounds.TOY_LOGPROB
        assert step.get("training/router_mismatch", 0.0) < 0.01
    assert any(step["actor/grad_norm"] > 0 for step in steps)
    shutil.copytree(straight, killed)
    (killed / "checkpoints" / "step_000003").rename(killed / "checkpoints" / "step_000003.partial")
    lines = (killed / "metrics.jsonl").read_text().splitlines()
    (killed / "metrics.jsonl").write_text("\n".join(lines[:2]) + "\n")
    train(2, config, *overrides, run=killed)
    assert comparable(killed) == comparable(straight)
    assert_same_checkpoint(*(run / "checkpoints" / "step_000003" for run in (straight, killed)))
    AutoModelForCausalLM.from_pretrained(straight / "hf")
