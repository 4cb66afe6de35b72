"""One mini-batch, one gradient, and one batch, one set of advantages: on one rank and on four, however
the samples are split.

Every policy loss and every mean, with a toy for a model. tests/runs/test_random_layouts.py runs the
algorithms with Megatron's models in its layouts. The work is in invariance_worker.py.
"""

import json
from pathlib import Path

import pytest
import torch

from rl.config.checks import check
from rl.config.exclusions import check_exclusions
from rl.config.objective import ADVANTAGES, LOSSES
from rl.config.options import ConfigError
from rl.config.schema import load_config
from rl.objectives.aggregate import MODES
from rl.objectives.kl import ESTIMATORS
from tests import bounds
from tests.each import each
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "invariance_worker.py"
WORLD_SIZES = [1, 4]
AGGREGATIONS, KL_ESTIMATORS = list(MODES), list(ESTIMATORS)
GRADIENT = bounds.of_sum(32)  # a row of a table collects about ten tokens, of two signs
METRIC = bounds.of_sum(300)  # a mini-batch has about 250 tokens
TOY = ["model.path=toy", "data.train=toy.jsonl"]

# Such that the clip, the bound or the choice of the loss binds on a good part of the tokens.
OPTIONS = {
    "ppo": ["objective.dual_clip=1.3"],
    "gspo": ["objective.clip_low=0.02", "objective.clip_high=0.03"],
    "luspo": ["objective.clip_low=0.02", "objective.clip_high=0.03"],
    "gmpo": ["objective.clip_low=0.3", "objective.clip_high=0.4"],
    "clip-cov": [
        "objective.cov_fraction=0.1",
        "objective.cov_low=0.2",
        "objective.cov_high=3.0",
        "objective.clip_low=0.2",
        "objective.clip_high=0.2",
    ],
    "kl-cov": ["objective.cov_fraction=0.1", "objective.kl_cov_coef=0.7"],
    "dppo-tv": ["objective.clip_low=0.01", "objective.clip_high=0.02"],
    "dppo-kl": ["objective.clip_low=0.005", "objective.clip_high=0.01"],
}


def terms(kind: int, number: int = 0) -> list[str]:
    """Nothing more than the loss, or KL, entropy and a weight on each token too, or only KL and entropy."""
    estimator = KL_ESTIMATORS[number % len(KL_ESTIMATORS)]
    extra = ["objective.kl_coef=0.1", f"objective.kl_estimator={estimator}", "objective.entropy_coef=0.05"]
    return [[], [*extra, "rollout_correction.truncate_tokens=1.5"], extra][kind % 3]


def allowed(overrides: list[str]) -> bool:
    try:
        check_exclusions(load_config(None, TOY + overrides))
    except ConfigError:
        return False
    return True


GROUPS = ["data.prompts_per_step=12", "training.prompts_per_minibatch=6"]


def policy_cases() -> dict[str, list[str]]:
    cases = {}
    for number, loss in enumerate(LOSSES):
        # ppo with every mean; each other loss with two of them, in turn.
        first = number % len(AGGREGATIONS)
        means = AGGREGATIONS if loss in ("ppo", "gmpo") else (AGGREGATIONS + AGGREGATIONS)[first : first + 2]
        for kind, aggregation in enumerate(means):
            keys = ["algorithm=grpo", f"objective.loss={loss}", f"objective.aggregation={aggregation}"]
            keys += GROUPS + OPTIONS.get(loss, [])
            if allowed(keys):
                cases[f"{loss}-{aggregation}"] = keys + terms(kind, len(cases))
    for key in ("off_policy_mask=0.05", "top_entropy=0.2"):
        cases[f"ppo-{key}"] = [*cases["ppo-seq-mean-token-mean"], f"objective.{key}"]
    # gmpo has one mean only, and one weight per sample.
    weighted = [key.replace("truncate_tokens", "truncate_samples") for key in terms(1)]
    cases["gmpo-seq-mean-token-mean-weighted"] = cases["gmpo-seq-mean-token-mean"] + weighted
    return cases


CASES = {
    name: [*keys, "training.micro_batch_tokens=90"]  # of about 250 tokens in each mini-batch
    for name, keys in policy_cases().items()
}

BY_ALGORITHM = {"reinforce++": "reinforce_pp", "gae": "ppo", "remax": "remax", "prime": "prime"}
ADVANTAGE_CASES = {
    name: [f"algorithm={BY_ALGORITHM.get(name, 'grpo')}", f"objective.advantage={name}"]
    for name in ADVANTAGES
}
# What changes rewards, values and weights before the advantages are taken.
for advantage, keys in {
    "reinforce++": ["objective.reward_kl.coef=0.1", "objective.gamma=0.9"],
    "rloo": ["objective.reward_kl.coef=0.1"],
    "gae": ["objective.reward_kl.coef=0.1", "objective.gamma=0.95", "objective.lam=0.9"],
    "optimal-token-baseline": ["rollout_correction.truncate_tokens=1.5"],
    "prime": ["objective.gamma=0.9", "implicit_reward.min_accuracy=0.3", "implicit_reward.max_accuracy=0.7"],
    "grpo": ["rollout_correction.reject=token-k3", "rollout_correction.reject_high=0.5"],
}.items():
    ADVANTAGE_CASES[advantage] += keys
