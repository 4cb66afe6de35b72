"""The second sources of losses, learning rates, draws and precision accept the run's own, and find errors."""

from dataclasses import replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rl.checks import head, updates
from rl.checks.advantages import check_entropy_coef
from rl.checks.batches import CheckFailed, check_rejections, check_uniforms
from rl.checks.few_samples import some
from rl.checks.objective import check_loss
from rl.checks.precision import CoarseFunctions, is_rounded
from rl.checks.updates import (
    UpdateChecks,
    check_divergence,
    check_present,
    check_selection,
    check_specs,
    expected_rate,
)
from rl.config.correction import RolloutCorrection
from rl.config.schema import Optimizer
from rl.config.terms import AdaptiveEntropy
from rl.data.batch import Batch
from rl.data.prompt_order import MixedOrder
from rl.data.prompts import Prompt
from rl.features.sampling_masks.trainer import SamplingMasks
from rl.features.teachers.divergence import linear_divergence, top_k, top_k_divergence
from rl.features.transformers_backend.model import _pad_vocabulary
from rl.objectives.distillation import divergence_of
from rl.objectives.entropy_controller import EntropyController
from rl.phases.draw import Draw
from rl.phases.policy_gradient import token_selection
from rl.phases.updates import critic_loss
from rl.rollout import inversion
from rl.training.learning_rate import RateSchedule
from rl.training.logprobs import linear_logprobs
from rl.training.loss import Loss, Totals
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
    own.num_learned = own.num_drawn
    own.check_cursor(own.state_dict())
    own.next(4)  # by a step that is aborted
    with pytest.raises(
        CheckFailed, match="would continue after 24 prompts, but complete steps have drawn 20"
    ):
        own.check_cursor(own.state_dict())
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
    batch.extra["unrejected_mask"], batch.mask = batch.mask, torch.tensor([1.0, 1, 0, 1])
    check_rejections(batch, correction)
    both = replace(correction, reject="token-k1,sample-k1", reject_high=[0.6, 0.1])
    with pytest.raises(CheckFailed, match="3 of 3 tokens count, the first with sample-k1=0.125"):
        check_rejections(batch, both)  # the mean over all four tokens is 0.125
    batch.mask = torch.tensor([0.0, 1, 0, 1])
    with pytest.raises(CheckFailed, match=r"1 tokens pass .*, but do not count, first token 0 of sample 0"):
        check_rejections(batch, correction)


def test_equal_random_numbers_of_tokens_are_found(monkeypatch):
    check_uniforms()
    monkeypatch.setattr(
        "rl.checks.batches.uniforms", lambda seeds, positions: inversion.uniforms(seeds, positions * 0)
    )
    with pytest.raises(CheckFailed, match="get only 16 random numbers"):
        check_uniforms()


@each("dtype", [torch.float32, torch.bfloat16])
def test_a_head_with_wrong_or_coarse_results_is_found(monkeypatch, dtype):
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    generator = torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter((torch.randn(300, 32, generator=generator) / 5).to(dtype))

    def found(name: str = "reverse_kl", linear=linear_divergence, tokens=None) -> list[str]:
        options = dict(filter_of=SamplingMasks, linear=linear, of=divergence_of(name, 0.3), tokens=tokens)
        return head.problems_of(weight, group, temperature=0.7, **options)

    def shifted(*args, **options):
        ids, log_q = top_k(*args, k=5, **options)
        return ids + 1, log_q

    for name in ("forward_kl", "reverse_kl", "jensen_shannon"):
        assert [found(name), found(name, top_k_divergence, partial(top_k, k=5))] == [[], []]
    assert found(linear=top_k_divergence, tokens=shifted) == [
        "the 5 tokens of teacher.top_k are not the teacher's most probable ones"
    ]

    def rounded(*args, **options):
        return tuple(x.bfloat16().float() for x in linear_logprobs(*args, **options))

    def without_gradient(*args, **options):
        logprobs, entropy, squares = linear_logprobs(*args, **options)
        return logprobs, entropy.detach() + 0 * logprobs, squares

    def unmasked(*args, **options):
        return linear_logprobs(*args, **(options | {"logits_filter": None}))

    for wrong, text, number in (
        (rounded, "differ from float64", 2),
        (without_gradient, "the gradient of log-probs", 2),
        (unmasked, "under sampling masks differ from float64", 1),
    ):
        monkeypatch.setattr(head, "linear_logprobs", wrong)
        assert text in found()[0] and len(found()) == number
    monkeypatch.setattr(head, "linear_logprobs", linear_logprobs)


@each("keys", [["top_entropy=0.3"], ["loss=kl-cov", "cov_fraction=0.3"], ["loss=clip-cov", "cov_low=-0.1"]])
def test_selected_tokens_that_the_formula_does_not_select_are_found(keys):
    config = config_with(*(f"objective.{key}" for key in keys), "algorithm=grpo")
    ids = [np.arange(20, dtype=np.int32)] * 3
    batch = Batch(ids, ids, torch.arange(3), torch.zeros(3, dtype=torch.bool))
    batch.mask, values = torch.ones(60), torch.randn(60, generator=torch.Generator().manual_seed(0)) - 3
    batch.advantages, batch.old_logprobs = values.roll(1), values
    select = token_selection(config)
    batch.extra["selected_tokens"] = found = select.function(batch, values, 0).float()
    options = dict(values=values.double().numpy(), goal=config.objective, eps=1e-7)
    check_selection(batch, [0, 1, 2], **options)
    batch.extra["selected_tokens"] = 1 - found
    with pytest.raises(CheckFailed, match=f"selected by objective.{keys[0]}, which selects"):
        check_selection(batch, [0, 1, 2], **options)


