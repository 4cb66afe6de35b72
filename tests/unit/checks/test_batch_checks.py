"""The checks of a batch: healthy batches pass, and each error is named with its sample or group."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from rl.checks import fp8
from rl.checks.batches import (
    CheckFailed,
    check_digests,
    check_endings,
    check_groups,
    check_informative,
    check_loss_weights,
    check_losses,
    check_mismatched,
    check_order,
    check_seeds,
    check_table,
    check_turns,
    warn_of_constant_scores,
)
from rl.checks.fp8 import check_fp8_blocks
from rl.checks.objective import check_loss
from rl.config.agents import Agents
from rl.config.correction import RolloutCorrection
from rl.config.declarations import formulas, literal_dict
from rl.config.rollout import Rollout
from rl.data.batch import Batch, concatenate, mismatch, pair_up
from rl.data.prompts import Prompt
from rl.models.fp8_blocks import quantised
from rl.objectives.rollout_correction import icepop
from rl.phases.policy_gradient import policy_loss
from rl.run.validation_metrics import validation_metrics
from tests.configs import config_with
from tests.each import each

END, VOCABULARY, LIMIT = 1, 16, 12


def sampled(seed: int, groups: int = 16, size: int = 8) -> tuple[Batch, torch.Tensor]:
    """Return samples drawn from random distributions, and log-probs of their tokens by another model."""
    rng = np.random.default_rng(seed)
    prompts = [Prompt(g, np.array([5, g], np.int32), "", "toy", None, {}) for g in range(groups)]
    ids, logprobs, others, truncated = [], [], [], []
    for _ in range(groups * size):
        tokens, own, other = [], [], []
        while len(tokens) < LIMIT and END not in tokens:
            p, q = rng.dirichlet(np.full(VOCABULARY, 0.5), size=2) + 1e-9
            token = rng.choice(VOCABULARY, p=p / p.sum())
            tokens.append(token)
            own.append(math.log(p[token] / p.sum()))
            other.append(math.log(q[token] / q.sum()))
        ids.append(np.array(tokens, np.int32))
        truncated.append(END not in tokens)
        logprobs += own
        others += other
    number = torch.arange(groups * size) // size
    batch = Batch(
        [prompts[g].token_ids for g in number], ids, number, torch.tensor(truncated), prompts=prompts
    )
    batch.rollout_logprobs = torch.tensor(logprobs)
    return batch, torch.tensor(others)


def endings(batch: Batch) -> None:
    check_endings(batch, Rollout(max_response_tokens=LIMIT), {END}, limits_vary=False)


def test_healthy_samples_pass():
    batch, _ = sampled(0)
    endings(batch)
    check_groups(batch, samples_per_prompt=8)


def test_wrong_endings_are_found():
    batch, _ = sampled(0)
    with pytest.raises(CheckFailed, match=r"with 12 tokens is complete by its label"):
        endings(replace(batch, truncated=torch.zeros_like(batch.truncated)))
    ended = int((~batch.truncated).nonzero()[0])
    for change, message in (
        (lambda ids: ids[:-1], "is complete by its label"),
        (lambda ids: np.append(ids, 3).astype(np.int32), "continues after a stop token|is complete"),
    ):
        ids = [change(x) if i == ended else x for i, x in enumerate(batch.response_ids)]
        with pytest.raises(CheckFailed, match=f"sample {ended} .*({message})"):
            endings(replace(batch, response_ids=ids, mask=None, rollout_logprobs=None))
    with pytest.raises(CheckFailed, match="not at rollout.max_response_tokens=20"):
        check_endings(batch, Rollout(max_response_tokens=20), {END}, limits_vary=False)


def test_samples_in_the_group_of_another_prompt_are_found():
    batch, _ = sampled(3)
    with pytest.raises(CheckFailed, match=r"sample 1 \(prompt 1\) is in group 1"):
        check_groups(replace(batch, groups=torch.arange(128) % 16), samples_per_prompt=8)
    with pytest.raises(CheckFailed, match="has 7 samples instead of rollout.samples_per_prompt=8"):
        check_groups(batch.select(list(range(1, 128))), samples_per_prompt=8)


def test_turns_beyond_the_limits_are_found():
    batch, _ = sampled(5, groups=2, size=2)
    ends = [len(ids) - len(ids) // 2 for ids in batch.response_ids]
    turns = [[1] * end + [2] * (len(ids) - end) for ids, end in zip(batch.response_ids, ends)]
    batch.turns = torch.tensor([turn for own in turns for turn in own], dtype=torch.int32)
    check_turns(batch, Agents(max_turns=2, max_tokens_per_turn=max(ends)))
    check_turns(batch, Agents(max_turns=2, max_tokens_per_turn=0))
    with pytest.raises(CheckFailed, match=r"sample 0 .* has 2, but agents.max_turns=1"):
        check_turns(batch, Agents(max_turns=1, max_tokens_per_turn=0))
    with pytest.raises(CheckFailed, match=f"has {max(ends)}, but agents.max_tokens_per_turn={max(ends) - 1}"):
        check_turns(batch, Agents(max_turns=2, max_tokens_per_turn=max(ends) - 1))


def test_a_validation_whose_scores_are_those_of_other_prompts_is_found():
    batch, _ = sampled(6, groups=4, size=3)
    batch.scores, batch.score_details = torch.arange(12.0), dict.fromkeys(("acc", "failed"), torch.zeros(12))
    of_prompts = batch.scores.double().reshape(4, 3)
    found = {"val-aux/toy/score/std@3": float(of_prompts.std(1, correction=0).mean())}
    check_table(batch, found)
    check_table(batch, found | {"val-aux/toy/score/score/mean@2": 7.0})  # a reward's score/score
    mixed = batch.scores.double().reshape(3, 4).t()
    with pytest.raises(CheckFailed, match="validation check: score/std@3 of toy is"):
        check_table(batch, {"val-aux/toy/score/std@3": float(mixed.std(1, correction=0).mean())})


def test_statistics_of_a_validation_are_computed_again():
    batch, _ = sampled(6, groups=2, size=4)
    batch.scores = torch.tensor([1.0, 0, 0, 1, 0, 1, 1, 0])
    batch.score_details = dict.fromkeys(("acc", "failed"), torch.zeros(8))
    answers = ["1", "2", "2", "1", None, "3", "4", "[INVALID]"]
    tables = {"toy": {"score": batch.scores.double().reshape(2, 4).numpy()}}
    found = validation_metrics(tables, {"toy": [answers[:4], answers[4:]]})
    assert found["val-core/toy/score/maj@4/mean"] == 0.75
    check_table(batch, found, answers)
    for name in found:
        with pytest.raises(CheckFailed, match="but samples of its prompts give"):
            check_table(batch, found | {name: found[name] + 0.01}, answers)


def test_a_loss_that_is_a_mean_of_means_is_found():
    losses = {"a": [torch.tensor([1.0, 2.0]), torch.tensor([3.0])], "b": [torch.tensor([6.0])]}
    found = {"val-core/a/loss": 2.0, "val-core/b/loss": 6.0, "val/loss": 3.0}
    found |= {name.replace("loss", "perplexity"): math.exp(value) for name, value in found.items()}
    prompts = [Prompt(i, np.array([i]), "", source, None, {}) for i, source in enumerate("aab")]
    check_losses(losses, found, prompts)
    for name, other in (("val/loss", 4.0), ("val-core/a/loss", 2.25), ("val/perplexity", math.exp(4.0))):
        with pytest.raises(CheckFailed, match=f"validation check: {name} is"):
            check_losses(losses, found | {name: other}, prompts)
    for more in "ac":
        with pytest.raises(CheckFailed, match=f"responses in the loss of {more} are .*, but data.val has"):
            check_losses(losses, found, [*prompts, replace(prompts[0], data_source=more)])


def test_a_response_to_its_own_prompt_is_no_mismatched_one():
    batch, _ = sampled(7, groups=4, size=2)
    parts = [[0, 1, 2, 3], [4, 5, 6, 7]]
    check_mismatched(batch, mismatch(batch, parts), parts)
    check_mismatched(batch, mismatch(batch, [[0, 1], [2, 3]]), [[0, 1], [2, 3]])  # no other prompt
    for wrong in (batch, mismatch(batch, [[0, 1], [2, 3], [4, 5], [6, 7]]), mismatch(batch, [[*range(8)]])):
        with pytest.raises(CheckFailed, match="loss check: sample 0 .*no response to another prompt"):
            check_mismatched(batch, wrong, parts)


def test_blocks_with_coarse_factors_are_found(monkeypatch):
    check_fp8_blocks()

    def coarse(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, factors = quantised(matrix)
        return values, factors.bfloat16().float()

    monkeypatch.setattr(fp8, "quantised", coarse)
    with pytest.raises(CheckFailed, match="the factors of FP8 blocks differ by 0.00"):
        check_fp8_blocks()


def test_groups_of_equal_scores_are_found():
    batch, _ = sampled(4)
    batch.scores = torch.rand(128, generator=torch.Generator().manual_seed(0))
    check_informative(batch, None, 4)
    # A penalty that makes up for the score leaves a group without advantages, but the filter has kept it.
    batch.rewards = torch.where(batch.groups == 3, 0.5, batch.scores)
    check_informative(batch, None, 4)
    batch.scores = batch.rewards
    with pytest.raises(CheckFailed, match="all samples of prompt 3 have the same score"):
        check_informative(batch, None, 4)


def test_samples_that_lost_their_tokens_or_scores_are_found():
    batch, _ = sampled(4)
    batch.delivered()
    batch.scores, draws = torch.rand(2, 128, generator=torch.Generator().manual_seed(0))
    batch.score_details = {"acc": draws.round(), "failed": torch.zeros(128)}
    batch.score_digests = batch.hash_scores(batch.digests)
    halves = [batch.keep_groups(list(range(k, 16, 2))) for k in (0, 1)]
    moved = concatenate(halves[::-1]).select(list(range(127, -1, -1)))
    check_digests(moved)
    check_digests(pair_up(chosen=halves[0], rejected=halves[1]))
    ids = list(moved.response_ids)
    wrong = {
        "the score that was made for it": dict(scores=moved.scores.roll(1)),
        r"made for it \(and \d+ further samples of \d+": dict(
            score_details={name: values.roll(1) for name, values in moved.score_details.items()}
        ),
        "the tokens and the ending": dict(truncated=~moved.truncated),
        r"sample 5 \(prompt \d+\) no longer has the tokens": dict(
            response_ids=[*ids[:5], ids[5][:-1], *ids[6:]], mask=None, rollout_logprobs=None
        ),
    }
    for message, change in wrong.items():
        with pytest.raises(CheckFailed, match=message):
            check_digests(replace(moved, **change))


@each(
    "name, change, message",
    [
        ("returns", lambda x: torch.cat([x, x[:1]]), r"returns as Tensor torch.float32 \[\d+\] on cpu, but"),
        ("returns", lambda x: x[1:], "one value per response token"),
        ("returns", lambda x: x[:, None], r"returns as Tensor torch.float32 \[\d+, 1\]"),
        ("returns", lambda x: x.double(), "returns as Tensor torch.float64"),
        ("returns", lambda x: x.numpy(), "returns as ndarray, but"),
        ("labels", lambda x: x, r"one value per sample, Tensor torch.float32 \[128\] on cpu; give it"),
        ("mine", lambda x: x, "has mine, but only .*; declare the column in EXTRA of rl/data/columns.py"),
        ("mask", lambda x: x, "has mask, which is a field of Batch; set batch.mask"),
        ("lengths", lambda x: x, "has lengths, but only"),
    ],
)
def test_an_extra_column_that_is_not_as_declared_is_refused_by_every_reader(name, change, message):
    batch, _ = sampled(0)
    batch.extra[name] = change(batch.rollout_logprobs)
    for read in (batch.hashes, batch.loss_columns, batch.loss_sample_columns, lambda: batch.select([1, 0])):
        with pytest.raises(ValueError, match=message):
            read()


def test_samples_in_another_order_than_their_prompts_are_found():
    batch, _ = sampled(4)
    check_order(batch, batch.prompts, samples_per_prompt=8)
    turned = batch.select(torch.arange(128).view(16, 8).t().flatten().tolist())
    wrong = {1: turned, 8: batch.keep_groups([0, *range(15, 0, -1)]), 120: batch.keep_groups(list(range(15)))}
    for sample, other in wrong.items():
        with pytest.raises(CheckFailed, match=f"from sample {sample} on"):
            check_order(other, batch.prompts, samples_per_prompt=8)


def test_inverted_importance_weights_are_found():
    batch, _ = sampled(5)
    batch.old_logprobs = batch.rollout_logprobs + 0.02 * torch.randn(len(batch.mask))
    weights = (batch.old_logprobs - batch.rollout_logprobs).exp()
    truncated = RolloutCorrection(truncate_tokens=1.005)
    batch.extra["loss_weights"] = weights.clamp(max=1.005)
    check_loss_weights(batch, truncated)
    for wrong in (1 / weights, weights):  # inverted, and without the bound
        batch.extra["loss_weights"] = wrong
        with pytest.raises(CheckFailed, match="a token has the importance weight"):
            check_loss_weights(batch, truncated)
    prefix = RolloutCorrection(icepop_low=0.99, icepop_high=1.005, icepop_level="prefix")
    given = batch.old_logprobs, batch.rollout_logprobs, batch.lengths, batch.mask
    batch.extra["loss_weights"] = icepop(*given, low=0.99, high=1.005, level="prefix")
    check_loss_weights(batch, prefix)
    batch.extra["loss_weights"] = icepop(*given, low=0.99, high=1.005)
    with pytest.raises(CheckFailed, match="a token has the importance weight"):
        check_loss_weights(batch, prefix)
    bounds = RolloutCorrection(icepop_low=0.9, icepop_high=1.005)
    batch.extra["loss_weights"] = weights * (weights < 1.005)
    check_loss_weights(batch, bounds)
    batch.extra["loss_weights"] = weights
    with pytest.raises(CheckFailed, match="a token has the importance weight"):
        check_loss_weights(batch, bounds)


def test_a_gradient_beyond_the_clip_range_is_found(monkeypatch):
    config = config_with("objective.loss=ppo")
    monkeypatch.setattr(torch, "maximum", lambda unclipped, clipped: unclipped)
    with pytest.raises(CheckFailed, match="beyond the clip range 0.8 to 1.2"):
        policy_loss(config).check()


@pytest.mark.parametrize("column", ["loss_weights", "sample_weights", "rollout_logprobs"])
def test_a_column_that_a_loss_does_not_read_is_found(column):
    config = config_with("objective.loss=ppo", "objective.off_policy_mask=0.05")
    loss = policy_loss(config)

    def wrong(micro, totals):
        kept = {name: x for name, x in micro.columns.items() if name != column}
        return loss.function(replace(micro, columns=kept), totals)

    check_loss("ppo", loss, config)
    with pytest.raises(CheckFailed, match="off_policy_mask=0.05: the loss ppo differs from its formula"):
        check_loss("ppo", wrong, config)


@pytest.mark.parametrize("name", [name for name in formulas("losses")])
def test_every_loss_passes_the_objective_check(name):
    for aggregation in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        keys = [f"objective.loss={name}", f"objective.aggregation={aggregation}"]
        policy_loss(config_with(*keys)).check()
        policy_loss(config_with(*keys, "objective.kl_coef=0.1", "objective.entropy_coef=0.01")).check()


@pytest.mark.parametrize(
    "keys",
    [
        *(["kl_coef=0.1", f"kl_estimator={name}"] for name in literal_dict("kl", "ESTIMATORS")),
        ["top_entropy=0.2"],
        ["off_policy_mask=0.05"],
        ["dual_clip=3", "clip_low=0.1", "clip_high=0.4"],
        ["adaptive_entropy.target=0.2"],
    ],
    ids=" ".join,
)
def test_every_option_passes_the_objective_check(keys):
    policy_loss(config_with(*(f"objective.{key}" for key in keys))).check()


@pytest.mark.parametrize(
    "keys",
    [
        "kl_coef=1e-6 entropy_coef=100",
        "kl_coef=1e-4 entropy_coef=1 kl_estimator=k1",
        "loss=gspo kl_coef=1e-6 entropy_coef=100 aggregation=seq-mean-token-sum-norm",
        "kl_coef=1e-13 entropy_coef=100",  # the KL term is below the rounding of the loss
    ],
)
def test_extreme_coefficients_pass_the_objective_check(keys):
    policy_loss(config_with(*(f"objective.{key}" for key in keys.split()))).check()


def test_a_small_kl_beside_a_large_entropy_bonus_is_checked():
    config, wrong = (
        config_with(f"objective.kl_coef={coef}", "objective.entropy_coef=100") for coef in (1e-6, 1.01e-6)
    )
    with pytest.raises(CheckFailed, match="the gradient for logprobs is"):
        check_loss(config.objective.loss, policy_loss(wrong), config)


def test_a_loss_of_the_wrong_sign_fails_the_objective_check():
    config = config_with("objective.kl_coef=0.1")
    loss = policy_loss(config)

    def negated(micro, totals):
        value, terms = loss(micro, totals)
        return -value, terms

    def doubled(micro, totals):
        value, terms = loss(micro, totals)
        return value + 0.1 * terms["actor/kl_loss"], terms

    with pytest.raises(CheckFailed, match="the gradient for logprobs is"):
        check_loss(config.objective.loss, negated, config)
    with pytest.raises(CheckFailed, match="the gradient for logprobs is"):
        check_loss(config.objective.loss, doubled, config)


@pytest.mark.parametrize("name", ["ppo", "gspo", "sapo"])
def test_a_ratio_to_the_present_policy_fails_the_objective_check(name):
    config = config_with(f"objective.loss={name}", "objective.kl_coef=0.1", "objective.entropy_coef=0.01")
    loss = policy_loss(config)

    def detached(micro, totals):
        columns = micro.columns | {"old_logprobs": micro.logprobs.detach()}
        return loss(replace(micro, columns=columns), totals)

    with pytest.raises(CheckFailed, match="instead of .* at a token"):
        check_loss(config.objective.loss, detached, config)


def test_constant_scores_are_warned_of_unless_groups_often_agree():
    batch, _ = sampled(6)
    history = Counter()
    batch.scores = torch.rand(128, generator=torch.Generator().manual_seed(0))
    assert warn_of_constant_scores(batch, history) == ""
    batch.scores = torch.zeros(128)
    assert "all 128 samples have the score 0, as only 0 of 16 groups before" in warn_of_constant_scores(
        batch, history
    )
    # A task whose groups mostly agree gives such a batch by chance.
    assert warn_of_constant_scores(batch, Counter({0.0: 900, "differs": 100})) == ""


def test_a_seed_that_was_used_before_fails_the_seed_check():
    batch, _ = sampled(6)
    batch.seeds = torch.arange(len(batch))
    used = check_seeds(batch, [])
    batch.seeds = torch.arange(len(batch)) + len(batch)
    assert check_seeds(batch, [used]) == frozenset(batch.seeds.tolist())
    for repeated in (3, len(batch) + 4):  # of an earlier call, of another sample of this one
        batch.seeds[5] = repeated
        with pytest.raises(CheckFailed, match="seed check: sample [45] .*further samples of 128"):
            check_seeds(batch, [used])
    batch.seeds[:] = -1
    assert check_seeds(batch, [used]) == frozenset()
