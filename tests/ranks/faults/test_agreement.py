import json

import numpy as np
import pytest

from rl.data.batch import fingerprint
from tests.spawn import run_ranks

CHECKS = """
    import json, sys, tempfile, time
    from dataclasses import replace
    import torch
    import torch.distributed as dist

    from rl.config.schema import Config
    from rl.faults.agreement import (
        PhaseAgreement, Disagreement, agree_on_config, agree_on_table, check_replicas, fail_together,
    )
    from rl.faults.phase_tracker import PhaseEntry
    from rl.config.options import ConfigError

    dist.init_process_group("gloo")
    rank, outcomes = dist.get_rank(), {}
    group = dist.new_group(backend="gloo")
    pair = [dist.new_group([0, 1]), dist.new_group([2])][rank == 2]
    config = Config()
    place = PhaseEntry("score", 3, 17, 0.0, 0.0, 60.0)

    def outcome(name, action):
        try:
            outcomes[name] = action()
        except (Disagreement, ConfigError) as error:
            outcomes[name] = str(error)

    def read(*failing):
        with fail_together():
            if rank in failing:
                raise ValueError(f"no file on host {rank}")
        return "went on"

    for failing in ((), (0,), (1,), (0, 1)):
        outcome(f"read, {failing} fail", lambda: read(*failing))

    def agree(change):
        config = Config()
        if rank == 1:
            change(config)
        agree_on_config(config)
        return "agreed"

    outcome("seed", lambda: agree(lambda config: setattr(config.run, "seed", 7)))
    outcome("nested", lambda: agree(lambda config: setattr(config.training.optimizer, "lr", 0.5)))
    outcome("list", lambda: agree(lambda config: config.data.train.append("other.parquet")))
    outcome("type", lambda: agree(lambda config: setattr(config.training, "tp", True)))
    outcome("same", lambda: agree(lambda config: None))

    def check(odd_place=place, batch={"ids": 5}, code="a", odd_rank=2, events=0, replica_size=1):
        mine = rank == odd_rank
        agreement = PhaseAgreement(config, code if mine else "a", group, replica_size=replica_size)
        memory = 100 + rank, 7 - rank, 9
        return agreement.check(odd_place if mine else place, batch if mine else {"ids": 5}, events, memory)

    def lateness():
        agreement = PhaseAgreement(config, "a", group)
        for waited_us in ((0, 0, 0), (3_000_000, 2_000_000, 1_000_000), (500_000, 0, 500_000)):
            agreement._waited_us = waited_us[rank]
            agreement.check(place, {"ids": 5}, 0, (0, 0, 0))
        return agreement.late_s.tolist()

    outcome("identical", check)
    outcome("late", lateness)
    outcome("batch", lambda: check(batch={"ids": 6, "advantages": 1}))
    outcome("column", lambda: check(batch={"ids": 5, "advantages": 1}))
    outcome("code", lambda: check(code="b", odd_rank=0))
    outcome("phase", lambda: check(replace(place, phase="update", number=18)))
    outcome("other replica", lambda: check(events=rank // 2, replica_size=2))
    outcome("event log", lambda: check(events=rank, replica_size=2))
    outcome("step", lambda: check(replace(place, step=4), odd_rank=1))

    def other_config():
        if rank == 1:
            config.training.optimizer.lr = 0.5
        return check()

    outcome("config", other_config)
    outcome("table", lambda: agree_on_table({"rl/x.py": "b" if rank == 1 else "a"}, "run different programs"))
    outcome("lacking", lambda: agree_on_table({"rl/x.py": "a"} if rank else {}, "run different programs"))

    def replicas(flip):
        torch.manual_seed(0 if rank < 2 else 1)  # rank 2 has another part of the model
        weights = {"linear.weight": torch.randn(64, 3), "norm.weight": torch.randn(5, dtype=torch.bfloat16)}
        if rank == 1 and flip == "norm.weight":
            weights[flip].view(torch.int16)[3] ^= 1
        if rank == 1 and flip == "linear.weight":
            weights[flip].view(torch.int32)[63, 2] ^= -(1 << 31)
        check_replicas("policy", [(pair, weights), (pair, {})], group)
        return "identical"

    for flip in ("none", "linear.weight", "norm.weight"):
        outcome(flip, lambda: replicas(flip))
    dist.destroy_process_group()
    print(json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def found():
    """Outcome of each case on three ranks."""
    return [json.loads(out) for out in run_ranks(3, CHECKS)]


DIFFERS = "{} differs between ranks: rank 1 and rank 0 were started differently."


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("read, () fail", "went on"),
        ("read, (0,) fail", "no file on host 0 (on rank 0)"),
        ("read, (1,) fail", "no file on host 1 (on rank 1)"),
        ("read, (0, 1) fail", "no file on host 0 (on rank 0, 1)"),
        ("seed", DIFFERS.format("run.seed")),
        ("nested", DIFFERS.format("training.optimizer.lr")),
        ("list", DIFFERS.format("data.train")),
        ("type", DIFFERS.format("training.tp")),
        ("same", "agreed"),
    ],
)
def test_ranks_fail_together_and_name_the_culprit(found, case, expected):
    assert [rank[case] for rank in found] == [expected] * 3


def test_ranks_that_agree_learn_the_largest_memory_and_who_is_late(found):
    for rank in found:
        assert rank["identical"] == rank["other replica"] == [102, 7, 9]
        assert rank["late"] == [0.0, 1.5, 2.0]  # who waits least is the latest


@pytest.mark.parametrize(
    ("case", "field", "rank"),
    [
        ("batch", "batch ids", 2),
        ("column", "batch advantages", 2),
        ("code", "code", 0),
        ("phase", "phase", 2),
        ("step", "step", 1),
        ("config", "configuration", 1),
    ],
)
def test_every_rank_names_the_field_and_the_odd_rank(found, case, field, rank):
    for text in (theirs[case] for theirs in found):
        assert text.startswith(f"ranks disagree on the {field} before ") and f": rank {rank} (" in text
        assert text.count("rank ") == 1 and "the other 2 ranks: " in text
        assert case != "phase" or ") has update; the other 2 ranks: score" in text


OTHERS = "the other replicas, or the first of two"


@pytest.mark.parametrize(
    ("case", "end"),
    [
        ("event log", "rank 1 generated other tokens than the first rank of its replica"),
        ("table", "rank 0 run different programs."),
        ("lacking", "rank 0 run different programs."),
        ("linear.weight", f"linear.weight of the policy on rank 1 differ from {OTHERS}"),
        ("norm.weight", f"norm.weight of the policy on rank 1 differ from {OTHERS}"),
        ("none", "identical"),
    ],
)
def test_what_differs_between_replicas_is_named(found, case, end):
    assert all(rank[case].endswith(end) for rank in found)
    if case in ("table", "lacking"):
        assert all(rank[case].startswith("rl/x.py differs between ranks: rank 1") for rank in found)


def test_fingerprints_differ_by_token_and_boundary():
    def of(*arrays):
        return fingerprint([np.array(array, np.int32) for array in arrays])

    cases = ([1, 2], [3]), ([1], [2, 3]), ([1, 2], [4]), ([3], [1, 2]), ([1, 2, 3],), ([1, 2], [3], [])
    assert of([1, 2], [3]) == of([1, 2], [3]) and len({of(*case) for case in cases}) == len(cases)
