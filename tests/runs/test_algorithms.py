"""Each algorithm from the command line with real engines: its metrics, above all of the first update."""

import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rl.config.schema import load_config
from rl.features.stored_runs.score_only import score_only
from tests import bounds
from tests.checkpoints import save_qwen2, save_qwen2_classifier
from tests.records import rollouts
from tests.spawn import ROOT, RanksFailed
from tests.toy import FROM_DATA, UNSCORED, train

ONE_UPDATE = "training.prompts_per_minibatch=0"


def steps_of(config: Path, *overrides: str, world_size: int = 1, run: Path | None = None) -> list[dict]:
    """Train; return the records. All their values are finite."""
    steps = train(world_size, config, *overrides, run=run)
    for step in steps:
        # null stands for a number that is not finite; scores without spread have no explained variance.
        assert all(value is not None for name, value in step.items() if name != "critic/vf_explained_var"), (
            step
        )
    return steps


def test_ppo_warms_its_critic_up_and_adapts_kl(config):
    kl = ("objective.reward_kl.controller=adaptive", "objective.reward_kl.coef=0.1")
    kl += ("objective.reward_kl.horizon=100",)
    critic = ("critic.warmup_steps=1", "critic.optimizer.lr=1e-3")
    overrides = ("run.max_steps=3", "rollout.top_p=0.9", *critic, *kl, "training.tp=2")
    steps = steps_of(config, "algorithm=ppo", *overrides, world_size=2)
    assert all(step["training/rollout_probs_diff_max"] <= bounds.TOY_LOGPROB for step in steps)
    assert "actor/pg_loss" not in steps[0] and "actor/pg_loss" in steps[1]
    # A value head that starts at 0.
    assert steps[0]["critic/values/max"] == steps[0]["critic/values/min"] == 0
    assert steps[1]["critic/values/max"] != 0
    assert steps[2]["critic/vf_loss"] < steps[0]["critic/vf_loss"] and steps[0]["critic/grad_norm"] > 0
    # The policy is its own reference until it moves; a divergence below the target lowers the weight.
    penalties = [step["actor/reward_kl_penalty"] for step in steps]
    assert penalties[0] == penalties[1] == 0 != penalties[2]
    # But not in the critic's warm-up, because the policy cannot move yet.
    weights = [step["actor/reward_kl_penalty_coeff"] for step in steps]
    assert weights == pytest.approx([0.1, 0.1, 0.1 * (1 - 0.2 * 32 / 100)])


def test_grpo_on_a_truncated_distribution(config):
    truncated = ("rollout.top_p=0.9", "rollout.top_k=5", "rollout.min_p=0.05", "training.pp=2")
    for step in steps_of(config, *truncated, "objective.kl_coef=0.01", world_size=2):
        assert step["training/rollout_probs_diff_max"] <= bounds.TOY_LOGPROB and step["actor/grad_norm"] > 0
        assert step["actor/entropy"] <= math.log(5)
        assert step["perf/held_bytes_received"] == step["perf/held_bytes_planned"] > 0


PLAIN = """
from rl.algorithms import grpo, sft

NEEDS = ("samples", "reward", "groups")
DEFAULTS = {"objective.advantage": "grpo", "objective.loss": "ppo"}

def collect(phases):
    return grpo.collect(phases)

def learn(phases, batch):
    phases.log_probs(batch)
    phases.update(batch, sft.loss)
"""


def test_a_plain_loss_function_gets_an_adaptive_entropy_bonus(config, tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN)
    overrides = (f"algorithm={tmp_path}/plain.py", "run.max_steps=1", "objective.entropy_coef=0.1")
    overrides += (ONE_UPDATE, "rollout.deterministic=true")
    [fixed] = steps_of(config, *overrides, run=tmp_path / "fixed")
    target = "objective.adaptive_entropy.target=10"
    [adapted] = steps_of(config, *overrides, target, run=tmp_path / "adapted")
    assert adapted["actor/entropy_coef"] == 0.1 and adapted["sft/loss"] == pytest.approx(fixed["sft/loss"])
    assert adapted["actor/grad_norm"] != fixed["actor/grad_norm"]


