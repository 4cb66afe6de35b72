"""The program from its command line, end to end with real ranks: what a user types and what they get."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import assert_same_checkpoint
from tests.records import comparable, records
from tests.spawn import ROOT, RanksFailed, run_ranks
from tools.make_toy import make_toy
from tools.prepare_data import prepare_gsm8k

GSM8K = ROOT / "tests" / "data" / "gsm8k"
TRAIN = ROOT / "train_rl.py"


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return make_toy(tmp_path_factory.mktemp("toy"), layers=2, intermediate=128)


@pytest.fixture
def config(toy, tmp_path) -> Path:
    """A GRPO run of two steps on the toy task, deterministic, into tmp_path/run."""
    path = tmp_path / "config.yaml"
    path.write_text(
        f"""
        algorithm: grpo
        run: {{name: test, dir: {tmp_path}/run, max_steps: 2}}
        model: {{path: {toy}/model, dtype: float32}}
        data: {{train: [{toy}/train.parquet], val: [{toy}/test.parquet], max_prompt_tokens: 16, prompts_per_step: 8}}
        training: {{micro_batch_tokens: 200, prompts_per_minibatch: 4, optimizer: {{lr: 1.0e-3}}}}
        rollout: {{samples_per_prompt: 4, max_response_tokens: 6, deterministic: true, cpu_kv_cache_mib: 16}}
        reward: {{function: "{tmp_path}/length_reward.py:score"}}
        validation: {{every: 2, max_prompts: 16}}
        """
    )
    # A model that knows nothing is never right; this reward tells its samples apart, so that gradients are not zero.
    (tmp_path / "length_reward.py").write_text(
        "def score(prompt, response, ground_truth, **extra):\n    return {'score': len(set(response)) / 6, 'acc': 0.0}\n"
    )
    return path


def train(world_size: int, config: Path, *overrides: str) -> None:
    run_ranks(world_size, TRAIN, "--config", config, *overrides, timeout=240)


LAYOUTS = {"dp2": (), "rollout_tp2": ("rollout.tp=2",), "pp2": ("training.pp=2",), "tp2": ("training.tp=2",)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_steps_of_grpo_in_each_layout(config, tmp_path, layout):
    train(2, config, *LAYOUTS[layout], "objective.kl_coef=0.01", "training.prompts_per_minibatch=0")
    before, *steps = records(tmp_path / "run")
    assert before["training/global_step"] == 0 and "val-core/addition/acc/mean@1" in before
    assert [step["training/global_step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["actor/grad_norm"] > 0
        # One update per step: its log-probs are the old ones to the bit.
        assert step["actor/ppo_kl"] == 0 and step["actor/pg_clipfrac"] == 0
        # The engine's log-probs are those of the trainer, whose weights the last step changed.
        assert step["training/rollout_probs_diff_max"] < 1e-4
    # The policy is its own reference until the first update.
    assert steps[0]["actor/kl_loss"] == 0 and steps[1]["actor/kl_loss"] > 0
    assert "val-core/addition/acc/mean@1" in steps[-1] and "timing_s/update_weights" in steps[-1]


def test_metrics_have_the_names_that_verl_users_know(config, tmp_path):
    train(1, config, "run.max_steps=1", "validation.every=0", "rollout.deterministic=false")
    [record] = records(tmp_path / "run")
    for name in (
        *(f"actor/{n}" for n in ("pg_loss", "grad_norm", "entropy", "ppo_kl", "pg_clipfrac", "lr")),
        *(f"critic/{n}/{s}" for n in ("score", "rewards", "advantages") for s in ("mean", "max", "min")),
        *(f"response_length/{n}" for n in ("mean", "max", "min", "clip_ratio")),
        *(f"prompt_length/{n}" for n in ("mean", "max", "min")),
        *(f"timing_s/{n}" for n in ("gen", "reward", "old_log_prob", "adv", "update_actor", "update_weights", "step")),
        *("perf/throughput", "perf/total_num_tokens", "training/global_step"),
        *(f"training/rollout_probs_diff_{n}" for n in ("mean", "max")),
    ):
        assert isinstance(record[name], (int, float)), name
    assert (tmp_path / "run" / "config.yaml").exists() and (tmp_path / "run" / "code" / "rl" / "loop.py").exists()
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_same_seed_gives_the_same_metrics_bit_for_bit_and_a_resumed_run_too(config, tmp_path):
    four = ("run.max_steps=4", "validation.every=2", "checkpoint.every=2", "training.optimizer.weight_decay=0.01")
    for name in ("first", "second"):
        train(2, config, *four, f"run.dir={tmp_path}/{name}")
    assert comparable(tmp_path / "first") == comparable(tmp_path / "second")

    # Stop after step 2, whose checkpoint is there, and go on.
    train(2, config, *four, f"run.dir={tmp_path}/resumed", "run.max_steps=2")
    train(2, config, *four, f"run.dir={tmp_path}/resumed")
    assert comparable(tmp_path / "resumed")[-2:] == comparable(tmp_path / "first")[-2:]
    assert len(comparable(tmp_path / "resumed")) == 5  # steps 0..4, each once
    assert_same_checkpoint(*(tmp_path / name / "checkpoints" / "step_000004" for name in ("first", "resumed")))


def test_another_seed_gives_other_metrics(config, tmp_path):
    for seed in (1, 2):
        train(1, config, "run.max_steps=1", "validation.every=0", f"run.seed={seed}", f"run.dir={tmp_path}/{seed}")
    assert comparable(tmp_path / "1") != comparable(tmp_path / "2")


def test_sft_exports_a_checkpoint_that_grpo_starts_from(config, tmp_path):
    # transformers reads the export; its loss on the training data is what SFT reached.
    sft = ("algorithm=sft", "data.val=[]", "run.max_steps=30", "data.prompts_per_step=32", "checkpoint.export_hf=true")
    train(2, config, *sft, "training.prompts_per_minibatch=0", "training.pp=2", f"run.dir={tmp_path}/sft")
    losses = [record["sft/loss"] for record in records(tmp_path / "sft")]
    assert losses[-1] < 0.7 * losses[0]
    train(2, config, f"model.path={tmp_path}/sft/hf", "training.tp=2", "run.max_steps=1")
    assert records(tmp_path / "run")[1]["training/rollout_probs_diff_max"] < 1e-4


def test_real_gsm8k_prompts_flow_through_two_steps(tmp_path):
    prepare_gsm8k(GSM8K, tmp_path / "gsm8k")
    make_toy(tmp_path / "toy")
    data = (f"data.train=[{tmp_path}/gsm8k/train.parquet]", f"data.val=[{tmp_path}/gsm8k/test.parquet]")
    where = (f"model.path={tmp_path}/toy/model", f"run.dir={tmp_path}/run")
    train(2, ROOT / "configs" / "gsm8k_toy.yaml", *data, *where)
    steps = records(tmp_path / "run")
    assert len(steps) == 2 and steps[1]["prompt_length/mean"] > 200 and "val-core/openai/gsm8k/acc/mean@1" in steps[1]
    assert all(step["reward/failures"] == 0 and step["training/rollout_probs_diff_max"] < 1e-4 for step in steps)
    sample = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[0])
    assert "####" in sample["prompt"] and float(sample["ground_truth"]).is_integer()


def test_help_lists_every_key_without_importing_torch():
    code = (
        "import sys; sys.argv = ['train_rl.py', '--help']; import train_rl\n"
        "try: train_rl.main()\n"
        "except SystemExit as leave: assert leave.code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for key in ("run.max_steps", "rollout.deterministic", "checkpoint.every", "training.optimizer.lr"):
        assert key in out


def refusal(world_size: int, config: Path, *overrides: str) -> str:
    """What the first rank says; every rank leaves with exit code 2 and only the first says anything."""
    with pytest.raises(RanksFailed) as failure:
        run_ranks(world_size, TRAIN, "--config", config, *overrides, timeout=60)
    errors = ["".join(re.findall(r"^error: .*$", text, re.MULTILINE)) for text in failure.value.stderr]
    assert errors[1:] == [""] * (world_size - 1) and "Traceback" not in "".join(failure.value.stderr)
    assert set(failure.value.returncodes) == {2}
    return errors[0]


class TestBadInput:
    def test_typo(self, config):
        said = refusal(2, config, "rollout.temprature=0.5")
        assert "rollout.temprature" in said and "rollout.temperature" in said

    def test_layout_that_does_not_divide(self, config):
        assert "training.tp=3" in refusal(2, config, "training.tp=3")

    def test_heads_that_do_not_divide(self, config):
        said = refusal(4, config, "training.tp=4")
        assert "training.tp=4" in said and "6 attention heads" in said and said.endswith("use 1 or 2.")

    def test_a_batch_smaller_than_a_minibatch(self, config):
        assert "training.prompts_per_minibatch=16" in refusal(2, config, "training.prompts_per_minibatch=16")

    def test_missing_model_directory(self, config, tmp_path):
        said = refusal(2, config, f"model.path={tmp_path}/nowhere")
        assert "model.path" in said and "nowhere" in said

    def test_parquet_without_the_prompt_column(self, config):
        said = refusal(1, config, "data.prompt_key=question")
        assert "question" in said and "ability" in said and "data.prompt_key" in said

    def test_empty_dataset(self, config, tmp_path):
        (tmp_path / "empty.jsonl").write_text("")
        assert "empty.jsonl" in refusal(1, config, f"data.train=[{tmp_path}/empty.jsonl]")

    def test_prompt_longer_than_the_limit(self, config):
        said = refusal(1, config, "data.max_prompt_tokens=6")
        assert all(word in said for word in ("data.max_prompt_tokens", "error", "drop", "truncate_left", "8", "6"))

    def test_prompt_longer_than_the_limit_is_cut_where_that_is_wanted(self, config, tmp_path):
        wanted = ("data.overlong_prompts=truncate_left", "run.max_steps=1", "validation.every=0")
        train(1, config, "data.max_prompt_tokens=6", *wanted)
        assert records(tmp_path / "run")[0]["prompt_length/max"] == 6

    def test_a_reward_function_that_raises_costs_scores_and_not_the_run(self, config, tmp_path):
        (tmp_path / "length_reward.py").write_text(
            "def score(prompt, response, ground_truth, **extra):\n"
            "    if int(ground_truth) % 2: raise RuntimeError('odd')\n"
            "    return 1.0\n"
        )
        train(1, config, "run.max_steps=1", "validation.before_training=false", "reward.failure_score=-1")
        [record] = records(tmp_path / "run")
        assert 0 < record["val-core/addition/acc/mean@1"] < 1  # a failed sample is a wrong one
        assert 0 < record["reward/failures"] < 32 and record["critic/score/min"] == -1 and record["critic/score/max"] == 1

    def test_a_run_directory_that_cannot_be_made(self, config, tmp_path):
        (tmp_path / "file").write_text("")
        assert "file" in refusal(2, config, f"run.dir={tmp_path}/file/run")

    def test_a_torn_checkpoint_file(self, config, toy, tmp_path):
        shutil.copytree(toy / "model", tmp_path / "model")
        whole = (toy / "model" / "model.safetensors").read_bytes()
        (tmp_path / "model" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
        assert "model.safetensors" in refusal(2, config, f"model.path={tmp_path}/model")

    def test_a_reward_function_that_is_not_there(self, config, tmp_path):
        assert "length_reward.py" in refusal(2, config, f"reward.function={tmp_path}/length_reward.py:nothing")
