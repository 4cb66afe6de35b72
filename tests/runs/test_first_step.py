"""run.mode=check: one real step, the report, and nothing else."""

import json

import pytest

from tests.spawn import RanksFailed, run_ranks
from tests.toy import TRAIN, write_config

CHECK = "run.mode=check"
HEALTHY = (
    "objective.kl_coef=0.01",
    "training.optimizer.lr=1.0e-5",
    "rollout.max_response_tokens=16",
    f"rollout.stop_token_ids={list(range(10, 60))}",  # half of the tokens
    "checkpoint.every=1",
)


def levels(directory) -> dict[str, str]:
    found = json.loads((directory / "first_step.json").read_text())
    return {verdict["name"]: verdict["level"] for verdict in found["verdicts"]}


def test_a_healthy_run_passes_and_stays_untouched(toy, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("a real run\n")
    config = write_config(tmp_path, toy, *HEALTHY)
    printed, silent = run_ranks(2, TRAIN, "--config", config, CHECK, timeout=300)
    found = levels(tmp_path / "run-check")
    assert "wrong" not in found.values(), printed
    names = ("chat template", "end token", "engine and trainer", "reference", "ratio", "gradient norm")
    assert {found[name] for name in (*names, "size of the step", "truncated", "whole run")} == {"ok"}, printed
    assert "[prompt, 8 tokens] <user>" in printed and "[response, " in printed and not silent
    assert "\33[" in (tmp_path / "run-check" / "first_step.txt").read_text()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]
    assert not (tmp_path / "run-check" / "checkpoints").exists()


def test_an_exploding_step_and_a_short_limit_are_wrong(toy, tmp_path):
    sick = ("training.optimizer.lr=3", "rollout.max_response_tokens=2", "training.prompts_per_minibatch=0")
    with pytest.raises(RanksFailed) as failure:
        run_ranks(1, TRAIN, "--config", write_config(tmp_path, toy, *sick), CHECK, timeout=300)
    assert failure.value.returncodes == [1]
    wrong = {name for name, level in levels(tmp_path / "run-check").items() if level == "wrong"}
    assert {"truncated", "size of the step"} <= wrong
    assert "-> lower training.optimizer.lr, now 3" in failure.value.stdout[0]
