"""Each loss of `objective.loss` is its pure function, and every key reaches it."""

import importlib
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from rl.config.functions import UsersError
from rl.config.objective import LOSSES
from rl.data.batch import Batch
from rl.objectives import rollout_correction
from rl.objectives.aggregate import MODES, aggregate
from rl.objectives.kl import ESTIMATORS, kl
from rl.objectives.kl_controller import AdaptiveKL
from rl.objectives.losses import clip_cov, kl_cov
from rl.objectives.off_policy_mask import off_policy_mask
from rl.objectives.top_entropy import select_tokens
from rl.phases.correction import reject, weigh, weights_of
from rl.phases.policy_gradient import advantages, filtered, policy_loss, token_selection, with_entropy_bonus
from rl.phases.reward_shaping import KlPenalty
from rl.training.loss import Totals
from rl.training.packing import pack
from tests.configs import config_with
from tests.each import each

TOTALS = Totals(num_tokens=301.0, num_samples=17.0, num_units=17.0)
"""Totals of a mini-batch that is larger than the micro-batches here."""


def config_of(**objective):
    config = config_with("rollout.max_response_tokens=50")
    return replace(config, objective=replace(config.objective, **objective))


def example(seed=0):
    """Ten samples of three prompts, empty and one-token responses and masked tokens among them; every column
    filled."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([5, 0, 12, 1, 8, 3, 9, 4, 16, 2])
    total = int(lengths.sum())

    def normal(size=total):
        return torch.randn(size, generator=generator)

    batch = Batch(
        prompt_ids=[np.ones(1 + i % 3, np.int32) for i in range(10)],
        response_ids=[np.ones(n, np.int32) for n in lengths],
        groups=torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 2]),
        truncated=torch.zeros(10, dtype=torch.bool),
        mask=(torch.rand(total, generator=generator) > 0.25).float(),
    )
    batch.old_logprobs, batch.ref_logprobs = -2 + normal(), -2 + normal()
    batch.advantages, batch.token_rewards = normal(), normal()
    batch.extra["sum_p_squared"] = torch.rand(total, generator=generator)
    position = torch.arange(total) - batch.offsets[:-1].repeat_interleave(lengths)
    batch.turns = (1 + position // 4).int()
    batch.extra["turn_rewards"] = torch.where(position % 4 == 3, 0.5, 0.0)
    batch.scores = batch.rewards = torch.randint(4, (10,), generator=generator) / 3
    details = {name: torch.rand(10, generator=generator) for name in ("acc", "score", "length", "format")}
    batch.score_details = details | {"failed": torch.zeros(10)}
    return batch


def micro_batch(seed=0, **columns):
    """All ten samples with log-probs and entropy as a model would give them, [R] leaves."""
    batch = example(seed)
    batch = batch.with_columns(columns)
    micro = pack(batch, list(range(10)), multiple=1, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed + 100)
    logprobs = batch.old_logprobs + 0.5 * torch.randn(len(batch.mask), generator=generator)
    entropy = torch.rand(len(batch.mask), generator=generator)
    micro.outputs |= dict(logprobs=logprobs.requires_grad_(), entropy=entropy.requires_grad_())
    return micro


def function(room, name):
    """The pure function of an estimator or loss, by its config name."""
    stem = name.replace("++", "_pp").replace("-", "_")
    return getattr(importlib.import_module(f"rl.objectives.{room}.{stem}"), stem)


# Losses -----------------------------------------------------------------------------------------------------

CLIP = {"clip_low": 0.05, "clip_high": 0.05}
OTHER_VALUES = {
    "ppo": CLIP | {"dual_clip": 1.1},
    "reinforce": {},
    "gpg": {},
    "cispo": CLIP,
    "sapo": {"sapo_tau_positive": 2.0, "sapo_tau_negative": 3.0},
    "dro": {"dro_beta": 0.7},
    "dppo-tv": CLIP | {"dppo_max_ratio": 1.01},
    "dppo-kl": CLIP | {"dppo_max_ratio": 1.01},
    "gspo": CLIP,
    "luspo": CLIP,
    "vespo": {
        "vespo_k_positive": 1.0,
        "vespo_lambda_positive": 1.5,
        "vespo_k_negative": 1.2,
        "vespo_lambda_negative": 1.3,
    },
    "fipo": CLIP
    | {"dual_clip": 1.1, "fipo_half_life": 3.0, "fipo_low": 0.5, "fipo_high": 1.7, "fipo_safe_ratio": 1.01},
    "gmpo": CLIP,
    "clip-cov": CLIP,
    "kl-cov": {"kl_cov_coef": 0.3},
}
"""Keys that each loss reads, with a value that is not the default."""
EXTRA_ARGUMENT = {
    "gspo": "lengths",
    "luspo": "lengths",
    "vespo": "lengths",
    "fipo": "lengths",
    "gmpo": "lengths",
    "clip-cov": "selected_tokens",
    "kl-cov": "selected_tokens",
}
KEYS = [(loss, key) for loss, keys in OTHER_VALUES.items() for key in keys]
SAME = [{"reinforce", "gpg"}, {"gspo", "luspo"}]


def chosen():
    return (torch.arange(60) % 3 == 0).float()


def token_loss_of(loss, micro, **options):
    """(token loss, statistics) of the pure function, with the defaults of the config and these options."""
    defaults = config_of().objective
    keys = {key: getattr(defaults, key) for key in OTHER_VALUES[loss]} | options
    extra = [micro.named(EXTRA_ARGUMENT[loss])] if loss in EXTRA_ARGUMENT else []
    inputs = micro.logprobs, micro.column("old_logprobs"), micro.column("advantages"), micro.mask
    return function("losses", loss)(*inputs, *extra, **keys)


def mean(micro, token_loss, mode="token-mean"):
    denominators = dict(num_tokens=TOTALS.num_tokens, num_samples=TOTALS.num_samples)
    return aggregate(token_loss, micro.mask, micro.lengths, mode, **denominators, norm=50)


def run(micro, **objective):
    return policy_loss(config_of(**objective))(micro, TOTALS)


def same_value_and_gradient(micro, found, expected):
    """Whether two losses are one function of the log-probs and the entropy."""
    leaves = (micro.logprobs, micro.entropy)
    grads = [
        torch.autograd.grad(x, leaves, retain_graph=True, allow_unused=True, materialize_grads=True)
        for x in (found, expected)
    ]
    same_grads = all(torch.allclose(a, b, rtol=1e-6, atol=1e-9) for a, b in zip(*grads))
    return same_grads and torch.allclose(found, expected, rtol=1e-6, atol=1e-8)


def test_every_loss_has_its_function_here():
    assert set(OTHER_VALUES) == set(LOSSES)


@each("aggregation", list(MODES))
@pytest.mark.parametrize("loss", LOSSES)
def test_policy_loss_is_the_mean_of_the_pure_function(loss, aggregation):
    micro = micro_batch(selected_tokens=chosen())
    value, metrics = run(micro, loss=loss, aggregation=aggregation)
    token_loss, stats = token_loss_of(loss, micro)
    assert same_value_and_gradient(micro, value, mean(micro, token_loss, aggregation))
    assert metrics["actor/pg_loss"] is value or torch.equal(metrics["actor/pg_loss"], value)
    expected = {f"actor/{name}": float(stat) / TOTALS.num_tokens for name, stat in stats.items()}
    assert {
        name: float(metric) for name, metric in metrics.items() if name != "actor/pg_loss"
    } == pytest.approx(expected)


def test_no_other_losses_are_the_same():
    micro = micro_batch(selected_tokens=chosen())
    values = {loss: run(micro, loss=loss)[0] for loss in LOSSES}
    for one, other in itertools.combinations(values, 2):
        assert same_value_and_gradient(micro, values[one], values[other]) == ({one, other} in SAME), (
            one,
            other,
        )


@pytest.mark.parametrize("loss, key", KEYS, ids=[f"{loss}-{key}" for loss, key in KEYS])
def test_each_key_of_a_loss_reaches_it(loss, key):
    micro = micro_batch(selected_tokens=chosen())
    another = OTHER_VALUES[loss][key]
    value, _ = run(micro, loss=loss, **{key: another})
    assert same_value_and_gradient(micro, value, mean(micro, token_loss_of(loss, micro, **{key: another})[0]))
    assert not same_value_and_gradient(micro, value, run(micro, loss=loss)[0])


@each("aggregation", list(MODES))
@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_loss_weights_multiply_the_loss_of_each_token(loss, aggregation):
    weights = torch.rand(60, generator=torch.Generator().manual_seed(2)) * 2
    micro = micro_batch(loss_weights=weights)
    value, metrics = run(micro, loss=loss, aggregation=aggregation)
    token_loss, stats = token_loss_of(loss, micro)
    assert same_value_and_gradient(micro, value, mean(micro, weights * token_loss, aggregation))
    assert not same_value_and_gradient(micro, value, mean(micro, token_loss, aggregation))
    # Denominators and statistics stay over the tokens that count.
    assert float(metrics["actor/ppo_kl"]) == pytest.approx(float(stats["ppo_kl"]) / TOTALS.num_tokens)


def test_vespo_reads_loss_weights_and_is_not_multiplied_by_them():
    weights = torch.rand(60, generator=torch.Generator().manual_seed(2)) * 2
    micro = micro_batch(loss_weights=weights)
    value, _ = run(micro, loss="vespo")
    keys = {key: getattr(config_of().objective, key) for key in OTHER_VALUES["vespo"]}
    inputs = (
        micro.logprobs,
        micro.column("old_logprobs"),
        micro.column("advantages"),
        micro.mask,
        micro.lengths,
    )
    weighted, _ = function("losses", "vespo")(*inputs, weights, **keys)
    assert same_value_and_gradient(micro, value, mean(micro, weighted))
    assert not same_value_and_gradient(micro, value, mean(micro, token_loss_of("vespo", micro)[0]))


def test_loss_weights_leave_kl_and_entropy_alone():
    weighted, plain = micro_batch(loss_weights=torch.zeros(60)), micro_batch()
    value, metrics = run(weighted, loss="ppo", kl_coef=0.3, entropy_coef=0.2)
    divergence = kl(weighted.logprobs, weighted.column("ref_logprobs"), weighted.mask, estimator="k3")
    assert same_value_and_gradient(
        weighted, value, 0.3 * mean(weighted, divergence) - 0.2 * mean(weighted, weighted.entropy)
    )
    assert metrics["actor/pg_loss"] == 0 and run(plain, loss="ppo")[0] != 0


@each("aggregation", list(MODES))
@each("estimator", list(ESTIMATORS))
def test_the_kl_term(estimator, aggregation):
    micro = micro_batch()
    value, metrics = run(micro, loss="ppo", aggregation=aggregation, kl_coef=0.3, kl_estimator=estimator)
    options = dict(estimator=estimator, old_logprobs=micro.column("old_logprobs"))
    divergence = mean(
        micro, kl(micro.logprobs, micro.column("ref_logprobs"), micro.mask, **options), aggregation
    )
    pg_loss = mean(micro, token_loss_of("ppo", micro)[0], aggregation)
    assert same_value_and_gradient(micro, value, pg_loss + 0.3 * divergence)
    assert metrics["actor/kl_loss"].item() == pytest.approx(divergence.item(), rel=1e-6)
    assert metrics["actor/pg_loss"].item() == pytest.approx(pg_loss.item(), rel=1e-6)


def test_without_a_kl_term_no_reference_policy_is_wanted():
    micro = micro_batch(ref_logprobs=None)
    value, metrics = run(micro, loss="ppo")
    assert value.isfinite() and "actor/kl_loss" not in metrics
    with pytest.raises(ValueError, match="no ref_logprobs"):
        run(micro, loss="ppo", kl_coef=0.1)


@each("aggregation", list(MODES))
def test_the_entropy_bonus_is_subtracted(aggregation):
    micro = micro_batch()
    value, _ = run(micro, loss="ppo", aggregation=aggregation, entropy_coef=0.4)
    bonus = mean(micro, micro.entropy, aggregation)
    assert same_value_and_gradient(
        micro, value, mean(micro, token_loss_of("ppo", micro)[0], aggregation) - 0.4 * bonus
    )
    assert bonus > 0


def test_an_adaptive_weight_replaces_that_of_the_config():
    config = config_with("objective.adaptive_entropy.target=0.2", "objective.entropy_coef=0.1")
    micro, loss = micro_batch(), with_entropy_bonus(policy_loss(config), config, 0.4)
    assert loss.reads == ("logprobs", "entropy")
    expected = mean(micro, token_loss_of("ppo", micro)[0]) - 0.4 * mean(micro, micro.entropy)
    assert same_value_and_gradient(micro, loss(micro, TOTALS)[0], expected)


def test_the_off_policy_mask_multiplies_the_loss_of_each_token():
    engine = example().old_logprobs + 0.2
    micro = micro_batch(rollout_logprobs=engine)
    token_loss, _ = token_loss_of("ppo", micro)
    for column in ("rollout_logprobs", "old_logprobs"):
        inputs = micro.logprobs, micro.column(column), micro.column("advantages"), micro.mask, micro.lengths
        unmasked = off_policy_mask(*inputs, bound=0.15)
        value, metrics = run(micro, loss="ppo", off_policy_mask=0.15, kl_coef=0.1)
        divergence = kl(micro.logprobs, micro.column("ref_logprobs"), micro.mask, estimator="k3")
        expected = mean(micro, unmasked * token_loss) + 0.1 * mean(micro, divergence)
        assert same_value_and_gradient(micro, value, expected)
        share = float((1 - unmasked).sum()) / TOTALS.num_tokens
        assert metrics["actor/off_policy_masked_fraction"].item() == pytest.approx(share) and share > 0
        micro.columns.pop("rollout_logprobs", None)


def test_only_tokens_of_high_entropy_have_a_loss():
    batch, config = example(), config_of(loss="ppo", top_entropy=0.2)
    entropy, selection = micro_batch().entropy.detach(), token_selection(config)
    selected = selection.function(batch, entropy, 5)
    assert selection.reads == "entropy" and selected.sum() == int(0.2 * batch.mask.sum())
    assert torch.equal(selected, select_tokens(entropy, batch.mask, top_entropy=0.2))
    micro = micro_batch(selected_tokens=selected.float())
    value, _ = run(micro, loss="ppo", top_entropy=0.2, entropy_coef=0.4)
    expected = mean(micro, selected * token_loss_of("ppo", micro)[0]) - 0.4 * mean(micro, micro.entropy)
    assert same_value_and_gradient(micro, value, expected)


def test_masked_tokens_may_hold_nan_in_every_column():
    nothing = example().mask == 0
    columns = ("old_logprobs", "ref_logprobs", "advantages")
    dirty = micro_batch(
        **{name: getattr(example(), name).masked_fill(nothing, float("nan")) for name in columns}
    )
    dirty.outputs["logprobs"] = micro_batch().logprobs.detach().requires_grad_()
    clean = micro_batch()
    for micro in (dirty, clean):
        value, _ = run(micro, loss="ppo", kl_coef=0.1)
        value.backward()
        micro.outputs["values"] = value
    assert torch.equal(dirty.values, clean.values) and torch.equal(dirty.logprobs.grad, clean.logprobs.grad)


# Tokens that a loss treats apart ----------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
def test_only_the_covariance_losses_choose_tokens(loss):
    assert (token_selection(config_of(loss=loss)) is not None) == (loss in ("clip-cov", "kl-cov"))


COV = dict(cov_fraction=1.0, cov_low=0.1, cov_high=2.0, clip_low=0.25, clip_high=0.3)
"""All candidates are chosen, so that each bound shows."""


def choice(loss, seed=5, **objective):
    batch = example()
    logprobs = micro_batch().logprobs.detach()
    return (
        token_selection(config_of(loss=loss, **(COV | objective))).function(batch, logprobs, seed),
        batch,
        logprobs,
    )


@each(
    "key, value",
    [("cov_fraction", 0.05), ("cov_low", 0.6), ("cov_high", 0.5), ("clip_low", 0.9), ("clip_high", 5.0)],
)
def test_clip_cov_chooses_with_the_keys_of_the_config(key, value):
    result, batch, logprobs = choice("clip-cov", **{key: value})
    keys = COV | {key: value}
    inputs = logprobs, batch.old_logprobs, batch.advantages, batch.mask
    assert torch.equal(result, clip_cov.select_tokens(*inputs, **keys, seed=5)) and result.any()
    assert not torch.equal(result, choice("clip-cov")[0])


def test_clip_cov_chooses_by_the_seed():
    assert (
        len({tuple(choice("clip-cov", seed=seed, cov_fraction=0.05)[0].tolist()) for seed in range(10)}) > 1
    )


@each("fraction", [0.05, 0.2])
def test_kl_cov_chooses_with_the_keys_of_the_config(fraction):
    result, batch, logprobs = choice("kl-cov", cov_fraction=fraction)
    inputs = logprobs, batch.advantages, batch.mask
    assert torch.equal(result, kl_cov.select_tokens(*inputs, cov_fraction=fraction))
    assert result.sum() == int(fraction * batch.mask.sum()) > 0


@pytest.mark.parametrize("loss", ["clip-cov", "kl-cov"])
def test_the_loss_reads_the_column_of_chosen_tokens(loss):
    none, some = micro_batch(selected_tokens=torch.zeros(60)), micro_batch(selected_tokens=chosen())
    expected = float((chosen() * some.mask).sum()) / TOTALS.num_tokens
    assert float(run(some, loss=loss)[1]["actor/pg_covfrac"]) == pytest.approx(expected)
    assert run(none, loss=loss)[1]["actor/pg_covfrac"] == 0
    with pytest.raises(ValueError, match="reads selected_tokens, which is not filled"):
        run(micro_batch(), loss=loss)


# What phases make of the batch before the loss --------------------------------------------------------------


def test_the_reward_kl_is_a_mean_per_token_of_each_sample():
    # As verl's apply_kl_penalty: the mean over a sample's tokens, then over samples, for the controller too.
    batch = example()
    batch.rewards, batch.token_rewards = torch.zeros(10), None
    batch.mask[5:17] = 0.0  # sample 2 has no token that counts, sample 1 is empty
    lengths = batch.lengths.tolist()
    divergence = ((batch.old_logprobs - batch.ref_logprobs) * batch.mask).split(lengths)
    per_sample = [float(d.sum() / m.sum()) for d, m in zip(divergence, batch.mask.split(lengths)) if m.sum()]
    keys = ["coef=0.5", "controller=adaptive", "target=0.1", "horizon=1000"]
    penalty = KlPenalty(config_with("algorithm=ppo", *[f"objective.reward_kl.{key}" for key in keys]))
    metrics = penalty.apply(batch, step=1)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(np.mean(per_sample), rel=1e-5)
    assert len(per_sample) < 10
    expected = AdaptiveKL(0.5, target=0.1, horizon=1000)
    expected.update(float(np.mean(per_sample)), len(per_sample))
    assert penalty.controller.coef == expected.coef != 0.5
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.5
    # The penalty itself is per token, and a sample's reward loses the sum.
    assert batch.rewards.tolist() == pytest.approx([-0.5 * float(d.sum()) for d in divergence], abs=1e-5)


def example_with_a_gap():
    """`example`, with log-probs of an engine that are not the trainer's."""
    batch = example()
    gap = torch.randn(60, generator=torch.Generator().manual_seed(3))
    batch.rollout_logprobs = batch.old_logprobs + 0.3 * gap
    return batch


