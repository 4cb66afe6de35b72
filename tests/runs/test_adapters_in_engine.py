"""Runs with adapters beside the engine's weights: refits in flight, cached prefixes, resumes."""

import pytest

from tests import bounds
from tests.checkpoints import save_tiny
from tests.records import comparable, records
from tests.runs.test_roles import FAULTY, IN_FLIGHT, WORKER
from tests.spawn import RanksFailed, run_ranks
from tests.toy import train

LORA = (
    "adapter.kind=lora",
    "adapter.rank=4",
    "adapter.alpha=8",
    "adapter.in_engine=adapter",
    "training.optimizer.lr=1e-2",
)


@pytest.mark.parametrize("cache", ["recompute", pytest.param("keep", marks=pytest.mark.slow)])
def test_running_requests_use_a_new_adapter(config, tmp_path, cache):
    run_ranks(
        2, WORKER, "gap", "--config", config, *IN_FLIGHT, *LORA, "run.max_steps=4", f"roles.cache={cache}"
    )
    gaps = [float(line) for line in (tmp_path / "run" / "gap.txt").read_text().split()]
    # With keys and values of older adapters, the engine's distribution is not the newest adapter's.
    assert (max(gaps) < bounds.TOY_LOGPROB) == (cache == "recompute"), gaps
    found = records(tmp_path / "run")
    assert [record["staleness/max"] for record in found][1:] == [1.0] * 3
    first, *later = (record["perf/refit_bytes_received"] for record in found)
    assert set(later) == {later[0]} and later[0] < 0.2 * first


@pytest.mark.slow
def test_a_kept_cache_serves_the_version_that_filled_it(config):
    """A carried sample keeps the cached prefixes of the adapter that began it."""
    options = ("rollout.carry_over=true", "rollout_correction.truncate_tokens=2", "rollout.oversample=1.5")
    kept = ("rollout.carry_over_cache=keep", "rollout.deterministic=false", "rollout.max_response_tokens=24")
    steps = train(1, config, *LORA, *options, *kept, "run.max_steps=3")
    assert steps[-1]["staleness/max"] >= 1 and all(step["actor/grad_norm"] > 0 for step in steps)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_kills_of_either_role_change_nothing(config, tmp_path, model):
    """The generators have rollout.tp 2; the routes of the mixture's experts are replayed."""
    overrides = (*IN_FLIGHT, *LORA, "roles.rollout=1-2", "rollout.tp=2", "checkpoint.every=2")
    if model == "moe":
        path = save_tiny("Qwen3MoeForCausalLM", tmp_path / "moe", seed=1)
        targets = "adapter.targets=[q_proj, v_proj, o_proj]"
        overrides += (f"model.path={path}", "training.router_replay=old_policy", targets)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(3, config, *overrides, run=whole)
    for place, rank, call in (("update", 0, 6), ("receive_weights", 1, 3)):
        fault = ("kill_this_rank", place, rank, call)
        with pytest.raises(RanksFailed):
            run_ranks(3, FAULTY, *fault, "--config", config, *overrides, f"run.dir={killed}", grace=30)
    train(3, config, *overrides, run=killed)
    assert comparable(killed) == comparable(whole)
    assert max(record["staleness/max"] for record in records(whole)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["engine", "old_policy"])
def test_adapted_experts_replay_routes(config, tmp_path, mode):
    """Merged adapters of routed experts; the experts that were chosen compute the gradient."""
    model = save_tiny("Qwen3MoeForCausalLM", tmp_path / "moe", seed=1)
    replay = (f"model.path={model}", f"training.router_replay={mode}", "training.ep=2", "training.epochs=2")
    steps = train(2, config, *LORA, *replay, "adapter.in_engine=merged")
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < 1e-3 and step["actor/grad_norm"] > 0
