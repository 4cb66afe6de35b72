"""Each algorithm from the command line, two steps with real engines: what it logs, and what must hold at its first update."""

import json
import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests import bounds
from tests.checkpoints import save_qwen2, save_qwen2_classifier
from tests.spawn import ROOT, RanksFailed, run_ranks
from tools.make_toy import make_toy

TRAIN = ROOT / "train_rl.py"

REWARD = '''
def score(prompt, response, ground_truth, **extra):
    """Tells the samples of a model that knows nothing apart."""
    value = len(set(response)) / 6
    return {"score": value, "acc": float(value > 0.5), "spread": value, "length": len(response) / 6}

def same(prompt, response, ground_truth, **extra):
    return 1.0
'''


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    directory = make_toy(tmp_path_factory.mktemp("toy"), layers=2, intermediate=128)
    (directory / "reward.py").write_text(REWARD)
    (directory / "config.yaml").write_text(
        f"""
        run: {{name: test, max_steps: 2}}
        model: {{path: {directory}/model, dtype: float32}}
        data: {{train: [{directory}/train.parquet], max_prompt_tokens: 16, prompts_per_step: 8}}
        training: {{micro_batch_tokens: 200, prompts_per_minibatch: 4, optimizer: {{lr: 1.0e-3}}}}
        rollout: {{samples_per_prompt: 4, max_response_tokens: 6, deterministic: true, cpu_kv_cache_mib: 16}}
        reward: {{function: "{directory}/reward.py:score"}}
        validation: {{every: 0}}
        logging: {{tensorboard: false}}
        """
    )
    return directory


def train(toy: Path, directory: Path, *overrides: str, world_size: int = 1) -> list[dict]:
    run_ranks(world_size, TRAIN, "--config", toy / "config.yaml", f"run.dir={directory}", *overrides, timeout=300)
    steps = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for step in steps:
        # null stands for a number that is not finite; a spread of 0 has no explained variance.
        assert all(value is not None for name, value in step.items() if name != "critic/vf_explained_var"), step
    return steps


def test_ppo_lets_its_critic_learn_first_and_adapts_the_weight_of_the_divergence(toy, tmp_path):
    kl = ("objective.reward_kl.controller=adaptive", "objective.reward_kl.coef=0.1", "objective.reward_kl.horizon=100")
    steps = train(
        toy, tmp_path, "algorithm=ppo", "run.max_steps=3", "critic.warmup_steps=1", "critic.optimizer.lr=1e-3",
        "rollout.samples_per_prompt=4", *kl, "training.tp=2", world_size=2,
    )
    assert "actor/pg_loss" not in steps[0] and "actor/pg_loss" in steps[1]
    # A value head that starts at 0.
    assert steps[0]["critic/values/max"] == steps[0]["critic/values/min"] == 0 and steps[1]["critic/values/max"] != 0
    assert steps[2]["critic/vf_loss"] < steps[0]["critic/vf_loss"] and steps[0]["critic/grad_norm"] > 0
    # The policy is its own reference until it moves; a divergence below the target lowers the weight.
    assert steps[0]["actor/reward_kl_penalty"] == steps[1]["actor/reward_kl_penalty"] == 0 != steps[2]["actor/reward_kl_penalty"]
    # But not in the critic's warm-up, in which the policy cannot move.
    weights = [step["actor/reward_kl_penalty_coeff"] for step in steps]
    assert weights == pytest.approx([0.1, 0.1, 0.1 * (1 - 0.2 * 32 / 100)])


def test_dapo_draws_until_enough_groups_have_spread(toy, tmp_path):
    steps = train(toy, tmp_path, "algorithm=dapo", "dynamic_sampling.prompts_per_round=6", "reward.overlong_buffer_tokens=3")
    for step in steps:
        assert step["dapo/rounds"] >= 2 and step["dapo/kept_groups"] == 8 <= step["dapo/drawn_groups"] == 6 * step["dapo/rounds"]
        assert -1 <= step["reward/overlong_penalty/mean"] < 0
        assert step["critic/rewards/mean"] < step["critic/score/mean"] + 1 and step["actor/grad_norm"] > 0