def test_a_token_has_to_pass_every_criterion_of_rejection():
    batch = example_with_a_gap()
    before = batch.mask.clone()
    pair = batch.old_logprobs, batch.rollout_logprobs, batch.lengths, before
    one = rollout_correction.reject(*pair, level="token", statistic="k1", low=-0.3, high=0.3)
    other = rollout_correction.reject(*pair, level="sequence", statistic="k3", low=0.0, high=0.05)
    keys = ["reject=token-k1,sample-k3", "reject_low=[-0.3, 0]", "reject_high=[0.3, 0.05]"]
    correction = config_with(*[f"rollout_correction.{key}" for key in keys]).rollout_correction
    found = reject(batch, correction)
    assert torch.equal(batch.mask, one * other)
    assert 0 < batch.mask.sum() < min(one.sum(), other.sum()) and max(one.sum(), other.sum()) < before.sum()
    share = 1 - float(batch.mask.sum() / before.sum())
    metrics = {name.removeprefix("rollout_corr/"): value for name, value in found.items()}
    assert metrics["rejected_fraction"] == pytest.approx(share)
    assert metrics["rollout_rs_masked_fraction"] == pytest.approx(share)
    for name, kept in (("token_k1", one), ("seq_mean_k3", other)):
        expected = 1 - float(kept.sum() / before.sum())
        assert metrics[f"rollout_rs_{name}_masked_fraction"] == pytest.approx(expected)


