"""Properties of every loss: masked positions enter nothing, and a mini-batch may be cut between any two
samples."""

import importlib
import inspect

import pytest
import torch

from rl.config.declarations import formulas
from rl.config.objective import Objective
from rl.objectives.aggregate import MODES, aggregate
from tests.each import each

LENGTHS = torch.tensor([4, 0, 6, 1, 9, 3, 5, 8, 0, 2])
every_loss = pytest.mark.parametrize("name", formulas("losses"))


def columns_of(seed: int) -> dict[str, torch.Tensor]:
    """Return the columns of ten samples, float64; one sample is empty and one is masked."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale):
        return scale * torch.randn(int(LENGTHS.sum()), generator=generator, dtype=torch.float64)

    old = -0.1 - normal(1.0).abs()
    mask = torch.rand(len(old), generator=generator) > 0.2
    mask[4:10] = False
    return dict(
        logprobs=(old + normal(0.3)).clamp(max=-1e-4),
        old_logprobs=old,
        advantages=torch.randn(10, generator=generator, dtype=torch.float64).repeat_interleave(LENGTHS),
        mask=mask,
        lengths=LENGTHS,
        selected_tokens=torch.rand(len(old), generator=generator) > 0.5,
        loss_weights=normal(0.3).exp(),
    )


def call(name: str, columns: dict[str, torch.Tensor]):
    """Return the loss of each token and the statistics, with default keys but narrow bounds."""
    formula = formulas("losses")[name]
    function = getattr(importlib.import_module(f"rl.objectives.losses.{formula.function}"), formula.function)
    goal = Objective(clip_low=0.1, clip_high=0.15)
    parameters = inspect.signature(function).parameters.values()
    keys = {p.name: getattr(goal, p.name) for p in parameters if p.kind is p.KEYWORD_ONLY}
    return function(**{p.name: columns[p.name] for p in parameters if p.name in columns}, **keys)


def outcome(name, columns):
    leaf = columns["logprobs"].clone().requires_grad_()
    token_loss, stats = call(name, columns | {"logprobs": leaf})
    return token_loss, torch.autograd.grad(token_loss.sum(), leaf)[0], stats


@every_loss
@each("as_float", [False, True])
@each("bad", [float("nan"), float("inf"), -float("inf")])
def test_masked_positions_enter_nothing(bad, as_float, name):
    clean = columns_of(4)
    mask = clean["mask"]
    dirty = {
        key: x if key in ("mask", "lengths", "selected_tokens") else torch.where(mask, x, bad)
        for key, x in clean.items()
    }
    clean_loss, clean_grad, clean_stats = outcome(name, clean)
    token_loss, grad, stats = outcome(name, dirty | ({"mask": mask.double()} if as_float else {}))
    assert torch.equal(token_loss, clean_loss) and torch.equal(grad, clean_grad) and stats == clean_stats
    assert not token_loss[~mask].any() and not grad[~mask].any() and grad.any()


@every_loss
@each("lengths", [[], [0, 0], [1], [2, 0, 1]])
def test_without_a_counted_token_value_and_gradient_are_0(lengths, name):
    count = sum(lengths)
    nothing = {key: torch.full((count,), -1.0) for key in columns_of(0)}
    nothing |= {"mask": torch.zeros(count), "lengths": torch.tensor(lengths, dtype=torch.int64)}
    token_loss, grad, stats = outcome(name, nothing)
    assert token_loss.tolist() == grad.tolist() == [0.0] * count
    assert all(value.item() == 0 and value.dim() == 0 for value in stats.values())


@every_loss
def test_on_policy_the_gradient_is_that_of_the_policy_gradient(name):
    columns = columns_of(3)
    mask, advantages = columns["mask"], columns["advantages"]
    equal = columns | {"old_logprobs": columns["logprobs"], "loss_weights": torch.ones(len(mask))}
    equal["selected_tokens"] = torch.zeros(len(mask))  # which the covariance losses treat apart
    _, grad, stats = outcome(name, equal)
    torch.testing.assert_close(grad, torch.where(mask, -advantages, 0.0), rtol=1e-6, atol=0)
    assert all(value == 0 for key, value in stats.items() if not key.endswith("_weight"))


@each("mode", list(MODES))
@every_loss
def test_any_split_gives_the_same_loss_and_gradient(name, mode):
    columns = columns_of(1)
    mask, leaf = columns["mask"], columns["logprobs"].requires_grad_()
    whole = dict(num_tokens=int(mask.sum()), num_samples=len(LENGTHS), norm=7.0)

    def share(tokens, samples):
        part = {key: x[samples if key == "lengths" else tokens] for key, x in columns.items()}
        token_loss, stats = call(name, part)
        return aggregate(token_loss, part["mask"], part["lengths"], mode, **whole), stats

    value, stats = share(slice(None), slice(None))
    (grad,) = torch.autograd.grad(value, leaf)
    part_of = torch.randint(0, 4, (len(LENGTHS),), generator=torch.Generator().manual_seed(2))
    token_part = part_of.repeat_interleave(LENGTHS)
    shares = [share(token_part == part, part_of == part) for part in range(5)]  # the last one is empty
    total = sum(value for value, _ in shares)
    torch.testing.assert_close(total, value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(total, leaf)[0], grad, rtol=1e-12, atol=1e-15)
    for key, expected in stats.items():
        torch.testing.assert_close(sum(part[key] for _, part in shares), expected, rtol=1e-12, atol=1e-12)
