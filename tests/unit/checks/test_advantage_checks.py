"""Advantages and rewards against their recomputation: every estimator agrees, and each error is found."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rl.checks import advantages as checks
from rl.checks.advantages import check_advantages
from rl.checks.batches import CheckFailed
from rl.config.declarations import formulas
from rl.config.schema import load_config
from rl.data.batch import Batch
from rl.objectives.advantages.gae import gae
from rl.objectives.advantages.prime import prime
from rl.objectives.preference import win_rates
from rl.objectives.returns import whiten
from rl.phases.policy_gradient import advantages, filtered
from rl.phases.reward_shaping import KlPenalty, overlong_penalty

SIZES = (5, 1, 4, 6, 4, 3)
OWN_ALGORITHMS = {"gae": "ppo", "prime": "prime", "remax": "remax"}


def config_of(name: str, *keys: str):
    algorithm = OWN_ALGORITHMS.get(name, "reinforce_pp" if name.startswith("reinforce") else "grpo")
    basic = (
        "model.path=toy",
        "data.train=toy.jsonl",
        f"algorithm={algorithm}",
        "rollout.samples_per_prompt=4",
    )
    return load_config(None, [*basic, f"objective.advantage={name}", *keys])


def example(config, seed: int) -> Batch:
    """Return ragged samples, also empty and masked ones and groups of equal rewards, with advantages."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(SIZES)
    lengths = torch.randint(0, 12, (count,), generator=generator)
    total = int(lengths.sum())

    def normal(size=total):
        return torch.randn(size, generator=generator)

    position = torch.cat([torch.arange(n) for n in lengths])
    batch = Batch(
        prompt_ids=[np.ones(2, np.int32)] * count,
        response_ids=[np.arange(n, dtype=np.int32) + i for i, n in enumerate(lengths.tolist())],
        groups=torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES)),
        truncated=torch.zeros(count, dtype=torch.bool),
        mask=(torch.rand(total, generator=generator) > 0.2).float(),
        turns=(1 + position // 4).int(),
        extra={"turn_rewards": torch.where(position % 4 == 3, 0.5, 0.0)},
    )
    batch.old_logprobs, batch.ref_logprobs, batch.extra["old_values"] = -2 + normal(), -2 + normal(), normal()
    batch.extra["sum_p_squared"], batch.extra["loss_weights"] = (
        torch.rand(total, generator=generator),
        normal().exp(),
    )
    batch.scores = torch.randint(4, (count,), generator=generator) / 3
    batch.scores[batch.groups == 3] = 0.1
    batch.extra["baselines"] = normal(count)
    batch.score_details = {
        name: torch.rand(count, generator=generator) for name in ("length", "format", "acc")
    }
    batch.score_details["failed"] = (torch.arange(count) % 5 == 0).float()
    batch.rewards = batch.scores.clone()
    if config.reward.overlong_buffer_tokens:
        batch.rewards = batch.rewards + overlong_penalty(batch, config)
    batch.extra |= filtered(batch, config)
    if config.algorithm in checks.LABELS:
        rates = win_rates(batch.rewards, batch.groups)
        batch.extra["labels"] = rates if config.algorithm == "sppo" else batch.outcomes.clamp(0, 1)
    KlPenalty(config).apply(batch, 1)
    goal = config.objective
    if goal.advantage == "gae":
        options = {
            name: getattr(goal, name) for name in ("gamma", "lam", "lam_critic", "length_adaptive_alpha")
        }
        found, batch.extra["returns"] = gae(
            batch.token_rewards, batch.extra["old_values"], lengths, batch.mask, **options
        )
        batch.advantages = whiten(found, batch.mask) if goal.whiten else found
    elif goal.advantage == "prime":
        coefs = dict(process_coef=5.0, outcome_coef=5.0, gamma=1.0)
        batch.advantages = prime(normal(), batch.scores, batch.groups, lengths, batch.mask, **coefs)
    elif config.algorithm != "sppo":
        batch.advantages = advantages(batch, config)
    return batch