def test_the_weights_that_are_measured_are_those_of_the_config():
    for keys, level, upper in (
        ([], "token", 2.0),
        (["truncate_tokens=1.1"], "token", 1.1),
        (["truncate_samples=1.2"], "sequence", 1.2),
        (["icepop_low=0.5", "icepop_high=1.3"], "token", 1.3),
        (["icepop_low=0.5", "icepop_high=1.3", "icepop_level=prefix"], "token", 1.3),
        (["icepop_low=0.5", "icepop_high=1.3", "icepop_level=sample"], "sequence", 1.3),
    ):
        batch = example_with_a_gap()
        correction = config_with(*[f"rollout_correction.{key}" for key in keys]).rollout_correction
        found = weigh(batch, correction, weights_of(batch, batch.old_logprobs, correction))
        pair = batch.old_logprobs, batch.rollout_logprobs, batch.lengths, batch.mask
        expected = rollout_correction.metrics(*pair, level=level, upper=upper)
        assert found.items() >= expected.items() and len(expected) == 27
        if "icepop_low=0.5" in keys:
            of_level = "sequence" if level == "sequence" else correction.icepop_level
            weights = rollout_correction.icepop(*pair, low=0.5, high=1.3, level=of_level)
            assert (
                torch.equal(batch.extra["loss_weights"], weights)
                and 0 < (weights > 0).sum() < batch.mask.sum()
            )


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_reads_the_entropy_only_for_its_bonus(loss):
    assert policy_loss(config_of(loss=loss)).reads == ("logprobs",)
    assert policy_loss(config_of(loss=loss, entropy_coef=0.1)).reads == ("logprobs", "entropy")