DAPO = ("algorithm=dapo", "dynamic_sampling.prompts_per_round=6", "reward.overlong_buffer_tokens=3")


def test_dapo_draws_until_enough_groups_have_spread(config):
    for step in steps_of(config, *DAPO):
        assert step["dapo/kept_groups"] == 8 <= step["dapo/drawn_groups"] == 6 * step["dapo/rounds"]
        assert step["dapo/rounds"] >= 2 and -1 <= step["reward/overlong_penalty/mean"] < 0
        assert step["critic/rewards/mean"] < step["critic/score/mean"] + 1 and step["actor/grad_norm"] > 0


def test_dapo_without_spread_gives_up_and_goes_on(config, toy):
    same = f"reward.function={toy}/reward.py:same"
    steps = steps_of(config, "algorithm=dapo", "dynamic_sampling.max_rounds=2", same)
    assert [step["dapo/kept_groups"] for step in steps] == [0, 0] and "actor/pg_loss" not in steps[1]
    assert [step["dapo/rounds"] for step in steps] == [2, 2]


POLICY_GRADIENTS = (
    (
        "algorithm=rloo",
        "objective.kl_coef=0.1",
        "objective.kl_estimator=k3-weighted",
        "objective.off_policy_mask=0.01",
        "objective.top_entropy=0.5",
        "objective.adaptive_entropy.target=100",
        "objective.adaptive_entropy.delta=0.001",
    ),
    ("algorithm=reinforce_pp", "objective.advantage=reinforce++-baseline"),
    (
        "objective.loss=gspo",
        "objective.clip_low=0.03",
        "objective.clip_high=0.04",
        "objective.aggregation=seq-mean-token-mean",
    ),
    ("objective.loss=clip-cov", "objective.cov_fraction=0.1", "objective.cov_low=-1", "objective.cov_high=1"),
    ("objective.loss=kl-cov", "objective.cov_fraction=0.1", "rollout_correction.bypass=true"),
    ("objective.advantage=optimal-token-baseline", "rollout_correction.truncate_tokens=2.0"),
    (
        "objective.advantage=gdpo",
        "objective.reward_columns=[spread, length]",
        "rollout_correction.reject=token-k2,sample-k3",
        "rollout_correction.reject_high=[0.2, 0.1]",
    ),
)
SLOW = ("gspo", "clip-cov", "optimal-token-baseline", "gdpo")
"""Losses and advantages; tests/unit/objectives compares their values already."""


def name_of(overrides: tuple[str, ...]) -> str:
    return overrides[0].partition("=")[2]


@pytest.mark.parametrize(
    "overrides",
    [pytest.param(case, marks=[pytest.mark.slow] * (name_of(case) in SLOW)) for case in POLICY_GRADIENTS],
    ids=name_of,
)
def test_two_steps_of_a_policy_gradient(config, overrides):
    first, second = steps_of(config, *overrides)
    for step in (first, second):
        assert step["actor/grad_norm"] > 0 and step["critic/advantages/max"] > 0
        assert "actor/ppo_kl" in step and "reward/length/mean" in step
        tokens = [step[f"global_seqlen/{name}"] for name in ("balanced_min", "mean", "balanced_max")]
        assert 0 < tokens[0] and tokens == sorted(tokens)
    if "cov_fraction" in " ".join(overrides):
        assert 0.05 < second["actor/pg_covfrac"] < 0.2
    if "adaptive_entropy" in " ".join(overrides):
        assert [step["actor/entropy_coef"] for step in (first, second)] == [0.0, 0.001]
        assert 0 <= first["actor/off_policy_masked_fraction"] < 1
    if "truncate_tokens" in " ".join(overrides):
        assert first["rollout_corr/weight_mean"] == pytest.approx(1, abs=bounds.TOY_LOGPROB)
    if "reject" in " ".join(overrides):
        assert first["rollout_corr/rejected_fraction"] == 0
        assert first["rollout_corr/rollout_rs_seq_mean_k3_masked_fraction"] == 0
    assert ("timing_s/old_log_prob" in first) == ("rollout_correction.bypass=true" not in overrides)


