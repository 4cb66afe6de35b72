"""run.mode: a run that stores its rollouts, and each half of it alone from them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.records import records, rollouts
from tests.spawn import ROOT, RanksFailed
from tests.toy import train, write_config

ALL = "logging.rollouts=all"


@pytest.fixture(scope="module")
def stored(toy, tmp_path_factory) -> Path:
    """Return the directory of a GRPO run of two steps that stored all samples; its config is beside it."""
    directory = tmp_path_factory.mktemp("stored")
    config = write_config(directory, toy, ALL, "objective.kl_coef=0.01")
    train(2, config)
    return directory / "run"


def learned(run: Path) -> list[dict]:
    """Return what each step's learning gave: equal in two runs that learned from the same samples."""
    return [
        {n: value for n, value in record.items() if n.startswith(("actor/", "critic/", "response_length/"))}
        for record in records(run)
    ]


def test_train_only_learns_exactly_what_the_run_learned(stored, tmp_path):
    options = ("run.mode=train_only", f"run.rollouts={stored}", "data.val=[/nowhere.parquet]")
    steps = train(2, stored.parent / "config.yaml", *options, run=tmp_path / "again")
    assert learned(tmp_path / "again") == learned(stored)
    assert not {"timing_s/gen", "timing_s/update_weights", "timing_s/reward"} & steps[0].keys()
    assert not (tmp_path / "again" / "rollouts").exists()
    with pytest.raises(RanksFailed) as failure:
        train(1, stored.parent / "config.yaml", *options, "run.max_steps=3", run=tmp_path / "more")
    assert "set run.max_steps to at most 2" in failure.value.stderr[0]


def test_rollout_only_stores_what_the_run_sampled(stored, tmp_path):
    options = ("run.mode=rollout_only", "run.max_steps=1")
    [record] = train(2, stored.parent / "config.yaml", *options, run=tmp_path / "half")
    assert not any(name.startswith("actor/") for name in record) and record["critic/score/mean"] > 0
    first = [row for row in rollouts(stored) if row["step"] == 1]
    learning = dict.fromkeys(("old_logprobs", "ref_logprobs", "advantages"))
    assert rollouts(tmp_path / "half") == [row | learning for row in first]
    assert len(first) == 32 and first[0]["advantages"] is not None


def test_score_only_shows_what_another_function_changes(stored, toy, tmp_path):
    """Without torch.distributed, Megatron, vLLM or the model."""

    def score_only(*options: str) -> str:
        code = (
            f"import sys; sys.argv[0] = 'train_rl.py'; sys.path.insert(0, {str(ROOT)!r}); import train_rl\n"
            "assert train_rl.main() == 0\n"
            "assert not {'torch', 'megatron', 'vllm', 'transformers'} & sys.modules.keys()"
        )
        command = [sys.executable, "-c", code, "--config", stored.parent / "config.yaml"]
        options = ("run.mode=score_only", f"run.dir={stored}", "model.path=/nowhere", *options)
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "all steps: 64 samples, 0 changed" in score_only()
    text = score_only(f"reward.function={toy}/reward.py:same")
    changed = sum(row["score"] != 1 for row in rollouts(stored))
    assert f"all steps: 64 samples, {changed} changed" in text and text.rstrip().endswith("-> 1.0000")
    assert re.search(r"group \d+ sample \d: 0\.\d+ -> 1 \| ground truth \d+ \| \S+", text)