OPTIONS = {
    "grpo": ["normalize_by_std=false"],
    "grpo-passk": ["normalize_by_std=false"],
    "gae": [
        "whiten=false",
        "lam=0.9 gamma=0.95",
        "lam=0.9 lam_critic=1 length_adaptive_alpha=0.3 whiten=false",
    ],
    "reinforce++": ["gamma=0.9", "reward_kl.estimator=k3"],
}
COMPARED = set(formulas("advantages"))
CASES = [(name, keys) for name in sorted(COMPARED) for keys in ["", *OPTIONS.get(name, [])]]


@pytest.mark.parametrize(("name", "keys"), CASES, ids=lambda value: str(value) or "defaults")
def test_every_estimator_agrees_with_its_second_computation(name, keys, monkeypatch):
    config = config_of(name, *(f"objective.{key}" for key in keys.split()))
    for seed in range(10):
        check_advantages(example(config, seed), config)
    monkeypatch.setattr(checks, "NUM_VALUES", 40)
    check_advantages(example(config, 3), config)


@pytest.mark.parametrize("name", sorted(COMPARED))
def test_wrong_advantages_are_found(name):
    config = config_of(name)
    batch = example(config, 0)
    right, counted = batch.advantages, batch.mask > 0
    wrong = {"shifted": right + 0.1, "scaled": right * 1.01}
    if name != "prime":
        last = torch.zeros_like(right)
        last[batch.offsets[-4] :] = 0.01
        wrong |= {"zero": right * 0, "negated": -right, "rolled": right.roll(7), "one group": right + last}
    for what, column in wrong.items():
        with pytest.raises(CheckFailed, match="advantage check"):
            check_advantages(replace(batch, advantages=torch.where(counted, column, 0.0)), config)
            pytest.fail(what)


def test_labels_are_win_rates_and_outcomes():
    basic = "model.path=toy", "data.train=toy.jsonl", "rollout.samples_per_prompt=4"
    for algorithm in checks.LABELS:
        config = load_config(None, [*basic, f"algorithm={algorithm}"])
        for seed in range(10):
            check_advantages(batch := example(config, seed), config)
        labels = batch.extra["labels"]
        sizes = torch.tensor(SIZES).repeat_interleave(torch.tensor(SIZES))
        for wrong in (0.5 + (labels - 0.5) * (1 - 1 / sizes), labels.roll(1), 1 - labels):
            batch.extra["labels"] = wrong
            with pytest.raises(CheckFailed, match=f"has the label .* but algorithm={algorithm} makes it"):
                check_advantages(batch, config)


@pytest.mark.parametrize("filtration", ["best", "best-random", "best-worst", "power"])
def test_weights_of_filtration_are_computed_again(filtration):
    keys = f"objective.filtration={filtration}", "objective.reward_kl.coef=0.1"
    config = config_of("gae", *keys)
    for seed in range(10):
        check_advantages(batch := example(config, seed), config)
    weights = batch.extra["sample_weights"]
    for wrong in (weights * 1.01, weights.roll(7), torch.ones_like(weights)):
        batch.extra["sample_weights"] = wrong
        with pytest.raises(CheckFailed, match=f"column sample_weights .* objective.filtration={filtration}"):
            check_advantages(batch, config)


def test_a_formula_with_another_option_is_found():
    for name, other in (("grpo", "normalize_by_std=false"), ("gae", "lam=0.9"), ("reinforce++", "gamma=0.9")):
        config = config_of(name)
        with pytest.raises(CheckFailed, match="advantage check"):
            check_advantages(example(config_of(name, f"objective.{other}"), 0), config)


def test_rewards_are_the_scores_less_the_penalties():
    keys = (
        "reward.overlong_buffer_tokens=6",
        "rollout.max_response_tokens=12",
        "objective.reward_kl.coef=0.1",
    )
    for name in set(formulas("advantages")) - {"maxrl"}:  # which refuses rewards below 0
        config = config_of(name, *keys)
        check_advantages(example(config, 0), config)
    config = config_of("rloo", *keys)
    batch = example(config, 0)
    for other in (
        "reward.overlong_penalty=0.5",
        "objective.reward_kl.coef=0.2",
        "objective.reward_kl.estimator=k2",
    ):
        with pytest.raises(CheckFailed, match=r"reward check: sample \d+ has the reward"):
            check_advantages(example(config_of("rloo", *keys, other), 0), config)
    batch.scores = batch.scores.roll(1)
    with pytest.raises(CheckFailed, match="reward check"):
        check_advantages(batch, config)