def test_remax_subtracts_the_greedy_responses_score(config):
    penalty = ("objective.reward_kl.coef=1", "objective.reward_kl.estimator=k2")
    first, second = steps_of(config, "algorithm=remax", "rollout.samples_per_prompt=1", *penalty)
    for step in (first, second):
        assert 0 <= step["critic/baseline/mean"] <= 1 and step["actor/grad_norm"] > 0
        expected = step["critic/rewards/mean"] - step["critic/baseline/mean"]
        assert step["critic/advantages/min"] <= expected <= step["critic/advantages/max"]
    assert first["critic/rewards/mean"] == first["critic/score/mean"]
    assert second["critic/rewards/mean"] < second["critic/score/mean"]


def test_dpo_starts_at_log_2_and_learns_its_pairs(config, toy, tmp_path):
    pq.write_table(pq.read_table(toy / "pairs.parquet").slice(0, 8), tmp_path / "pairs.parquet")
    data = ("algorithm=dpo", f"data.train=[{tmp_path}/pairs.parquet]", "run.max_steps=20", ONE_UPDATE)
    data += FROM_DATA
    steps = steps_of(config, *data, "training.optimizer.lr=3e-4", world_size=2)
    assert steps[0]["preference/loss"] == pytest.approx(math.log(2), rel=bounds.of_sum(64))
    assert steps[0]["preference/margin"] == 0
    assert "timing_s/gen" not in steps[0] and steps[0]["prompt_length/mean"] < 16
    assert steps[-1]["preference/loss"] < 0.6 and steps[-1]["preference/accuracy"] > 0.8
    assert steps[-1]["preference/chosen_reward"] > steps[-1]["preference/rejected_reward"]


def test_kto_starts_at_one_half_and_learns_its_labels(config, toy, tmp_path):
    pq.write_table(pq.read_table(toy / "labels.parquet").slice(0, 8), tmp_path / "labels.parquet")
    data = ("algorithm=kto", f"data.train=[{tmp_path}/labels.parquet]", "run.max_steps=20", ONE_UPDATE)
    data += FROM_DATA
    steps = steps_of(config, *data, "training.optimizer.lr=3e-4", "preference.beta=0.5", world_size=2)
    assert "timing_s/gen" not in steps[0] and "timing_s/old_log_prob" not in steps[0]
    assert steps[0]["preference/loss"] == 0.5 and steps[0]["preference/kl"] == 0
    assert steps[-1]["preference/loss"] < 0.4 and steps[-1]["preference/accuracy"] > 0.8
    assert steps[-1]["preference/margin"] > 0.3 and steps[-1]["preference/kl"] >= 0


@pytest.mark.parametrize("algorithm", ["orpo", pytest.param("simpo", marks=pytest.mark.slow)])
def test_pairs_without_a_reference_policy(config, toy, tmp_path, algorithm):
    pq.write_table(pq.read_table(toy / "pairs.parquet").slice(0, 8), tmp_path / "pairs.parquet")
    data = (
        f"algorithm={algorithm}",
        f"data.train=[{tmp_path}/pairs.parquet]",
        "run.max_steps=20",
        ONE_UPDATE,
        *FROM_DATA,
    )
    steps = steps_of(config, *data, "training.optimizer.lr=3e-4")
    assert "timing_s/gen" not in steps[0] and "timing_s/ref" not in steps[0]
    assert steps[-1]["preference/loss"] < steps[0]["preference/loss"] - 0.1
    assert steps[-1]["preference/accuracy"] > 0.8