ADVANTAGE_CASES["gae-unwhitened"] = [*ADVANTAGE_CASES["gae"], "objective.whiten=false"]
vapo = ["objective.lam_critic=1", "objective.length_adaptive_alpha=0.3", "objective.filtration=best-worst"]
ADVANTAGE_CASES["gae-vapo"] = [*ADVANTAGE_CASES["gae"], *vapo, "rollout.samples_per_prompt=4"]
ADVANTAGE_CASES["dapo"] = ["algorithm=dapo", "data.prompts_per_step=11"]  # two rounds or more


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """{world size: what each rank saved}."""
    directory = tmp_path_factory.mktemp("invariance")
    cases = directory / "cases.json"
    cases.write_text(json.dumps({"losses": CASES, "advantages": ADVANTAGE_CASES}))
    run_ranks(max(WORLD_SIZES), WORKER, cases, directory, *WORLD_SIZES, timeout=240)
    return {n: [torch.load(directory / f"{n}.{rank}.pt") for rank in range(n)] for n in WORLD_SIZES}


# Gradients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@each("case", CASES)
def test_gradient_does_not_depend_on_ranks_or_micro_batches(results, case, world_size):
    reference = results[1][0]["losses"][case]["whole"]["gradients"]
    for how, found in results[world_size][0]["losses"][case].items():
        assert len(found["gradients"]) == len(reference) == 2
        for update, (a, b) in enumerate(zip(found["gradients"], reference)):
            assert any(gradient.any() for gradient in b.values())
            for name in b:  # one by one: a small table must not hide behind a large one
                difference, norm = (a[name].double() - b[name].double()).norm(), b[name].double().norm()
                where = f"{how}, update {update}, {name}: {difference / norm:.1e}"
                assert difference <= GRADIENT * norm, where


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@each("case", CASES)
def test_metrics_do_not_depend_on_ranks_or_micro_batches(results, case, world_size):
    reference = results[1][0]["losses"][case]["whole"]["metrics"]
    assert sum(key.rpartition("/")[2] == "loss" for key in reference) >= 1
    for rank in results[world_size]:
        for how, found in rank["losses"][case].items():
            assert found["metrics"] == pytest.approx(reference, rel=METRIC, abs=METRIC), how


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_case_has_micro_batches_without_a_sample(results, world_size):
    for case, splits in results[world_size][0]["losses"].items():
        assert splits["random"]["empty"] >= 2, case  # one in each mini-batch


def test_what_sets_the_losses_apart_takes_part_in_the_comparison(results):
    metrics = {case: splits["whole"]["metrics"] for case, splits in results[1][0]["losses"].items()}
    shares = {"off_policy_masked_fraction", "pg_clipfrac", "pg_covfrac"}
    for case, found in metrics.items():
        for name in found:
            assert name.rpartition("/")[2] not in shares or 0.02 < found[name] < 0.98, (
                f"{case}: {name} {found[name]}"
            )
    assert metrics["ppo-token-mean"]["actor/pg_clipfrac_lower"] > 0.02
    # So the check above has seen them.
    assert {"actor/pg_covfrac", "actor/pg_clipfrac"} < metrics["clip-cov-token-sum"].keys()


def test_all_losses_means_and_terms_are_compared():
    for loss in LOSSES:
        of_loss = [keys for keys in CASES.values() if f"objective.loss={loss}" in keys]
        means = {key for keys in of_loss for key in keys if key.startswith("objective.aggregation=")}
        assert len(means) == {"gmpo": 1, "ppo": len(AGGREGATIONS)}.get(loss, 2)
        assert {"objective.kl_coef=0.1" in keys for keys in of_loss} == {True, False} or loss == "gmpo"
        weight = "truncate_samples" if loss == "gmpo" else "truncate_tokens"
        assert any(f"rollout_correction.{weight}=1.5" in keys for keys in of_loss)


# Advantages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@each("case", ADVANTAGE_CASES)
def test_every_rank_has_the_advantages_of_one_process(results, case, world_size):
    reference = results[1][0]["advantages"][case]["direct"]
    for rank in results[world_size]:
        found = rank["advantages"][case]["exchanged"]
        for name, expected in reference.items():
            assert torch.equal(found[name], expected), name


@each("case", ADVANTAGE_CASES)
def test_advantages_differ_and_are_whitened(results, case):
    found = results[1][0]["advantages"][case]["direct"]
    kept = found["advantages"][found["mask"] > 0].double()
    assert kept.isfinite().all() and kept.unique().numel() > 2 and 0 in found["lengths"]
    if case in ("gae", "prime", "reinforce++", "reinforce++-baseline"):
        error = bounds.of_sum(kept.numel())
        assert abs(kept.mean()) < error and kept.var() == pytest.approx(1, rel=error)


def test_a_run_may_have_such_configs():
    for keys in [*CASES.values(), *ADVANTAGE_CASES.values()]:
        check(load_config(None, TOY + keys))
