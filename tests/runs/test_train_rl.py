"""The program from its command line, end to end with real ranks."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import bounds
from tests.checkpoints import assert_same_checkpoint
from tests.records import comparable, rollouts
from tests.spawn import ROOT, RanksFailed, run_ranks
from tests.toy import SFT, TRAIN, train, write_config
from tools.prepare_data import prepare_gsm8k

GSM8K = ROOT / "tests" / "data" / "gsm8k"


@pytest.fixture
def config(toy, tmp_path) -> Path:
    """Return the config of a GRPO run of two steps, with a validation before and after them."""
    validation = (f"data.val=[{toy}/test.parquet]", "validation.every=2", "validation.max_prompts=16")
    return write_config(tmp_path, toy, *validation)


LAYOUTS = {"dp2": (), "rollout_tp2": ("rollout.tp=2",), "pp2": ("training.pp=2",), "tp2": ("training.tp=2",)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_steps_of_grpo_in_each_layout(config, layout):
    one_update = "training.prompts_per_minibatch=0"
    before, *steps = train(2, config, *LAYOUTS[layout], "objective.kl_coef=0.01", one_update)
    assert before["training/global_step"] == 0 and "val-core/addition/acc/mean@1" in before
    assert [step["training/global_step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["actor/grad_norm"] > 0
        # One update per step: its log-probs are bitwise the old ones.
        assert step["actor/ppo_kl"] == 0 and step["actor/pg_clipfrac"] == 0
        # The engine's log-probs equal the trainer's, although the last step changed the trainer's weights.
        assert step["training/rollout_probs_diff_max"] < bounds.TOY_LOGPROB
        assert step["perf/slowest_rank"] in (0, 1) and step["perf/slowest_rank_late_s"] > 0
    # The policy is its own reference until the first update.
    assert steps[0]["actor/kl_loss"] == 0 and steps[1]["actor/kl_loss"] > 0
    assert "val-core/addition/acc/mean@1" in steps[-1] and "timing_s/update_weights" in steps[-1]


def test_metrics_have_the_names_that_verl_users_know(config, tmp_path):
    options = ("run.max_steps=1", "rollout.deterministic=false", "logging.tensorboard=true")
    [record] = train(1, config, "validation.every=0", *options)
    for name in (
        *(f"actor/{n}" for n in ("pg_loss", "grad_norm", "entropy", "ppo_kl", "pg_clipfrac", "lr")),
        *(f"critic/{n}/{s}" for n in ("score", "rewards", "advantages") for s in ("mean", "max", "min")),
        *(f"response_length/{n}" for n in ("mean", "max", "min", "clip_ratio")),
        *(f"prompt_length/{n}" for n in ("mean", "max", "min")),
        *(f"timing_s/{n}" for n in ("gen", "reward", "old_log_prob", "adv", "update_actor", "step")),
        *("timing_s/update_weights", "timing_per_token_ms/gen", "timing_per_token_ms/update_actor"),
        *("perf/throughput", "perf/total_num_tokens", "training/global_step", "training/epoch"),
        *("perf/time_per_step", "perf/cpu_memory_used_gb", "perf/host_memory_gib"),
        *(f"training/rollout_probs_diff_{n}" for n in ("mean", "max", "std")),
    ):
        assert isinstance(record[name], (int, float)), name
    for part in ("config.yaml", "code/rl/run/loop.py", "tensorboard"):
        assert (tmp_path / "run" / part).exists(), part
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_a_seed_gives_one_run_which_resumes_exactly(config, tmp_path):
    four = ("run.max_steps=4", "checkpoint.every=2", "training.optimizer.weight_decay=0.01")
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    train(2, config, *four, run=straight)
    train(2, config, *four, "run.max_steps=2", run=resumed)  # ends with the checkpoint of step 2
    first = comparable(resumed)
    train(2, config, *four, run=resumed)
    assert len(comparable(straight)) == 5  # steps 0 to 4, each once
    assert first == comparable(straight)[:3] and comparable(resumed) == comparable(straight)
    assert rollouts(resumed) == rollouts(straight) and len(rollouts(straight)) == 4 * 4 * 4
    assert_same_checkpoint(*(run / "checkpoints" / "step_000004" for run in (straight, resumed)))
    other = tmp_path / "other"
    train(2, config, "run.max_steps=1", "run.seed=2", run=other)
    assert comparable(other)[1] != comparable(straight)[1]


def test_sft_exports_a_checkpoint_that_grpo_starts_from(config, tmp_path):
    sft = ("data.val=[]", "run.max_steps=30", "data.prompts_per_step=32", "checkpoint.export_hf=true")
    steps = train(2, config, *SFT, *sft, "training.pp=2", run=tmp_path / "sft")
    assert steps[-1]["sft/loss"] < 0.7 * steps[0]["sft/loss"]
    steps = train(2, config, f"model.path={tmp_path}/sft/hf", "training.tp=2", "run.max_steps=1")
    assert steps[1]["training/rollout_probs_diff_max"] < bounds.TOY_LOGPROB


def test_real_gsm8k_prompts_flow_through_two_steps(toy, tmp_path):
    prepare_gsm8k(GSM8K, tmp_path / "gsm8k")
    data = (f"data.train=[{tmp_path}/gsm8k/train.parquet]", f"data.val=[{tmp_path}/gsm8k/test.parquet]")
    config = ROOT / "configs" / "gsm8k_toy.yaml"
    steps = train(2, config, *data, f"model.path={toy}/model", run=tmp_path / "run")
    assert (
        len(steps) == 2
        and steps[1]["prompt_length/mean"] > 200
        and "val-core/openai/gsm8k/acc/mean@1" in steps[1]
    )
    assert all(step["reward/failures"] == 0 for step in steps)
    assert all(step["training/rollout_probs_diff_max"] < bounds.TOY_LOGPROB for step in steps)
    sample = rollouts(tmp_path / "run")[0]
    assert "####" in sample["prompt"] and float(sample["ground_truth"]).is_integer()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--config", "configs/quickstart.yaml", "--print-config"),
        ("--config", "configs/qwen2.5-7b_gsm8k_grpo_8gpu.yaml", "--dry-run", "--world-size", "8"),
    ],
    ids=["help", "print_config", "dry_run"],
)
def test_a_reader_that_leaves_ends_it_silently(arguments):
    """`train_rl.py --help | head`; here the reader has left before the first line."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        command = [sys.executable, TRAIN, *arguments]
        done = subprocess.run(command, cwd=ROOT, stdout=pipe, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


def test_a_plain_run_imports_no_other_feature(config, tmp_path):
    script = Path(__file__).parent / "plain_imports.py"
    run_ranks(1, script, tmp_path / "out", "--config", config, "run.max_steps=1")
    assert (tmp_path / "out").read_text() == ""


def test_help_lists_every_key_without_importing_torch():
    code = (
        "import sys; sys.argv = ['train_rl.py', '--help', 'all']; import train_rl\n"
        "try: train_rl.main()\n"
        "except SystemExit as leave: assert leave.code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for key in ("run.max_steps", "rollout.deterministic", "checkpoint.every", "training.optimizer.lr"):
        assert key in out


def refusal(world_size: int, config: Path, *overrides: str) -> str:
    """Return the first rank's error, the only one; every rank leaves with exit code 2."""
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
        assert all(
            word in said for word in ("data.max_prompt_tokens", "error", "drop", "truncate_left", "8", "6")
        )

    def test_prompt_longer_than_the_limit_is_cut_on_request(self, config):
        options = ("data.overlong_prompts=truncate_left", "run.max_steps=1", "validation.every=0")
        [record] = train(1, config, "data.max_prompt_tokens=6", *options)
        assert record["prompt_length/max"] == 6

    def test_a_reward_function_that_raises_costs_only_scores(self, config, tmp_path):
        (tmp_path / "odd.py").write_text(
            "def score(prompt, response, ground_truth, **extra):\n"
            "    if int(ground_truth) % 2: raise RuntimeError('odd')\n"
            "    return 1.0\n"
        )
        reward = (f"reward.function={tmp_path}/odd.py:score", "reward.failure_score=-1")
        [record] = train(1, config, *reward, "run.max_steps=1", "validation.before_training=false")
        assert 0 < record["val-core/addition/acc/mean@1"] < 1  # a failed sample is a wrong one
        assert 0 < record["reward/failures"] < 32
        assert record["critic/score/min"] == -1 and record["critic/score/max"] == 1

    def test_a_run_directory_that_cannot_be_made(self, config, tmp_path):
        (tmp_path / "file").write_text("")
        assert "file" in refusal(2, config, f"run.dir={tmp_path}/file/run")

    def test_a_run_directory_without_room_for_the_watchdog(self, config, tmp_path):
        """The message was the system's alone, such as `No space left on device`."""
        (tmp_path / "run").mkdir(mode=0o700)
        (tmp_path / "run" / "stacks").write_text("")
        assert f"run.dir={tmp_path}/run cannot be written" in refusal(2, config, f"run.dir={tmp_path}/run")

    def test_a_torn_checkpoint_file(self, config, toy, tmp_path):
        shutil.copytree(toy / "model", tmp_path / "model")
        whole = (toy / "model" / "model.safetensors").read_bytes()
        (tmp_path / "model" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
        assert "model.safetensors" in refusal(2, config, f"model.path={tmp_path}/model")

    def test_a_reward_function_that_is_not_there(self, config, toy):
        assert "reward.py" in refusal(2, config, f"reward.function={toy}/reward.py:nothing")