def test_dapo_without_any_spread_gives_up_after_its_rounds_and_goes_on(toy, tmp_path):
    steps = train(toy, tmp_path, "algorithm=dapo", "dynamic_sampling.max_rounds=2", f"reward.function={toy}/reward.py:same")
    assert [step["dapo/kept_groups"] for step in steps] == [0, 0] and "actor/pg_loss" not in steps[1]
    assert [step["dapo/rounds"] for step in steps] == [2, 2]


# What these four add beside the gradient is compared by value in tests/objectives.
SLOW = ("gspo", "clip-cov", "optimal-token-baseline", "gdpo")


def _name(overrides) -> str:
    return overrides[0].partition("=")[2]


@pytest.mark.parametrize(
    "overrides",
    [pytest.param(overrides, marks=[pytest.mark.slow] * (_name(overrides) in SLOW)) for overrides in [
        ("algorithm=rloo",),
        ("algorithm=reinforce_pp", "objective.advantage=reinforce++-baseline"),
        ("objective.loss=gspo", "objective.clip_low=0.03", "objective.clip_high=0.04", "objective.aggregation=seq-mean-token-mean"),
        ("objective.loss=clip-cov", "objective.cov_fraction=0.1", "objective.cov_low=-1", "objective.cov_high=1"),
        ("objective.loss=kl-cov", "objective.cov_fraction=0.1", "rollout_correction.bypass=true"),
        ("objective.advantage=optimal-token-baseline", "rollout_correction.truncate_tokens=2.0"),
        ("objective.advantage=gdpo", "objective.reward_columns=[spread, length]",
         "rollout_correction.reject=token-k2,sample-k3", "rollout_correction.reject_high=[0.2, 0.1]"),
    ]],
    ids=_name,
)
def test_two_steps_of_a_policy_gradient(toy, tmp_path, overrides):
    first, second = train(toy, tmp_path, *overrides)
    for step in (first, second):
        assert step["actor/grad_norm"] > 0 and step["critic/advantages/max"] > 0
        assert "actor/ppo_kl" in step and "reward/length/mean" in step
        tokens = [step[f"global_seqlen/{name}"] for name in ("balanced_min", "mean", "balanced_max")]
        assert 0 < tokens[0] and tokens == sorted(tokens)
    if "cov_fraction" in " ".join(overrides):
        assert 0.05 < second["actor/pg_covfrac"] < 0.2
    if "truncate_tokens" in " ".join(overrides):
        assert first["rollout_corr/weight_mean"] == pytest.approx(1, abs=bounds.TOY_LOGPROB)
    if "reject" in " ".join(overrides):
        assert first["rollout_corr/rejected_fraction"] == 0
        assert first["rollout_corr/rollout_rs_seq_mean_k3_masked_fraction"] == 0
    assert ("timing_s/old_log_prob" in first) == ("rollout_correction.bypass=true" not in overrides)


def test_remax_measures_against_the_greedy_response(toy, tmp_path):
    steps = train(toy, tmp_path, "algorithm=remax", "rollout.samples_per_prompt=1")
    for step in steps:
        assert 0 <= step["critic/baseline/mean"] <= 1 and step["actor/grad_norm"] > 0
        expected = step["critic/score/mean"] - step["critic/baseline/mean"]
        assert step["critic/advantages/min"] <= expected <= step["critic/advantages/max"]


def test_dpo_starts_at_log_2_and_learns_its_pairs(toy, tmp_path):
    few = pq.read_table(toy / "pairs.parquet").slice(0, 8)
    pq.write_table(few, tmp_path / "pairs.parquet")
    data = ("algorithm=dpo", f"data.train=[{tmp_path}/pairs.parquet]", "run.max_steps=20", "training.prompts_per_minibatch=0")
    steps = train(toy, tmp_path / "run", *data, "training.optimizer.lr=3e-4", world_size=2)
    assert steps[0]["preference/loss"] == pytest.approx(math.log(2), rel=bounds.of_sum(64))
    assert steps[0]["preference/margin"] == 0
    assert "timing_s/gen" not in steps[0] and steps[0]["prompt_length/mean"] < 16
    assert steps[-1]["preference/loss"] < 0.6 and steps[-1]["preference/accuracy"] > 0.8
    assert steps[-1]["preference/chosen_reward"] > steps[-1]["preference/rejected_reward"]