def test_spin_moves_the_policy_to_the_data(config, tmp_path):
    for step in steps_of(
        config, "algorithm=spin", ONE_UPDATE, *UNSCORED
    ):  # spin's opponent is the policy itself
        assert step["preference/loss"] == pytest.approx(math.log(2), rel=bounds.of_sum(64))
        assert step["actor/grad_norm"] > 0
    several = ("algorithm=spin", "run.max_steps=1", "training.epochs=4", ONE_UPDATE, *UNSCORED)
    assert steps_of(config, *several, run=tmp_path / "epochs")[0]["preference/loss"] < math.log(2)


def test_sppo_moves_log_ratios_towards_win_rates(config, tmp_path):
    sppo = ("algorithm=sppo", "run.max_steps=1", ONE_UPDATE, "preference.beta=0.5")
    sppo += ("training.optimizer.lr=3e-5",)
    [one] = steps_of(config, *sppo, run=tmp_path / "one")
    [many] = steps_of(config, *sppo, "training.epochs=6", run=tmp_path / "many")
    assert one["preference/log_ratio"] == 0 < many["preference/log_ratio"]
    assert many["preference/loss"] < one["preference/loss"]


def test_prime_trains_its_reward_model_on_outcomes(config):
    keys = dict(min_accuracy=0, max_accuracy=1, beta=0.5) | {"optimizer.lr": 1e-3}
    reward = [f"implicit_reward.{key}={value}" for key, value in keys.items()]
    policy = ("training.epochs=4", ONE_UPDATE, "training.optimizer.lr=0", "training.pp=2")
    steps = steps_of(config, "algorithm=prime", *reward, *policy, world_size=2)
    assert steps[0]["implicit_reward/reward/mean"] == 0 != steps[1]["implicit_reward/reward/mean"]
    assert steps[0]["prime/kept_groups"] == 8 and steps[0]["implicit_reward/grad_norm"] > 0
    # The loss before any update is log 2; the mean over four passes is lower.
    assert steps[0]["implicit_reward/loss"] < math.log(2) - 0.01
    assert steps[1]["critic/advantages/max"] > 0 and steps[1]["actor/grad_norm"] > 0