def test_steps_of_the_entropy_coefficient_are_computed_again():
    goal = AdaptiveEntropy(target=0.2, delta=0.005, high=0.012)
    control = EntropyController(0.01, target=0.2, delta=0.005, low=0.0, high=0.012)
    for entropy in (0.1, 0.3, 0.1):
        before, weight = control.coef, control.update(entropy)
        check_entropy_coef(goal, entropy, before, (weight, control.coef))
    with pytest.raises(CheckFailed, match="objective.adaptive_entropy has the coefficient 0.012, but"):
        check_entropy_coef(goal, 0.3, 0.01, (0.0, 0.012))


def three_samples() -> Batch:
    ids = [np.arange(20, dtype=np.int32)] * 3
    return Batch(ids, ids, torch.arange(3), torch.zeros(3, dtype=torch.bool), mask=torch.ones(60))


def test_an_output_that_only_a_check_reads_is_computed_in_few_updates(monkeypatch):
    monkeypatch.setattr(updates, "gather_objects", lambda own: [own])
    monkeypatch.setattr(updates, "any_rank", bool)
    model, batch = SimpleNamespace(spec=SimpleNamespace(has_values=False), num_updates=0), three_samples()
    batch.extra["selected_tokens"] = torch.zeros(60)
    config = config_with("objective.top_entropy=0.3", "algorithm=grpo")
    checks, totals = UpdateChecks(model, batch, 1e-3, is_first=False, config=config), Totals(60.0, 3.0, 3.0)
    numbers = []
    for model.num_updates in range(101):
        outputs = checks.begin(None, totals, [[[0, 1, 2]]], ("logprobs",))
        numbers += [model.num_updates] * ("entropy" in outputs)
    assert numbers == [0, 1, 99]
    assert checks.begin(None, totals, [[[0, 1, 2]]], ("logprobs", "entropy")) == ("logprobs", "entropy")


def test_an_estimate_of_a_small_divergence_is_compared_in_its_own_size(monkeypatch):
    monkeypatch.setattr(updates, "gather_objects", lambda own: [own])
    monkeypatch.setattr(updates, "any_rank", bool)
    batch = three_samples()
    batch.ref_logprobs = torch.zeros(60)
    logprobs = 1e-9 * torch.arange(60)
    ratios = logprobs.view(3, 20).double().sum(1)
    check_divergence(float(ratios.mean()), batch, [0, 1, 2], logprobs)
    with pytest.raises(CheckFailed, match="the loss gets kl"):  # the mean of two samples differs by 2e-7
        check_divergence(float(ratios[1:].mean()), batch, [0, 1, 2], logprobs)


def test_each_row_of_each_embedding_of_a_model_that_learns_has_a_gradient():
    first, other, head = (torch.nn.Embedding(8, 4, padding_idx=0) for _ in range(3))
    own = torch.nn.ModuleList([first, other, head])
    own.get_input_embeddings, own.get_output_embeddings = lambda: first, lambda: head
    spec = SimpleNamespace(temperature=1.0, dtype="float32", has_values=False)
    model = SimpleNamespace(spec=spec, chunks=[own], optimizer=None)
    config = config_with("model.dtype=float32")
    check_specs(config, {"policy": model})  # a frozen model may keep its padding
    model.optimizer = object()
    with pytest.raises(CheckFailed, match="row 0 of an embedding of the policy does not learn"):
        check_specs(config, {"policy": model})
    _pad_vocabulary(own, 12)
    check_specs(config, {"policy": model})
    other(torch.zeros(1, dtype=torch.int64)).sum().backward()
    assert (len(first.weight), len(other.weight)) == (12, 8) and other.weight.grad[0].eq(1).all()


def test_an_estimate_of_older_weights_is_found():
    check_present(0.25, {3: 0.25}, 3)
    for measured in ({2: 0.25}, {3: 0.5}):
        with pytest.raises(CheckFailed, match="the loss gets kl=0.25, an estimate that was not computed"):
            check_present(0.25, measured, 3)


def test_few_samples_are_not_all_the_first_of_their_groups():
    for number, size in ((16, 4), (64, 8), (512, 16), (9, 3)):
        assert {sample % size for seed in range(20) for sample in some(range(number), 4, seed)} == {
            *range(size)
        }
    assert sorted(some(range(3), 4, 1)) == [0, 1, 2]


def test_a_gate_that_is_rounded_before_it_is_float32_is_found():
    x = torch.randn(4, 3).bfloat16()
    for gate, found in (
        (lambda: x.float().sigmoid(), set()),
        (lambda: x.sigmoid() * x, set()),
        (lambda: x.sigmoid().float(), {"the result of sigmoid"}),
        (lambda: x.exp(), {"the argument of exp"}),
    ):
        with torch.no_grad(), CoarseFunctions() as functions:
            gate()
        assert functions.found == found