def test_spin_pulls_the_policy_to_the_data(toy, tmp_path):
    steps = train(toy, tmp_path, "algorithm=spin", "run.max_steps=3", "training.prompts_per_minibatch=0")
    for step in steps:  # one update per step, whose opponent is the policy itself
        assert step["preference/loss"] == pytest.approx(math.log(2), rel=bounds.of_sum(64))
        assert step["actor/grad_norm"] > 0
    several = train(toy, tmp_path / "epochs", "algorithm=spin", "training.epochs=4", "training.prompts_per_minibatch=0")
    assert several[0]["preference/loss"] < math.log(2)


def test_sppo_moves_log_ratios_towards_win_rates(toy, tmp_path):
    config = ("algorithm=sppo", "run.max_steps=1", "training.prompts_per_minibatch=0", "preference.beta=0.5")
    one = train(toy, tmp_path / "one", *config, "training.optimizer.lr=3e-5")
    many = train(toy, tmp_path / "many", *config, "training.optimizer.lr=3e-5", "training.epochs=6")
    assert one[0]["preference/log_ratio"] == 0 < many[0]["preference/log_ratio"]
    assert many[0]["preference/loss"] < one[0]["preference/loss"]


def test_prime_trains_its_reward_model_on_outcomes(toy, tmp_path):
    bounds = ("implicit_reward.min_accuracy=0", "implicit_reward.max_accuracy=1", "implicit_reward.beta=0.5")
    few = ("implicit_reward.optimizer.lr=1e-3", "training.epochs=4", "training.prompts_per_minibatch=0")
    steps = train(toy, tmp_path, "algorithm=prime", *bounds, *few, "training.optimizer.lr=0", "training.pp=2", world_size=2)
    assert steps[0]["implicit_reward/reward/mean"] == 0 != steps[1]["implicit_reward/reward/mean"]
    assert steps[0]["prime/kept_groups"] == 8 and steps[0]["implicit_reward/grad_norm"] > 0
    # Its loss before any update is log 2; the mean over four passes is lower.
    assert steps[0]["implicit_reward/loss"] < math.log(2) - 0.01
    assert steps[1]["critic/advantages/max"] > 0 and steps[1]["actor/grad_norm"] > 0


HOSTILE = '''
import os, time

def score(prompt, response, ground_truth, **extra):
    """By the prompt: two digits of its sum."""
    kind = int(ground_truth) % 8
    if kind == 0:
        time.sleep(1000)
    if kind == 1:
        if os.fork() == 0:
            os.setsid()
            time.sleep(1000)
        raise RuntimeError("left a child behind")
    if kind == 2:
        return bytearray(10 << 30)
    if kind == 3:
        raise ValueError("no")
    if kind == 4:
        print("x" * 10_000_000)
    if kind == 5:
        os._exit(3)
    return 1.0
'''


def test_a_hostile_reward_function_costs_its_samples_and_never_the_run(toy, tmp_path, monkeypatch):
    (tmp_path / "hostile.py").write_text(HOSTILE)
    monkeypatch.setenv("MARK_OF_THIS_TEST", str(tmp_path))  # children inherit it
    limits = ("reward.timeout_s=1", "reward.memory_mib=2048", "reward.workers=2", "reward.failure_score=-1", "logging.samples=1000")
    wanted = ("run.max_steps=1", "data.prompts_per_step=16", "rollout.samples_per_prompt=1", "objective.advantage=reinforce++")
    [record] = train(toy, tmp_path / "run", f"reward.function={tmp_path}/hostile.py:score", *limits, *wanted)
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 16
    for sample in samples:
        assert sample["score"] == (-1 if int(sample["ground_truth"]) % 8 in (0, 1, 2, 3, 5) else 1), sample
    assert record["reward/failures"] == sum(sample["score"] == -1 for sample in samples) > 0
    left = [path for path in Path("/proc").glob("[0-9]*/environ") if str(tmp_path).encode() in read_bytes(path)]
    assert left == []