HOSTILE = '''
import os, time

def score(prompt, response, ground_truth, **extra):
    """Fail in a way that the ground truth, a sum, selects."""
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


def test_a_hostile_reward_function_does_not_end_the_run(config, tmp_path, monkeypatch):
    (tmp_path / "hostile.py").write_text(HOSTILE)
    monkeypatch.setenv("MARK_OF_THIS_TEST", str(tmp_path))  # children inherit it
    reward = dict(
        function=f"{tmp_path}/hostile.py:score", timeout_s=1, memory_mib=2048, workers=2, failure_score=-1
    )
    few = (
        "run.max_steps=1",
        "data.prompts_per_step=16",
        "rollout.samples_per_prompt=1",
        "logging.rollouts=all",
    )
    limits = [f"reward.{key}={value}" for key, value in reward.items()]
    [record] = steps_of(config, *limits, *few, "objective.advantage=reinforce++")
    samples = rollouts(tmp_path / "run")
    assert len(samples) == 16
    for sample in samples:
        assert sample["score"] == (-1 if int(sample["ground_truth"]) % 8 in (0, 1, 2, 3, 5) else 1), sample
    assert record["reward/failures"] == sum(sample["score"] == -1 for sample in samples) > 0
    left = [path for path in Path("/proc").glob("[0-9]*/environ") if str(tmp_path).encode() in read(path)]
    assert left == []


def read(path: Path) -> bytes:
    """Return the contents of a file of a process that may have ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_reward_model_and_a_judge_add_to_the_score(config, tmp_path, capsys):
    classifier = save_qwen2_classifier(tmp_path / "classifier", seed=3)
    path = save_qwen2(tmp_path / "judge", seed=4, max_position_embeddings=512)
    (tmp_path / "parse.py").write_text(
        "def parse(text):\n    if len(text) % 7 == 0: raise ValueError\n    return 2.0\n"
    )
    judge = dict(
        path=path,
        coef=10.0,
        parser=f"{tmp_path}/parse.py:parse",
        max_prompt_tokens=256,
        max_response_tokens=16,
        template="'{prompt} {response} {ground_truth}?'",
    )
    models = [f"reward.judge.{key}={value}" for key, value in judge.items()]
    models += [f"reward.model.path={classifier}", "reward.model.coef=0.5", "reward.failure_score=-5"]
    models += ["logging.rollouts=all"]
    for step in steps_of(config, *models, "rollout.deterministic=false", world_size=2):
        assert step["reward/judge/mean"] == 2.0 and step["reward/reward_model/mean"] != 0
        assert step["critic/score/max"] > 18
        assert step["training/rollout_probs_diff_max"] < bounds.TOY_LOGPROB
        assert (step["critic/score/min"] == -5) == (step["reward/failures"] > 0)
    score_only(load_config(str(config), [*models, "run.mode=score_only", "reward.timeout_s=30"]))
    assert "all steps: 64 samples, 0 changed" in capsys.readouterr().out
    score_only(load_config(str(config), [*models, "run.mode=score_only", "reward.judge.coef=9"]))
    failures = sum(sample["score"] == -5 for sample in rollouts(tmp_path / "run"))
    assert f"all steps: 64 samples, {64 - failures} changed" in capsys.readouterr().out


def test_unfit_reward_models_and_judges_are_refused(config, toy):
    limits = "reward.judge.max_prompt_tokens=4096 and reward.judge.max_response_tokens=512"
    for override, words in {
        f"reward.model.path={toy}/model": "score.weight",
        f"reward.judge.path={toy}/model": limits,
        "reward.judge.path=/nowhere/judge": "reward.judge.path=/nowhere/judge",
    }.items():
        with pytest.raises(RanksFailed) as failure:
            train(1, config, override)
        assert failure.value.returncodes == [2] and words in failure.value.stderr[0]


def test_validation_has_greedy_and_sampled_responses(config, toy):
    validation = ("validation.every=1", "validation.samples_per_prompt=4", "validation.max_prompts=8")
    steps = steps_of(config, *validation, f"data.val=[{toy}/test.parquet]", "run.max_steps=1")
    assert len(steps) == 2
    for step in steps:
        names = ("mean@1", "mean@4", "best@4/mean")
        greedy, mean, best = (step[f"val-core/addition/acc/{name}"] for name in names)
        assert 0 <= greedy <= 1 and 0 <= mean <= best <= 1
        assert step["val-aux/addition/acc/best@2/mean"] <= best and "val-aux/addition/spread/std@4" in step


def test_several_sources_with_weights_and_a_curriculum(config, toy, tmp_path):
    two = f"data.train=[{toy}/train.parquet, {toy}/test.parquet]"
    [record] = steps_of(config, "run.max_steps=1", two, "data.train_weights=[1.0, 3.0]")
    assert record["actor/grad_norm"] > 0
    (tmp_path / "easy.py").write_text(
        "def order(epoch, prompts, rng):\n"
        "    return sorted(range(len(prompts)), key=lambda i: int(prompts[i].ground_truth))\n"
    )
    easy = (f"data.curriculum={tmp_path}/easy.py:order", "logging.rollouts=all", "run.max_steps=1")
    steps_of(config, *easy, run=tmp_path / "easy")
    rows = pq.read_table(toy / "train.parquet").column("reward_model").to_pylist()
    sums = sorted(int(row["ground_truth"]) for row in rows)
    drawn = [int(sample["ground_truth"]) for sample in rollouts(tmp_path / "easy")]
    assert set(drawn) == set(sums[:8])


def test_an_algorithm_of_ones_own_runs_from_its_file(config, tmp_path):
    rloo = (ROOT / "rl" / "algorithms" / "rloo.py").read_text()
    (tmp_path / "mine.py").write_text(rloo.replace("0.01", "0.02"))
    [record] = steps_of(config, f"algorithm={tmp_path}/mine.py", "run.max_steps=1")
    assert record["actor/reward_kl_penalty_coeff"] == 0.02
    assert (tmp_path / "run" / "code" / "mine.py").exists()
