"""Seconds of a step in the forms of asynchrony, beside hand numbers and published figures."""

import argparse
import math
from pathlib import Path

import pytest

from rl.config.schema import load_config
from rl.dry_run import report
from rl.dry_run.asynchrony import StepForm, best, forms
from rl.dry_run.estimate import estimate
from rl.dry_run.generation import EngineRates, Work, generation_seconds
from rl.dry_run.hardware import Hardware
from rl.dry_run.report import report_forms

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


def found(name, world_size, *overrides, **lengths):
    config = load_config(str(CONFIGS / f"{name}.yaml"), overrides)
    return estimate(config, world_size, Hardware(), plan=False, **lengths)


def test_equal_lengths_take_their_tokens_times_a_step():
    work = Work(groups=4, samples=2, mean=100, sigma=0.0, longest=1000)
    at_once = EngineRates(replicas=2, slots=8, decode_s=lambda samples: 1 + samples)
    assert generation_seconds(work, at_once) == pytest.approx(100 * 5)
    in_two_waves = EngineRates(replicas=2, slots=2, decode_s=lambda samples: 1 + samples)
    assert generation_seconds(work, in_two_waves) == pytest.approx(2 * 100 * 3)
    prompts = Work(groups=4, samples=2, mean=100, sigma=0.0, longest=1000, prompt=50)
    slow = EngineRates(replicas=2, slots=8, decode_s=lambda samples: 1, prefill_s=0.1)
    assert generation_seconds(prompts, slow) == pytest.approx(100 + 4 * 50 * 0.1 / 2)


def test_the_mean_of_lengths_is_that_asked_for():
    lengths = Work(groups=1, samples=1, mean=400, sigma=1.0, longest=1000).lengths(20000)
    assert lengths.mean() == pytest.approx(400) and lengths.max() == 1000
    logarithms = sorted(math.log(length) for length in lengths)
    assert logarithms[10000] - logarithms[3173] == pytest.approx(1.0, abs=0.05)  # one sigma below the median


def test_the_longest_response_ends_a_synchronous_step_only():
    work = Work(groups=64, samples=1, mean=100, sigma=1.0, longest=10000)
    engines = EngineRates(replicas=4, slots=16, decode_s=lambda samples: 1.0)
    assert generation_seconds(work, engines) > 4 * 100
    carried = [generation_seconds(work, engines, started=started) for started in (1.0, 1.25, 1.5)]
    assert carried[0] > 1.25 * carried[1] > carried[2]
    fresh = generation_seconds(work, engines, started=1.25, staleness=4)
    assert fresh <= carried[1]  # less often does a step wait for a group that would be too old


def test_carry_over_and_split_gain_about_what_verl_reports():
    """Issue: verl's v1_async_trainer.md, Qwen3.5-35B-A3B on 32 GPUs, tp 4, responses to 32k of mean 12.7k:
    12,053 tokens/s synchronous, 18,852 with the tail carried over, 18,829 split. The 512 samples follow from
    tokens/s and hours. Assumed: training is a quarter of a step, and 64 samples double a decoding step."""
    work = Work(groups=64, samples=8, mean=12700, sigma=0.7, longest=32768)

    def seconds(share, started):
        engines = EngineRates(replicas=8 * share, slots=256, decode_s=lambda samples: 1 + samples / 64)
        return generation_seconds(work, engines, started=started)

    generation = seconds(1, 1)
    rest = generation / 3
    carried = (generation + rest) / (seconds(1, 2) + rest)
    split = max((generation + rest) / max(seconds(1 - i / 8, 2), rest * 8 / i) for i in range(1, 5))
    assert carried == pytest.approx(18852 / 12053, rel=0.15)
    assert split == pytest.approx(18829 / 12053, rel=0.15)


def test_a_split_that_starves_one_side_is_not_recommended():
    """NeMo-RL 0.6, Qwen3-30B-A3B on 16 GPUs: 221 s synchronous, 301 s one step off on halves. So one side
    needs 301 / 2 of the 221 s on all ranks; here it is the trainer."""
    layout = ("data.prompts_per_step=256", "training.tp=4", "rollout.tp=4")
    before = found("qwen3-30b-a3b_math_grpo_4x8", 32, *layout, prompt=300, response=1000)
    shown = forms(before, sigma=0.2, generation_s=221 - 301 / 2, rest_s=301 / 2)
    assert shown[0] == StepForm({}, pytest.approx(221))
    halves = [form for form in shown if form.overrides.get("roles.train") == "0-15"]
    assert all(form.seconds == pytest.approx(301, rel=0.02) for form in halves)
    assert best(shown) is shown[0]


def test_the_simplest_form_close_to_the_fastest_is_used():
    slow, carried, split = StepForm({}, 100), StepForm({"a": 1}, 70), StepForm({"b": 1}, 68)
    assert best([slow, carried, split]) is carried
    assert best([slow, carried, StepForm({"b": 1}, 60)]).overrides == {"b": 1}
    assert best([slow, StepForm({"a": 1}, 95), StepForm({"b": 1}, 93)]) is slow


def test_a_synchronous_form_takes_the_seconds_of_the_step():
    config = load_config(str(CONFIGS / "qwen2.5-7b_gsm8k_grpo_8gpu.yaml"), ("training.tp=4",))
    before = estimate(config, 8, Hardware(nvlink_gb_s=1.0), plan=True)
    assert before.seconds["update_weights"] > 1
    assert forms(before, sigma=before.lengths.sigma)[0].seconds == before.step_seconds


def test_every_form_that_is_shown_is_a_config_that_fits(monkeypatch):
    before = found("qwen2.5-32b_dapo_aime_16x8", 128)
    options = argparse.Namespace(sigma_response_tokens=0.7, generation_seconds=0.0, rest_seconds=0.0)
    text = report_forms(before, options)
    assert "rollout.carry_over=true rollout.oversample=" in text and "synchronous" in text
    assert "roles.train=0-" in text and "-127 roles.lag=1 roles.granularity=batch" in text
    assert text.splitlines()[-1].startswith(("use ", "keep synchronous")) and "by estimated rates" in text
    monkeypatch.setattr(report, "LEAST_STEP_S", 1e9)
    assert "no advice for steps below 1e+09 s" in report_forms(before, options)


def test_a_split_run_has_its_own_memory_and_seconds():
    before = found("qwen2.5-7b_gsm8k_grpo_8gpu", 8)
    roles = ("roles.train=0-3", "roles.rollout=4-7", "rollout_correction.truncate_tokens=2")
    after = found("qwen2.5-7b_gsm8k_grpo_8gpu", 8, *roles)
    assert (after.layout.dp, after.layout.replicas) == (before.layout.dp // 2, before.layout.replicas // 2)
    assert after.memory.away == 0 < before.memory.away
    rest = sum(after.seconds.values()) - after.seconds["gen"]
    assert after.step_seconds == max(after.seconds["gen"], rest)