def read_bytes(path: Path) -> bytes:
    """Of a process that may be gone by now."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_reward_model_and_a_judge_add_to_the_score(toy, tmp_path):
    classifier = save_qwen2_classifier(tmp_path / "classifier", seed=3)
    judge = save_qwen2(tmp_path / "judge", seed=4, max_position_embeddings=512)
    (tmp_path / "parse.py").write_text("def parse(text):\n    if len(text) % 7 == 0: raise ValueError\n    return 2.0\n")
    models = (
        f"reward.model.path={classifier}", "reward.model.coef=0.5", f"reward.judge.path={judge}", "reward.judge.coef=10.0",
        f"reward.judge.parser={tmp_path}/parse.py:parse", "reward.judge.max_prompt_tokens=256", "reward.judge.max_response_tokens=16",
        "reward.failure_score=-5", "rollout.deterministic=false", "reward.judge.template='{prompt} {response} {ground_truth}?'",
    )
    for step in train(toy, tmp_path / "run", *models, world_size=2):
        assert step["reward/judge/mean"] == 2.0 and step["reward/reward_model/mean"] != 0
        assert step["critic/score/max"] > 18 and step["training/rollout_probs_diff_max"] < bounds.TOY_LOGPROB
        assert (step["critic/score/min"] == -5) == (step["reward/failures"] > 0)


def test_a_reward_model_without_a_head_and_a_judge_without_positions_are_refused(toy, tmp_path):
    for overrides, words in (
        ((f"reward.model.path={toy}/model",), "score.weight"),
        ((f"reward.judge.path={toy}/model",), "reward.judge.max_prompt_tokens=4096 and reward.judge.max_response_tokens=512"),
        (("reward.judge.path=/nowhere/judge",), "reward.judge.path=/nowhere/judge"),
    ):
        with pytest.raises(RanksFailed) as failure:
            train(toy, tmp_path, *overrides)
        assert failure.value.returncodes == [2] and words in failure.value.stderr[0]


def test_validation_measures_greedy_and_sampled_responses(toy, tmp_path):
    wanted = ("validation.every=1", "validation.samples_per_prompt=4", "validation.max_prompts=8", f"data.val=[{toy}/test.parquet]")
    before, after = train(toy, tmp_path, *wanted, "run.max_steps=1")
    for record in (before, after):
        names = ("mean@1", "mean@4", "best@4/mean")
        greedy, mean, best = (record[f"val-core/addition/acc/{name}"] for name in names)
        assert 0 <= greedy <= 1 and 0 <= mean <= best <= 1
        assert record["val-aux/addition/acc/best@2/mean"] <= best and "val-aux/addition/spread/std@4" in record


def test_several_sources_with_weights_and_a_curriculum(toy, tmp_path):
    two = f"data.train=[{toy}/train.parquet, {toy}/test.parquet]"
    [record] = train(toy, tmp_path / "weights", "run.max_steps=1", two, "data.train_weights=[1.0, 3.0]")
    assert record["actor/grad_norm"] > 0
    (tmp_path / "easy.py").write_text(
        "def order(epoch, prompts, rng):\n    return sorted(range(len(prompts)), key=lambda i: int(prompts[i].ground_truth))\n"
    )
    train(toy, tmp_path / "easy", "run.max_steps=1", f"data.curriculum={tmp_path}/easy.py:order", "logging.samples=4")
    samples = [json.loads(line) for line in (tmp_path / "easy" / "samples.jsonl").read_text().splitlines()]
    assert {sample["ground_truth"] for sample in samples} <= {"20", "21"}


def test_an_algorithm_of_ones_own_runs_from_its_file(toy, tmp_path):
    (tmp_path / "mine.py").write_text((ROOT / "rl" / "algorithms" / "rloo.py").read_text().replace("0.01", "0.02"))
    [record] = train(toy, tmp_path / "run", f"algorithm={tmp_path}/mine.py", "run.max_steps=1")
    assert record["actor/reward_kl_penalty_coeff"] == 0.02 and (tmp_path / "run" / "code" / "mine.py").exists()
