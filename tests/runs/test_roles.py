"""Runs with ranks that either train or generate (`roles`)."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import bounds
from tests.intruder import assert_harmless, attacked
from tests.records import comparable, records
from tests.spawn import ROOT, RanksFailed, run_ranks
from tests.toy import TRAIN, UNSCORED, train, write_config
from tools.consumed import count

WORKER, FAULTY = (Path(__file__).with_name(f"{name}.py") for name in ("roles_worker", "faulty_train"))
ROLES = ("roles.train=0-0", "roles.rollout=1-1", "rollout_correction.truncate_tokens=2")
IN_FLIGHT = (
    *ROLES,
    "roles.granularity=group",
    "roles.refit_after_steps=4",
    "run.max_steps=6",
    "rollout.max_response_tokens=24",
    "rollout.max_concurrent_samples=24",
)


def without_staleness(run: Path) -> list[dict]:
    return [
        {name: value for name, value in record.items() if not name.startswith("staleness/")}
        for record in comparable(run)
    ]


def assert_each_prompt_once(run: Path, consumed: int) -> None:
    found = count(run)
    assert found.is_exact and found.consumed == consumed, found.line()


@pytest.fixture(scope="module")
def split(toy, tmp_path_factory) -> Path:
    """Return the directory of an undisturbed run with roles and `roles.lag` 0."""
    directory = tmp_path_factory.mktemp("undisturbed")
    train(2, write_config(directory, toy), *ROLES, "roles.lag=0")
    return directory / "run"


def test_lag_0_equals_the_run_without_roles(config, split, tmp_path):
    train(1, config, "rollout_correction.truncate_tokens=2", run=tmp_path / "alone")
    environment = json.loads((split / "environment.json").read_text())
    assert environment["world_size"] == 2 and environment["role_sizes"] == {"train": 1, "rollout": 1}
    assert without_staleness(split) == comparable(tmp_path / "alone")
    assert_each_prompt_once(split, consumed=16)


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.parametrize("launcher", ["forked", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_another_user_of_the_node_changes_nothing(config, split, tmp_path, launcher):
    overrides = (*ROLES, "roles.lag=0")
    with attacked(payload := tmp_path / "payload", [os.getpid()]) as found:
        if launcher == "forked":
            train(2, config, *overrides)
        else:
            subprocess.run([*TORCHRUN, TRAIN, "--config", config, *overrides], check=True, timeout=300)
    assert comparable(tmp_path / "run") == comparable(split)
    assert_harmless(found, payload)


def test_spin_learns_from_the_samples_of_other_ranks(config):
    for step in train(2, config, *ROLES[:2], "roles.lag=0", "algorithm=spin", *UNSCORED):
        assert step["actor/grad_norm"] > 0


@pytest.mark.parametrize("cache", [pytest.param("recompute", marks=pytest.mark.slow), "keep"])
def test_in_flight_refits_keep_versions_and_log_probs_true(config, tmp_path, cache):
    run_ranks(2, WORKER, "gap", "--config", config, *IN_FLIGHT, "run.max_steps=4", f"roles.cache={cache}")
    gaps = [float(line) for line in (tmp_path / "run" / "gap.txt").read_text().split()]
    # With keys and values of older weights, the engine's distribution is not the newest weights'.
    assert (max(gaps) < bounds.TOY_LOGPROB) == (cache == "recompute")
    assert [record["staleness/max"] for record in records(tmp_path / "run")][1:] == [1.0] * 3


@pytest.mark.slow
def test_a_staleness_above_the_lag_ends_the_run(config, tmp_path):
    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, WORKER, "old_labels", "--config", config, *ROLES, "run.max_steps=6", grace=30)
    assert failure.value.returncodes == [1, 1]
    cause = "was sampled by version 0 of the weights on the replica of rank 1, but version 2 is to learn"
    assert cause in failure.value.stderr[0]


@pytest.mark.slow
def test_no_token_is_older_than_the_lag_in_200_steps(config, tmp_path):
    overrides = ("rollout.deterministic=false", "roles.lag=2", "training.optimizer.lr=1e-4")
    steps = train(2, config, *IN_FLIGHT, *overrides, "run.max_steps=200")
    assert len(steps) == 200 and max(step["staleness/max"] for step in steps) <= 2
    assert_each_prompt_once(tmp_path / "run", consumed=1600)


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["batch", "group", "sample"])
def test_kills_of_either_role_change_nothing(config, toy, tmp_path, granularity):
    overrides = (*IN_FLIGHT, f"roles.granularity={granularity}", "checkpoint.every=2", "watchdog.lost_s=60")
    overrides += (f"data.val=[{toy}/test.parquet]", "validation.every=3", "validation.max_prompts=4")
    overrides += ("roles.refit_after_steps=64",) * (granularity == "batch")
    train(2, config, *overrides, run=tmp_path / "whole")
    killed = tmp_path / "killed"
    for place, rank, call in (("update", 0, 6), ("receive_weights", 1, 3)):
        fault = ("kill_this_rank", place, rank, call)
        with pytest.raises(RanksFailed):
            run_ranks(2, FAULTY, *fault, "--config", config, *overrides, f"run.dir={killed}", grace=30)
    train(2, config, *overrides, run=killed)
    assert comparable(killed) == comparable(tmp_path / "whole")
    for run in (killed, tmp_path / "whole"):
        assert_each_prompt_once(run, consumed=48)


@pytest.mark.parametrize(
    "place, rank", [("build_rollout", 1), pytest.param("build_engines", 0, marks=pytest.mark.slow)]
)
def test_both_roles_report_what_one_refuses(config, place, rank):
    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, FAULTY, "refuse_here", place, rank, 1, "--config", config, *ROLES, grace=30)
    assert failure.value.returncodes == [2, 2]
    # Another thread may still write a library's warning behind the error.
    errors = [line for line in failure.value.stderr[0].splitlines() if line.startswith("error")]
    assert errors == ["error: injected=1 does not fit; remove it."]


@pytest.mark.parametrize(
    "place, call",
    [
        ("deliver", 6),
        pytest.param("begin_group", 8, marks=pytest.mark.slow),
        pytest.param("receive_weights", 3, marks=pytest.mark.slow),
        pytest.param("answer", 2, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_without_a_dead_replica(config, toy, tmp_path, place, call):
    overrides = (*IN_FLIGHT, "roles.rollout=1-2", "roles.min_replicas=1", "rollout.deterministic=false")
    overrides += (f"data.val=[{toy}/test.parquet]", "validation.every=3", "validation.max_prompts=4")
    overrides += ("watchdog.lost_s=10", "watchdog.beat_s=2")
    fault = ("kill_this_rank", place, 2, call)
    with pytest.raises(RanksFailed) as failure:
        run_ranks(3, FAULTY, *fault, "--config", config, *overrides, timeout=400, grace=200)
    assert failure.value.returncodes == [0, 0, -signal.SIGKILL], failure.value
    log = failure.value.stderr[0]
    assert "warning: lost rank 2 (" in log and "goes on without replica 1 until its next start" in log
    assert records(tmp_path / "run")[-1]["training/global_step"] == 6
    assert_each_prompt_once(tmp_path / "run", consumed=48)


@pytest.mark.slow
def test_a_stop_of_a_generator_stops_both_roles(toy, tmp_path):
    config = write_config(tmp_path, toy, "data.prompts_per_step=32", "training.prompts_per_minibatch=8")
    overrides = (*IN_FLIGHT, "rollout.deterministic=false", "run.max_steps=30")
    process = subprocess.Popen(
        [str(part) for part in (*TORCHRUN, TRAIN, "--config", config, *overrides)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    for line in process.stderr:
        if line.startswith("step  3/"):
            heartbeat = (tmp_path / "run" / "heartbeat" / "rank_1.json").read_text()
            os.kill(json.loads(heartbeat)["pid"], signal.SIGUSR2)
    process.wait(240)
    steps = len(records(tmp_path / "run"))
    assert 3 <= steps < 30
    train(2, config, *overrides, f"run.max_steps={steps + 2}")
    assert_each_prompt_once(tmp_path / "run", consumed=32 * (steps + 2))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "ppo"])
def test_two_trainers_and_two_generators(config, tmp_path, algorithm):
    overrides = (
        *IN_FLIGHT,
        f"algorithm={algorithm}",
        "roles.train=0-1",
        "roles.rollout=2-3",
        "training.tp=2",
    )
    overrides += ("run.max_steps=3",)
    if algorithm == "grpo":
        overrides += ("rollout.tp=2",)
    if algorithm == "dapo":
        overrides += ("dynamic_sampling.prompts_per_round=6",)
    if algorithm == "ppo":
        overrides += ("critic.warmup_steps=1", "roles.lag=2", "rollout.samples_per_prompt=4")
    first = train(4, config, *overrides, run=tmp_path / "first")
    assert max(record["staleness/max"] for record in first) >= 1
    train(4, config, *overrides, run=tmp_path / "again")
    assert comparable(tmp_path / "again") == comparable(tmp_path / "first")
