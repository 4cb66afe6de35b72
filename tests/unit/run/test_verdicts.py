"""Verdicts on the first step: each illness gets its own, and a healthy step none."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from rl.checks.rounding import RoundingNoise
from rl.config.schema import load_config
from rl.data.batch import Batch
from rl.data.prompts import Prompt
from rl.features.first_step import verdicts as of
from rl.features.first_step.report import sample_text
from rl.features.first_step.verdicts import Facts, verdicts
from tools.make_toy import build_tokenizer

GROUPS, SIZE, LIMIT = 8, 4, 10
TEMPLATE = (
    "{% for message in messages %}<user>{{ message['content'] }}{% if message['role'] == 'assistant' %}"
    "<turn>{% endif %}{% endfor %}"
)
KEYS = ("model.path=toy", "data.train=toy.jsonl", f"rollout.max_response_tokens={LIMIT}")


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(special=["<turn>"], chat_template=TEMPLATE)


def healthy(tokenizer, *overrides: str) -> Facts:
    """Return the facts of a step that no verdict objects to."""
    rng, end = np.random.default_rng(0), tokenizer.convert_tokens_to_ids("<turn>")
    plain = [id for id in range(len(tokenizer)) if id not in of.special_ids(tokenizer)]
    chat = [{"role": "user", "content": "1+1="}]
    prompts = [
        Prompt(g, np.array(plain[:3], np.int32), "1+1=", "toy", "2", {}, messages=chat) for g in range(GROUPS)
    ]
    ids = [np.append(rng.choice(plain, 5), end).astype(np.int32) for _ in range(GROUPS * SIZE)]
    groups = torch.arange(GROUPS * SIZE) // SIZE
    batch = Batch(
        [prompts[g].token_ids for g in groups], ids, groups, torch.zeros(len(ids), dtype=torch.bool), prompts
    )
    batch.rollout_logprobs = -torch.rand(len(ids) * 6)
    batch.old_logprobs = batch.rollout_logprobs + 1e-6
    batch.ref_logprobs = batch.old_logprobs.clone()
    batch.scores = (torch.arange(len(ids)) % 2).float()
    metrics = {
        "actor/grad_norm": 0.5,
        "actor/pg_clipfrac": 0.01,
        "actor/ppo_kl": 1e-4,
        "critic/score/min": 0.0,
        "critic/score/max": 1.0,
        "critic/score/mean": 0.5,
        "perf/idle_share_gen/mean": 0.05,
        "reward/failures": 0.0,
        "timing_s/step": 10.0,
        "training/imbalance": 0.02,
        "training/logprob_gap": 1e-6,
        "training/logprob_gap_limit": 1e-5,
        "training/micro_batches": 2.0,
        "training/rollout_probs_diff_mean": 1e-6,
    }
    phases = {
        "gen": {"s": 5.0, "host GiB": 1.0, "device GiB": 60.0, "device total GiB": 80.0},
        "update_actor": {"s": 4.0, "host GiB": 2.0, "device GiB": 70.0, "device total GiB": 80.0},
    }
    config = load_config(None, [*KEYS, *overrides])
    after = batch.old_logprobs + 0.01
    return Facts(config, tokenizer, {end}, metrics, batch, after=after, phases=phases)


def bad(facts: Facts) -> dict[str, str]:
    return {verdict.name: verdict.level for verdict in verdicts(facts) if verdict.level != "ok"}


def test_a_healthy_step_has_every_verdict_and_all_are_ok(tokenizer):
    facts = healthy(tokenizer)
    assert bad(facts) == {}
    assert len(verdicts(facts)) == len(of.CHECKS) - 1  # all but the error
    assert not any(verdict.remedy for verdict in verdicts(facts))


def truncate(facts):
    facts.batch.truncated[::3] = True


def never_end(facts):
    facts.batch.truncated[:] = True


def another_end(facts):
    facts.stop_ids = {facts.tokenizer.eos_token_id}


def special_within(facts):
    facts.batch.response_ids[1][2] = facts.tokenizer.convert_tokens_to_ids("<user>")


def strings(facts):
    facts.batch.prompts = [replace(prompt, messages=None) for prompt in facts.batch.prompts]


def masked(facts):
    facts.batch.mask[:12] = 0  # two samples


def equal(facts):
    facts.batch.response_ids[:] = [facts.batch.response_ids[0]] * len(facts.batch)


def constant(facts):
    facts.metrics |= {"critic/score/min": 0.0, "critic/score/max": 0.0, "critic/score/mean": 0.0}
    facts.metrics["actor/grad_norm"] = 0.0


def flat_groups(facts):
    facts.batch.scores = facts.batch.groups.float()


def failures(facts):
    facts.metrics["reward/failures"] = 8.0


def one_failure(facts):
    facts.metrics["reward/failures"] = 1.0


def above_noise(facts):
    facts.noise = RoundingNoise(1, 1.0)
    logprobs = facts.batch.old_logprobs
    facts.noise.measure([[[0]]], facts.batch, facts.batch.mask > 0, [logprobs, logprobs + 2e-7])


def engine(facts):
    facts.metrics["training/rollout_probs_diff_mean"] = 0.05


def large_lr(facts):
    facts.after = facts.batch.old_logprobs - 3.0


def nan(facts):
    facts.after = facts.batch.old_logprobs * torch.nan


def still(facts):
    facts.after = facts.batch.old_logprobs.clone()


def large_norm(facts):
    facts.metrics["actor/grad_norm"] = 50.0


def clipped(facts):
    facts.metrics["actor/pg_clipfrac"] = 0.9


def error(facts):
    facts.batch, facts.metrics, facts.after, facts.phases = None, {}, None, {}
    facts.error = "LogprobMismatch: the engine's log-probs differ"


def slow_reward(facts):
    facts.phases["reward"] = facts.phases["gen"] | {"s": 9.0}


def idle(facts):
    facts.metrics["perf/idle_share_gen/mean"] = 0.4


def memory(facts):
    facts.phases["update_actor"]["device GiB"] = 79.0


ILLNESSES = {
    truncate: {"truncated": "look"},
    never_end: {"truncated": "wrong", "end token": "wrong"},
    another_end: {"chat template": "wrong", "special tokens": "look"},
    special_within: {"special tokens": "look"},
    strings: {"chat template": "look"},
    masked: {"masks": "look"},
    equal: {"duplicates": "look"},
    constant: {"reward": "wrong", "gradient norm": "wrong"},
    flat_groups: {"reward": "wrong"},
    failures: {"reward failures": "wrong"},
    one_failure: {"reward failures": "look"},
    engine: {"engine and trainer": "look"},
    above_noise: {"engine and trainer": "wrong"},
    large_lr: {"size of the step": "wrong"},
    nan: {"size of the step": "wrong"},
    still: {"size of the step": "look"},
    large_norm: {"gradient norm": "look"},
    clipped: {"ratio": "wrong"},
    error: {"step": "wrong"},
    slow_reward: {"slowest phase": "look"},
    idle: {"idle replicas": "look"},
    memory: {"memory": "look"},
}


@pytest.mark.parametrize("illness", ILLNESSES, ids=lambda illness: illness.__name__)
def test_an_illness_gets_its_verdict_and_no_other(illness, tokenizer):
    facts = healthy(tokenizer)
    illness(facts)
    assert bad(facts) == ILLNESSES[illness]
    assert all(verdict.remedy for verdict in verdicts(facts) if verdict.level != "ok")


def test_with_a_teacher_a_constant_reward_is_not_wrong(tokenizer):
    facts = healthy(tokenizer, "teacher.path=teacher", "teacher.advantage_coef=0.1")
    constant(facts)
    facts.metrics["actor/grad_norm"] = 0.5
    assert bad(facts) == {"reward": "look"}


def test_a_warm_up_hides_no_learning_rate_that_is_too_high(tokenizer):
    facts = healthy(tokenizer, "training.optimizer.warmup_steps=100", "run.max_steps=1000")
    assert bad(facts) == {"size of the step": "look"}  # 0.01 nats at a hundredth of the rate


def test_a_run_longer_than_its_time_is_looked_at(tokenizer):
    facts = healthy(tokenizer, "run.max_steps=1000", "run.max_time=1:00:00")
    assert bad(facts) == {"whole run": "look"}


def test_a_check_leaves_the_run_directory_and_checkpoints_alone(tmp_path):
    mode = ("run.mode=check", "run.dir=runs/mine/", "checkpoint.every=5", "data.val=[held.jsonl]")
    config = load_config(None, [*KEYS, *mode])
    assert config.run.dir == "runs/mine-check"
    assert (config.checkpoint.every, config.checkpoint.resume, config.data.val) == (0, "never", [])
    named = load_config(None, [*KEYS, *mode, "checkpoint.resume=runs/first", "checkpoint.weights_only=true"])
    assert (named.checkpoint.resume, named.checkpoint.weights_only) == ("runs/first", True)
    again = load_config(None, [*KEYS, "run.mode=check", f"run.dir={config.run.dir}"])
    assert again.run.dir == config.run.dir


def test_a_sample_is_shown_with_its_parts_and_special_tokens(tokenizer):
    batch = healthy(tokenizer).batch
    batch.turns = torch.ones(len(batch.mask), dtype=torch.int32)
    batch.turns[2:4], batch.mask[2:5] = 0, 0  # two tokens of a tool, then one that was rejected
    shown = sample_text(batch, 0, tokenizer)
    parts = re.findall(r"\[(.*?), (\d+) tokens\]", shown.plain)
    assert parts == [
        ("prompt", "3"),
        ("response", "2"),
        ("given, not learned from", "2"),
        ("response, not learned from", "1"),
        ("response", "1"),
    ]
    (reverse,) = (span for span in shown.spans if "reverse" in str(span.style))
    assert shown.plain[reverse.start : reverse.end] == "<turn>"