OWN = """
def raises(rewards, groups):
    return rewards / groups["no"]
def short(rewards, groups):
    return rewards[1:]
def alone(logprobs, advantages):
    return -logprobs * advantages
def cut(logprobs, advantages):
    return logprobs[1:], {}
"""


@each(
    "name, words",
    [
        ("advantage=raises", r"raised IndexError: .* \(own.py, line 3\); correct the function"),
        ("advantage=short", r"an advantage per sample, a floating tensor of shape \[10\], not .*\[9\]"),
        ("loss=alone", r"must return \(losses, dict of sums over tokens\), not Tensor of shape"),
        ("loss=cut", "must return a loss per token first, a floating tensor of shape"),
    ],
)
def test_what_an_own_formula_does_wrong_is_one_sentence(tmp_path, name, words):
    (tmp_path / "own.py").write_text(OWN)
    key, _, function = name.partition("=")
    config = config_of(**{key: f"{tmp_path}/own.py:{function}"})
    with pytest.raises(UsersError, match=f"objective.{key}=.*own.py:{function} .*{words}"):
        if key == "advantage":
            advantages(example(), config)
        else:
            policy_loss(config)(micro_batch(), TOTALS)


def test_a_filtered_sample_is_weighted_in_the_loss():
    config, totals = config_of(advantage="gae", filtration="best-worst"), TOTALS
    columns = filtered(example(), config)
    plain, weighted = micro_batch(), micro_batch(**columns)
    for micro in (plain, weighted):
        policy_loss(config)(micro, totals)[0].backward()
    expected = plain.outputs["logprobs"].grad * columns["sample_weights"]
    torch.testing.assert_close(weighted.outputs["logprobs"].grad, expected)
    assert expected.count_nonzero() < plain.outputs["logprobs"].grad.count_nonzero()
    assert filtered(example(), config_of(advantage="gae")) == {}
