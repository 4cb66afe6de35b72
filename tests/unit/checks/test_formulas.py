"""The second sources of losses, learning rates, draws and precision accept the run's own, and find errors."""

from dataclasses import replace
from functools import partial
from importlib import import_module

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rl.checks import head
from rl.checks.batches import CheckFailed, check_rejections
from rl.checks.objective import check_loss
from rl.checks.precision import is_rounded
from rl.checks.sampling import check_uniforms
from rl.checks.updates import expected_rate
from rl.config.correction import RolloutCorrection
from rl.config.schema import Optimizer
from rl.data.batch import Batch
from rl.data.prompt_order import MixedOrder
from rl.data.prompts import Prompt
from rl.features.teachers.divergence import linear_divergence
from rl.objectives.distillation import divergence_of
from rl.phases.draw import Draw
from rl.phases.updates import critic_loss
from rl.rollout import inversion
from rl.training.learning_rate import RateSchedule
from rl.training.logprobs import linear_logprobs
from rl.training.loss import Loss
from tests.configs import config_with
from tests.each import each

PREFERENCE = ("preference.beta=0.5", "preference.label_smoothing=0.1")


@each("name", ["sft", "dpo", "spin", "simpo", "orpo", "kto", "sppo", "distill", "prime", "critic"])
def test_losses_of_algorithms_equal_their_formulas(name):
    config = config_with("preference.gamma=0.7", "critic.value_clip=0.1", *PREFERENCE)
    if name == "critic":
        loss = Loss(partial(critic_loss, clip=0.1))
    else:
        module = import_module(f"rl.algorithms.{name}")
        function = getattr(module, "reward_loss" if name == "prime" else "loss")
        loss = Loss(function if name == "sft" else partial(function, config=config))
        if name == "spin":
            loss = loss.given(reference="old_logprobs")
    key = {"prime": "implicit_reward"}.get(name, name)
    check_loss(key, loss, config)

    def doubled(micro, totals, **given):
        return 2 * loss.given(**given)(micro, totals)[0], {}

    with pytest.raises(CheckFailed, match=f"the loss {key} differs from its formula"):
        check_loss(key, Loss(doubled), config)


@each("schedule", ["constant", "linear", "cosine"])
def test_rates_equal_the_closed_form(schedule):
    optimizer = Optimizer(lr=1e-3, min_lr=1e-4, warmup_steps=3, schedule=schedule)
    rates = [RateSchedule(optimizer, 20).rate(step) for step in range(1, 21)]
    assert rates == pytest.approx([expected_rate(optimizer, step, 20) for step in range(1, 21)], rel=1e-12)


def test_sources_of_a_mixture_are_drawn_again():
    rows = [Prompt(i, np.array([i]), "", "toy", None, {}, source=i % 2) for i in range(10)]
    sources = [np.arange(10)[np.arange(10) % 2 == n] for n in range(2)]

    def draw(seed: int) -> Draw:
        order = MixedOrder(sources, [3, 1], seed=seed, shuffle=True)
        return Draw(rows, order, seed=3, weights=[3, 1])

    own = draw(3)
    for _ in range(5):
        own.next(4)
    own.check_cursor(own.state_dict())
    with pytest.raises(CheckFailed, match="would continue after 16 prompts, but the steps have drawn 20"):
        own.check_cursor(own.state_dict() | {"num_drawn": 16})
    with pytest.raises(CheckFailed, match="rows of the files"):
        draw(4).next(32)


def test_values_rounded_to_bfloat16_are_found():
    values = torch.rand(100, generator=torch.Generator().manual_seed(0))
    assert not is_rounded(values) and is_rounded(values.bfloat16().float())
    assert not is_rounded(2.0 ** torch.arange(9)) and not is_rounded(torch.zeros(9))


def test_rejected_tokens_that_count_are_found():
    correction = RolloutCorrection(reject="token-k1", reject_low=-0.1, reject_high=0.1)
    batch = Batch(
        [np.array([1], np.int32)], [np.arange(4, dtype=np.int32)], torch.tensor([0]), torch.tensor([False])
    )
    batch.rollout_logprobs, batch.old_logprobs = torch.tensor([-1.0, -2, -3, -4]), None
    with pytest.raises(CheckFailed, match="begins without old_logprobs"):
        check_rejections(batch, correction)
    batch.old_logprobs = torch.tensor([-1.0, -2, -3.5, -4])
    with pytest.raises(CheckFailed, match="1 of 4 tokens count, the first with token-k1=0.5"):
        check_rejections(batch, correction)
    check_rejections(replace(batch, mask=torch.tensor([1.0, 1, 0, 1])), correction)


def test_equal_random_numbers_of_tokens_are_found(monkeypatch):
    check_uniforms()
    monkeypatch.setattr(
        "rl.checks.sampling.uniforms", lambda seeds, positions: inversion.uniforms(seeds, positions * 0)
    )
    with pytest.raises(CheckFailed, match="get only 16 random numbers"):
        check_uniforms()


@each("dtype", [torch.float32, torch.bfloat16])
def test_a_head_with_wrong_or_coarse_results_is_found(monkeypatch, dtype):
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    generator = torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter((torch.randn(300, 32, generator=generator) / 5).to(dtype))

    def found(name: str = "reverse_kl") -> list[str]:
        of = divergence_of(name, 0.3)
        return head.problems_of(weight, group, temperature=0.7, linear=linear_divergence, of=of)

    assert [found(name) for name in ("forward_kl", "reverse_kl", "jensen_shannon")] == [[]] * 3

    def rounded(*args, **options):
        return tuple(x.bfloat16().float() for x in linear_logprobs(*args, **options))

    def without_gradient(*args, **options):
        logprobs, entropy, squares = linear_logprobs(*args, **options)
        return logprobs, entropy.detach() + 0 * logprobs, squares

    for wrong, text in ((rounded, "differ from float64"), (without_gradient, "the gradient of log-probs")):
        monkeypatch.setattr(head, "linear_logprobs", wrong)
        assert text in found()[0] and len(found()) == 1
    monkeypatch.setattr(head, "linear_logprobs", linear_logprobs)
